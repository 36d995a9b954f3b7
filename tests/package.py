"""The Lightning package that the behaviour tests of this process run under, and our classes for it.

``lightning.pytorch`` and ``pytorch_lightning`` are two sets of classes. A group of ranks is told which to use before it
imports any test (``ranks.py``); the test process itself, which trains nothing, has ``pytorch_lightning``.
"""

from __future__ import annotations

import os

from ranks import PACKAGES, TESTED_PACKAGE

NAME = os.environ.get(TESTED_PACKAGE, PACKAGES[0])

if NAME == "lightning":
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch import Callback, LightningModule, Trainer, callbacks, seed_everything
    from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler, ModelCheckpoint
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger, Logger
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    from adaptive_ddp.lightning import AdaptiveDDPStrategy, GradientUsageMonitor
    from adaptive_ddp.lightning.fabric import AdaptiveDDPStrategy as FabricAdaptiveDDPStrategy
else:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
    from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from pytorch_lightning import Callback, LightningModule, Trainer, callbacks, seed_everything
    from pytorch_lightning.callbacks import BackboneFinetuning, GradientAccumulationScheduler, ModelCheckpoint
    from pytorch_lightning.cli import LightningCLI
    from pytorch_lightning.demos.boring_classes import BoringModel
    from pytorch_lightning.loggers import CSVLogger, Logger
    from pytorch_lightning.plugins.precision import MixedPrecision
    from pytorch_lightning.strategies import DDPStrategy

    from adaptive_ddp import AdaptiveDDPStrategy, GradientUsageMonitor
    from adaptive_ddp.fabric import AdaptiveDDPStrategy as FabricAdaptiveDDPStrategy

__all__ = [
    "NAME",
    "AdaptiveDDPStrategy",
    "BackboneFinetuning",
    "BoringModel",
    "CSVLogger",
    "Callback",
    "DDPStrategy",
    "Fabric",
    "FabricAdaptiveDDPStrategy",
    "FabricDDPStrategy",
    "FabricMixedPrecision",
    "GradientAccumulationScheduler",
    "GradientUsageMonitor",
    "LightningCLI",
    "LightningModule",
    "Logger",
    "MixedPrecision",
    "ModelCheckpoint",
    "Trainer",
    "callbacks",
    "seed_everything",
]

"""A DDP strategy for PyTorch Lightning that chooses ``find_unused_parameters`` by itself.

Importing the package registers ``ddp_adaptive``, ``ddp_adaptive_spawn``, ``ddp_adaptive_fork`` and
``ddp_adaptive_notebook`` for ``Trainer(strategy=...)`` and for ``Fabric(strategy=...)`` of ``pytorch_lightning``, and
of ``lightning`` if that has been imported already; otherwise ``import adaptive_ddp.lightning`` does.
"""

import sys

import adaptive_ddp.fabric
from adaptive_ddp.decision import Decision, State, UnusedParameter
from adaptive_ddp.pytorch_lightning import AdaptiveDDPStrategy, GradientUsageMonitor
from adaptive_ddp.reducer import finish_reduction
from adaptive_ddp.report import UnusedParametersError, UnusedParametersWarning
from adaptive_ddp.verdict import Advice, Finding, ParameterUsage, Verdict

__all__ = [
    "AdaptiveDDPStrategy",
    "Advice",
    "Decision",
    "Finding",
    "GradientUsageMonitor",
    "ParameterUsage",
    "State",
    "UnusedParameter",
    "UnusedParametersError",
    "UnusedParametersWarning",
    "Verdict",
    "finish_reduction",
]

if sys.modules.get("lightning") is not None:
    import adaptive_ddp.lightning
    import adaptive_ddp.lightning.fabric  # noqa: F401

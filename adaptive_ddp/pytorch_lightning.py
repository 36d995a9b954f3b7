"""The strategy and the callback for ``pytorch_lightning``, and the strategy's names in that package's registry."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from typing_extensions import override

from adaptive_ddp.monitor import GradientUsageMonitorMixin
from adaptive_ddp.names import register
from adaptive_ddp.strategy import AdaptiveDDPMixin


class AdaptiveDDPStrategy(AdaptiveDDPMixin, DDPStrategy):
    """DDP that chooses ``find_unused_parameters`` by itself, for ``pytorch_lightning``'s Trainer.

    It starts with the flag off. Whenever a parameter receives no gradient, on any rank and at any step, it finishes
    that step's reduction in place, turns the flag on for the rest of the fit, on all ranks at once, and warns. See
    :class:`~adaptive_ddp.strategy.AdaptiveDDPMixin` for the arguments and what is raised.
    """

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names; those that are there already stay as they are."""
        register(cls, strategy_registry)


class GradientUsageMonitor(GradientUsageMonitorMixin, Callback):
    """Records which parameters received a gradient, on how many ranks, for ``pytorch_lightning``'s Trainer.

    See :class:`~adaptive_ddp.monitor.GradientUsageMonitorMixin` for the arguments and what is raised.
    """


AdaptiveDDPStrategy.register_strategies(StrategyRegistry)

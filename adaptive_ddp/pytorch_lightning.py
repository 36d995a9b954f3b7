"""The strategy and the callback for ``pytorch_lightning``, and the strategy's names in that package's registry."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from typing_extensions import override

from adaptive_ddp.monitor import GradientUsageMonitorMixin
from adaptive_ddp.strategy import AdaptiveDDPMixin

_START_METHODS = {
    "ddp_adaptive": "popen",
    "ddp_adaptive_spawn": "spawn",
    "ddp_adaptive_fork": "fork",
    "ddp_adaptive_notebook": "fork",
}


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
        for name, start_method in _START_METHODS.items():
            if name not in strategy_registry:
                strategy_registry.register(
                    name,
                    cls,
                    description=f"DDP that chooses find_unused_parameters itself, `start_method` '{start_method}'",
                    start_method=start_method,
                )


class GradientUsageMonitor(GradientUsageMonitorMixin, Callback):
    """Records which parameters received a gradient, on how many ranks, for ``pytorch_lightning``'s Trainer.

    See :class:`~adaptive_ddp.monitor.GradientUsageMonitorMixin` for the arguments and what is raised.
    """


AdaptiveDDPStrategy.register_strategies(StrategyRegistry)

"""The strategies and the callback for the package ``lightning``, and the strategy's names in its registry.

``lightning.pytorch`` and ``pytorch_lightning`` are two sets of classes; the Trainer of one refuses a strategy of the
other. Both can be used in one process.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from adaptive_ddp.monitor import GradientUsageMonitorMixin
from adaptive_ddp.names import register
from adaptive_ddp.strategy import AdaptiveDDPMixin

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ModuleNotFoundError as error:
    raise ImportError(
        "adaptive_ddp.lightning needs the package lightning, which is not installed: write pip install"
        " adaptive-ddp[lightning]. For pytorch_lightning, write from adaptive_ddp import AdaptiveDDPStrategy."
    ) from error


# The mixins are typed against the other package's classes.
class AdaptiveDDPStrategy(AdaptiveDDPMixin, DDPStrategy):  # type: ignore[misc]
    """DDP that chooses ``find_unused_parameters`` by itself, for the Trainer of ``lightning.pytorch``.

    It starts with the flag off. Whenever a parameter receives no gradient, on any rank and at any step, it finishes
    that step's reduction in place, turns the flag on for the rest of the fit, on all ranks at once, and warns. See
    :class:`~adaptive_ddp.strategy.AdaptiveDDPMixin` for the arguments and what is raised.
    """

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names; those that are there already stay as they are."""
        register(cls, strategy_registry)


class GradientUsageMonitor(GradientUsageMonitorMixin, Callback):  # type: ignore[misc]
    """Records which parameters received a gradient, on how many ranks, for the Trainer of ``lightning.pytorch``.

    See :class:`~adaptive_ddp.monitor.GradientUsageMonitorMixin` for the arguments and what is raised.
    """


AdaptiveDDPStrategy.register_strategies(StrategyRegistry)

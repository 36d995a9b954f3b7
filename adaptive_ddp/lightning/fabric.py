"""The strategy for ``lightning.fabric`` and its names in that registry."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from typing_extensions import override

from adaptive_ddp.fabric_strategy import FabricAdaptiveDDPMixin
from adaptive_ddp.names import register


# The mixin is typed against the other package's twin.
class AdaptiveDDPStrategy(FabricAdaptiveDDPMixin, DDPStrategy):  # type: ignore[misc]
    """DDP that chooses ``find_unused_parameters`` by itself, for ``lightning.fabric``'s Fabric.

    It starts with the flag off. Whenever a parameter of a model receives no gradient, on any rank and at any step, it
    finishes that step's reduction in place, turns the flag on for that model, on all ranks at once, and warns. See
    :class:`~adaptive_ddp.fabric_strategy.FabricAdaptiveDDPMixin` for the arguments and what is raised.
    """

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names; those that are there already stay as they are."""
        register(cls, strategy_registry)


AdaptiveDDPStrategy.register_strategies(STRATEGY_REGISTRY)

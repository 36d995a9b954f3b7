"""The names in Lightning's strategy registries, the same in each of them. Plain Python.

Promise: a name that is registered already, by whomever, stays as it is.
"""

from __future__ import annotations

from typing import Any

START_METHODS = {
    "ddp_adaptive": "popen",
    "ddp_adaptive_spawn": "spawn",
    "ddp_adaptive_fork": "fork",
    "ddp_adaptive_notebook": "fork",
}


def register(strategy: type, registry: Any) -> None:
    """Register a strategy under its names.

    Args:
        strategy: the class.
        registry: a Lightning strategy registry.
    """
    for name, start_method in START_METHODS.items():
        if name not in registry:
            registry.register(
                name,
                strategy,
                description=f"DDP that chooses find_unused_parameters itself, `start_method` '{start_method}'",
                start_method=start_method,
            )

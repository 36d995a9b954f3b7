"""What the strategies refuse and what they tell the user, for the Trainer and for Fabric alike.

Promise: rank zero warns of a parameter once, a rank of sitting out at the 1st, 10th, 100th, ... time, and of a set of
trainable parameters that keeps changing once. Imports no Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from inspect import signature
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.nn.parallel import DistributedDataParallel

from adaptive_ddp.decision import Decision
from adaptive_ddp.reducer import Reduction
from adaptive_ddp.report import UnusedParametersWarning, describe_rewraps, describe_sit_out

Fallback: TypeAlias = Literal["find_unused_parameters", "finish"]
OnUnused: TypeAlias = Literal["fallback", "raise"]

_REFUSED = {
    "find_unused_parameters": (
        "the strategy chooses that flag itself, at run time. Leave the argument out; or, to fix the flag, write"
        ' strategy="ddp" (off) or strategy="ddp_find_unused_parameters_true" (on)'
    ),
    "static_graph": (
        "a static graph cannot follow what the strategy finds out at run time. Leave the argument out; or, for a graph"
        " that never changes, write strategy=DDPStrategy(static_graph=True)"
    ),
    "skip_all_reduce_unused_params": (
        "with it, ranks that differ in what they use wait for each other for ever. Leave the argument out; or, for"
        " ranks that never differ, write"
        " strategy=DDPStrategy(find_unused_parameters=True, skip_all_reduce_unused_params=True)"
    ),
}

# A run whose set of trainable parameters changes this often is told what that costs.
_MANY_REWRAPS = 10


def refuse_arguments(class_name: str, arguments: MutableMapping[str, Any]) -> None:
    """Refuse the arguments of ``DDPStrategy`` that choose what the strategy is there to choose.

    Where all that this torch has are there, as from LightningCLI, which passes every argument of
    ``DistributedDataParallel`` with its default, those that are False are taken out instead.

    Args:
        class_name: the strategy's name, for the error.
        arguments: what goes on to ``DDPStrategy``.

    Raises:
        ValueError: naming the argument, why it is refused and what to write instead.
    """
    known = [name for name in _REFUSED if name in signature(DistributedDataParallel.__init__).parameters]
    if all(name in arguments for name in known):
        for name in known:
            if arguments[name] is False:
                del arguments[name]
    for name, reason in _REFUSED.items():
        if name in arguments:
            raise ValueError(f"{class_name}({name}={arguments[name]!r}): {reason}.")


def refuse_choices(class_name: str, fallback: object, on_unused: object) -> None:
    """Refuse values that there are not.

    Raises:
        ValueError: naming the argument, its value and what to write instead.
    """
    if fallback not in get_args(Fallback):
        raise ValueError(
            f'{class_name}(fallback={fallback!r}): there is no such fallback. Write fallback="find_unused_parameters"'
            ' (the default) to turn the flag on once a parameter got no gradient, or fallback="finish" to leave it off'
            " and finish each reduction in place."
        )
    if on_unused not in get_args(OnUnused):
        raise ValueError(
            f'{class_name}(on_unused={on_unused!r}): there is no such thing to do. Write on_unused="fallback" (the'
            ' default) to train on, or on_unused="raise" for an error on all ranks once a parameter got no gradient.'
        )


class Notices:
    """What the user has been told of one module so far.

    Args:
        of: a line that says which module it is, where there are several.

    Attributes:
        changes: how often the set of trainable parameters has changed.
    """

    def __init__(self, of: str = "") -> None:
        self.of = of
        self.changes = 0
        self._warned_of: set[str] = set()
        self._sit_outs = 0
        self._rewrap_seconds = 0.0

    def announce(self, decision: Decision, *, is_global_zero: bool) -> None:
        """Have rank zero say what is new in a decision."""
        names = {parameter.name for parameter in decision.unused}
        if is_global_zero and not names <= self._warned_of:
            warnings.warn(f"{self.of}{decision}", UnusedParametersWarning, stacklevel=2)
        self._warned_of |= names

    def sat_out(self, *, rank: int, step: int, reason: str) -> None:
        """Count a step that this rank had nothing to contribute to; say so now and then."""
        self._sit_outs += 1
        if str(self._sit_outs).rstrip("0") == "1":
            text = describe_sit_out(rank=rank, step=step, times=self._sit_outs, reason=reason)
            warnings.warn(f"{self.of}{text}", UserWarning, stacklevel=2)

    def rewrapped(self, seconds: float, *, step: int, is_global_zero: bool) -> None:
        """Count the time that a change of the set of trainable parameters took; say so once there are many."""
        self._rewrap_seconds += seconds
        if self.changes == _MANY_REWRAPS and is_global_zero:
            mean_ms = 1000 * self._rewrap_seconds / self.changes
            text = describe_rewraps(changes=self.changes, steps=step, mean_ms=mean_ms)
            warnings.warn(f"{self.of}{text}", UserWarning, stacklevel=2)


def keep_scaler_content(precision: object, reduction: Reduction) -> None:
    """Under a gradient scaler, have zeros where all ranks sat a step out: it refuses one without a gradient."""
    if getattr(precision, "scaler", None) is None:
        return
    if all(parameter.grad is None for parameter in reduction.parameters):
        for parameter in reduction.parameters:
            parameter.grad = torch.zeros_like(parameter)

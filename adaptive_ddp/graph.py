"""Which parameters the autograd graph of a loss reaches, and a way to reach them all. Torch alone, its public API.

Promise: a look that can stop early does; :func:`touch` changes neither a loss nor a gradient.

Limits: what a custom function does in a backward of its own, inside the backward, is in no graph that can be looked
at. :class:`BlindForwards` notices where that may happen, as long as a parameter is used in the forward of the module
that owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def reached_parameters(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a backward from ``loss`` will reach, as they are found; each one once.

    What a custom function does inside its own backward is not in this graph: parameters that only a reentrant
    checkpoint reaches (``torch/utils/checkpoint.py``, ``CheckpointFunction``) are not found.

    Args:
        loss: the root of the graph; may have been used for a backward already.
    """
    for node in _nodes(loss):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph of a loss, as they are found; each one once."""
    pending: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def checkpoints_in(loss: Tensor) -> int:
    """How many reentrant checkpoints a backward from the loss comes through, each of which runs one backward inside it.

    Those inside another checkpoint are not in this graph.
    """
    return sum(node.name() == "CheckpointFunctionBackward" for node in _nodes(loss))


@dataclass(frozen=True)
class Landmarks:
    """What tells that a backward comes through a forward of some module.

    Attributes:
        nodes: the nodes that the forward's outputs come from. They are found where the parameters are not, inside a
            reentrant checkpoint.
        parameters: the module's parameters. They are found where the loss is not made of outputs, as that of a
            regularizer.
    """

    nodes: frozenset[Any]
    parameters: frozenset[Tensor]


def reached_landmarks(loss: Tensor, landmarks: Sequence[Landmarks]) -> set[int]:
    """Which of the landmarks a backward from ``loss`` comes by, by their places; stops when it has found them all."""
    reached: set[int] = set()
    for node in _nodes(loss):
        variable = getattr(node, "variable", None)
        for place, landmark in enumerate(landmarks):
            if node in landmark.nodes or (variable is not None and variable in landmark.parameters):
                reached.add(place)
        if len(reached) == len(landmarks):
            break
    return reached


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned: in lists, tuples, mappings and dataclasses, nested or not."""
    if isinstance(output, Tensor):
        yield output
        return
    inner: Iterable[Any] = ()
    if isinstance(output, Mapping):
        inner = output.values()
    elif isinstance(output, (list, tuple)):
        inner = output
    elif is_dataclass(output):
        inner = (getattr(output, field.name) for field in fields(output))
    for value in inner:
        yield from tensors_in(value)


def reaches_any(loss: Tensor, parameters: frozenset[Tensor]) -> bool:
    """Whether a backward from ``loss`` reaches any of the parameters; stops at the first that it finds."""
    return any(parameter in parameters for parameter in reached_parameters(loss))


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return (None,) * ctx.count


def touch(parameters: Sequence[Tensor]) -> Tensor:
    """A zero whose backward reaches every parameter and brings none of them a gradient.

    The hooks of all of them fire, so a DDP wrapper reduces this rank's zeros and counts it as having used nothing.

    Args:
        parameters: the parameters, none of which has sparse gradients; those that are frozen are reached all the same.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    zero: Tensor = _Touch.apply(*parameters)  # type: ignore[no-untyped-call]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return zero


class BlindForwards:
    """Notes which parameters' modules ran without recording a graph, as inside a reentrant checkpoint.

    Such a checkpoint (``torch/utils/checkpoint.py``, ``CheckpointFunction``) runs its part of the forward without grad
    mode, and again, with it, inside the backward.

    Args:
        module: the module that owns the parameters, itself or through its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._handles: list[RemovableHandle] = []
        self._watched: set[Tensor] = set()
        self._seen: set[Tensor] = set()

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Begin to look at the forwards of the modules that own these parameters; what is watched stays watched."""
        added = set(parameters) - self._watched
        if not added:
            return
        self._watched |= added
        for module in self._module.modules():
            owned = added.intersection(module.parameters(recurse=False))
            if owned:
                self._handles.append(module.register_forward_pre_hook(_Note(owned, self._seen)))

    @property
    def seen(self) -> frozenset[Tensor]:
        """The watched parameters whose modules ran so since :meth:`forget`."""
        return frozenset(self._seen)

    def forget(self) -> None:
        """Start anew, after a backward."""
        self._seen.clear()

    def close(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Note:
    """A forward hook that notes parameters whose module runs without grad mode."""

    def __init__(self, owned: set[Tensor], seen: set[Tensor]) -> None:
        self._owned = owned
        self._seen = seen

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            self._seen |= self._owned

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module, or a pickle of it, is not the module that is trained here.
        return _Note, (set(), set())

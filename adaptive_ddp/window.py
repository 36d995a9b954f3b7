"""Which parameters received a gradient in the current accumulation window.

A window is the run of backwards that ends in a synchronised one. The reducer only knows the last of them, and whether
a hook fired, not whether it brought a gradient; this file knows the rest.

Promise: what :meth:`AccumulationWindow.received` says is exact for the parameters it was opened for. A window that is
never opened costs nothing, and one that was closed costs later backwards nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adaptive_ddp.reducer import forget_removed_hooks


class AccumulationWindow:
    """Records, from its opening on, the parameters that a backward accumulates a gradient into.

    Args:
        parameters: the reducer's parameters, in its order.

    Attributes:
        is_open: whether it is recording.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._handles: list[tuple[int, RemovableHandle]] = []
        self._received: set[int] = set()
        self._recorded: frozenset[int] = frozenset()
        self.is_open = False

    def open(self, always: Collection[int]) -> None:
        """Start recording, before the first backward of a window; on an open window, do nothing.

        Args:
            always: record these parameters. Of the others only those are recorded that hold a gradient from before the
                window, since for the rest ``.grad`` itself tells; that is one look at each ``.grad``.
        """
        if self.is_open:
            return
        self.is_open = True
        held = (index for index, parameter in enumerate(self._parameters) if parameter.grad is not None)
        self._recorded = frozenset(held).union(always)
        for index in self._recorded:
            self._handles.append((index, self._record(index)))

    def close(self) -> None:
        """Stop recording and forget, after the window's synchronised backward."""
        for index, handle in self._handles:
            handle.remove()
            forget_removed_hooks(self._parameters[index])
        self._handles.clear()
        self._received = set()
        self._recorded = frozenset()
        self.is_open = False

    def received(self, index: int) -> bool:
        """Whether a backward of this window brought the parameter with this index a gradient.

        On a window that was never opened, which holds a single backward, the question can only be about a parameter
        that this backward did not reach, and the answer is no. To be asked before the reduction writes zeros into
        gradients that were None.
        """
        if not self.is_open:
            return False
        if index in self._recorded:
            return index in self._received
        return self._parameters[index].grad is not None

    def _record(self, index: int) -> RemovableHandle:
        parameter: Any = self._parameters[index]

        def record(gradient: Tensor | None) -> None:
            # It is also called when the backward brings nothing (a custom function that returned None); then .grad
            # stays as it is, and what counts is what counts for the flag (reducer.cpp, autograd_hook): is there one?
            if gradient is not None or parameter.grad is not None:
                self._received.add(index)

        trainable = parameter.requires_grad
        # A toggled-off parameter takes no hook, but may be toggled on again before the window ends.
        parameter.requires_grad_(True)
        # One for after the accumulation would cost its parameter over a microsecond in every later backward, also when
        # it has been removed.
        handle: RemovableHandle = parameter.register_hook(record)
        parameter.requires_grad_(trainable)
        return handle

"""The strategy's part in a Fabric loop: what happens to the models that were set up, in the order data meets them.

Promise: when ``fabric.backward(loss)`` returns, every gradient on every rank is what ``find_unused_parameters=True``
gives, whether or not that flag is on, of every model that the loss of any rank comes by; and all ranks take the same
decision about a model in the same backward. What ``fabric.setup`` returned, and the wrapper in it, stay the objects
that they are.

Limits: all ranks set up the same models in the same order, and run the same forwards and as many backwards, as DDP
demands anyway. A rank without a loss has to run ``fabric.backward`` on something, a ``torch.zeros((),
requires_grad=True)``; one that runs none leaves the others waiting until the process group times out. A model that is
itself called inside a reentrant checkpoint is not seen to take part in the backward.

This file imports neither of the two Lightning packages: :class:`FabricAdaptiveDDPMixin` goes in front of the Fabric
``DDPStrategy`` of either (see ``fabric.py``).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from adaptive_ddp.decision import Decision, State
from adaptive_ddp.graph import Landmarks, reached_landmarks, tensors_in
from adaptive_ddp.notices import Fallback, Notices, OnUnused, keep_scaler_content, refuse_arguments, refuse_choices
from adaptive_ddp.reducer import at_end_of_backward, rebuild_reducer, require_private_api
from adaptive_ddp.report import SIT_OUT_OF_A_LOOP, UnusedParametersError, describe_added
from adaptive_ddp.run import Aftermath, Run

if TYPE_CHECKING:
    from lightning_fabric.strategies.ddp import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object

# A look for added parameters is a walk over the module, too slow for every backward.
_STEPS_BETWEEN_LOOKS_FOR_ADDED = 100


@dataclass(frozen=True)
class _Forward:
    """A forward whose backward is to come."""

    is_synchronised: bool
    landmarks: Landmarks


class _Model:
    """A model that was set up: its wrapper, the run on it, and the forward whose backward is to come."""

    def __init__(self, place: int, ddp: DistributedDataParallel, options: Mapping[str, bool]) -> None:
        self.place = place
        self.ddp = ddp
        self._options = options
        self.run = Run(ddp, State.PROBE, **options)
        # Frozen ones too, which may be unfrozen; those that are added are refused.
        self.parameters = frozenset(self.run.trainable.parameters)
        self.notices = Notices()
        # Synchronised backwards that it took part in.
        self.steps = 0
        self.forward: _Forward | None = None
        self._is_frozen = False
        self._sync_is_suspended = False

    def rebuild(self, *, flag: bool) -> None:
        """Give the wrapper another reducer, with the flag on or off, and start anew on it."""
        self.run.close()
        rebuild_reducer(self.ddp, find_unused_parameters=flag)
        self.run = Run(self.ddp, State.ON if flag else State.PROBE, **self._options)

    def before_forward(self) -> None:
        """Keep the wrapper from waiting for a backward that will not come; let go of the graph that it came not for."""
        if not torch.is_grad_enabled():
            return
        self.forward = None
        self._is_frozen = not any(p.requires_grad for p in self.run.trainable.parameters)
        if self._is_frozen and self.ddp.require_backward_grad_sync:
            self._sync_is_suspended = True
            self.ddp.require_backward_grad_sync = False

    def after_forward(self, output: Any) -> None:
        """Note what will tell that a backward comes through this forward."""
        if self._sync_is_suspended:
            self._sync_is_suspended = False
            self.ddp.require_backward_grad_sync = True
            # As the forward of a wrapper that waits leaves it: the next one broadcasts the buffers.
            self.ddp.require_forward_param_sync = True
        if self._is_frozen or not torch.is_grad_enabled():
            return
        nodes = frozenset(tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None)
        landmarks = Landmarks(nodes, self.parameters)
        self.forward = _Forward(self.ddp.require_backward_grad_sync, landmarks)

    def before_backward(self, loss: Tensor) -> None:
        """Open the window, or leave it open, as the forward was made: the reducer goes by that too."""
        assert self.forward is not None
        now = self.ddp.require_backward_grad_sync
        self.ddp.require_backward_grad_sync = self.forward.is_synchronised
        try:
            self.run.before_backward(loss)
        finally:
            self.ddp.require_backward_grad_sync = now


class _ForwardHook:
    """Keeps a model, as long as its wrapper lives, and tells it of the wrapper's forwards."""

    def __init__(self, model: _Model | None) -> None:
        self._model = model

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._model is not None:
            self._model.after_forward(output)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the wrapper is a plain wrapper.
        return _ForwardHook, (None,)


class _ForwardPreHook(_ForwardHook):
    """The same, before a forward."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self._model is not None:
            self._model.before_forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardPreHook, (None,)


class FabricAdaptiveDDPMixin(_DDPStrategy):
    """DDP that chooses ``find_unused_parameters`` by itself; to go in front of a Fabric ``DDPStrategy``.

    Args:
        *args: as for ``DDPStrategy``.
        fallback: as for the Trainer's strategy.
        on_unused: as for the Trainer's strategy. The error comes when all models that took part in the backward are
            done with it.
        **kwargs: as for ``DDPStrategy``, those that it hands on to ``DistributedDataParallel`` included.

    Raises:
        ValueError: for ``find_unused_parameters``, ``static_graph`` or ``skip_all_reduce_unused_params``, and for a
            ``fallback`` or an ``on_unused`` that there is not.
        RuntimeError: if this torch lacks the private calls that the strategy needs.
    """

    def __init__(
        self,
        *args: Any,
        fallback: Fallback = "find_unused_parameters",
        on_unused: OnUnused = "fallback",
        **kwargs: Any,
    ) -> None:
        refuse_arguments(type(self).__name__, kwargs)
        refuse_choices(type(self).__name__, fallback, on_unused)
        require_private_api(rebuilds=True)
        super().__init__(*args, **kwargs)
        self._raises = on_unused == "raise"
        self._run_options = {"prefers_finish": fallback == "finish", "reads_at_once": self._raises}
        # Weak, so that a model that the user lets go of goes.
        self._models: list[weakref.ref[_Model]] = []
        self._decisions: list[Decision | None] = []
        self._latest: Decision | None = None

    @property
    def decisions(self) -> tuple[Decision | None, ...]:
        """What the ranks decided together about each model, in the order of setting up; the same on every rank.

        None for a model before its first synchronised backward. ``decision.step`` counts the synchronised backwards
        that the model took part in.
        """
        return tuple(self._decisions)

    @property
    def decision(self) -> Decision | None:
        """The decision about the only model; with several, the one that was taken last."""
        return self._latest

    # -- a model is set up --------------------------------------------------------------------------------------------

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap a module with the flag off and start probing; a collective, on every rank in the same order.

        Each module but the first gets a process group of its own, over the same ranks: where ranks miss different
        things, the reductions of two wrappers start in different orders.
        """
        user_kwargs = self._ddp_kwargs
        if self._models and user_kwargs.get("device_mesh") is None:
            self._ddp_kwargs = {**user_kwargs, "process_group": self._another_group(user_kwargs.get("process_group"))}
        try:
            ddp = super().setup_module(module)
        finally:
            self._ddp_kwargs = user_kwargs
        # A module whose every reduction was put off by the user (delay_all_reduce_named_params) has no reducer.
        if hasattr(ddp, "reducer"):
            model = _Model(len(self._models), ddp, self._run_options)
            ddp.register_forward_pre_hook(_ForwardPreHook(model))
            ddp.register_forward_hook(_ForwardHook(model), always_call=True)
            self._models.append(weakref.ref(model))
            self._decisions.append(None)
        return ddp

    def _another_group(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        made: Any
        if group is None:
            made = dist.new_group(timeout=self._timeout)
        else:
            ranks = dist.get_process_group_ranks(group)
            made = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        another: dist.ProcessGroup = made
        return another

    # -- a backward ---------------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward, and finish the reductions of the models that take part in it.

        A model takes part if its latest forward was to be synchronised and the loss of some rank comes by it; which
        model Fabric was told (``fabric.backward(loss, model=...)``) makes no difference. On every rank the gradients
        are complete when this returns. A rank whose loss comes by none of a model's parameters contributes zeros. The
        calls are those of Fabric's ``Strategy.backward`` (``strategies/strategy.py``, 2.6.6), with the finish before
        the last.

        Raises:
            RuntimeError: on every rank, if the set of trainable parameters changed differently across ranks, or if
                parameters were added to a model.
            UnusedParametersError: on every rank, if some rank left a parameter of a model without a gradient and the
                strategy was told to raise then.
        """
        pending = [model for reference in self._models if (model := reference()) is not None and model.forward]
        synchronised = [model for model in pending if model.forward and model.forward.is_synchronised]
        taking_part = self._agree_on_taking_part(tensor, synchronised)
        for model in taking_part:
            tensor = self._begin(model, tensor)
        unsynchronised = [model for model in pending if model not in synchronised]
        if unsynchronised and not tensor.requires_grad:
            # A rank without a loss in the middle of a window; there is nobody to contribute to yet.
            tensor = tensor + torch.zeros((), device=tensor.device, requires_grad=True)
        for model in (*taking_part, *unsynchronised):
            model.before_backward(tensor)
        handle = at_end_of_backward(tensor, lambda: _finish_all(taking_part)) if len(taking_part) > 1 else None
        self.precision.pre_backward(tensor, module)
        try:
            self.precision.backward(tensor, module, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
        decided = [decision for model in taking_part if (decision := self._after_backward(model, tensor)) is not None]
        for decision in decided:
            if decision.unused and self._raises:
                raise UnusedParametersError(decision)
        if not taking_part and len(synchronised) == len(self._models) == 1:
            keep_scaler_content(self.precision, synchronised[0].run.reduction)
        self.precision.post_backward(tensor, module)

    def _agree_on_taking_part(self, loss: Tensor, models: Sequence[_Model]) -> list[_Model]:
        """Which of the models with a forward to synchronise the loss of some rank comes by.

        The others cannot be asked once they are in their backward, where they wait for this rank. So all ranks say
        before it what their loss comes by, and only one that comes by less than all of it waits for the answer.
        """
        if not models:
            return []
        landmarks = [model.forward.landmarks for model in models if model.forward]
        reached = {models[place].place for place in reached_landmarks(loss, landmarks)}
        posted = models[0].run.post_map(reached, len(self._models))
        if len(reached) == len(models):
            return list(models)
        counts = posted.read()
        return [model for model in models if counts[model.place]]

    def _begin(self, model: _Model, loss: Tensor) -> Tensor:
        """Look at the model's parameters, and mend a loss that reaches none of them."""
        run = model.run
        if model.steps % _STEPS_BETWEEN_LOOKS_FOR_ADDED == 0 and (names := run.trainable.added()):
            raise RuntimeError(describe_added(names=names))
        run.stands_in = False
        run.note_unfrozen()
        run.note_frozen()
        if not run.reaches_nothing(loss):
            return loss
        zero = run.stand_in()
        if model.ddp.find_unused_parameters:
            run.reduction.expect(zero)
        return loss + zero

    def _after_backward(self, model: _Model, loss: Tensor) -> Decision | None:
        model.steps += 1
        model.forward = None
        aftermath = model.run.after_backward(loss, lambda: model.steps) or Aftermath()
        if len(self._models) > 1:
            name = type(model.ddp.module).__name__
            model.notices.of = f"Model {model.place + 1} of {len(self._models)} that were set up ({name}): "
        if aftermath.decision is not None:
            self._decisions[model.place] = self._latest = aftermath.decision
            if not self._raises:
                model.notices.announce(aftermath.decision, is_global_zero=self.is_global_zero)
        if aftermath.sat_out:
            if not aftermath.change_seen:
                model.notices.sat_out(rank=self.global_rank, step=model.steps, reason=SIT_OUT_OF_A_LOOP)
            keep_scaler_content(self.precision, model.run.reduction)
        if aftermath.set_changed:
            model.notices.changes += 1
        self._rewrap_if_due(model)
        return aftermath.decision

    def _rewrap_if_due(self, model: _Model) -> None:
        """Give the model's wrapper another reducer, on every rank, once that has been decided."""
        flag = model.run.rewrap_with_flag
        if flag is None:
            return
        began = time.perf_counter()
        model.rebuild(flag=flag)
        if not flag:
            seconds = time.perf_counter() - began
            model.notices.rewrapped(seconds, step=model.steps, is_global_zero=self.is_global_zero)


def _finish_all(models: Sequence[_Model]) -> None:
    for model in models:
        model.run.finish_within_backward()

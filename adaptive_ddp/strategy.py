"""The Lightning hooks of the strategy, in the order in which data meets them.

Promise: after each synchronised backward, and before ``on_after_backward``, every gradient on every rank is what
``find_unused_parameters=True`` gives, whether or not that flag is on; and all ranks take the same decision about the
flag in the same step.

Limits: a backward that does not go through Lightning (``loss.backward()`` in manual optimization instead of
``self.manual_backward(loss)``) is not seen here, as it is not seen by Lightning's own ``DDPStrategy``.

This file imports neither of the two Lightning packages: :class:`AdaptiveDDPMixin` goes in front of the ``DDPStrategy``
of either (see ``pytorch_lightning.py``).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from adaptive_ddp.decision import Decision, Obstacle, State, decide
from adaptive_ddp.graph import reached_parameters, reaches_any, touch
from adaptive_ddp.reducer import (
    Reduction,
    dismantle,
    gradient_or_zeros,
    move_comm_hooks,
    require_private_api,
    sparse_parameters,
    uses_power_sgd,
)
from adaptive_ddp.report import (
    UnusedParametersWarning,
    describe_added,
    describe_rewraps,
    describe_sit_out,
    describe_split,
)
from adaptive_ddp.tally import Exchange, PostedTally
from adaptive_ddp.trainable import TrainableSet
from adaptive_ddp.window import AccumulationWindow

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy as _DDPStrategy
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle
else:
    _DDPStrategy = object

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


@dataclass
class _Step:
    """One synchronised backward, as far as it is known."""

    number: int
    tally: PostedTally
    # The parameters that are unused on this rank, with the gradients they had before: the reducer's index of each.
    unused: dict[int, Tensor | None]
    # This rank's backward, where something is missing; the graph is gone with the step, what it hides is not.
    hides_parameters: bool


@dataclass
class _Run:
    """What belongs to one wrapper."""

    reduction: Reduction
    window: AccumulationWindow
    exchange: Exchange
    trainable: TrainableSet
    state: State
    # The flag that the wrapper should have; it is wrapped again at the first moment outside its forward.
    rewrap_with_flag: bool | None = None
    # The latest step, while some rank has yet to read its tally.
    open_step: _Step | None = None
    # A backward of the next window has been, which the wrapper knows of and its successor would not.
    is_within_window: bool = False
    # Seen on this rank since the last synchronised backward: the trainable parameters are not those of the wrapper.
    change_seen: bool = False
    # Of those, what was trainable in some backward since and is not in the reducer: it may hold a gradient.
    unfrozen: set[int] = field(default_factory=set)
    # Agreed by all ranks: what has become trainable and is not in the reducer. Reduced here until the rewrap.
    outside: list[int] = field(default_factory=list)
    # The current step has no loss of its own on this rank.
    sat_out: bool = False
    # A usage map that is known to all, while some rank has had no graph to look for obstacles in.
    undecided: tuple[_Step, list[int]] | None = None


def _hides_parameters(run: _Run, loss: Tensor, reaching: frozenset[int]) -> bool:
    """Whether the backward of a loss reached some of the reducer's parameters outside the graph of that loss."""
    reached = set(reached_parameters(loss))
    return any(run.reduction.parameters[index] not in reached for index in reaching)


class AdaptiveDDPMixin(_DDPStrategy):
    """DDP that chooses ``find_unused_parameters`` by itself; to go in front of a Lightning ``DDPStrategy``.

    Args:
        *args: as for ``DDPStrategy``.
        **kwargs: as for ``DDPStrategy``, those that it hands on to ``DistributedDataParallel`` included.

    Raises:
        ValueError: for ``find_unused_parameters``, ``static_graph`` or ``skip_all_reduce_unused_params``.
        RuntimeError: if this torch lacks the private calls that finishing a reduction needs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, reason in _REFUSED.items():
            if name in kwargs:
                raise ValueError(f"{type(self).__name__}({name}={kwargs[name]!r}): {reason}.")
        require_private_api()
        super().__init__(*args, **kwargs)
        self._run: _Run | None = None
        self._decision: Decision | None = None
        self._warned_of: set[str] = set()
        self._sit_outs = 0
        self._changes = 0
        self._rewrap_seconds = 0.0
        self._sparse_handles: list[RemovableHandle] = []

    @property
    def decision(self) -> Decision | None:
        """What the ranks decided together in this fit, or the last one; the same on every rank.

        None before the first synchronised backward. ``str(strategy.decision)`` is the report.
        """
        return self._decision

    # -- a fit begins -------------------------------------------------------------------------------------------------

    @override
    def configure_ddp(self) -> None:
        """Wrap the module with the flag off and start probing, whatever an earlier fit decided."""
        super().configure_ddp()
        self._decision = None
        self._warned_of.clear()
        self._sit_outs = self._changes = 0
        self._rewrap_seconds = 0.0
        self._begin(State.PROBE)

    def _begin(self, state: State) -> None:
        """Start on a wrapper that has just been made."""
        self._run = None
        # A module whose every reduction was put off by the user (delay_all_reduce_named_params) has no reducer.
        if not hasattr(self._wrapper, "reducer"):
            return
        reduction = Reduction(self._wrapper)
        self._run = _Run(
            reduction=reduction,
            window=AccumulationWindow(reduction.parameters),
            exchange=Exchange(self._wrapper.process_group, reduction.device),
            trainable=TrainableSet(self._wrapper.module, self._wrapper.parameters_to_ignore),
            state=state,
        )
        self._unshare_sparse_gradients(reduction)

    def _unshare_sparse_gradients(self, reduction: Reduction) -> None:
        """Give the reducer copies of sparse gradients.

        It divides them in place (``reducer.cpp``, ``mark_variable_ready_sparse``). An additive embedding's gradient
        shares memory with the gradient that flows on to earlier layers, which would be divided with it.
        """
        self._share_sparse_gradients()
        sparse_ones: list[Any] = [
            parameter
            for parameter, sparse in zip(reduction.parameters, reduction.expects_sparse, strict=True)
            if sparse
        ]
        self._sparse_handles = [parameter.register_hook(torch.clone) for parameter in sparse_ones]

    def _share_sparse_gradients(self) -> None:
        for handle in self._sparse_handles:
            handle.remove()
        self._sparse_handles = []

    # -- a training step ----------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Look for parameters that were added to the module, once an epoch.

        Raises:
            RuntimeError: naming them, if there are any.
        """
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0 and self._run is not None and (names := self._run.trainable.added()):
            raise RuntimeError(describe_added(names=names))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; mend a loss that reaches nothing; afterwards rewrap, if a backward inside it decided so.

        On a rank whose ``training_step`` returns None under automatic optimization this returns a zero instead, whose
        backward contributes zeros to the other ranks' step.
        """
        run = self._run
        if run is None:
            return super().training_step(*args, **kwargs)
        run.sat_out = False
        # Under manual optimization a step may toggle requires_grad on the way; between steps it should be at rest.
        if not self._is_automatic and run.trainable.has_changed():
            run.change_seen = True
        with self._mended_step(run) if self._is_automatic else nullcontext():
            output = super().training_step(*args, **kwargs)
        self._rewrap_if_due()
        return output

    @contextmanager
    def _mended_step(self, run: _Run) -> Iterator[None]:
        """Have the module's ``training_step`` return a loss that DDP can run on, from within the wrapped forward.

        The flag's graph walk starts from what the wrapped forward returns. Lightning redirects ``forward`` to
        ``training_step`` by shadowing the method on the instance in the same way.
        """
        module = self.lightning_module
        assert module is not None
        shadowed = module.__dict__.get("training_step")
        original = module.training_step

        def restore() -> None:
            if shadowed is None:
                module.__dict__.pop("training_step", None)
            else:
                module.__dict__["training_step"] = shadowed

        def training_step(*args: Any, **kwargs: Any) -> Any:
            # First, since the step may copy or save the module.
            restore()
            return self._mend(run, original(*args, **kwargs))

        module.__dict__["training_step"] = training_step
        try:
            yield
        finally:
            restore()

    def _mend(self, run: _Run, output: Any) -> Any:
        """Replace a missing loss; under the flag, add a touch of every parameter to one that reaches none."""
        if run.trainable.has_changed():
            run.change_seen = True
            run.unfrozen.update(run.trainable.unfrozen())
        if output is None:
            return self._sit_out(run)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and self._reaches_nothing(run, loss):
            loss = loss + self._sit_out(run)
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss
        return output

    def _reaches_nothing(self, run: _Run, loss: Tensor) -> bool:
        """Whether a backward from the loss is impossible, or would have the other ranks wait for ever."""
        if not loss.requires_grad:
            return True
        # With the flag off it shows after the backward, at no cost.
        return self._wrapper.find_unused_parameters and not reaches_any(loss, run.reduction.parameter_set)

    def _sit_out(self, run: _Run) -> Tensor:
        run.sat_out = True
        self._warn_of_sit_out(run)
        if self._wrapper.find_unused_parameters:
            # Under the flag no reduction starts before some hook has fired.
            return touch(run.reduction.parameters)
        return torch.zeros((), device=run.reduction.device, requires_grad=True)

    def _warn_of_sit_out(self, run: _Run) -> None:
        if run.change_seen:
            # The rank may have trained what is not in the reducer yet.
            return
        self._sit_outs += 1
        if str(self._sit_outs).rstrip("0") == "1":
            text = describe_sit_out(rank=self.global_rank, step=self._step_number, times=self._sit_outs)
            warnings.warn(text, UserWarning, stacklevel=2)

    # -- its backward -------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, and finish its reduction before ``on_after_backward`` or any other hook runs.

        On every rank the gradients are complete when this returns. The calls are those of Lightning's
        ``Strategy.backward`` (``strategies/strategy.py``, 2.6.6), with the finish between the third and the fourth.

        Raises:
            RuntimeError: on every rank, if the set of trainable parameters changed differently across ranks.
        """
        assert self.lightning_module is not None
        if self._run is not None and not self._is_automatic:
            closure_loss = self._mend_manual_loss(self._run, closure_loss)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        synchronised = self._before_backward()
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        if synchronised:
            self._finish_backward(closure_loss)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _mend_manual_loss(self, run: _Run, loss: Tensor) -> Tensor:
        """Do for a loss of manual optimization what :meth:`_mend` does in the wrapped forward."""
        run.sat_out = False
        if unfrozen := run.trainable.unfrozen():
            run.change_seen = True
            run.unfrozen.update(unfrozen)
        return loss + self._sit_out(run) if self._reaches_nothing(run, loss) else loss

    def _before_backward(self) -> bool:
        """Note what the window needs; return whether the reduction of this backward is ours to finish."""
        run = self._run
        if run is None:
            return False
        synchronised: bool = self._wrapper.require_backward_grad_sync
        run.is_within_window = not synchronised
        if not self._wrapper.find_unused_parameters and (run.state is State.PROBE or not synchronised):
            run.window.open(record_all=run.state is State.PROBE)
        return synchronised

    def _finish_backward(self, loss: Tensor) -> None:
        """Finish the reduction on this rank, and agree with the others on what was unused.

        Every rank runs the same collectives here: the branches depend on tallies that all ranks have read, or, where
        some read one early, on all of them having done so.
        """
        run = self._run
        assert run is not None
        unused, missing = self._finish_reduction(run)
        reaching = frozenset(range(len(run.reduction.parameters))) - missing
        sat_out = run.sat_out or not reaching
        hides = bool(unused) and run.state in (State.PROBE, State.WATCH) and _hides_parameters(run, loss, reaching)
        changed, run.change_seen = run.change_seen, False
        waiting = bool(unused) or sat_out or changed
        tally = run.exchange.post(waiting=waiting, missing=bool(unused) and not sat_out, changed=changed)
        step = _Step(self._step_number, tally, unused, hides)
        self._look_back(run)
        if run.undecided is not None:
            self._decide(run, *run.undecided, loss, reaching)
        if waiting or run.state is State.PROBE:
            self._settle(run, step, loss, reaching)
        else:
            # Read in the next step, so that a rank that used everything does not wait for the others in this one.
            run.open_step = step
        self._reduce_outside(run)
        if sat_out:
            self._keep_scaler_content(run)
        if self._is_automatic:
            self._rewrap_if_due()

    def _finish_reduction(self, run: _Run) -> tuple[dict[int, Tensor | None], frozenset[int]]:
        """Finish the reduction on this rank; return what is unused on it, with what it held, and what was missing."""
        window, reduction = run.window, run.reduction
        if self._wrapper.find_unused_parameters:
            # The flag looks at the graph of the loss. A backward may reach less of it (backward(inputs=...)).
            reduction.finish(is_used=lambda index: True, wakes=False)
            return {}, frozenset()
        finished = reduction.finish(is_used=window.received)
        unused = finished.unused
        if run.state is State.PROBE:
            # To the reducer a parameter whose hook fired is ready, even if the backward brought it no gradient (a
            # custom autograd function that returned None). The window tells the two apart.
            for index in range(len(reduction.parameters)):
                if not window.received(index):
                    unused.setdefault(index, None)
        window.close()
        if len(finished.missing) == len(reduction.parameters) and not run.sat_out:
            self._warn_of_sit_out(run)
        return unused, finished.missing

    # -- the ranks' agreement -----------------------------------------------------------------------------------------

    def _look_back(self, run: _Run) -> None:
        """Read the tally of the step before, which every rank has read by now or reads here."""
        step, run.open_step = run.open_step, None
        if step is None:
            return
        count = step.tally.read()
        if count.changed:
            self._raise_split(run, step)
        if count.missing and run.state is State.WATCH and run.undecided is None:
            run.undecided = step, self._missed_by(run, step)

    def _settle(self, run: _Run, step: _Step, loss: Tensor, reaching: frozenset[int]) -> None:
        """Read a tally in its own step, and act on it."""
        count = step.tally.read()
        probing = run.state is State.PROBE
        if not probing and count.waiting < run.exchange.world_size:
            # The ranks that used everything learn of it in the next step; what there is to decide is decided there.
            run.open_step = step
            return
        missed_by = None
        if count.waiting == run.exchange.world_size:
            # Only now can a parameter be unused everywhere.
            missed_by = self._missed_by(run, step)
            for index, gradient in step.unused.items():
                if missed_by[index] == run.exchange.world_size:
                    run.reduction.restore(index, gradient)
        if count.changed:
            self._agree_on_trainable_set(run, step)
        elif run.state in (State.PROBE, State.WATCH) and count.missing and run.undecided is None:
            self._decide(run, step, missed_by or self._missed_by(run, step), loss, reaching)
        elif probing and not count.waiting:
            self._decide(run, step, [0] * len(run.reduction.parameters), loss, reaching)

    def _missed_by(self, run: _Run, step: _Step) -> list[int]:
        return run.exchange.count(step.unused, len(run.reduction.parameters))

    def _decide(
        self, run: _Run, step: _Step, missed_by: list[int], loss: Tensor | None, reaching: frozenset[int]
    ) -> None:
        """Decide from a usage map, on every rank alike; or put it off while a rank has no graph to look into."""
        obstacles = [Obstacle.SPARSE] if any(run.reduction.expects_sparse) else []
        if uses_power_sgd(self._wrapper):
            obstacles.append(Obstacle.POWER_SGD)
        if any(missed_by):
            hides = step.hides_parameters or (loss is not None and _hides_parameters(run, loss, reaching))
            lacks_graph = loss is not None and not reaching
            hidden, without_graph = run.exchange.count([0] * hides + [1] * lacks_graph, 2)
            if hidden:
                obstacles.append(Obstacle.REENTRANT)
            elif without_graph:
                run.undecided = step, missed_by
                return
        run.undecided = None
        self._decision = decide(
            step=step.number,
            world_size=run.exchange.world_size,
            names=run.reduction.names,
            numels=[parameter.numel() for parameter in run.reduction.parameters],
            missed_by=missed_by,
            obstacles=obstacles,
        )
        run.state = self._decision.state
        if run.state is State.ON:
            run.rewrap_with_flag = True
        names = {parameter.name for parameter in self._decision.unused}
        if self.is_global_zero and not names <= self._warned_of:
            warnings.warn(str(self._decision), UnusedParametersWarning, stacklevel=2)
        self._warned_of |= names

    def _agree_on_trainable_set(self, run: _Run, step: _Step) -> None:
        """Go on with the set of trainable parameters that all ranks have now, or raise if it is not the same."""
        size = len(run.trainable.names)
        now = [index for index, trainable in enumerate(run.trainable.now()) if trainable]
        run.unfrozen.update(run.trainable.unfrozen())
        counts = run.exchange.count([*now, *(size + index for index in run.unfrozen)], 2 * size)
        if step.tally.read().changed < run.exchange.world_size or not set(counts) <= {0, run.exchange.world_size}:
            self._raise_split(run, step)
        run.outside = sorted(run.unfrozen)
        run.trainable.accept()
        # With nothing left to train there is nothing to wrap; the old wrapper stays until there is.
        run.rewrap_with_flag = False if now else None
        self._changes += 1

    def _raise_split(self, run: _Run, step: _Step) -> None:
        trainable = frozenset(name for name, now in zip(run.trainable.names, run.trainable.now(), strict=True) if now)
        by_rank = run.exchange.gather(trainable)
        raise RuntimeError(describe_split(step=step.number, names=run.trainable.names, trainable_by_rank=by_rank))

    def _reduce_outside(self, run: _Run) -> None:
        """Reduce the gradients of parameters that became trainable after wrapping, by the reducer's own rule."""
        if not run.outside:
            return
        parameters = [run.trainable.parameters[index] for index in run.outside]
        sparse = sparse_parameters(self._wrapper.module)
        used = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
        for parameter, used_by in zip(parameters, run.exchange.count(used, len(parameters)), strict=True):
            if used_by:
                gradient = gradient_or_zeros(parameter, sparse=parameter in sparse)
                parameter.grad = run.exchange.average(gradient)

    def _keep_scaler_content(self, run: _Run) -> None:
        """Under a gradient scaler, have zeros where all ranks sat a step out: it refuses one without a gradient."""
        if getattr(self.precision_plugin, "scaler", None) is None:
            return
        if all(parameter.grad is None for parameter in run.reduction.parameters):
            for parameter in run.reduction.parameters:
                parameter.grad = torch.zeros_like(parameter)

    # -- wrapping again -----------------------------------------------------------------------------------------------

    def _rewrap_if_due(self) -> None:
        """Wrap the module again, on every rank, once that has been decided."""
        run = self._run
        if run is None or run.rewrap_with_flag is None or run.is_within_window:
            return
        began = time.perf_counter()
        flag = run.rewrap_with_flag
        old = self._wrapper
        run.window.close()
        # What is kept of the run would keep the old buckets alive.
        self._run = run = None
        dismantle(old)
        user_kwargs = self._ddp_kwargs
        # Without init_sync=False the constructor would give every rank the buffers of rank zero.
        self._ddp_kwargs = {**user_kwargs, "find_unused_parameters": flag, "init_sync": False}
        try:
            self.model = self._setup_model(old.module)
        finally:
            self._ddp_kwargs = user_kwargs
        # Whether the next forward broadcasts the buffers; under manual optimization Lightning has it stop after the
        # first, and a new wrapper would begin again.
        self._wrapper.require_forward_param_sync = old.require_forward_param_sync
        self._register_ddp_hooks()
        move_comm_hooks(old, self._wrapper)
        self._begin(State.ON if flag else State.PROBE)
        if not flag:
            self._note_rewrap(time.perf_counter() - began)

    def _note_rewrap(self, seconds: float) -> None:
        self._rewrap_seconds += seconds
        if self._changes == _MANY_REWRAPS and self.is_global_zero:
            mean_ms = 1000 * self._rewrap_seconds / self._changes
            text = describe_rewraps(changes=self._changes, steps=self._step_number, mean_ms=mean_ms)
            warnings.warn(text, UserWarning, stacklevel=2)

    # -- a fit ends ---------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        """Read the last step's tally, which no later step will read."""
        super().on_train_end()
        run = self._run
        if run is None:
            return
        self._look_back(run)
        if run.undecided is not None:
            self._decide(run, *run.undecided, None, frozenset())
            self._rewrap_if_due()

    @override
    def teardown(self) -> None:
        """Unwrap the module, also after an exception, and leave no hook on it."""
        if self._run is not None:
            self._run.window.close()
            self._run = None
            # A traceback may keep the wrapper alive, whose hooks would disturb the next one.
            dismantle(self._wrapper)
        self._share_sparse_gradients()
        if isinstance(self.model, DistributedDataParallel):
            # Done before Lightning does it, whose teardown recommends static_graph=True for this very class.
            self.model = self.lightning_module
        super().teardown()

    # -- where things are ---------------------------------------------------------------------------------------------

    @property
    def _wrapper(self) -> DistributedDataParallel:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    @property
    def _is_automatic(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization

    @property
    def _step_number(self) -> int:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.global_step + 1

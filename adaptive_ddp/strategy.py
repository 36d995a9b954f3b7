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
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from adaptive_ddp.decision import Decision, State
from adaptive_ddp.reducer import dismantle, move_comm_hooks, require_private_api
from adaptive_ddp.report import (
    UnusedParametersError,
    UnusedParametersWarning,
    describe_added,
    describe_rewraps,
    describe_sit_out,
)
from adaptive_ddp.run import Run

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy as _DDPStrategy
    from torch.optim import Optimizer
else:
    _DDPStrategy = object

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


class AdaptiveDDPMixin(_DDPStrategy):
    """DDP that chooses ``find_unused_parameters`` by itself; to go in front of a Lightning ``DDPStrategy``.

    Args:
        *args: as for ``DDPStrategy``.
        fallback: what to do once some rank left a parameter without a gradient. ``"find_unused_parameters"``: wrap the
            module again with the flag on, where the flag can serve the graph. ``"finish"``: leave the flag off and
            finish each step's reduction in place. The gradients are the same bits; ``docs/performance.md`` says which
            is faster when.
        on_unused: ``"fallback"``: do that and warn. ``"raise"``: raise an error instead, on all ranks in the step in
            which some rank left a parameter without a gradient, before the optimizer steps. Every rank then waits for
            the others' word at the end of each backward. A rank that sits a step out is no reason.
        **kwargs: as for ``DDPStrategy``, those that it hands on to ``DistributedDataParallel`` included.

    Raises:
        ValueError: for ``find_unused_parameters``, ``static_graph`` or ``skip_all_reduce_unused_params``, and for a
            ``fallback`` or an ``on_unused`` that there is not.
        RuntimeError: if this torch lacks the private calls that finishing a reduction needs.
    """

    def __init__(
        self,
        *args: Any,
        fallback: Fallback = "find_unused_parameters",
        on_unused: OnUnused = "fallback",
        **kwargs: Any,
    ) -> None:
        for name, reason in _REFUSED.items():
            if name in kwargs:
                raise ValueError(f"{type(self).__name__}({name}={kwargs[name]!r}): {reason}.")
        if fallback not in get_args(Fallback):
            raise ValueError(
                f"{type(self).__name__}(fallback={fallback!r}): there is no such fallback. Write"
                ' fallback="find_unused_parameters" (the default) to turn the flag on once a parameter got no gradient,'
                ' or fallback="finish" to leave it off and finish each reduction in place.'
            )
        if on_unused not in get_args(OnUnused):
            raise ValueError(
                f"{type(self).__name__}(on_unused={on_unused!r}): there is no such thing to do. Write"
                ' on_unused="fallback" (the default) to train on, or on_unused="raise" for an error on all ranks once a'
                " parameter got no gradient."
            )
        require_private_api()
        super().__init__(*args, **kwargs)
        self._fallback = fallback
        self._on_unused = on_unused
        self._run: Run | None = None
        self._decision: Decision | None = None
        self._warned_of: set[str] = set()
        self._sit_outs = 0
        self._changes = 0
        self._rewrap_seconds = 0.0

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
        # A module whose every reduction was put off by the user (delay_all_reduce_named_params) has no reducer.
        has_reducer = hasattr(self._wrapper, "reducer")
        options = {
            "prefers_finish": self._fallback == "finish",
            "reads_at_once": self._on_unused == "raise",
            "toggles": not self._is_automatic,
        }
        self._run = Run(self._wrapper, state, **options) if has_reducer else None

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
        run.stands_in = False
        run.note_frozen()
        with self._mended_step(run) if self._is_automatic else nullcontext():
            output = super().training_step(*args, **kwargs)
        self._rewrap_if_due()
        return output

    @contextmanager
    def _mended_step(self, run: Run) -> Iterator[None]:
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

    def _mend(self, run: Run, output: Any) -> Any:
        """Replace a missing loss; under the flag, add a touch of every parameter to one that reaches none."""
        run.note_unfrozen()
        if output is None:
            return self._stand_in(run)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and run.reaches_nothing(loss):
            loss = loss + self._stand_in(run)
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss
        return output

    def _stand_in(self, run: Run) -> Tensor:
        zero = run.stand_in()
        # A rank that trains what is not in the reducer yet has not sat out.
        if not run.change_seen:
            self._warn_of_sit_out()
        return zero

    def _warn_of_sit_out(self) -> None:
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
            UnusedParametersError: on every rank, if some rank left a parameter without a gradient and the strategy was
                told to raise then.
        """
        assert self.lightning_module is not None
        run = self._run
        if run is not None and not self._is_automatic:
            closure_loss = self._mend_manual_loss(run, closure_loss)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        synchronised = run is not None and run.before_backward(closure_loss)
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        if run is not None and synchronised:
            self._after_backward(run, closure_loss)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _mend_manual_loss(self, run: Run, loss: Tensor) -> Tensor:
        """Do for a loss of manual optimization what :meth:`_mend` does in the wrapped forward."""
        run.stands_in = False
        run.note_unfrozen()
        return loss + self._stand_in(run) if run.reaches_nothing(loss) else loss

    def _after_backward(self, run: Run, loss: Tensor) -> None:
        aftermath = run.after_backward(loss, self._step_number)
        self._announce(aftermath.decision)
        if aftermath.sat_out:
            if not run.stands_in and not aftermath.change_seen:
                self._warn_of_sit_out()
            self._keep_scaler_content(run)
        if aftermath.set_changed:
            self._changes += 1
        if self._is_automatic:
            self._rewrap_if_due()

    def _announce(self, decision: Decision | None) -> None:
        """Keep what was decided, and have rank zero say what is new in it, or raise on all ranks."""
        if decision is None:
            return
        self._decision = decision
        if decision.unused and self._on_unused == "raise":
            raise UnusedParametersError(decision)
        names = {parameter.name for parameter in decision.unused}
        if self.is_global_zero and not names <= self._warned_of:
            warnings.warn(str(decision), UnusedParametersWarning, stacklevel=2)
        self._warned_of |= names

    def _keep_scaler_content(self, run: Run) -> None:
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
        run.close()
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
        self._announce(run.conclude())
        self._rewrap_if_due()

    @override
    def teardown(self) -> None:
        """Unwrap the module, also after an exception, and leave no hook on it."""
        if self._run is not None:
            self._run.close()
            self._run = None
            # A traceback may keep the wrapper alive, whose hooks would disturb the next one.
            dismantle(self._wrapper)
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

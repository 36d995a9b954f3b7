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

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from adaptive_ddp.decision import Decision, State, decide
from adaptive_ddp.reducer import Reduction, dismantle, require_private_api
from adaptive_ddp.report import UnusedParametersWarning
from adaptive_ddp.tally import Exchange, PostedTally
from adaptive_ddp.window import AccumulationWindow

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy as _DDPStrategy
    from torch.optim import Optimizer
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


@dataclass
class _Step:
    """One synchronised backward, as far as it is known."""

    number: int
    tally: PostedTally
    # The parameters that are unused on this rank, with the gradients they had before: the reducer's index of each.
    unused: dict[int, Tensor | None]


@dataclass
class _Run:
    """What belongs to one wrapper with the flag off."""

    reduction: Reduction
    window: AccumulationWindow
    exchange: Exchange
    state: State = State.PROBE
    # The latest step, while some rank has yet to read its tally.
    open_step: _Step | None = None


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
        self._run = None
        # A module whose every reduction was put off by the user (delay_all_reduce_named_params) has no reducer.
        if hasattr(self._wrapper, "reducer"):
            reduction = Reduction(self._wrapper)
            self._run = _Run(
                reduction=reduction,
                window=AccumulationWindow(reduction.parameters),
                exchange=Exchange(self._wrapper.process_group, reduction.device),
            )

    # -- a training step ----------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; afterwards rewrap, if a backward inside it (manual optimization) decided so."""
        output = super().training_step(*args, **kwargs)
        self._rewrap_if_due()
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, and finish its reduction before ``on_after_backward`` or any other hook runs.

        On every rank the gradients are complete when this returns. The calls are those of Lightning's
        ``Strategy.backward`` (``strategies/strategy.py``, 2.6.6), with the finish between the second and the third.
        """
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        synchronised = self._before_backward()
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        if synchronised:
            self._finish_backward()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _before_backward(self) -> bool:
        """Note what the window needs; return whether the reduction of this backward is ours to finish."""
        run = self._run
        if run is None:
            return False
        synchronised: bool = self._wrapper.require_backward_grad_sync
        if run.state is State.PROBE or not synchronised:
            run.window.open(record_all=run.state is State.PROBE)
        return synchronised

    def _finish_backward(self) -> None:
        """Finish the reduction on this rank, and agree with the others on what was unused.

        Every rank runs the same collectives here: the branches depend on tallies that all ranks have read, or, where a
        rank reads one early, on a tally that equals the world size only if all of them do.
        """
        run = self._run
        assert run is not None
        unused = self._finish_reduction(run)
        sat_out = len(unused) == len(run.reduction.parameters)
        tally = run.exchange.post(missing=bool(unused) and not sat_out, sat_out=sat_out)
        step = _Step(self._step_number, tally, unused)
        earlier, run.open_step = run.open_step, None
        if earlier is not None and earlier.tally.read().missing:
            self._decide(run, earlier, self._missed_by(run, earlier))
        if run.state is State.WATCH and not unused:
            # Read in the next step, so that a rank that used everything does not wait for the others in this one.
            run.open_step = step
        else:
            self._settle(run, step)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            self._rewrap_if_due()

    def _finish_reduction(self, run: _Run) -> dict[int, Tensor | None]:
        """Finish the reduction on this rank; return the parameters that are unused on it, with what they held."""
        window, reduction = run.window, run.reduction
        unused = reduction.finish(is_used=window.received)
        if run.state is State.PROBE:
            # To the reducer a parameter whose hook fired is ready, even if the backward brought it no gradient (a
            # custom autograd function that returned None). The window tells the two apart.
            for index in range(len(reduction.parameters)):
                if not window.received(index):
                    unused.setdefault(index, None)
        window.close()
        return unused

    def _settle(self, run: _Run, step: _Step) -> None:
        """Read a tally in its own step, and act on it."""
        count = step.tally.read()
        probing = run.state is State.PROBE
        if count.missing + count.sat_out == run.exchange.world_size:
            # Only now can a parameter be unused everywhere; and as every rank has something missing, all are here.
            missed_by = self._missed_by(run, step)
            for index, gradient in step.unused.items():
                if missed_by[index] == run.exchange.world_size:
                    run.reduction.restore(index, gradient)
            if count.missing and run.state is not State.ON:
                self._decide(run, step, missed_by)
        elif count.missing and probing:
            self._decide(run, step, self._missed_by(run, step))
        elif count.missing and run.state is State.WATCH:
            # The ranks that used everything learn of it in the next step; the decision is taken there.
            run.open_step = step
        elif probing and not count.sat_out:
            self._decide(run, step, [0] * len(run.reduction.parameters))

    def _missed_by(self, run: _Run, step: _Step) -> list[int]:
        return run.exchange.sum_usage(step.unused, len(run.reduction.parameters))

    def _decide(self, run: _Run, step: _Step, missed_by: list[int]) -> None:
        self._decision = decide(
            step=step.number,
            world_size=run.exchange.world_size,
            names=run.reduction.names,
            numels=[parameter.numel() for parameter in run.reduction.parameters],
            missed_by=missed_by,
        )
        run.state = self._decision.state
        if run.state is State.ON and self.is_global_zero:
            warnings.warn(str(self._decision), UnusedParametersWarning, stacklevel=2)

    def _rewrap_if_due(self) -> None:
        """Wrap the module again with the flag on, on every rank, once that has been decided."""
        run = self._run
        if run is None or run.state is not State.ON:
            return
        old = self._wrapper
        # Torch's own flag does the rest of this fit. What is kept of the run would keep the old buckets alive.
        self._run = None
        dismantle(old)
        user_kwargs = self._ddp_kwargs
        # Without init_sync=False the constructor would give every rank the buffers of rank zero.
        self._ddp_kwargs = {**user_kwargs, "find_unused_parameters": True, "init_sync": False}
        try:
            self.model = self._setup_model(old.module)
        finally:
            self._ddp_kwargs = user_kwargs
        # Whether the next forward broadcasts the buffers; under manual optimization Lightning has it stop after the
        # first, and a new wrapper would begin again.
        self._wrapper.require_forward_param_sync = old.require_forward_param_sync
        self._register_ddp_hooks()

    # -- a fit ends ---------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        """Read the last step's tally, which no later step will read."""
        super().on_train_end()
        run = self._run
        if run is None:
            return
        step, run.open_step = run.open_step, None
        if step is not None and step.tally.read().missing:
            self._decide(run, step, self._missed_by(run, step))
            self._rewrap_if_due()

    @override
    def teardown(self) -> None:
        """Unwrap the module."""
        self._run = None
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
    def _step_number(self) -> int:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.global_step + 1

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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from adaptive_ddp.decision import Decision, State
from adaptive_ddp.notices import Fallback, Notices, OnUnused, keep_scaler_content, refuse_arguments, refuse_choices
from adaptive_ddp.reducer import dismantle, move_comm_hooks, require_private_api
from adaptive_ddp.report import SIT_OUT_OF_A_FIT, UnusedParametersError, describe_added
from adaptive_ddp.run import Run
from adaptive_ddp.smoke import SmokeRun, findings_of_run, findings_of_trainer, is_smoke_run
from adaptive_ddp.verdict import Verdict, judge, written_arguments

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy as _DDPStrategy
    from torch.optim import Optimizer
else:
    _DDPStrategy = object


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
        refuse_arguments(type(self).__name__, kwargs)
        refuse_choices(type(self).__name__, fallback, on_unused)
        require_private_api()
        self._written = written_arguments(kwargs, super().__init__, DistributedDataParallel.__init__)
        super().__init__(*args, **kwargs)
        self._fallback = fallback
        self._on_unused = on_unused
        self._run: Run | None = None
        self._decision: Decision | None = None
        self._notices = Notices()
        self._smoke: SmokeRun | None = None
        self._verdict: Verdict | None = None

    @property
    def decision(self) -> Decision | None:
        """What the ranks decided together in this fit, or the last one; the same on every rank.

        None before the first synchronised backward. ``str(strategy.decision)`` is the report.
        """
        return self._decision

    @property
    def verdict(self) -> Verdict | None:
        """What a smoke run (``fast_dev_run``) says about which strategy to train under; the same on every rank.

        There from the end of the fit on; None in and after any other fit. ``str(strategy.verdict)`` is what rank zero
        prints.
        """
        return self._verdict

    # -- a fit begins -------------------------------------------------------------------------------------------------

    @override
    def configure_ddp(self) -> None:
        """Wrap the module with the flag off and start probing, whatever an earlier fit decided."""
        super().configure_ddp()
        self._decision = None
        self._notices = Notices()
        self._begin(State.PROBE)
        self._verdict = None
        assert self.lightning_module is not None
        if self._run is not None and is_smoke_run(self.lightning_module.trainer):
            self._smoke = SmokeRun(
                self._run.trainable.parameters,
                is_automatic=self._is_automatic,
                findings=findings_of_trainer(self.lightning_module.trainer),
            )

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
        if self._is_automatic:
            restore = self._shadow_training_step(run)
            try:
                output = super().training_step(*args, **kwargs)
            finally:
                restore()
        else:
            output = super().training_step(*args, **kwargs)
        if self._smoke is not None:
            self._smoke.note_output(output)
        self._rewrap_if_due()
        return output

    def _shadow_training_step(self, run: Run) -> Callable[[], None]:
        """Have the module's ``training_step`` return a loss that DDP can run on, from within the wrapped forward.

        The flag's graph walk starts from what the wrapped forward returns. Lightning redirects ``forward`` to
        ``training_step`` by shadowing the method on the instance in the same way.

        Returns:
            What makes it as it was, if called before the step or after it.
        """
        module = self.lightning_module
        assert module is not None
        attributes = module.__dict__
        shadowed = attributes.get("training_step")
        original = module.training_step

        def restore() -> None:
            if shadowed is None:
                attributes.pop("training_step", None)
            else:
                attributes["training_step"] = shadowed

        def training_step(*args: Any, **kwargs: Any) -> Any:
            # First, since the step may copy or save the module.
            restore()
            return self._mend(run, original(*args, **kwargs))

        attributes["training_step"] = training_step
        return restore

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
        self._notices.sat_out(rank=self.global_rank, step=self._get_step_number(), reason=SIT_OUT_OF_A_FIT)

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
        if self._smoke is not None:
            self._smoke.begin_backward()
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        if self._smoke is not None and run is not None:
            self._smoke.end_backward(closure_loss, synchronised=synchronised, stands_in=run.stands_in)
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
        aftermath = run.after_backward(loss, self._get_step_number)
        if aftermath is not None:
            self._announce(aftermath.decision)
            if aftermath.sat_out:
                if not run.stands_in and not aftermath.change_seen:
                    self._warn_of_sit_out()
                keep_scaler_content(self.precision_plugin, run.reduction)
            if aftermath.set_changed:
                self._notices.changes += 1
        if run.rewrap_with_flag is not None and self._is_automatic:
            self._rewrap_if_due()

    def _announce(self, decision: Decision | None) -> None:
        """Keep what was decided, and have rank zero say what is new in it, or raise on all ranks."""
        if decision is None:
            return
        self._decision = decision
        if decision.unused and self._on_unused == "raise":
            self._conclude_smoke_run()
            raise UnusedParametersError(decision)
        self._notices.announce(decision, is_global_zero=self.is_global_zero)

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
            seconds = time.perf_counter() - began
            self._notices.rewrapped(seconds, step=self._get_step_number(), is_global_zero=self.is_global_zero)

    # -- a fit ends ---------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        """Read the last step's tally, which no later step will read."""
        super().on_train_end()
        run = self._run
        if run is None:
            return
        self._announce(run.conclude(self._get_step_number() - 1))
        self._conclude_smoke_run()
        self._rewrap_if_due()

    def _conclude_smoke_run(self) -> None:
        """Judge what all ranks recorded, on every rank, and have rank zero print it."""
        smoke, run = self._smoke, self._run
        if smoke is None or run is None:
            return
        self._end_smoke_run()
        own = {"fallback": self._fallback, "on_unused": self._on_unused}
        self._verdict = judge(
            run.gather(smoke.record(findings_of_run(run))),
            names=run.trainable.names,
            numels=[parameter.numel() for parameter in run.trainable.parameters],
            arguments=self._written,
            own_arguments=written_arguments(own, AdaptiveDDPMixin.__init__),
        )
        if self.is_global_zero:
            print(self._verdict)

    def _end_smoke_run(self) -> None:
        if self._smoke is not None:
            self._smoke.close()
            self._smoke = None

    @override
    def teardown(self) -> None:
        """Unwrap the module, also after an exception, and leave no hook on it."""
        self._end_smoke_run()
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

    def _get_step_number(self) -> int:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.global_step + 1

"""A callback that records which parameters received a gradient, on how many ranks, step by step.

Promise: weights are those of a run without it, bit for bit; the only collective is an asynchronous all-reduce of one
integer a parameter, right after a synchronised backward, where all ranks have just met; nothing waits for it before the
next one; and after an exception nothing waits for another rank at all. Where plain DDP leaves a reduction unfinished,
nothing is exchanged: the run ends as it would have, with a warning that names the parameters.

How a gradient is noticed: by a tensor hook on each parameter, which runs when the backward brings this rank's own
gradient and before DDP reduces it, so that the zeros which DDP writes for what is missing, and gradients
from before the step, do not count.

Limits: under manual optimization a backward that does not go through ``self.manual_backward(loss)`` is not seen, as it
is not seen by Lightning. What counts is what counts for DDP: a hook that fires while there is a gradient, be it one
from before. Parameters that are added during a fit are recorded from the next fit on. Sharding strategies are refused.

This file imports neither of the two Lightning packages: :class:`GradientUsageMonitorMixin` goes in front of the
``Callback`` of either.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from adaptive_ddp.picture import PICTURE_SUFFIXES, UsageHistory, draw, require_matplotlib
from adaptive_ddp.reducer import Reduction, forget_removed_hooks
from adaptive_ddp.usage_table import (
    TABLE_SUFFIXES,
    Record,
    TableWriter,
    continue_table,
    create_table,
    require_table_packages,
)

if TYPE_CHECKING:
    from pytorch_lightning import Callback as _Callback
    from torch.utils.hooks import RemovableHandle
else:
    _Callback = object

_RECEIVED, _REACHED = 1, 2

# Where loggers put the picture.
_PICTURE_NAME = "gradient_usage"

# After an exception: how long to look whether the last all-reduce has ended anyway.
_PATIENCE = timedelta(seconds=0.5)

_MOST_NAMES = 20

_SHARDING_STRATEGIES = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")


class GradientHooks:
    """Notes which parameters receive a gradient while it is attached. Of this rank alone.

    Args:
        parameters: the parameters, frozen ones included.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        self._received = bytearray(len(parameters))

    def attach(self) -> None:
        """Begin to take note; nothing is noted yet."""
        self._received[:] = bytes(len(self._parameters))
        if not self._handles:
            self._handles = [self._hook(index) for index in range(len(self._parameters))]

    def detach(self) -> None:
        """Remove the hooks; parameters without them cost nothing."""
        for handle, parameter in zip(self._handles, self._parameters, strict=False):
            handle.remove()
            forget_removed_hooks(parameter)
        self._handles = []

    def take(self) -> bytearray:
        """One byte a parameter, for what was noted since the last call or since attaching.

        1 if it received a gradient; 2 if its hook was called, but there was none; 0 otherwise.
        """
        received, self._received[:] = bytearray(self._received), bytes(len(self._parameters))
        return received

    def _hook(self, index: int) -> RemovableHandle:
        received = self._received
        parameter: Any = self._parameters[index]

        def note(gradient: Tensor | None) -> None:
            if gradient is not None or parameter.grad is not None:
                received[index] = _RECEIVED
            elif not received[index]:
                # A custom autograd function returned None; to DDP's reducer the parameter is ready all the same.
                received[index] = _REACHED

        trainable = parameter.requires_grad
        # A frozen parameter takes no hook, but may be unfrozen while this is attached.
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_hook(note)
        parameter.requires_grad_(trainable)
        return handle


@dataclass
class _Pending:
    """A recorded backward whose all-reduce may be under way."""

    step: int
    backward: int
    epoch: int
    global_step: int
    value: Tensor
    work: dist.Work | None
    # Which parameters were trainable when the batch was over.
    trainable: tuple[bool, ...] | None = None

    def has_ended(self) -> bool:
        return self.work is None or self.work.is_completed()

    def read(self) -> list[int]:
        if self.work is not None:
            self.work.wait()
        counts: list[int] = self.value.tolist()
        return counts


@dataclass
class _Fit:
    """What belongs to one fit."""

    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    hooks: GradientHooks
    world_size: int
    device: torch.device
    table_path: Path | None
    continues_table: bool
    picture_path: Path | None
    history: UsageHistory | None
    # Of a wrapper whose reductions may stay unfinished.
    reduction: Reduction | None
    pending: list[_Pending]
    step: int = 0
    backward: int = 0
    is_recording: bool = False
    # There has been a backward that is not recorded yet.
    has_gradients: bool = False
    table: TableWriter | None = None
    warned_of: frozenset[str] = frozenset()


class GradientUsageMonitorMixin(_Callback):
    """Records on how many ranks each parameter received a gradient; writes a table and draws a heat map.

    To go in front of a Lightning ``Callback``. It works under every DDP strategy and on a single device. A *step* is an
    accumulation window under automatic optimization, where a parameter counts as used if any of the window's
    micro-batches brought it a gradient; and a batch under manual optimization, of which each synchronised backward is
    recorded by itself.

    On every rank: hooks take note of gradients in the steps to be recorded, and one asynchronous all-reduce of one
    integer a parameter follows each recorded backward. On rank zero alone: files are written, and loggers called. A
    file that cannot be written ends in a warning, not in the end of the run. After an exception the files hold all that
    the ranks had exchanged by then.

    Args:
        every_n_steps: record steps 1, 1 + n, 1 + 2n, ...; the others cost nothing.
        table: the file of the table, ``.csv`` or ``.parquet``; None for no table. A relative path is one under
            ``trainer.log_dir``, or ``trainer.default_root_dir`` where a run has no logger. If it exists, ``-v1`` and so
            on is put behind the name; a run that is resumed from a checkpoint goes on with the file it was writing.
        picture: the file of the heat map, ``.png``, ``.svg`` or ``.pdf``; None for no picture. Drawn when the fit ends.
        log_picture: hand the picture to those of the trainer's loggers that take images.
        most_rows: the most rows the picture may have; modules are folded until they fit.

    Raises:
        ValueError: for a value that cannot be used.
        TypeError: for one of another type.
        ImportError: if the picture or the table needs a package that is not installed.
        RuntimeError: when a fit starts under a strategy that shards parameters, or is neither DDP nor a single device.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        table: str | Path | None = "gradient_usage.csv",
        picture: str | Path | None = "gradient_usage.png",
        log_picture: bool = True,
        most_rows: int = 40,
    ) -> None:
        super().__init__()
        _require_count("every_n_steps", every_n_steps, at_least=1)
        _require_count("most_rows", most_rows, at_least=2)
        if not isinstance(log_picture, bool):
            raise TypeError(f"GradientUsageMonitor(log_picture={log_picture!r}): write True or False.")
        if table is None and picture is None:
            raise ValueError(
                "GradientUsageMonitor(table=None, picture=None) would record without keeping anything. Leave one of"
                " the two out, or leave the callback out."
            )
        self._every_n_steps = every_n_steps
        self._table = _require_path("table", table, TABLE_SUFFIXES)
        self._picture = _require_path("picture", picture, PICTURE_SUFFIXES)
        self._log_picture = log_picture
        self._most_rows = most_rows
        if self._table is not None:
            require_table_packages(self._table)
        if self._picture is not None:
            require_matplotlib()
        self._fit: _Fit | None = None
        self._paths_in_checkpoint: dict[str, Path] = {}
        self._written_table: Path | None = None
        self._written_picture: Path | None = None

    @property
    def table_path(self) -> Path | None:
        """The table of this fit, or of the last one; None before its first row, and on ranks other than zero."""
        return self._written_table

    @property
    def picture_path(self) -> Path | None:
        """The picture of the last fit; None before it has been drawn, and on ranks other than zero."""
        return self._written_picture

    @override
    def state_dict(self) -> dict[str, Any]:
        """Where the files are, for a run that is resumed. Step numbers are the trainer's own."""
        fit = self._fit
        paths = {"table": self._written_table, "picture": self._written_picture if fit is None else fit.picture_path}
        return {kind: str(path) for kind, path in paths.items() if path is not None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take from a checkpoint where the files are."""
        self._paths_in_checkpoint = {kind: Path(path) for kind, path in state_dict.items()}

    # -- a fit begins -------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a strategy that shards parameters, before it does."""
        if stage == "fit":
            for cls in type(trainer.strategy).__mro__:
                if cls.__name__ in _SHARDING_STRATEGIES:
                    raise RuntimeError(_describe_unsupported(trainer.strategy))

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the parameters and, on all ranks together, the directory."""
        world_size = trainer.world_size
        if world_size > 1 and _ddp_wrapper(trainer) is None:
            raise RuntimeError(_describe_unsupported(trainer.strategy))
        paths = [path for path in (self._table, self._picture) if path is not None]
        directory = None if all(path.is_absolute() for path in paths) else _directory(trainer)
        named = tuple((n, p) for n, p in pl_module.named_parameters() if _can_receive(p))
        names = tuple(name for name, _ in named)
        parameters = tuple(parameter for _, parameter in named)
        table, continues = self._choose_path("table", directory, self._table)
        picture, _ = self._choose_path("picture", directory, self._picture)
        self._paths_in_checkpoint = {}
        self._written_table = self._written_picture = None
        self._fit = _Fit(
            names=names,
            parameters=parameters,
            hooks=GradientHooks(parameters),
            world_size=world_size,
            device=trainer.strategy.root_device,
            table_path=table,
            continues_table=continues,
            picture_path=picture,
            history=UsageHistory(names, self._every_n_steps)
            if trainer.is_global_zero and self._picture is not None
            else None,
            reduction=_reduction_to_check(trainer),
            pending=[],
        )

    def _choose_path(self, kind: str, directory: Path | None, path: Path | None) -> tuple[Path | None, bool]:
        """The file to write, and whether it is that of the run which is resumed."""
        if path is None:
            return None, False
        wanted = path if directory is None else directory / path
        old = self._paths_in_checkpoint.get(kind)
        if old is not None and old.parent == wanted.parent and old.suffix == wanted.suffix and old.exists():
            return old, True
        return _unused_path(wanted), False

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn of parameters that have been added to the module, on rank zero."""
        fit = self._fit
        if fit is None or not trainer.is_global_zero:
            return
        known = {id(parameter) for parameter in fit.parameters}
        added = [n for n, p in pl_module.named_parameters() if _can_receive(p) and id(p) not in known]
        if not fit.warned_of.issuperset(added):
            fit.warned_of |= frozenset(added)
            warnings.warn(
                f"GradientUsageMonitor records the parameters that the module had when the fit began. Not among them:"
                f" {', '.join(added)}. They will be recorded from the next fit on.",
                UserWarning,
                stacklevel=2,
            )

    # -- a step -------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Put the hooks on, if a step begins that is to be recorded."""
        fit = self._fit
        if fit is None:
            return
        step = _step_number(trainer, pl_module)
        if step == fit.step:
            return
        fit.step, fit.backward, fit.has_gradients = step, 0, False
        fit.is_recording = (step - 1) % self._every_n_steps == 0
        if fit.is_recording:
            fit.hooks.attach()
        else:
            fit.hooks.detach()

    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Record a backward that has been reduced. Under DDP all ranks come here together."""
        fit = self._fit
        if fit is None or not fit.is_recording:
            return
        wrapper = _ddp_wrapper(trainer)
        # On a single device nothing is reduced; there the optimizer's step ends an accumulation window.
        ends_window = not pl_module.automatic_optimization if wrapper is None else wrapper.require_backward_grad_sync
        fit.has_gradients = True
        if ends_window:
            self._record(fit, trainer, wrapper)

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """On a single device, record the window that ends here."""
        fit = self._fit
        if fit is None or not fit.is_recording or _ddp_wrapper(trainer) is not None:
            return
        # A step without a loss has nothing to record; under manual optimization the backwards have been.
        if fit.has_gradients and pl_module.automatic_optimization:
            self._record(fit, trainer, None)

    def _record(self, fit: _Fit, trainer: Any, wrapper: DistributedDataParallel | None) -> None:
        fit.backward += 1
        fit.has_gradients = False
        noted = fit.hooks.take()
        if wrapper is not None and (missing := _missing(fit, trainer, noted)):
            # Other ranks may be waiting in their backward for what this one has not reduced. An all-reduce of ours
            # would meet their buckets, and the process group would end the process instead of raising an error.
            fit.is_recording = False
            text = _describe_unfinished(rank=trainer.global_rank, step=fit.step, missing=missing)
            warnings.warn(text, UserWarning, stacklevel=2)
            return
        value = (torch.frombuffer(noted, dtype=torch.uint8) == _RECEIVED).to(dtype=torch.int32)
        work = None
        if fit.world_size > 1:
            value = value.to(fit.device)
            work = dist.all_reduce(value, async_op=True)
        fit.pending.append(_Pending(fit.step, fit.backward, trainer.current_epoch, trainer.global_step, value, work))

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write what has been exchanged by now; the latest record may stay under way until the next one."""
        fit = self._fit
        if fit is None or not fit.pending:
            return
        # At rest: under manual optimization a step may toggle requires_grad on its way.
        _note_trainable(fit)
        while len(fit.pending) > 1:
            self._settle(fit, trainer)

    def _settle(self, fit: _Fit, trainer: Any) -> None:
        """Read the oldest record, which every rank has posted, and write it on rank zero."""
        pending = fit.pending.pop(0)
        counts = pending.read()
        if not trainer.is_global_zero:
            return
        assert pending.trainable is not None
        record = Record(
            step=pending.step,
            backward=pending.backward,
            epoch=pending.epoch,
            global_step=pending.global_step,
            world_size=fit.world_size,
            received=[
                count if count or trainable else None
                for count, trainable in zip(counts, pending.trainable, strict=True)
            ],
        )
        self._write(fit, record)
        if fit.history is not None:
            fit.history.add(record)

    # -- the files ----------------------------------------------------------------------------------------------------

    def _write(self, fit: _Fit, record: Record) -> None:
        if fit.table_path is None:
            return
        try:
            if fit.table is None:
                fit.table = self._open_table(fit, fit.table_path, record.step)
            fit.table.write(record)
        except OSError as error:
            _warn_of_loss(f"the table {fit.table_path}", error)
            fit.table_path = None

    def _open_table(self, fit: _Fit, path: Path, step: int) -> TableWriter:
        if fit.continues_table:
            kept = fit.history.add if fit.history is not None else _ignore
            try:
                table = continue_table(path, fit.names, before_step=step, kept=kept)
            except ValueError as error:
                path = fit.table_path = _unused_path(path)
                warnings.warn(
                    f"GradientUsageMonitor begins a new table, {path}, since that of the resumed run cannot be"
                    f" continued: {error}.",
                    UserWarning,
                    stacklevel=2,
                )
            else:
                self._written_table = path
                return table
        table = create_table(path, fit.names)
        self._written_table = path
        return table

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the rest, on all ranks together, and draw the picture."""
        fit = self._fit
        if fit is not None:
            _note_trainable(fit)
            while fit.pending:
                self._settle(fit, trainer)
            self._finish(trainer)

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write and draw what the ranks have exchanged; wait for none of them."""
        fit = self._fit
        if fit is None:
            return
        _note_trainable(fit)
        give_up = time.monotonic() + _PATIENCE.total_seconds()
        try:
            while fit.pending:
                while not fit.pending[0].has_ended() and time.monotonic() < give_up:
                    time.sleep(0.01)
                if not fit.pending[0].has_ended():
                    break
                self._settle(fit, trainer)
        except RuntimeError:
            # The process group has failed, which is what the run ends with already.
            pass
        finally:
            self._finish(trainer)

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave no hook on the module, whatever happened."""
        if stage == "fit":
            self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        fit, self._fit = self._fit, None
        if fit is None:
            return
        fit.hooks.detach()
        if fit.table is not None:
            try:
                fit.table.close()
            except OSError as error:
                _warn_of_loss(f"the table {fit.table_path}", error)
        if fit.history is None or fit.history.is_empty or fit.picture_path is None:
            return
        # Nothing that goes wrong with a picture is worth a training run, or may hide what ended it.
        try:
            figure = draw(fit.history, most_rows=self._most_rows)
            path = fit.picture_path
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
            self._written_picture = path
        except Exception as error:
            _warn_of_loss(f"the picture {fit.picture_path}", error)
            return
        if self._log_picture:
            for logger in trainer.loggers:
                try:
                    hand_to_logger(logger, figure, path, trainer.global_step)
                except Exception as error:
                    _warn_of_loss(f"the picture in {type(logger).__name__}", error)


# -- what the trainer says --------------------------------------------------------------------------------------------


def _ddp_wrapper(trainer: Any) -> DistributedDataParallel | None:
    """The wrapper that is in use now; a strategy may replace it between two backwards."""
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def _finishes_reductions(trainer: Any) -> bool:
    # Of the strategies, ours has a decision.
    return hasattr(trainer.strategy, "decision")


def _reduction_to_check(trainer: Any) -> Reduction | None:
    """The reducer, if it is one that parameters without a gradient leave unfinished: that of plain DDP."""
    wrapper = _ddp_wrapper(trainer)
    if wrapper is None or _finishes_reductions(trainer) or not hasattr(wrapper, "reducer"):
        return None
    return None if wrapper.find_unused_parameters or wrapper.static_graph else Reduction(wrapper)


def _missing(fit: _Fit, trainer: Any, noted: bytearray) -> Sequence[str]:
    """The parameters that keep this rank's reduction from being finished."""
    if not any(noted) and not _finishes_reductions(trainer):
        # The reducer does not know of a backward that reached nothing.
        return fit.names
    if fit.reduction is None:
        return ()
    return [fit.reduction.names[index] for index in fit.reduction.missing()]


def _step_number(trainer: Any, pl_module: Any) -> int:
    """The number of the current step, from 1; the same on every rank, and going on when a run is resumed."""
    if pl_module.automatic_optimization:
        return int(trainer.global_step) + 1
    # One batch may take the steps of several optimizers, all of which global_step counts.
    return int(trainer.fit_loop.total_batch_idx) + 1


def _directory(trainer: Any) -> Path:
    """Where relative paths lead. A collective (``Trainer.log_dir``), to be entered by every rank."""
    directory = str(trainer.log_dir or trainer.default_root_dir)
    if "://" in directory:
        raise RuntimeError(
            f"GradientUsageMonitor writes to local files, and this run's directory is {directory}. Give it absolute"
            " paths: GradientUsageMonitor(table=..., picture=...)."
        )
    return Path(directory).absolute()


def _can_receive(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _note_trainable(fit: _Fit) -> None:
    latest = [pending for pending in fit.pending if pending.trainable is None]
    if latest:
        trainable = tuple(parameter.requires_grad for parameter in fit.parameters)
        for pending in latest:
            pending.trainable = trainable


def _ignore(record: Record) -> None:
    pass


# -- arguments and messages -------------------------------------------------------------------------------------------


def _require_count(name: str, value: Any, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"GradientUsageMonitor({name}={value!r}): write a whole number, {at_least} or more.")
    if value < at_least:
        raise ValueError(f"GradientUsageMonitor({name}={value!r}): write a whole number, {at_least} or more.")


def _require_path(name: str, value: Any, suffixes: Sequence[str]) -> Path | None:
    if value is None:
        return None
    advice = f"write a file name that ends in {' or '.join(suffixes)}, or None for none"
    if not isinstance(value, (str, Path)):
        raise TypeError(f"GradientUsageMonitor({name}={value!r}): {advice}.")
    path = Path(value)
    if path.suffix not in suffixes or path.is_dir():
        raise ValueError(f"GradientUsageMonitor({name}={str(value)!r}): {advice}.")
    return path


def _unused_path(path: Path) -> Path:
    """The path, or one with ``-v1`` and so on behind its name where there is such a file."""
    unused, version = path, 0
    while unused.exists():
        version += 1
        unused = path.with_stem(f"{path.stem}-v{version}")
    return unused


def _warn_of_loss(what: str, error: Exception) -> None:
    warnings.warn(
        f"GradientUsageMonitor could not write {what}: {type(error).__name__}: {error}. Training is not affected.",
        UserWarning,
        stacklevel=2,
    )


def _describe_unfinished(*, rank: int, step: int, missing: Sequence[str]) -> str:
    shown = ", ".join(missing[:_MOST_NAMES]) + (
        f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
    )
    return (
        f"On rank {rank} plain DDP left the reduction of step {step} unfinished, because these parameters received no"
        f" gradient: {shown}. GradientUsageMonitor does not record this step. The gradients are not the mean over the"
        " ranks, and DDP raises an error in the next forward, or ranks wait for each other until the process group"
        ' times out. Use strategy="ddp_adaptive" or "ddp_find_unused_parameters_true"; if these parameters should have'
        " been used, look for why they do not reach the loss."
    )


def _describe_unsupported(strategy: Any) -> str:
    return (
        f"GradientUsageMonitor cannot follow gradients under {type(strategy).__name__}: it works under DDP strategies"
        ' ("ddp", "ddp_adaptive", "ddp_find_unused_parameters_true", DDPStrategy(static_graph=True)) and on a single'
        " device. Leave the callback out, or train with one of those."
    )


# -- loggers ----------------------------------------------------------------------------------------------------------


def hand_to_logger(logger: Any, figure: Any, path: Path, step: int) -> bool:
    """Give a logger the picture, by whatever it offers for images; of pytorch_lightning 2.6.6's loggers all but CSV.

    Args:
        logger: one of the trainer's loggers, on rank zero.
        figure: a matplotlib figure.
        path: the file it was saved to.
        step: the trainer's ``global_step``.

    Returns:
        False for a logger that takes no images, which is left alone.
    """
    # WandbLogger
    if _offers(logger, "log_image"):
        logger.log_image(_PICTURE_NAME, [str(path)])
        return True
    # LitLogger
    if _offers(logger, "log_file"):
        logger.log_file(str(path))
        return True
    experiment: Any = getattr(logger, "experiment", None)
    # TensorBoardLogger
    if _offers(experiment, "add_figure"):
        experiment.add_figure(_PICTURE_NAME, figure, global_step=step, close=False)
        return True
    if _offers(experiment, "log_figure"):
        arguments = inspect.signature(experiment.log_figure).parameters
        if "artifact_file" in arguments:
            # MLFlowLogger, whose experiment is a client that serves many runs
            experiment.log_figure(logger.run_id, figure, f"{_PICTURE_NAME}{path.suffix}")
        else:
            # CometLogger
            experiment.log_figure(figure_name=_PICTURE_NAME, figure=figure, step=step)
        return True
    # NeptuneLogger, whose run is a tree of fields
    if any(cls.__name__ == "NeptuneLogger" for cls in type(logger).__mro__):
        experiment[_PICTURE_NAME].upload(str(path))
        return True
    return False


def _offers(thing: Any, method: str) -> bool:
    """Whether the method is there by name; a stand-in that answers to any name does not count."""
    return callable(inspect.getattr_static(thing, method, None) and getattr(thing, method))

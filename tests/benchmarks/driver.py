"""How a contender is stepped: within a ``Trainer.fit`` of its own, all of them in one process, one at a time.

Two ways. In the first (:class:`DirectSeat`) the fits are entered one inside another, from ``on_train_start``, so that
each strategy is set up as in any training; then the strategy's own ``training_step`` and ``backward`` are called in the
order in which Lightning's closure calls them, and nothing else of Lightning's runs: what a strategy costs is not hidden
by what the loop costs. In the second (:class:`TrainerSeat`) each fit has a thread, and the loop, its hooks and its
closures all run; at the end of each batch the thread hands the baton back, and waits.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from adaptive_ddp import UnusedParametersWarning
from benchmarks.contenders import Contender
from benchmarks.shapes import Stack


def make_trainer(strategy: Any, callback: Callback, device: str, **options: Any) -> Trainer:
    """A Trainer for this rank of the group, with nothing switched on that is not needed."""
    # The group may be spread over nodes, which is how ranks can share a GPU.
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    options.update({"devices": local_ranks, "num_nodes": dist.get_world_size() // local_ranks})
    options.update({"accelerator": "gpu" if device == "cuda" else "cpu", **dict.fromkeys(off, False)})
    return Trainer(strategy=strategy, callbacks=[callback], max_epochs=1, **options)


def make_loader(batches: Any) -> DataLoader[Tensor]:
    """The batches as they are, in their order."""
    return DataLoader(batches, batch_size=None)


def use_one_thread() -> None:
    """Give this rank one thread to compute with, which a Trainer would otherwise change by its number of devices."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


class Seat(Protocol):
    """A contender that can be stepped."""

    group: str
    contender: Contender
    trainer: Trainer
    model: Stack

    def step(self, batch: Tensor, number: int) -> float:
        """Train on one batch; return the seconds of wall time that it took on this rank."""


@dataclass
class DirectSeat:
    """A contender whose strategy is called directly."""

    group: str
    contender: Contender
    model: Stack
    device: str = "cpu"
    trainer: Trainer = field(init=False)

    def step(self, batch: Tensor, number: int) -> float:
        synchronise(self.device)
        began = time.perf_counter()
        self.train_on(batch, number)
        synchronise(self.device)
        return time.perf_counter() - began

    def train_on(self, batch: Tensor, number: int) -> None:
        """What Lightning's closure and the optimizer do with a batch, without what Lightning does in between."""
        strategy, optimizer = self.trainer.strategy, self.trainer.optimizers[0]
        loss: Any = strategy.training_step(batch, number)
        optimizer.zero_grad()
        strategy.backward(loss, optimizer)
        optimizer.step()


def synchronise(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


class _Inside(Callback):
    """Does something within the fit, instead of training."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._work()
        trainer.should_stop = True


def within_fits(seats: Sequence[DirectSeat], work: Callable[[], None]) -> None:
    """Enter a fit for each seat, one inside another, and do the work within the innermost."""
    if not seats:
        work()
        return
    first, *others = seats
    inside = _Inside(lambda: within_fits(others, work))
    first.trainer = make_trainer(first.contender.strategy(), inside, first.device, min_epochs=0)
    first.trainer.fit(first.model, make_loader([torch.zeros(1)]))


class TrainerSeat:
    """A contender whose Trainer runs its loop, in a thread that only ever runs while :meth:`step` waits for it."""

    def __init__(
        self, group: str, contender: Contender, model: Stack, batches: list[Tensor], device: str = "cpu"
    ) -> None:
        self.group = group
        self.contender = contender
        self.model = model
        self.device = device
        self.trainer = make_trainer(contender.strategy(), _Baton(self), device)
        self._batches = batches
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._began = self._seconds = 0.0
        self._thread = threading.Thread(target=self._fit, daemon=True)

    def start(self) -> None:
        """Run the fit up to its first batch."""
        self._thread.start()
        self._wait()

    def step(self, batch: Tensor, number: int) -> float:
        """Run from one ``on_train_batch_end`` to the next; the batch is the Trainer's own, from its loader."""
        self._go.release()
        self._wait()
        return self._seconds

    def end(self) -> None:
        """Run the fit to its end, which comes after the last batch."""
        self._go.release()
        self._thread.join()
        self._wait()

    def hand_over(self) -> None:
        """In the thread: stop the clock, wait for the next turn, and start it."""
        synchronise(self.device)
        self._seconds = time.perf_counter() - self._began
        self._done.release()
        self._go.acquire()
        synchronise(self.device)
        self._began = time.perf_counter()

    def _fit(self) -> None:
        try:
            use_one_thread()
            self.trainer.fit(self.model, make_loader(self._batches))
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


class _Baton(Callback):
    def __init__(self, seat: TrainerSeat) -> None:
        self._seat = seat

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seat.hand_over()

    def on_train_batch_end(self, *args: Any) -> None:
        self._seat.hand_over()


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that the contenders are known to give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedParametersWarning)
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified.*")
        warnings.filterwarnings("ignore", module="pytorch_lightning|lightning")
        yield

"""Train one model under three strategies and compare them: ``python -m adaptive_ddp``.

The model sends each image to one of several experts and has a head that nothing uses, so on most steps the ranks
differ in which parameters get a gradient. It is trained on scikit-learn's digits by real ranks (processes over Gloo on
loopback, each with its own ``Trainer``), under plain ``ddp``, ``ddp_find_unused_parameters_true`` and ``ddp_adaptive``.

Promise: what is printed was measured in this run. The exit status is 0 only if ``ddp_adaptive`` is right on more than
90 % of the held-out images, with equal weights on all ranks after every step, and ends with the weights that
``ddp_find_unused_parameters_true`` ends with. Nothing is downloaded, nothing hangs (each training has a bound in time),
and no rank outlives the program, however it ends.

Limits: the times are those of a tiny model on a CPU, which is no benchmark. It needs an operating system with fork.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import multiprocessing as mp
import os
import signal
import statistics
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, TensorDataset

STRATEGIES = ("ddp", "ddp_find_unused_parameters_true", "ddp_adaptive")
WANTED_ACCURACY = 0.90
TOLERANCE = 1e-6
EXPERTS, IMAGES_PER_STEP, SEED = 8, 8, 8
# A rank that waits for another one longer than this gives up by itself. Nothing here takes a tenth of it.
GROUP_TIMEOUT = timedelta(seconds=30)
# What the other ranks get, once one has failed, to fail too.
GRACE_S = 2.0


class _RoutedDigits(LightningModule):
    """A gate that sends each image to one of several experts, and a head that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, EXPERTS)
        experts = (nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)) for _ in range(EXPERTS))
        self.experts = nn.ModuleList(experts)
        self.unused_head = nn.Linear(64, 10)
        self.used: tuple[int, ...] = ()

    def forward(self, images: Tensor) -> Tensor:
        probability, chosen = self.gate(images).softmax(dim=1).max(dim=1)
        self.used = tuple(chosen.unique().tolist())
        logits = images.new_zeros(len(images), 10)
        for expert in self.used:
            rows = chosen == expert
            # Through the factor, the gate learns from the logits.
            logits[rows] = self.experts[expert](images[rows]) * probability[rows, None]
        return logits

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def _load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the images to train on, and those held out: a fifth, always the same ones."""
    from sklearn import datasets  # type: ignore[import-untyped]

    images, labels = map(torch.from_numpy, datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    held_out, training = order[: len(order) // 5], order[len(order) // 5 :]
    # Centred, or the gate would send nearly every image to the same expert.
    images = ((images - images[training].mean(dim=0)) / 16).float()
    return TensorDataset(images[training], labels[training]), TensorDataset(images[held_out], labels[held_out])


class _Job(NamedTuple):
    """What the ranks are to do."""

    strategy: str
    devices: int
    epochs: int


class _Step(NamedTuple):
    """What a rank sends after each optimizer step: its seconds, the experts it used, a digest of the new weights."""

    seconds: float
    used: tuple[int, ...]
    digest: bytes


class _End(NamedTuple):
    """What a rank sends in the end: why it failed (with a traceback, if that is not foreseen), or what it came to."""

    failure: str = ""
    details: str = ""
    accuracy: float = 0.0
    weights: Sequence[Any] = ()
    decision: str = ""


class _Reporter(Callback):
    """Tells the parent of each step as it is done, so that it knows how far a rank came that fails or hangs later."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._began = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        seconds = time.perf_counter() - self._began
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in pl_module.state_dict().values()))
        self._parent.send(_Step(seconds, cast(_RoutedDigits, pl_module).used, digest.digest()))


def _run_rank(job: _Job, rank: int, port: int, parent: Connection) -> None:
    """Be one rank of a training."""
    # In a thread, as a rank may be stuck in a collective when its parent dies.
    threading.Thread(target=_end_with, args=(mp.parent_process(),), daemon=True).start()
    # What is worth knowing goes through the connection. The rest, from Lightning's tips to what Gloo says of a killed
    # rank, comes from Python and C++ alike, and is silenced where both end.
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    try:
        parent.send(_train(job, rank, port, _Reporter(parent)))
    except Exception as error:
        parent.send(_explain(error))


def _end_with(process: Any) -> None:
    process.join()
    os._exit(1)


def _train(job: _Job, rank: int, port: int, reporter: _Reporter) -> _End:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    # What torchrun sets, so that the Trainer takes this process for the rank it is and launches nothing. It has no
    # use for the address, as it finds the process group made here, whose store is with the parent.
    os.environ.update(TORCHELASTIC_RUN_ID="adaptive_ddp", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GROUP_RANK="0")
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.devices)))
    store = TCPStore("127.0.0.1", port)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=job.devices, timeout=GROUP_TIMEOUT)
    torch.manual_seed(SEED)
    model = _RoutedDigits()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: Any = {"accelerator": "cpu", "callbacks": reporter, **dict.fromkeys(off, False)}
    trainer = Trainer(devices=job.devices, strategy=job.strategy, max_epochs=job.epochs, **options)
    training, held_out = _load_digits()
    # Lightning's DistributedSampler gives each rank its share of the images.
    trainer.fit(model, DataLoader(training, batch_size=IMAGES_PER_STEP, shuffle=True))
    images, labels = held_out.tensors
    with torch.no_grad():
        accuracy = (model.eval()(images).argmax(dim=1) == labels).float().mean().item()
    # NumPy arrays: a tensor would cross as a handle into a dying process.
    weights = [tensor.numpy() for tensor in model.state_dict().values()]
    return _End(accuracy=accuracy, weights=weights, decision=str(getattr(trainer.strategy, "decision", "")))


def _explain(error: Exception) -> _End:
    text = str(error)
    # The second is how Lightning words the first.
    if "Expected to have finished reduction" in text or "not used in producing the loss" in text:
        return _End("reduction error")
    # Gloo's words for a rank that does not come, and for one that is gone, which depend on what was under way.
    if any(words in text.lower() for words in ("timed out", "closed by peer", "reset by peer", "broken pipe")):
        return _End("hang, waiting for another rank")
    return _End(type(error).__name__, details="".join(traceback.format_exception(error)))


@dataclass
class _Training:
    """What the parent knows of a training: the steps of each rank, and how each ended, in the order of arrival."""

    strategy: str
    steps: list[list[_Step]]
    ends: dict[int, _End] = field(default_factory=dict)

    @property
    def failures(self) -> dict[int, _End]:
        return {rank: end for rank, end in self.ends.items() if end.failure}

    @property
    def story(self) -> str:
        failed = [f"rank {r}: {end.failure} in step {len(self.steps[r]) + 1}" for r, end in self.failures.items()]
        return f"failed ({'; '.join(failed)})" if failed else "trained"

    @property
    def shared_steps(self) -> list[tuple[_Step, ...]]:
        """The steps that all ranks did, each as seen by every rank."""
        return list(zip(*self.steps, strict=False))

    @property
    def equal_weights(self) -> str:
        """Whether the ranks held equal weights after every step; unknown where some of them did not tell."""
        for number, ranks in enumerate(self.shared_steps, start=1):
            if len({step.digest for step in ranks}) > 1:
                return f"no, from step {number}"
        return "yes" if len(self.shared_steps) == max(map(len, self.steps)) > 0 else "unknown"

    @property
    def row(self) -> tuple[str, ...]:
        steps = " or ".join(map(str, sorted({len(steps) for steps in self.steps})))
        if self.failures:
            # What came first; the rest followed from it, or is like it.
            ended = f"failed: {next(iter(self.failures.values())).failure}"
            return self.strategy, ended, steps, "-", self.equal_weights, "-"
        step_time = f"{statistics.median(step.seconds for step in self.steps[0]) * 1e3:.1f} ms"
        return self.strategy, "trained", steps, f"{self.ends[0].accuracy:.1%}", self.equal_weights, step_time


def _run_training(job: _Job) -> _Training:
    """Train in fresh processes, which are gone when this returns or raises."""
    context = mp.get_context("forkserver")
    training = _Training(job.strategy, steps=[[] for _ in range(job.devices)])
    ranks: dict[Connection, int] = {}
    # Port 0 is any free one.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        for rank in range(job.devices):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(job, rank, store.port, theirs), daemon=True)
            # A request that is broken off leaves the server with a traceback to print.
            with _interrupt_held_back():
                process.start()
            theirs.close()
            ranks[ours] = rank
        _listen(training, ranks, bound_s=60 + 20.0 * job.epochs)
    finally:
        for child in mp.active_children():
            child.kill()
            child.join()
    return training


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Have Ctrl-C take effect at the end of this, and not within."""
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        signal.raise_signal(signal.SIGINT)


def _listen(training: _Training, ranks: dict[Connection, int], bound_s: float) -> None:
    """Take down what the ranks send until each has come to its end, or the bound is reached."""
    deadline = time.monotonic() + bound_s
    while ranks and (left := deadline - time.monotonic()) > 0:
        for connection in cast("list[Connection]", wait(list(ranks), timeout=left)):
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = _End("process died")
            if isinstance(message, _Step):
                training.steps[ranks[connection]].append(message)
            else:
                training.ends[ranks.pop(connection)] = message
                deadline = min(deadline, time.monotonic() + GRACE_S) if message.failure else deadline
    training.ends.update(dict.fromkeys(ranks.values(), _End("hang, stopped")))


def _judge(reference: _Training, adaptive: _Training) -> bool:
    """Print what is claimed of ``ddp_adaptive`` and whether it holds; return whether all of it does."""
    verdicts = [(False, f"it and {reference.strategy} trained to the end")]
    if not (reference.failures or adaptive.failures):
        ours, theirs = ([*map(torch.from_numpy, t.ends[0].weights)] for t in (adaptive, reference))
        equal, measure = all(map(torch.equal, ours, theirs)), "bit for bit (torch.equal)"
        if (devices := len(adaptive.steps)) & (devices - 1):
            # A mean over such a number of ranks is rounded, so it may depend on the order of the operations.
            equal = all((a - b).norm() <= TOLERANCE * b.norm() for a, b in zip(ours, theirs, strict=True))
            measure = f"within {TOLERANCE:g} relative ({devices} is no power of two)"
        verdicts = [
            (adaptive.ends[0].accuracy > WANTED_ACCURACY, f"it is right on over {WANTED_ACCURACY:.0%} of new images"),
            (adaptive.equal_weights == "yes", "its ranks held equal weights after every step"),
            (equal, f"its final weights equal those of {reference.strategy}, {measure}"),
        ]
    print(f"\n{adaptive.strategy}:")
    for holds, claim in verdicts:
        print(f"  {'yes' if holds else 'NO '}  {claim}")
    return all(holds for holds, _ in verdicts)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0; write for example 2")
    return int(text)


def _demonstrate(devices: int, epochs: int) -> bool:
    """Run the three trainings and print what they came to; return whether every verdict is a yes."""
    print(f"{EXPERTS} experts that share images of digits, and a head that nothing uses. Ranks: {devices}.\n")
    # The ranks are forked from a server that has paid for the imports, and inherit from it that Ctrl-C is ignored.
    mp.get_context("forkserver").set_forkserver_preload(["adaptive_ddp.__main__", "sklearn.datasets"])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
    trainings = []
    for strategy in STRATEGIES:
        print(f"{strategy} ...", end=" ", flush=True)
        began = time.monotonic()
        trainings.append(_run_training(_Job(strategy, devices, epochs)))
        print(f"{trainings[-1].story} ({time.monotonic() - began:.1f} s)", flush=True)
        # Of a failure that is foreseen there are no details; of the others, what came first says most.
        print(*[failure.details for failure in trainings[-1].failures.values()][:1], end="", file=sys.stderr)
    _, reference, adaptive = trainings
    if not adaptive.failures:
        differing = sum(len({step.used for step in ranks}) > 1 for ranks in adaptive.shared_steps)
        print(f"\nIn {differing / len(adaptive.shared_steps):.0%} of the steps the ranks used different experts.")
        print(f"{adaptive.strategy} warned:\n")
        print(textwrap.indent(f"UnusedParametersWarning: {adaptive.ends[0].decision}", "    "))
    rows = [("", "ended", "steps", "accuracy", "equal weights", "time/step"), *(training.row for training in trainings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    return _judge(reference, adaptive)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m adaptive_ddp",
        description="Train a model whose ranks differ in the parameters they use, under three strategies, and compare.",
        epilog="The exit status is 0 only if ddp_adaptive is right on over 90 % of new images and its weights equal"
        " those of ddp_find_unused_parameters_true: bit for bit, or within 1e-6 relative if N is no power of two.",
    )
    parser.add_argument("--devices", type=_positive, default=2, metavar="N", help="number of ranks (default: 2)")
    parser.add_argument("--epochs", type=_positive, default=6, metavar="N", help="passes over the images (default: 6)")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("sklearn") is None:
        print("The images come with scikit-learn, which is missing: pip install adaptive-ddp[demo]", file=sys.stderr)
        return 1
    try:
        return 0 if _demonstrate(options.devices, options.epochs) else 1
    except KeyboardInterrupt:
        print("\nInterrupted; all ranks are stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # Once more under its own name, by which the ranks find their function.
    from adaptive_ddp.__main__ import main as run

    sys.exit(run())

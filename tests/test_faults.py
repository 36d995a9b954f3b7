"""Faults: a rank that is killed, raises, is interrupted or answers no more, at each place of a step.

Promise under test: every other rank ends with an error within the process group's own timeout, with the weights of a
whole number of steps, and no process stays behind. What was interrupted goes on from its last checkpoint.

A group in which a rank died cannot be used again, so each fault gets ranks of its own, in a process group that the
strategy makes, with the timeout that a user gives it. ``pytest -s tests/test_faults.py`` prints what each fault led to
and how long it took.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial, wraps
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from differential import CONTENDERS
from models import WIDTH, Branches, LateEverywhere, SomeRanks, Usage
from package import AdaptiveDDPStrategy, Callback, LightningModule, ModelCheckpoint, Trainer, seed_everything
from ranks import TESTED_PACKAGE, Ranks, pipe, process_under
from torch import Tensor
from torch.utils.data import DataLoader

from adaptive_ddp import strategy
from adaptive_ddp.reducer import Reduction
from adaptive_ddp.tally import Exchange

# What a user would give the strategy to have a dead rank noticed soon.
TIMEOUT = timedelta(seconds=5)
# What a busy machine may take on top of it to unwind and end a process.
SLACK_S = 10.0
BOUND_S = TIMEOUT.total_seconds() + SLACK_S
# For processes to start, connect and get to the fault.
START_BOUND_S = 60.0
# The time-out bounds the ranks' finding each other too.
ATTEMPTS = 3
# A script's ranks take seconds to unwind, and its launcher looks after them once in five. Well under their time-out.
SCRIPT_BOUND_S = 40.0
STEPS = 5


# -- where a fault strikes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """What the ranks use, and the step (from 0) in which the fault strikes."""

    usage: Usage
    step: int
    model: type[Branches] = Branches
    # Whether that step is the first of a fit that goes on from a checkpoint.
    resumed: bool = False


SCENARIOS = {
    "first step": Scenario(models.all_used, 0),
    "first step, fallback": Scenario(models.never_last, 0),
    "later step": Scenario(models.all_used, 2),
    "later step, fallback": Scenario(LateEverywhere(2), 2),
    # Rank 1 misses something in one step, and all ranks fall back in the next.
    "later step, split": Scenario(SomeRanks(2, 1), 2),
    "step after a split": Scenario(SomeRanks(2, 1), 3),
    "flag on": Scenario(models.never_last, 2),
    "finishing": Scenario(models.never_last, 2, models.CheckpointedBranches),
    "first step, resumed": Scenario(models.never_last, 2, resumed=True),
    "last step": Scenario(models.all_used, STEPS - 1),
}

# The parts of a step, in their order.
HOOKS = ("on_train_batch_start", "training_step", "on_after_backward", "on_before_optimizer_step")
INSIDE = ("training_step", "in backward", "before the finish", "before the tally", "after the tally")
REWRAPPING = ("before the usage map", "before dismantling", "before wrapping", "after wrapping")


@dataclass(frozen=True)
class Fault:
    """What happens, where, on which ranks."""

    act: str
    place: str
    scenario: str
    ranks: tuple[int, ...] = (1,)
    world_size: int = 2

    def __str__(self) -> str:
        ranks = "all ranks" if len(self.ranks) == self.world_size else f"rank {self.ranks[0]} of {self.world_size}"
        return f"{self.act}-{self.place}-{self.scenario}-{ranks}"


class PlannedError(Exception):
    """An error in a user's code."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise PlannedError


def interrupt() -> None:
    # As Ctrl-C does; Python raises KeyboardInterrupt before the call returns.
    signal.raise_signal(signal.SIGINT)


ACTS = {"killed": kill, "stopped": stop, "raises": fail, "raises, stays": fail, "interrupted": interrupt}


class Trap(Callback):
    """Springs the fault once, when its place is reached in its step on one of its ranks."""

    def __init__(self, fault: Fault, tell: Callable[[Any], None]) -> None:
        self.fault = fault
        self.tell = tell
        self.step: int | None = None
        self.is_set = True

    def spring(self, place: str) -> None:
        fault = self.fault
        here = place == fault.place and self.step == SCENARIOS[fault.scenario].step
        if here and self.is_set and dist.get_rank() in fault.ranks:
            self.is_set = False
            self.tell(time.monotonic())
            ACTS[fault.act]()

    def surround(self, owner: Any, name: str, before: str | None = None, after: str | None = None) -> None:
        """Have a part of the package spring the trap; never undone, since the process ends with the fault."""
        original = getattr(owner, name)

        @wraps(original)
        def surrounded(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.spring(before)
            result = original(*args, **kwargs)
            if after:
                self.spring(after)
            return result

        setattr(owner, name, surrounded)

    def lay(self, module: Branches) -> None:
        self.surround(Reduction, "finish", "before the finish")
        self.surround(Exchange, "post", "before the tally", "after the tally")
        self.surround(Exchange, "count", "before the usage map")
        self.surround(strategy, "dismantle", "before dismantling")
        self.surround(AdaptiveDDPStrategy, "_setup_model", "before wrapping", "after wrapping")
        # By then the later parameters' buckets are on their way.
        module.branches[0].register_forward_hook(self._watch)

    def _watch(self, module: Any, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self.spring("in backward"))

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.step = trainer.global_step
        self.spring("on_train_batch_start")

    def on_after_backward(self, *args: Any) -> None:
        self.spring("on_after_backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.spring("on_before_optimizer_step")


class Digests(Callback):
    """Keeps a digest of the weights after each step."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.taken.append(digest(pl_module))


def digest(module: LightningModule) -> str:
    tensors = [tensor.numpy().tobytes() for tensor in module.state_dict().values()]
    return hashlib.sha256(b"".join(tensors)).hexdigest()


def batch_of(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def make_module(scenario: Scenario, trap: Trap | None = None) -> Branches:
    """What a step does depends on its number alone, so that a resumed run does what an uninterrupted one would."""

    class Stepwise(scenario.model):  # type: ignore[name-defined, misc]
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            step = self.trainer.global_step
            if trap:
                trap.spring("training_step")
            return super().training_step(batch_of(step), step)

    seed_everything(7, verbose=False)
    module: Branches = Stepwise(scenario.usage)
    if trap:
        trap.lay(module)
    return module


def fit(
    world_size: int,
    chosen: Any,
    module: LightningModule,
    callbacks: list[Callback],
    *,
    steps: int = STEPS,
    ckpt_path: Path | None = None,
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=chosen,
        callbacks=callbacks,
        max_steps=steps,
        max_epochs=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.zeros(STEPS, 1), batch_size=None), ckpt_path=ckpt_path)


# -- ranks that may die -----------------------------------------------------------------------------------------------


@dataclass
class End:
    """How a rank ended."""

    code: int | None
    seconds: float
    error: str = ""
    steps: int = 0
    digest: str = ""


@dataclass
class Outcome:
    """How the ranks ended; seconds are counted from the fault."""

    fault: Fault
    package: str
    struck: set[int]
    ends: list[End]
    orphans: list[int]

    @property
    def survivors(self) -> list[End]:
        return [end for rank, end in enumerate(self.ends) if rank not in self.fault.ranks]


OUTCOMES: list[Outcome] = []
ROW = "{:18} {:15} {:25} {:22} {:10} {:18} {:>8}"
SCRIPTS: list[tuple[str, str, int, int, float]] = []


def free_port() -> int:
    # Below the ports that the system gives to clients, so that no other process gets it before rank 0 listens.
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def serve(rank: int, fault: Fault, port: int, directory: Path | None, connection: Connection) -> None:
    # The children of a rank would be found by its session.
    os.setsid()
    torch.set_num_threads(1)
    # The tracebacks of planned errors are nobody's business.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        # What torchrun sets, so that a Trainer takes this process for the rank it is and launches nothing.
        TORCHELASTIC_RUN_ID="tests",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(fault.world_size),
        LOCAL_WORLD_SIZE=str(fault.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    scenario = SCENARIOS[fault.scenario]
    trap = Trap(fault, lambda at: connection.send(("struck", at)))
    module = make_module(scenario, trap)
    digests = Digests()
    try:
        if scenario.resumed:
            fit(fault.world_size, adaptive(), module, [trap, *saving(directory)], steps=scenario.step)
        checkpoint = directory / "last.ckpt" if scenario.resumed else None
        fit(fault.world_size, adaptive(), module, [trap, digests, *saving(directory)], ckpt_path=checkpoint)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        connection.send(("ended", (text, len(digests.taken), digest(module))))
        if fault.act == "raises, stays" and isinstance(error, PlannedError):
            # As in a notebook, whose process outlives the error.
            signal.pause()
        raise SystemExit(1) from None


def adaptive() -> AdaptiveDDPStrategy:
    # Room for less than a layer: many buckets, some of which are on their way when a backward is cut short.
    return AdaptiveDDPStrategy(timeout=TIMEOUT, bucket_cap_mb=1e-5)


def saving(directory: Path | None) -> list[Callback]:
    if directory is None:
        return []
    return [ModelCheckpoint(directory, save_last=True, every_n_train_steps=1, enable_version_counter=False)]


def strike(fault: Fault, package: str, directory: Path | None = None) -> Outcome:
    """Have the fault strike a group of ranks; again where the ranks did not find each other in time to get to it."""
    for _ in range(ATTEMPTS):
        outcome = run_once(fault, package, directory)
        if outcome.struck:
            break
    OUTCOMES.append(outcome)
    return outcome


def run_once(fault: Fault, package: str, directory: Path | None) -> Outcome:
    """Run ranks until all have ended; kill those that have not by then."""
    port = free_port()
    pipes = [pipe() for _ in range(fault.world_size)]
    processes = []
    for rank, (_, theirs) in enumerate(pipes):
        process = process_under(package, serve, rank, fault, port, directory, connection=theirs)
        process.start()
        theirs.close()
        processes.append(process)
    ours = [pipe[0] for pipe in pipes]
    ends = [End(None, 0.0) for _ in processes]
    struck_at: dict[int, float] = {}
    stays = {"stopped", "raises, stays"} & {fault.act}
    waiting: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
    waiting.update({connection: rank for rank, connection in enumerate(ours)})
    deadline = time.monotonic() + START_BOUND_S

    def is_over() -> bool:
        alive = {rank for rank in range(fault.world_size) if processes[rank].sentinel in waiting}
        return not (alive - set(fault.ranks) if stays else alive)

    while not is_over() and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), timeout=left):
            rank = waiting[ready]
            if not isinstance(ready, Connection):
                del waiting[ready]
                processes[rank].join()
                ends[rank].code = processes[rank].exitcode
                ends[rank].seconds = time.monotonic() - min(struck_at.values(), default=time.monotonic())
                continue
            try:
                what, value = ready.recv()
            except (EOFError, OSError):
                del waiting[ready]
                continue
            if what == "struck":
                struck_at[rank] = value
                deadline = min(struck_at.values()) + BOUND_S
            else:
                ends[rank].error, ends[rank].steps, ends[rank].digest = value
    # What came in the same moment as the end of its process.
    for rank, connection in enumerate(ours):
        with contextlib.suppress(EOFError, OSError):
            while connection.poll():
                what, value = connection.recv()
                if what == "ended":
                    ends[rank].error, ends[rank].steps, ends[rank].digest = value
        connection.close()
    for process in processes:
        process.kill()
        process.join()
    sessions = {process.pid for process in processes}
    orphans = [pid for pid, session in sessions_of_processes() if session in sessions]
    return Outcome(fault, package, set(struck_at), ends, orphans)


def sessions_of_processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # After the command's name in parentheses: state, parent, group, session.
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[3])


@cache
def outcome_of(fault: Fault, package: str) -> Outcome:
    return silent_outcomes(package)[fault] if fault in SILENT else strike(fault, package)


@cache
def silent_outcomes(package: str) -> dict[Fault, Outcome]:
    """All at once, since they do little but wait."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(SILENT, pool.map(partial(strike, package=package), SILENT), strict=True))


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    print(ROW.format("package", "fault", "place", "step", "ranks", "the others ended", "after"))
    for outcome in OUTCOMES:
        fault = outcome.fault
        others = outcome.survivors or outcome.ends
        kinds = ", ".join(sorted({end.error.partition(":")[0] or f"code {end.code}" for end in others}))
        seconds = max(end.seconds for end in others)
        where = f"{len(fault.ranks)} of {fault.world_size}"
        print(ROW.format(outcome.package, fault.act, fault.place, fault.scenario, where, kinds, f"{seconds:.2f} s"))
    for package, act, rank, code, seconds in SCRIPTS:
        row = (package, act, "a script, popen", "flag on", f"rank {rank}", f"code {code}", f"{seconds:.2f} s")
        print(ROW.format(*row))


# -- killed -----------------------------------------------------------------------------------------------------------

KILLED = [
    *[
        Fault("killed", place, scenario)
        for scenario in ("first step", "first step, fallback", "later step", "later step, fallback")
        for place in INSIDE
    ],
    *[Fault("killed", place, "flag on") for place in INSIDE if place != "before the finish"],
    *[
        Fault("killed", place, scenario)
        for scenario in ("first step, fallback", "later step, fallback", "step after a split")
        for place in REWRAPPING
    ],
    # The rank that misses something, and the one that does not and will read the tally later.
    Fault("killed", "before the tally", "later step, split", (0,)),
    Fault("killed", "before the tally", "later step, split", (1,)),
    # Rank 0 also keeps the store through which the ranks found each other.
    Fault("killed", "in backward", "later step", (0,)),
    Fault("killed", "before wrapping", "later step, fallback", (0,)),
    Fault("killed", "before the tally", "finishing"),
    # No later step reads this tally.
    Fault("killed", "before the tally", "last step"),
    Fault("killed", "in backward", "later step, split", (1,), 3),
    Fault("killed", "before wrapping", "later step, fallback", (2,), 3),
]

# -- raises -----------------------------------------------------------------------------------------------------------

RAISES = [
    Fault("raises", place, scenario)
    for scenario in ("first step", "later step", "later step, fallback")
    for place in HOOKS
]

# A process that lives on without an answer is noticed only by the timeout.
SILENT = [
    Fault("raises, stays", "training_step", "later step"),
    Fault("raises, stays", "on_after_backward", "later step, fallback"),
    Fault("stopped", "in backward", "first step, fallback"),
    Fault("stopped", "before the tally", "first step"),
    Fault("stopped", "before the tally", "last step"),
    Fault("stopped", "before wrapping", "later step, fallback"),
]
FAULTS = KILLED + RAISES + SILENT


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_other_ranks_end_with_an_error_within_the_timeout(ranks: Ranks, fault: Fault) -> None:
    outcome = outcome_of(fault, ranks.package)
    assert outcome.struck == set(fault.ranks)
    for survivor in outcome.survivors:
        assert survivor.error.startswith("RuntimeError"), survivor
        assert survivor.code == 1, survivor
        assert survivor.seconds < BOUND_S


@pytest.mark.parametrize("fault", KILLED, ids=str)
def test_the_rank_was_killed(ranks: Ranks, fault: Fault) -> None:
    assert [outcome_of(fault, ranks.package).ends[rank].code for rank in fault.ranks] == [-signal.SIGKILL]


@pytest.mark.parametrize("fault", RAISES, ids=str)
def test_the_rank_ends_with_its_own_error(ranks: Ranks, fault: Fault) -> None:
    for rank in fault.ranks:
        end = outcome_of(fault, ranks.package).ends[rank]
        assert (end.code, end.error.partition(":")[0]) == (1, "PlannedError")


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_no_process_stays_behind(ranks: Ranks, fault: Fault) -> None:
    assert outcome_of(fault, ranks.package).orphans == []


def references_of(scenario: Scenario) -> list[str]:
    """Digests of the weights before the first step and after each, trained without interruption and without us."""
    # The flag cannot serve a graph with reentrant checkpoints.
    contender = "oracle" if scenario.model is models.CheckpointedBranches else "flag"
    module, digests = make_module(scenario), Digests()
    before = digest(module)
    fit(dist.get_world_size(), CONTENDERS[contender](), module, [digests])
    return [before, *digests.taken]


@pytest.fixture(scope="module")
def references(ranks: Ranks) -> dict[str, list[str]]:
    return {name: ranks(2).run(references_of, scenario)[0] for name, scenario in SCENARIOS.items()}


# Sums over more than two ranks depend on the layout of buckets in their last bit.
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.world_size == 2], ids=str)
def test_the_other_ranks_hold_the_weights_of_a_whole_number_of_steps(
    ranks: Ranks, references: dict[str, list[str]], fault: Fault
) -> None:
    for survivor in outcome_of(fault, ranks.package).survivors:
        # An optimizer's step may be over before the batch is.
        assert survivor.digest in references[fault.scenario][survivor.steps : survivor.steps + 2]


# -- interrupted ------------------------------------------------------------------------------------------------------

BOTH = (0, 1)
INTERRUPTED = [
    *[
        Fault("interrupted", place, scenario, BOTH)
        for scenario in ("first step, resumed", "later step, fallback")
        for place in ("in backward", "before the tally", *HOOKS)
    ],
    *[Fault("interrupted", place, "later step, fallback", BOTH) for place in REWRAPPING],
    *[Fault("interrupted", place, "first step, resumed") for place in ("in backward", "on_before_optimizer_step")],
    *[
        Fault("interrupted", place, "later step, fallback")
        for place in (
            "on_train_batch_start",
            "training_step",
            "on_after_backward",
            "before the tally",
            "before wrapping",
        )
    ],
]


def resume(scenario: Scenario, checkpoint: Path) -> list[str]:
    """Digests of the weights at the end of the run, resumed under the adaptive strategy and under the flag."""
    found = []
    for chosen in (AdaptiveDDPStrategy(), CONTENDERS["flag"]()):
        module = make_module(scenario)
        fit(dist.get_world_size(), chosen, module, [], ckpt_path=checkpoint)
        found.append(digest(module))
    return found


@pytest.mark.parametrize("fault", INTERRUPTED, ids=str)
def test_an_interrupted_run_goes_on_from_its_last_checkpoint(
    ranks: Ranks, references: dict[str, list[str]], fault: Fault, tmp_path: Path
) -> None:
    outcome = strike(fault, ranks.package, tmp_path)
    assert outcome.struck == set(fault.ranks)
    for rank, end in enumerate(outcome.ends):
        assert end.error.partition(":")[0] == ("SystemExit" if rank in fault.ranks else "RuntimeError"), end
        assert end.seconds < BOUND_S
    assert outcome.orphans == []
    at_the_end = references[fault.scenario][-1]
    assert ranks(2).run(resume, SCENARIOS[fault.scenario], tmp_path / "last.ckpt") == [[at_the_end] * 2] * 2


# -- under the launchers ----------------------------------------------------------------------------------------------


def processes_with(marker: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.parametrize(("fault", "rank"), [("killed", 0), ("killed", 1), ("raises", 1)])
def test_a_script_ends_with_an_error_and_leaves_no_process_behind(
    ranks: Ranks, fault: str, rank: int, tmp_path: Path
) -> None:
    marker = f"adaptive-ddp-{uuid.uuid4()}"
    tests = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "programs/faults.py", "popen", fault, str(rank), str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": str(tests),
            "GLOO_SOCKET_IFNAME": "lo",
            "FAULT_MARKER": marker,
            TESTED_PACKAGE: ranks.package,
        },
        cwd=tests,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        # Ends when the last process that holds the pipe does, which is not always the first of them.
        output, _ = process.communicate(timeout=2 * START_BOUND_S)
        seconds = time.monotonic() - float((tmp_path / "struck").read_text())
        left = processes_with(marker)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    SCRIPTS.append((ranks.package, fault, rank, process.returncode, seconds))
    assert left == []
    assert process.returncode != 0, output
    assert not (tmp_path / "unnoticed").exists(), output
    assert seconds < SCRIPT_BOUND_S, output

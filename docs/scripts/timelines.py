"""Measure and draw the timelines of docs/index.md.

``python docs/scripts/timelines.py measure`` trains on two real Gloo ranks and keeps what happened when in
``docs/scripts/timelines.json``; ``python docs/scripts/timelines.py draw`` draws that into ``docs/images``. About twenty
seconds on two cores.

Promise: every bar and mark is an event of a run, with the time at which it began and ended on the clock that the two
processes share. Nothing is moved or made longer, but for a least width of bars; where the axis is cut, it shows it.

Limits: the figures show one run each, on loopback, of a model whose layers are wide so that each phase takes
milliseconds. They show the order of events, and are no benchmark.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing as mp
import os
import platform
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent
MEASURED = SCRIPTS / "timelines.json"
IMAGES = SCRIPTS.parent / "images"

# -- measure ----------------------------------------------------------------------------------------------------------

RANKS = 2
WIDTH, BATCH, LAYERS, SKIPPED = 1024, 256, 6, 2
SMALL_WIDTH, SMALL_BATCH, SMALL_LAYERS = 32, 16, 150
# Before the step that is recorded: DDP rebuilds its buckets after the first one.
CLEAN_STEPS = 3
GROUP_TIMEOUT_S = 3.0
BOUND_S = 40.0


@dataclass(frozen=True)
class Scene:
    """One run.

    Attributes:
        key: its name in the file.
        strategy: the strategy.
        skips: the ranks on which the recorded step leaves a layer out.
        small: the model is one of many small layers, and the recorded step is the one of median length.
    """

    key: str
    strategy: str
    skips: tuple[int, ...] = ()
    small: bool = False


SCENES = (
    Scene("diverge-ddp", "ddp", skips=(0, 1)),
    Scene("diverge-adaptive", "ddp_adaptive", skips=(0, 1)),
    Scene("hang-ddp", "ddp", skips=(1,)),
    Scene("hang-adaptive", "ddp_adaptive", skips=(1,)),
    Scene("cost-ddp", "ddp", small=True),
    Scene("cost-flag", "ddp_find_unused_parameters_true", small=True),
    Scene("cost-adaptive", "ddp_adaptive", small=True),
)


class Clock:
    """What happened on this rank: kind, start and end in seconds."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, float]] = []

    def add(self, kind: str, start: float, end: float | None = None) -> None:
        """Note an event that is over now, or was at ``end``."""
        self.events.append((kind, start, time.perf_counter() if end is None else end))

    def timed(self, kind: str, function: Callable[..., Any], counts: Callable[[Any], bool] = lambda _: True) -> Any:
        """The same function, noting its calls; those that return something that does not count are left out."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self.add(kind, start)
                raise
            if counts(result):
                self.add(kind, start)
            return result

        return call


def run_rank(scene: Scene, rank: int, store: str, parent: Connection) -> None:
    """Train on one rank, and send the events."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_RUN_ID="timelines", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="1", GROUP_RANK="0", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    try:
        parent.send(_train(scene, rank, store))
    except BaseException:
        parent.send(traceback.format_exc())
    # Whoever ends first would end the wait of the other.
    parent.recv()


def _train(scene: Scene, rank: int, store: str) -> dict[str, Any]:  # noqa: PLR0915
    import pytorch_lightning as pl
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    import adaptive_ddp.reducer
    import adaptive_ddp.tally

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    clock = Clock()
    recorded_from = CLEAN_STEPS

    class Sgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            start = time.perf_counter()
            super().step()
            clock.add("optimizer", start)
            return loss

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            width, layers = (SMALL_WIDTH, SMALL_LAYERS) if scene.small else (WIDTH, LAYERS)
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=scene.small) for _ in range(layers))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            start = time.perf_counter()
            x = batch
            for number, layer in enumerate(self.layers):
                if not (batch_idx >= CLEAN_STEPS and rank in scene.skips and number == SKIPPED):
                    x = torch.relu(x + layer(x)) * 0.5
            loss = x.square().mean()
            clock.add("forward", start)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Sgd(self.parameters(), lr=1.0)

    class Watcher(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            strategy: Any = trainer.strategy
            strategy.precision_plugin.backward = clock.timed("backward", strategy.precision_plugin.backward)
            ddp = strategy.model

            # DDP looks at the annotations, and refuses them as text.
            def reduce(state, bucket):  # type: ignore[no-untyped-def]
                start = time.perf_counter()
                buffer = bucket.buffer().div_(RANKS)

                def done(future: Any) -> Tensor:
                    clock.add("bucket", start)
                    # Raises what the reduction failed with.
                    future.value()
                    return buffer

                return dist.all_reduce(buffer, async_op=True).get_future().then(done)

            ddp.register_comm_hook(None, reduce)
            if scene.strategy == "ddp_find_unused_parameters_true":
                # What the wrapper does between the module's forward and its own return.
                ddp._post_forward = clock.timed("walk", ddp._post_forward)
            if scene.strategy == "ddp_adaptive":
                rewrap = strategy._rewrap_if_due

                def timed_rewrap() -> None:
                    if strategy._run is not None and strategy._run.rewrap_with_flag is not None:
                        clock.timed("rewrap", rewrap)()

                strategy._rewrap_if_due = timed_rewrap

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx <= recorded_from or scene.small:
                dist.barrier()
            clock.add("step", time.perf_counter())

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            clock.add("step done", time.perf_counter())
            digests.append(float(sum(p.detach().double().sum() for p in pl_module.parameters())))

        def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
            clock.add("error", time.perf_counter())
            errors.append(" ".join(str(exception).split())[:160])

    reduction: Any = adaptive_ddp.reducer.Reduction
    reduction.finish = clock.timed("finish", reduction.finish, lambda finished: bool(finished.missing))
    posted: Any = adaptive_ddp.tally
    posted.PostedTally.read = clock.timed("agree", posted.PostedTally.read)
    posted.Exchange.post = clock.timed("tally", posted.Exchange.post)
    posted.Exchange.count = clock.timed("agree", posted.Exchange.count)
    posted.PostedMap.read = clock.timed("agree", posted.PostedMap.read)

    digests: list[float] = []
    errors: list[str] = []
    torch.manual_seed(1)
    model = Model()
    torch.manual_seed(2 + rank)
    shape = (SMALL_BATCH, SMALL_WIDTH) if scene.small else (BATCH, WIDTH)
    steps = 80 if scene.small else CLEAN_STEPS + 2
    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = scene.strategy
    if not scene.small:
        # Each layer is a bucket of its own.
        options = {"bucket_cap_mb": WIDTH * WIDTH * 4 / 2**20}
        kind = pl.strategies.DDPStrategy if strategy == "ddp" else adaptive_ddp.AdaptiveDDPStrategy
        strategy = kind(**options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_epochs=1,
        callbacks=[Watcher()],
        use_distributed_sampler=False,
        **off,
    )
    batches = torch.utils.data.DataLoader([torch.randn(shape) for _ in range(steps)], batch_size=None)
    try:
        trainer.fit(model, batches)
    except RuntimeError:
        if not errors:
            raise
    return {"events": clock.events, "errors": errors, "weights": digests}


def measure_scene(scene: Scene) -> dict[str, Any]:
    """Run it, and keep what is to be drawn, in milliseconds from the start of the recorded step."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(scene, rank, f"{folder}/store", theirs), daemon=True)
            process.start()
            ends.append(ours)
            processes.append(process)
        deadline = time.monotonic() + BOUND_S
        answers: dict[int, Any] = {}
        try:
            while len(answers) < RANKS and (left := deadline - time.monotonic()) > 0:
                for end in wait([end for rank, end in enumerate(ends) if rank not in answers], timeout=left):
                    answers[ends.index(end)] = end.recv()
        finally:
            for process in processes:
                process.kill()
                process.join()
    for rank in range(RANKS):
        if not isinstance(answers.get(rank), dict):
            raise RuntimeError(f"{scene.key}, rank {rank}: {answers.get(rank, 'no answer in time')}")
        if len(_starts(answers[rank]["events"])) <= CLEAN_STEPS:
            raise RuntimeError(f"{scene.key}, rank {rank}, ended early: {answers[rank]['errors']}")
    first = _median_step(answers[0]["events"]) if scene.small else CLEAN_STEPS
    steps = 1 if scene.small else 2
    return {"strategy": scene.strategy, "ranks": [_cut(answers[rank], first, steps, answers) for rank in range(RANKS)]}


def _starts(events: list[tuple[str, float, float]]) -> list[float]:
    return [start for kind, start, _ in events if kind == "step"]


def _median_step(events: list[tuple[str, float, float]]) -> int:
    begins, ends = _starts(events), [start for kind, start, _ in events if kind == "step done"]
    lengths = sorted((end - begin, number) for number, (begin, end) in enumerate(zip(begins, ends, strict=True)))
    return lengths[len(lengths) // 2][1]


def _cut(answer: dict[str, Any], first: int, steps: int, answers: dict[int, Any]) -> dict[str, Any]:
    """The events of these steps; and, for each optimizer step, whether the ranks held equal weights after it."""
    origin = min(_starts(other["events"])[first] for other in answers.values())
    begins = _starts(answer["events"])
    begin = begins[first]
    end = begins[first + steps] if len(begins) > first + steps else float("inf")
    events = [
        [kind, round((start - origin) * 1e3, 3), round((stop - origin) * 1e3, 3)]
        for kind, start, stop in answer["events"]
        if begin <= start < end and kind not in ("step done",)
    ]
    common = min(len(other["weights"]) for other in answers.values())
    equal = [len({other["weights"][number] for other in answers.values()}) == 1 for number in range(common)]
    return {"events": sorted(events, key=lambda event: event[1]), "errors": answer["errors"], "equal": equal[first:]}


def measure() -> None:
    """Run all scenes and write the file."""
    import pytorch_lightning as pl
    import torch

    measured: dict[str, Any] = {
        "how": f"torch {torch.__version__.split('+')[0]}, pytorch-lightning {pl.__version__}, two Gloo ranks on"
        f" loopback, one thread each, {platform.machine()}; process-group timeout {GROUP_TIMEOUT_S:g} s",
        "scenes": {scene.key: measure_scene(scene) for scene in SCENES},
    }
    MEASURED.write_text(json.dumps(measured, indent=1).replace("\n    ", "") + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("measure", "draw"))
    if parser.parse_args().what == "measure":
        measure()


if __name__ == "__main__":
    main()

"""Measure and draw the timelines of docs/index.md.

``python docs/scripts/timelines.py measure`` trains on two real Gloo ranks and keeps what happened when in
``docs/scripts/timelines.json``; ``python docs/scripts/timelines.py draw`` draws that into ``docs/images``. About twenty
seconds on two cores.

Promise: every bar and mark is an event of a run, with the time at which it began and ended on the clock that the two
processes share. Nothing is moved or made longer, but for a least width of bars; where the axis is cut, it shows it.

Limits: the figures show one run each, on loopback, of a model whose layers are wide so that each phase takes
milliseconds, the less disturbed of two. They show the order of events, and are no benchmark.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing as mp
import os
import platform
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
SMALL_WIDTH, SMALL_BATCH, SMALL_LAYERS, SMALL_STEPS = 32, 16, 150, 400
# Before the step that is recorded: DDP rebuilds its buckets after the first one.
CLEAN_STEPS = 3
GROUP_TIMEOUT_S = 3.0
BOUND_S = 60.0
# Of each scene; the one is kept that other programs disturbed less.
RUNS = 2


@dataclass(frozen=True)
class Scene:
    """One run.

    Attributes:
        key: its name in the file.
        strategy: the strategy.
        skips: the ranks on which the recorded step leaves a layer out.
        trouble: what else is particular about the recorded step: ``"reentrant"`` (all blocks run in reentrant
            checkpoints), ``"sparse"`` (an embedding with sparse gradients goes unused), ``"no path"`` (rank 1 returns a
            loss that reaches no parameter), ``"none"`` (rank 1 returns None).
        small: the model is one of many small layers, and the recorded step is the shortest of all.
    """

    key: str
    strategy: str
    skips: tuple[int, ...] = ()
    trouble: str = ""
    small: bool = False


SCENES = (
    Scene("diverge-ddp", "ddp", skips=(0, 1)),
    Scene("diverge-adaptive", "ddp_adaptive", skips=(0, 1)),
    Scene("hang-ddp", "ddp", skips=(1,)),
    Scene("hang-adaptive", "ddp_adaptive", skips=(1,)),
    Scene("cost-ddp", "ddp", small=True),
    Scene("cost-flag", "ddp_find_unused_parameters_true", small=True),
    Scene("cost-adaptive", "ddp_adaptive", small=True),
    *(
        Scene(f"{trouble}-{short}", strategy, skips=(0, 1) if trouble == "reentrant" else (), trouble=trouble)
        for trouble in ("reentrant", "sparse", "no path", "none")
        for short, strategy in (("flag", "ddp_find_unused_parameters_true"), ("adaptive", "ddp_adaptive"))
    ),
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


def _train(scene: Scene, rank: int, store: str) -> dict[str, Any]:
    import pytorch_lightning as pl
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

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

    def run_block(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(x + layer(x)) * 0.5

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            width, layers = (SMALL_WIDTH, SMALL_LAYERS) if scene.small else (WIDTH, LAYERS)
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=scene.small) for _ in range(layers))
            if scene.trouble == "sparse":
                self.embedding = nn.Embedding(64, width, sparse=True)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            start = time.perf_counter()
            troubled = batch_idx >= CLEAN_STEPS
            x = batch
            if scene.trouble == "sparse" and not troubled:
                x = x + self.embedding(torch.arange(64)).mean(dim=0)
            for number, layer in enumerate(self.layers):
                if troubled and rank in scene.skips and number == SKIPPED:
                    continue
                if troubled and scene.trouble == "reentrant" and number > 0:
                    x = checkpoint(run_block, layer, x, use_reentrant=True)
                else:
                    x = run_block(layer, x)
            loss = x.square().mean()
            clock.add("forward", start)
            if troubled and rank == 1 and scene.trouble == "no path":
                return torch.zeros((), requires_grad=True)
            if troubled and rank == 1 and scene.trouble == "none":
                return None
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
                    return future.value()[0]

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
    steps = SMALL_STEPS if scene.small else CLEAN_STEPS + 2
    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = scene.strategy
    if not scene.small:
        # Each layer is a bucket of its own.
        options = {"bucket_cap_mb": WIDTH * WIDTH * 4 / 2**20}
        if strategy == "ddp_adaptive":
            strategy = adaptive_ddp.AdaptiveDDPStrategy(**options)
        else:
            strategy = pl.strategies.DDPStrategy(**options, find_unused_parameters=strategy != "ddp")
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
    first = _shortest_step(answers) if scene.small else CLEAN_STEPS
    steps = 1 if scene.small or scene.trouble else 2
    return {"strategy": scene.strategy, "ranks": [_cut(answers[rank], first, steps, answers) for rank in range(RANKS)]}


def _moments(events: list[tuple[str, float, float]], wanted: str) -> list[float]:
    return [start for kind, start, _ in events if kind == wanted]


def _starts(events: list[tuple[str, float, float]]) -> list[float]:
    return _moments(events, "step")


def _shortest_step(answers: dict[int, Any]) -> int:
    """The step for which the slowest rank took the least time, from when the first one began it."""
    begins = zip(*(_starts(answer["events"]) for answer in answers.values()), strict=True)
    ends = zip(*(_moments(answer["events"], "step done") for answer in answers.values()), strict=True)
    lengths = [max(end) - min(begin) for begin, end in zip(begins, ends, strict=True)]
    return lengths.index(min(lengths))


def _undisturbed(scene: dict[str, Any]) -> float:
    """Whether other programs kept the ranks from computing shows in how long the forwards took."""
    return sum(end - start for rank in scene["ranks"] for kind, start, end in rank["events"] if kind == "forward")


def _cut(answer: dict[str, Any], first: int, steps: int, answers: dict[int, Any]) -> dict[str, Any]:
    """The events of these steps; and, for each optimizer step, whether the ranks held equal weights after it."""
    origin = min(_starts(other["events"])[first] for other in answers.values())
    begins = _starts(answer["events"])
    begin = begins[first]
    end = begins[first + steps] if len(begins) > first + steps else float("inf")
    events = [
        [kind, round((start - origin) * 1e3, 3), round((stop - origin) * 1e3, 3)]
        for kind, start, stop in answer["events"]
        if begin <= start <= end and kind not in ("step done",)
    ]
    common = min(len(other["weights"]) for other in answers.values())
    equal = [len({other["weights"][number] for other in answers.values()}) == 1 for number in range(common)]
    return {"events": sorted(events, key=lambda event: event[1]), "errors": answer["errors"], "equal": equal[first:]}


def measure(keys: list[str]) -> None:
    """Run the scenes, or those of these names, and write each into the file as it is done."""
    import pytorch_lightning as pl
    import torch

    scenes = json.loads(MEASURED.read_text())["scenes"] if MEASURED.exists() else {}
    how = (
        f"torch {torch.__version__.split('+')[0]}, pytorch-lightning {pl.__version__}, two Gloo ranks on loopback,"
        f" one thread each, {platform.machine()}; process-group timeout {GROUP_TIMEOUT_S:g} s"
    )
    for scene in SCENES:
        if keys and scene.key not in keys:
            continue
        scenes[scene.key] = min((measure_scene(scene) for _ in range(RUNS)), key=_undisturbed)
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(scene)}" for key, scene in scenes.items())
        MEASURED.write_text(f'{{"how": {json.dumps(how)},\n"scenes": {{\n{lines}\n}}}}\n')


# -- draw -------------------------------------------------------------------------------------------------------------

# Narrow, so that the text is legible on a phone.
PICTURE_WIDTH, LEFT, RIGHT = 400, 46, 8
BAR, NETWORK_ROWS, NETWORK_BAR, LANE_GAP = 18, 3, 4, 9
LANE = BAR + 2 + NETWORK_ROWS * (NETWORK_BAR + 1)
# A wait longer than this is cut out of the axis.
CUT_FROM_MS, CUT_TO_SHARE = 1000.0, 0.2
LEAST_WIDTH = 1.6
# A step that begins later than this is the next one.
LEAST_STEP_MS = 30.0

# Each with what it is called under the picture, on light and on dark.
KINDS = {
    "forward": ("forward", "#7d8da3", "#8a9ab0"),
    "walk": ("graph walk", "#c2185b", "#f06292"),
    "backward": ("backward", "#2f6fde", "#5b93f5"),
    "bucket": ("all-reduce of a bucket", "#128c7e", "#2bbfae"),
    "finish": ("finish", "#e07b00", "#ff9d2e"),
    "agree": ("tally, usage map", "#7b3fc4", "#ab7df0"),
    "rewrap": ("rewrap", "#c2185b", "#f06292"),
    "optimizer": ("optimizer step", "#8a7a00", "#d4c02a"),
    "next": ("the next step begins", "none", "none"),
    "wait": ("waits for the other rank", "#d32f2f", "#ff6b6b"),
}
NAMED_ON_THE_BAR = ("forward", "backward", "finish")

Event = tuple[str, float, float]


class Axis:
    """From milliseconds to places in the picture, with a long wait cut out.

    Args:
        moments: when something happens; the longest time between two of them is cut, if it is long.
        shown_ms: the milliseconds that are to fit next to a cut, so that panels have one scale.
    """

    def __init__(self, moments: list[float], shown_ms: float) -> None:
        ordered = sorted(moments)
        gaps = [(later - earlier, earlier) for earlier, later in itertools.pairwise(ordered)]
        longest, begins = max(gaps)
        self.cut = (begins, begins + longest) if longest > CUT_FROM_MS else None
        self._cut_to = CUT_TO_SHARE * shown_ms if self.cut else 0.0
        self._scale = (PICTURE_WIDTH - LEFT - RIGHT) / (shown_ms + self._cut_to)

    def __call__(self, moment: float) -> float:
        """The place of a moment."""
        if self.cut is None or moment <= self.cut[0]:
            return LEFT + moment * self._scale
        begin, end = self.cut
        if moment < end:
            return LEFT + (begin + self._cut_to * (moment - begin) / (end - begin)) * self._scale
        return LEFT + (begin + self._cut_to + moment - end) * self._scale


def _shown_ms(ranks: list[dict[str, Any]]) -> float:
    moments = sorted(_all_moments(ranks))
    gaps = (later - earlier for earlier, later in itertools.pairwise(moments))
    return moments[-1] - sum(gap for gap in gaps if gap > CUT_FROM_MS)


def _all_moments(ranks: list[dict[str, Any]]) -> list[float]:
    return [moment for rank in ranks for _, start, end in rank["events"] for moment in (start, end)]


def _parts(events: list[Event]) -> list[Event]:
    """The bars of a rank: what it did, and where it waited for longer than anything takes."""
    parts: list[Event] = []
    reached = 0.0
    buckets = [event for event in events if event[0] == "bucket"]
    for kind, start, end in events:
        if kind in ("bucket", "tally"):
            continue
        if start - reached > CUT_FROM_MS:
            parts.append(("wait", reached, start))
        if kind == "backward" and end - start > CUT_FROM_MS:
            # It has nothing left to compute once its last bucket is on its way.
            alone = max(launch for _, launch, _ in buckets)
            parts += [("backward", start, alone), ("wait", alone, end)]
        elif kind == "backward" or kind in KINDS:
            parts.append((kind, start, end))
        reached = max(reached, end)
    return parts


def _bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, LEAST_WIDTH):.1f}" height="{height}" rx="1"/>'
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _lane(number: int, events: list[Event], axis: Axis, y: float) -> list[str]:
    drawn = [_text(0, y + BAR - 5, f"rank {number}")]
    for kind, start, end in _parts(events):
        x, width = axis(start), axis(end) - axis(start)
        drawn.append(_bar(kind, x, y, width, BAR))
        if kind == "wait":
            # To the left of where the axis is cut.
            drawn.append(_text(x + 4, y + BAR - 5, "waits", "on-bar"))
        elif kind in NAMED_ON_THE_BAR and width > 6.6 * len(kind):
            drawn.append(_text(x + width / 2, y + BAR - 5, kind, "on-bar", "middle"))
    free = [0.0] * NETWORK_ROWS
    for kind, start, end in events:
        if kind == "bucket":
            row = free.index(min(free))
            free[row] = end
            top = y + BAR + 2 + row * (NETWORK_BAR + 1)
            failed = end - start > CUT_FROM_MS
            drawn.append(_bar("wait" if failed else "bucket", axis(start), top, axis(end) - axis(start), NETWORK_BAR))
        elif kind == "error":
            x, middle = min(axis(start) + 7, PICTURE_WIDTH - 7), y + BAR / 2
            drawn.append(f'<path class="cross" d="M{x - 5:.1f} {middle - 5}l10 10m0 -10l-10 10"/>')
            if x < PICTURE_WIDTH - 45:
                drawn.append(_text(x + 9, y + BAR - 5, "error", "bad"))
        elif kind == "step" and start > LEAST_STEP_MS:
            drawn.append(f'<path class="next" d="M{axis(start):.1f} {y - 3}v{LANE + 4}"/>')
    return drawn


def _ticks(axis: Axis, end: float, y: float) -> list[str]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if axis(step) - LEFT > 40)
    drawn, last = [], 0.0
    for moment in range(0, int(end) + 1, step):
        x = axis(moment)
        in_cut = axis.cut and axis(axis.cut[0]) - 30 < x < axis(axis.cut[1]) + 30
        if in_cut or (moment and x - last < 38) or x > PICTURE_WIDTH - 14:
            continue
        last = x
        drawn.append(f'<path class="tick" d="M{x:.1f} {y}v4"/>')
        drawn.append(_text(x, y + 14, f"{moment} ms" if not moment else f"{moment:,}", "small", "middle"))
    return drawn


@dataclass(frozen=True)
class Panel:
    """One strategy: a lane a rank and an axis.

    Attributes:
        title: the strategy, and what it is given.
        outcome: what came of it.
        look: ``"good"``, ``"bad"`` or ``"small"`` (neither).
        ranks: the events.
    """

    title: str
    outcome: str
    look: str
    ranks: list[dict[str, Any]]


def _panel(shown: Panel, shown_ms: float, y: float) -> tuple[str, float]:
    """What is drawn, and where the next panel may begin."""
    ranks = shown.ranks
    moments = _all_moments(ranks)
    axis = Axis(moments, shown_ms)
    drawn = [_text(0, y + 12, shown.title, "title"), _text(0, y + 27, shown.outcome, shown.look)]
    top = y = y + 36
    for number, rank in enumerate(ranks):
        drawn += _lane(number, rank["events"], axis, y)
        y += LANE + LANE_GAP
    drawn.append(f'<path class="axis" d="M{LEFT} {y - 4}H{PICTURE_WIDTH - 2}"/>')
    drawn += _ticks(axis, max(moments), y - 4)
    if axis.cut:
        x = (axis(axis.cut[0]) + axis(axis.cut[1])) / 2
        drawn.append(f'<path class="gap" d="M{x - 3:.1f} {top - 3}l6 12l-6 12V{y - 4}h6V{top + 21}l6 -12l-6 -12z"/>')
        drawn.append(_text(x + 2, y + 10, f"{(axis.cut[1] - axis.cut[0]) / 1000:.1f} s cut", "small", "middle"))
    return "\n".join(drawn), y + 30


def _legend(kinds: list[str], y: float) -> tuple[str, float]:
    drawn, x = [], 0.0
    for kind in kinds:
        width = 16 + 5.9 * len(KINDS[kind][0])
        if x + width > PICTURE_WIDTH:
            x, y = 0.0, y + 16
        mark = f'<path class="next" d="M{x + 5} {y - 1}v12"/>' if kind == "next" else _bar(kind, x, y, 10, 10)
        drawn += [mark, _text(x + 14, y + 9, KINDS[kind][0], "small")]
        x += width + 8
    return "\n".join(drawn), y + 20


def picture(panels: list[Panel], description: str) -> str:
    """Panels on one scale, one below the other, and what the colours mean."""
    shown_ms = 1.03 * max(_shown_ms(shown.ranks) for shown in panels)
    body, y = [], 0.0
    for shown in panels:
        drawn, y = _panel(shown, shown_ms, y)
        body.append(drawn)
    events = [rank["events"] for shown in panels for rank in shown.ranks]
    seen = {kind for rank in events for kind, _, _ in (*_parts(rank), *rank)}
    if any(kind == "step" and start > LEAST_STEP_MS for rank in events for kind, start, _ in rank):
        seen.add("next")
    drawn, y = _legend([kind for kind in KINDS if kind in seen], y)
    body.append(drawn)
    light = "".join(f".{kind}{{fill:{colour}}}" for kind, (_, colour, _) in KINDS.items())
    dark = "".join(f".{kind}{{fill:{colour}}}" for kind, (_, _, colour) in KINDS.items())
    style = (
        "text{font:12px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}"
        ".title{font:600 12.5px ui-monospace,monospace}.card{fill:#fff;stroke:#ddd}"
        ".on-bar{fill:#fff;font-size:11px}.good{fill:#1b7a34}.bad{fill:#c62828}"
        ".axis,.tick{stroke:#888;fill:none}.cross{stroke:#c62828;stroke-width:3;fill:none}.gap{fill:#fff}"
        + light
        + ".next{stroke:#888;stroke-dasharray:2 2;fill:none}"
    )
    style += (
        "@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.small{fill:#b5b5b5}.card,.gap{fill:#1e2129}"
        ".card{stroke:#3a3f4b}.on-bar{fill:#10131a}.good{fill:#6fd38a}.bad{fill:#ff8a80}.cross{stroke:#ff6b6b}"
        + dark
        + "}"
    )
    margin = 9
    width, height = PICTURE_WIDTH + 2 * margin, y + 2 * margin
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img">\n'
        f"<title>{escape(description)}</title>\n<style>{style}</style>\n"
        f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1:.0f}" rx="6"/>\n'
        f'<g transform="translate({margin} {margin})">\n' + "\n".join(body) + "\n</g>\n</svg>\n"
    )


def _outcome(scene: dict[str, Any]) -> str:
    """In words, from the events: how many buckets were reduced, who waited, how it ended."""
    ranks = scene["ranks"]
    waiting = [any(part == "wait" for part, *_ in _parts(rank["events"])) for rank in ranks]
    failed = [bool(rank["errors"]) for rank in ranks]
    stepped = [any(kind == "optimizer" for kind, *_ in rank["events"]) for rank in ranks]
    if any(waiting):
        who = "both ranks wait" if all(waiting) else f"rank {waiting.index(True)} waits"
        return f"{who} for the time-out of {GROUP_TIMEOUT_S:g} s; " + ("both fail" if all(failed) else "it fails")
    if all(failed) and not any(stepped):
        return "error in the backward, on both ranks"
    reduced = min(sum(kind == "bucket" for kind, *_ in rank["events"]) for rank in ranks)
    if all(failed) and not ranks[0]["equal"][0]:
        return f"{reduced} of {LAYERS} buckets reduced; weights differ; error a step late"
    if any(failed) or not ranks[0]["equal"][0]:
        raise RuntimeError(f"{scene['strategy']} ended in a way that there are no words for")
    return "finished in the same step; equal weights"


def _length(ranks: list[dict[str, Any]]) -> float:
    return max(end for rank in ranks for kind, _, end in rank["events"] if kind == "optimizer")


def pictures(scenes: dict[str, Any]) -> dict[str, str]:
    """Each picture by the name of its file, from what was measured."""

    def shown(key: str, title: str) -> Panel:
        scene = scenes[key]
        outcome = _outcome(scene)
        return Panel(title, outcome, "good" if "equal" in outcome else "bad", scene["ranks"])

    def cost(key: str, title: str) -> Panel:
        ranks = scenes[key]["ranks"]
        return Panel(title, f"everything is used; {_length(ranks):.2f} ms", "small", ranks)

    both, one, flag = "both ranks skip a layer", "rank 1 skips a layer", "ddp_find_unused_parameters_true"
    troubles = {
        "reentrant": "reentrant checkpoints, a layer unused",
        "sparse": "sparse embedding unused",
        "no path": "rank 1's loss reaches nothing",
        "none": "rank 1 returns None",
    }
    return {
        "timeline_diverge.svg": picture(
            [shown("diverge-ddp", f"ddp: {both}"), shown("diverge-adaptive", f"ddp_adaptive: {both}")],
            "Timeline of two ranks that skip a layer, under ddp and under ddp_adaptive",
        ),
        "timeline_hang.svg": picture(
            [shown("hang-ddp", f"ddp: {one}"), shown("hang-adaptive", f"ddp_adaptive: {one}")],
            "Timeline of two ranks of which one skips a layer, under ddp and under ddp_adaptive",
        ),
        "timeline_cost.svg": picture(
            [cost("cost-ddp", "ddp"), cost("cost-flag", flag), cost("cost-adaptive", "ddp_adaptive")],
            "Timeline of a step in which everything is used, under ddp, with the flag, and under ddp_adaptive",
        ),
        **{
            f"timeline_{trouble.replace(' ', '_')}.svg": picture(
                [
                    shown(f"{trouble}-flag", f"the flag: {title}"),
                    shown(f"{trouble}-adaptive", f"ddp_adaptive: {title}"),
                ],
                f"Timeline of two ranks under the flag and under ddp_adaptive: {title}",
            )
            for trouble, title in troubles.items()
        },
    }


def draw() -> None:
    """Draw what is in the file."""
    for name, svg in pictures(json.loads(MEASURED.read_text())["scenes"]).items():
        (IMAGES / name).write_text(svg)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("measure", "draw"))
    parser.add_argument("scenes", nargs="*", help="measure these only")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.scenes)
    else:
        draw()


if __name__ == "__main__":
    main()

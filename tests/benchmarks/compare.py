"""Compare the contenders: ``PYTHONPATH=.:tests python -m benchmarks.compare``; ``--help`` tells the rest.

``docs/performance.md`` says what is compared with what, and what came out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from ranks import RankGroup

from benchmarks import cuda, fallback, own_work, traffic
from benchmarks.contenders import COMPARISONS, GROUPS
from benchmarks.picture import draw
from benchmarks.results import Result, Summary, evaluate, load, machine, table
from benchmarks.shapes import SHAPES, Place, Ranks, Unused
from benchmarks.timing import Job, run_job

BOUND_S = 1800.0


def measure(group: RankGroup, job: Job) -> Result:
    """Do a job on a group of ranks."""
    return evaluate(job, [group.run(run_job, job, repeat, bound_s=BOUND_S) for repeat in range(job.repeats)])


def names() -> list[str]:
    """What can be measured."""
    return sorted({comparison.contender for comparison in COMPARISONS})


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """What the arguments ask for: for each shape the clean model, and each kind of unused parameters."""
    common: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("steps", "repeats", "warm_up", "burst", "seed", "through_trainer")
    }
    common["only"] = tuple(arguments.only)
    wanted = [comparison.group for comparison in COMPARISONS if comparison.contender in (arguments.only or names())]
    groups = tuple(group for group in arguments.group if group in wanted)
    others = tuple(group for group in groups if group != "clean")
    for shape in arguments.shape:
        if "clean" in groups:
            yield Job(shape, None, ("clean",), **common)
        for share in arguments.share if others else ():
            for place in arguments.place:
                for ranks in arguments.ranks:
                    yield Job(shape, Unused(share, place, ranks), others, **common)


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments, or an error that says what is wrong with them."""
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["300", "1200"])
    parser.add_argument("--group", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--only", nargs="+", choices=names(), default=[], help="what to measure of the groups")
    parser.add_argument("--share", nargs="+", type=float, default=[0.1], help="shares of unused blocks")
    parser.add_argument("--place", nargs="+", choices=get_args(Place), default=["late"])
    parser.add_argument("--ranks", nargs="+", choices=get_args(Ranks), default=["same"], help="who leaves out what")
    parser.add_argument("--world-size", nargs="+", type=int, default=[2])
    parser.add_argument("--steps", type=int, default=200, help="counted steps of each contender")
    parser.add_argument("--repeats", type=int, default=4, help="in how many parts, with everything made anew")
    parser.add_argument("--warm-up", type=int, default=12, help="steps before those in each part")
    parser.add_argument("--burst", type=int, default=1, help="steps in a row that a contender takes in its turn")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the batches")
    parser.add_argument("--through-trainer", action="store_true", help="whole Trainers, with their hooks and closures")
    parser.add_argument("--own-work", action="store_true", help="instead: what ours adds to a clean step, in µs")
    parser.add_argument("--profile", action="store_true", help="with --own-work: by function")
    parser.add_argument("--fallback", action="store_true", help="instead: what the step of a fallback costs")
    parser.add_argument("--bytes", action="store_true", help="instead: what the ranks send for the tally and the map")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: instead, the checks on a GPU")
    parser.add_argument("--full", action="store_true", help="every shape, 10 %% and 50 %%, early and late, same or not")
    parser.add_argument("--quick", action="store_true", help="the smallest shape and few steps, to see that it runs")
    parser.add_argument("--output", type=Path, help="a folder for compare.json, .md and, with matplotlib, .png")
    parser.add_argument("--merge", nargs="+", type=Path, help="instead: show several compare.json in one, in --output")
    arguments = parser.parse_args(words)
    if arguments.merge and not arguments.output:
        parser.error("--merge needs --output, the folder to write into")
    if arguments.full:
        arguments.shape, arguments.share = list(SHAPES), [0.1, 0.5]
        arguments.place, arguments.ranks = list(get_args(Place)), list(get_args(Ranks))
    if arguments.quick:
        arguments.shape, arguments.steps, arguments.repeats, arguments.warm_up = ["62"], 6, 1, 3
    return arguments


def write(results: list[Result], folder: Path) -> None:
    """Write what is there so far."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "results": [result.as_json() for result in results]}
    (folder / "compare.json").write_text(json.dumps(content, indent=1))
    show([result.summary for result in results], folder)


def show(summaries: list[Summary], folder: Path) -> None:
    """Write the tables and, where there is matplotlib, the picture."""
    (folder / "compare.md").write_text("\n\n".join(map(table, summaries)) + "\n")
    if importlib.util.find_spec("matplotlib"):
        draw(summaries, folder / "compare.png")


def run_merge(files: list[Path], folder: Path) -> int:
    """Put the results of earlier runs into one table and one picture."""
    folder.mkdir(parents=True, exist_ok=True)
    show([summary for file in files for summary in load(json.loads(file.read_text()))], folder)
    return 0


def run_own_work(steps: int, profile: bool) -> None:
    """Print what the strategy adds to a clean step."""
    group = RankGroup(1)
    try:
        rows = [group.run(own_work.measure_own_work, n, steps, bound_s=BOUND_S)[0] for n in own_work.PARAMETERS]
    finally:
        group.kill()
    print(own_work.table(rows))
    for row in rows if profile else ():
        print(f"\n{row.parameters} parameters, under the profiler, a step:\n" + "\n".join(row.profile[:16]))


def run_fallback(world_size: int, times: int) -> None:
    """Print what a fallback costs."""
    group = RankGroup(world_size)
    try:
        costs = [
            fallback.evaluate(title, group.run(fallback.measure_fallbacks, *kind, times, bound_s=BOUND_S))
            for title, kind in fallback.KINDS.items()
        ]
    finally:
        group.kill()
    print(fallback.table(costs))


def run_bytes() -> int:
    """Print what our collectives send; return 1 if that depends on the world size."""
    sent: dict[tuple[str, str, int], Sequence[traffic.Sent]] = {}
    for world_size in traffic.WORLD_SIZES_RUN:
        group = RankGroup(world_size)
        try:
            for strategy in traffic.STRATEGIES:
                for ranks in ("same", "some"):
                    sent[strategy, ranks, world_size] = group.run(traffic.record, strategy, ranks, bound_s=BOUND_S)
        finally:
            group.kill()
    print(traffic.table(sent))
    for text in (wrong := traffic.depends_on_world_size(sent)):
        print(f"WRONG: {text}")
    return int(bool(wrong))


def main(words: list[str] | None = None) -> int:
    """Do what the arguments ask for; return 1 if some weights were not what they had to be."""
    arguments = parse(sys.argv[1:] if words is None else words)
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    if arguments.merge:
        return run_merge(arguments.merge, arguments.output)
    if arguments.device == "cuda":
        return cuda.main()
    if arguments.own_work:
        run_own_work(arguments.steps, arguments.profile)
    if arguments.fallback:
        run_fallback(arguments.world_size[0], times=arguments.steps // 10)
    if arguments.bytes:
        return run_bytes()
    if arguments.own_work or arguments.fallback:
        return 0
    return run_comparison(arguments)


def run_comparison(arguments: argparse.Namespace) -> int:
    """Compare the contenders; return 1 if some weights were not what they had to be."""
    results: list[Result] = []
    for world_size in arguments.world_size:
        group = RankGroup(world_size)
        try:
            for job in jobs(arguments):
                results.append(measure(group, job))
                print(f"\n{table(results[-1].summary)}", flush=True)
                for text in results[-1].unequal:
                    print(f"WRONG: {text}", flush=True)
                if arguments.output:
                    write(results, arguments.output)
        finally:
            group.kill()
    return int(any(result.unequal for result in results))


if __name__ == "__main__":
    sys.exit(main())

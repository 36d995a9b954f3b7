"""The checks on a GPU: equal bits, synchronisations of the device in a clean step, peak memory over a fallback.

In two settings, on a single GPU: two Gloo ranks that share it (each is a node of its own to Lightning, with one
device), and one rank under NCCL. ``python -m benchmarks.compare --device cuda`` runs all of it in a few minutes, and
says so and does nothing where there is no GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankGroup

from adaptive_ddp import AdaptiveDDPStrategy
from benchmarks.contenders import GROUPS, Contender, flag_strategy
from benchmarks.driver import DirectSeat, quiet, use_one_thread, within_fits
from benchmarks.results import evaluate
from benchmarks.results import table as ratio_table
from benchmarks.shapes import NONE, SHAPES, Stack, Unused
from benchmarks.timing import Job, run_job

BOUND_S = 240.0
STEPS, PROFILED_STEPS = 20, 4
# What a CUDA runtime calls waiting for the device (CUPTI's names, as torch.profiler shows them).
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_CLEAN = {contender.name: contender for contender in GROUPS["clean"]}


@dataclass(frozen=True)
class Checked:
    """What one rank saw.

    Attributes:
        synchronisations: of one clean step, by contender and name of the call, on average.
        peak_bytes: the most that was allocated while a model was trained, by how.
    """

    synchronisations: dict[str, dict[str, float]]
    peak_bytes: dict[str, int]


def become_only_rank_of_a_node(backend: str) -> None:
    """On a rank: let Lightning see a node of its own with one device, and make the group anew if it is another one."""
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE="1")
    if backend != dist.get_backend():
        assert dist.get_world_size() == 1, "a GPU takes one rank of NCCL"
        dist.destroy_process_group()
        store = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "store")
        torch.cuda.set_device(0)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)


def check(device: str) -> Checked:
    """On a rank: count synchronisations, and measure memory."""
    use_one_thread()
    with quiet():
        counts = {name: count_synchronisations(_CLEAN[name], device) for name in ("plain", "watch")}
        peaks = {
            "the flag from the start": peak_bytes(flag_strategy, device),
            "ours, over the fallback": peak_bytes(AdaptiveDDPStrategy, device),
        }
    return Checked(counts, peaks)


def count_synchronisations(contender: Contender, device: str) -> dict[str, float]:
    """The calls by which a clean step waits for the device."""
    shape = SHAPES["62"]
    seat = DirectSeat("cuda", contender, Stack(shape), device)
    batch = torch.ones(shape.batch, device=device)
    calls: Counter[str] = Counter()

    def work() -> None:
        for number in range(STEPS):
            seat.step(batch, number)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            for number in range(PROFILED_STEPS):
                # Not the seat's step, which waits for the device itself, to take the time.
                seat.train_on(batch, number)
        calls.update(event.name for event in profile.events() if event.name in SYNCHRONISING)

    within_fits([seat], work)
    return {name: calls[name] / PROFILED_STEPS for name in sorted(calls)}


def peak_bytes(strategy: Any, device: str) -> int:
    """The most memory that was allocated in a fit in which something goes unused from the fifth step on."""
    shape, rank, world_size = SHAPES["wide"], dist.get_rank(), dist.get_world_size()
    unused = Unused(0.2, "late", "same")

    def left_out(step: int) -> frozenset[int]:
        return unused.left_out(shape, rank, world_size, step) if step >= 4 else NONE

    seat = DirectSeat("cuda", Contender("memory", strategy, "some unused"), Stack(shape, left_out), device)
    batch = torch.ones(shape.batch, device=device)
    peaks = [0]

    def work() -> None:
        for number in range(10):
            seat.step(batch, number)
        if device == "cuda":
            peaks.append(torch.cuda.max_memory_allocated())

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    within_fits([seat], work)
    return max(peaks) - before


def run(device: str, settings: Sequence[tuple[str, int]]) -> list[str]:
    """Do all checks in the given settings, each a backend and a number of ranks; print what came out.

    Returns:
        What is wrong: unequal weights, and synchronisations that our strategy adds.
    """
    wrong = []
    for backend, world_size in settings:
        print(f"\n## {backend}, {world_size} ranks, {device}\n", flush=True)
        group = RankGroup(world_size)
        try:
            group.run(become_only_rank_of_a_node, backend, bound_s=BOUND_S)
            jobs = [
                Job("300", None, ("clean",), steps=60, repeats=2, device=device),
                Job("300", Unused(0.1, "late", "same"), ("on", "finish"), steps=60, repeats=2, device=device),
                Job("resnet", Unused(0.1, "early", "different"), ("on", "finish"), steps=20, repeats=1, device=device),
            ]
            for job in jobs:
                result = evaluate(job, [group.run(run_job, job, n, bound_s=BOUND_S) for n in range(job.repeats)])
                print(f"{ratio_table(result.summary)}\n", flush=True)
                wrong += result.unequal
            parts: list[Checked] = group.run(check, device, bound_s=BOUND_S)
        finally:
            group.kill()
        for rank, part in enumerate(parts):
            print(f"rank {rank}: synchronisations a clean step {part.synchronisations}")
            peaks = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in part.peak_bytes.items())
            print(f"rank {rank}: peak memory: {peaks}")
            plain, watch = (sum(part.synchronisations[name].values()) for name in ("plain", "watch"))
            if watch > plain:
                wrong.append(f"{backend}, rank {rank}: {watch - plain:.2f} synchronisations more in a clean step")
    return wrong


def main() -> int:
    """Run the checks on the GPU, if there is one; return 1 if something is wrong."""
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was run.")
        return 0
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    wrong = run("cuda", [("gloo", 2), ("nccl", 1)])
    for text in wrong:
        print(f"WRONG: {text}")
    return int(bool(wrong))

"""The loop of docs/bare-loop.md, taken from the page, against the same loop under find_unused_parameters=True."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PAGE = (Path(__file__).parent.parent / "docs" / "bare-loop.md").read_text()
(LOOP,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

STEPS = 4

# usage(step, rank) -> the branches that a rank uses
USAGES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "none unused": lambda step, rank: (0, 1, 2),
    "unused everywhere": lambda step, rank: (0, 2),
    "unused on some ranks": lambda step, rank: (0, 1, 2) if rank == 0 else (0, 2),
    "unused late": lambda step, rank: (0, 2) if step == 2 else (0, 1, 2),
    "unused late on some ranks": lambda step, rank: (0,) if step == 2 and rank == 0 else (0, 1, 2),
    "in turn": lambda step, rank: ((step + rank) % 3,),
}


class Branches(nn.Module):
    """A trunk and three branches; column 0 of a batch tells its step."""

    def __init__(self, usage: str) -> None:
        super().__init__()
        self.usage = USAGES[usage]
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.trunk(batch[:, 1:])
        used = self.usage(int(batch[0, 0]), dist.get_rank())
        output: Tensor = sum(self.branches[branch](hidden) for branch in used)  # type: ignore[assignment]
        return output


def train_under_the_flag(ddp: nn.Module, optimizer: torch.optim.Optimizer, windows: list[list[Tensor]]) -> None:
    for *earlier, last in windows:
        optimizer.zero_grad()
        with ddp.no_sync():
            for batch in earlier:
                ddp(batch).square().mean().backward()
        ddp(last).square().mean().backward()
        optimizer.step()


def make_exact(module: nn.Module) -> None:
    """Have weights be multiples of 3/8, so that with integers for inputs every third of a gradient, and sum, is exact.

    More than two ranks are added up in an order that depends on the layout of the buckets, which the flag changes.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((parameter * 8 / 3).round() * 3 / 8)


def outcome(train: Callable[..., None], usage: str, batches_a_step: int, options: dict[str, Any]) -> list[Any]:
    """The weights after each step, and the gradients that led to them."""
    exact = dist.get_world_size() > 2
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches(usage).double(), **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.5, weight_decay=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(STEPS):
        # In a window the first batch uses what its step does, and the last what the next step does.
        window = [torch.randn(8, 5, generator=generator, dtype=torch.double) for _ in range(batches_a_step)]
        if exact:
            make_exact(ddp)
            window = [batch.round() for batch in window]
        for place, batch in enumerate(window):
            batch[:, 0] = step + place
        train(ddp, optimizer, [window])
        for name, parameter in ddp.module.named_parameters():
            gradient = None if parameter.grad is None else parameter.grad.clone()
            seen.append((name, step, parameter.detach().clone(), gradient))
    return seen


def differences(code: str, usage: str, batches_a_step: int, options: dict[str, Any]) -> list[str]:
    """Where the page's loop and the flag's differ in weights or gradients."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "docs/bare-loop.md", "exec"), namespace)
        ours = outcome(namespace["train"], usage, batches_a_step, options)
    flag = outcome(train_under_the_flag, usage, batches_a_step, {**options, "find_unused_parameters": True})
    different = []
    for (name, step, weight, gradient), (_, _, weight_wanted, wanted) in zip(ours, flag, strict=True):
        if not torch.equal(weight, weight_wanted):
            different.append(f"weight of {name} at step {step}")
        if (gradient is None) != (wanted is None) or (gradient is not None and not torch.equal(gradient, wanted)):
            different.append(f"gradient of {name} at step {step}: {gradient} instead of {wanted}")
    return different


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize(
    ("world_size", "options", "batches_a_step"),
    [(2, {}, 1), (2, {"gradient_as_bucket_view": True}, 2), (3, {}, 2)],
    ids=["two ranks", "two ranks, views, windows of two batches", "three ranks, windows of two batches"],
)
def test_the_pages_loop_gives_the_flags_bits(
    ranks: Ranks, world_size: int, options: dict[str, Any], batches_a_step: int, usage: str
) -> None:
    assert ranks(world_size).run(differences, LOOP, usage, batches_a_step, options) == [[]] * world_size


def test_without_the_agreement_the_loop_differs(ranks: Ranks) -> None:
    alone = LOOP.replace("            parameter.grad = None\n", "            pass\n")
    assert alone != LOOP
    for different in ranks(2).run(differences, alone, "unused everywhere", 1, {}):
        assert [text for text in different if text.startswith("weight of branches.1")]


def printed(code: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "docs/bare-loop.md", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def test_the_loop_prints_what_the_page_shows(ranks: Ranks) -> None:
    by_rank_0, by_rank_1 = ranks(2).run(printed, LOOP)
    assert by_rank_1 == ""
    assert f"```text\n{by_rank_0}```" in PAGE


def switches_to_the_flag() -> list[str]:
    """Do what the page says about wrapping again; return where the gradients are not the mean."""
    from adaptive_ddp import reducer

    ddp = DistributedDataParallel(Branches("unused late"))
    ddp(torch.zeros(8, 5)).square().mean().backward()
    reducer.dismantle(ddp)
    ddp = DistributedDataParallel(ddp.module, find_unused_parameters=True, init_sync=False)
    wrong = []
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(torch.full((8, 5), float(step))).square().mean().backward()
        for name, parameter in ddp.module.named_parameters():
            if ("branches.1" in name and step == 2) != (parameter.grad is None):
                wrong.append(f"{name} at step {step}")
    return wrong


def test_wrapping_again_with_the_flag_as_the_page_says(ranks: Ranks) -> None:
    assert ranks(2).run(switches_to_the_flag) == [[]] * 2


def sits_out(code: str) -> list[bool]:
    """Rank 0 has no loss in its step; return whether each gradient is half of rank 1's own."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "docs/bare-loop.md", "exec"), namespace)
    torch.manual_seed(0)
    module = Branches("none unused")
    batch = torch.randn(8, 5).fill_(0.5)
    own = torch.autograd.grad(module(batch).square().mean(), list(module.parameters()))
    ddp = DistributedDataParallel(module)
    loss = ddp(batch).square().mean()
    namespace["backward"](ddp, torch.zeros((), requires_grad=True) if dist.get_rank() == 0 else loss)
    return [torch.equal(p.grad, gradient / 2) for p, gradient in zip(module.parameters(), own, strict=True)]


def test_a_rank_without_a_loss_contributes_zeros_as_the_page_says(ranks: Ranks) -> None:
    assert ranks(2).run(sits_out, LOOP) == [[True] * 8] * 2

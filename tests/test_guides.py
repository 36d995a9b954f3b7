"""The guides: what a page shows as printed is what its example prints, and what it says of the mean is so."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Trainer
from ranks import Ranks
from torch.utils.data import DataLoader

PAGES = sorted((Path(__file__).parent.parent / "docs" / "guides").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def run_example(code: str) -> tuple[str, list[str]]:
    """Run a page's example as one of its ranks; return what it prints, and what the strategy warns of."""
    printed = io.StringIO()
    # Left by another test in the same process; Lightning's sampler would shuffle by it.
    os.environ.pop("PL_GLOBAL_SEED", None)
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(code, "the example", "exec"), {"__name__": "__main__"})
    return printed.getvalue(), [str(w.message) for w in caught if str(w.message).startswith(("DDP left", "Rank "))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_prints_what_the_page_shows(ranks: Ranks, page: Path) -> None:
    (example,) = blocks(page, "python")
    shown = blocks(page, "text")
    (printed, warned), (printed_by_rank_1, warned_by_rank_1) = ranks(2).run(run_example, example)
    assert printed == shown[0]
    assert printed_by_rank_1 == ""
    # A warning is the report itself, or is shown below it.
    assert {f"{text}\n" for text in warned + warned_by_rank_1} <= set(shown)
    assert bool(warned or warned_by_rank_1) == (page.stem != "fine-tuning")


def scaled_step(code: str) -> tuple[list[float], list[float]]:
    """Take a step of the example's module in which rank 1 sits out; return its weights and those of rank 0 alone."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "the example", "exec"), namespace)
    torch.manual_seed(1)
    module, batch = namespace["Careful"](), torch.randn(8, 8)
    gradients = torch.autograd.grad(module.layer(batch).square().mean(), list(module.parameters()))
    expected = [p.detach() - 0.1 * g for p, g in zip(module.parameters(), gradients, strict=True)]
    if dist.get_rank() == 1:
        batch = batch * float("nan")
    options: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp_adaptive", max_steps=1, use_distributed_sampler=False, **options
    )
    trainer.fit(module, DataLoader(batch, batch_size=8))
    return [torch.cat([p.flatten() for p in weights]).tolist() for weights in (list(module.parameters()), expected)]


def test_the_hook_of_skipping_bad_batches_keeps_the_size_of_a_step(ranks: Ranks) -> None:
    (example,) = blocks(next(page for page in PAGES if page.stem == "skipping-bad-batches"), "python")
    for weights, expected in ranks(2).run(scaled_step, example):
        # Lightning shuffles the rows, which are then added up in another order.
        assert weights == pytest.approx(expected, rel=1e-5)

"""docs/errors.md: each message that it quotes is one that somebody really says."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adaptive_ddp import AdaptiveDDPStrategy, Decision, State, UnusedParameter, UnusedParametersError, reducer, report

PAGE = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()


def quoted(source: str) -> list[str]:
    """The headings of a section."""
    (section,) = re.findall(rf"^## From {source}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^### (.*)$", section, re.MULTILINE)


def says(message: str, quotation: str) -> bool:
    pattern = ".*".join(re.escape(part.strip()) for part in quotation.split("…"))
    return re.search(pattern, message, re.DOTALL) is not None


# -- ours -------------------------------------------------------------------------------------------------------------


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    return str(caught.value)


def our_messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One of each message of the strategy, as its own code makes it."""
    unused = (UnusedParameter("head.weight", 4, 1),)
    on, finish = (Decision(state, 1, 2, 3, 12, unused) for state in (State.ON, State.FINISH))
    refused = ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params")
    messages = [
        str(on),
        str(finish),
        str(UnusedParametersError(on)),
        report.describe_sit_out(rank=0, step=1, times=1),
        report.describe_split(step=1, names=["a", "b"], trainable_by_rank=[frozenset("a"), frozenset("b")]),
        report.describe_rewraps(changes=10, steps=20, mean_ms=1.0),
        report.describe_added(names=["adapter.weight"]),
        *(error_of(lambda name=name: AdaptiveDDPStrategy(**{name: True})) for name in refused),
        error_of(lambda: AdaptiveDDPStrategy(fallback="never")),
        error_of(lambda: AdaptiveDDPStrategy(on_unused="ignore")),
    ]
    with monkeypatch.context() as patch:
        patch.delattr(DistributedDataParallel, "_build_params_for_reducer")
        messages.append(error_of(reducer.require_private_api))
    # To have torch word it otherwise takes another torch, so this one is read in the source.
    source = re.sub(r'"\n\s*f?"', "", Path(reducer.__file__).read_text())
    return [*messages, *re.findall(r'"(torch .* words its reduction error .*)"', source)]


def test_each_quotation_of_ours_is_a_message_and_each_message_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, quotations = our_messages(monkeypatch), quoted("AdaptiveDDP")
    assert [q for q in quotations if not any(says(message, q) for message in messages)] == []
    assert [m for m in messages if not any(says(m, quotation) for quotation in quotations)] == []


# -- Lightning's ------------------------------------------------------------------------------------------------------


def test_each_quotation_of_lightning_is_in_its_source() -> None:
    folder = Path(pytorch_lightning.__file__).parent
    sources = [folder / "strategies" / "ddp.py", folder / "loops" / "optimization" / "automatic.py"]
    texts = []
    for source in sources:
        strings = (n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.Constant))
        texts += [node.value for node in strings if isinstance(node.value, str)]
    assert len(quoted("Lightning")) == 2
    assert [q for q in quoted("Lightning") if not any(says(text, q) for text in texts)] == []


# -- torch's ----------------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        self.checkpointed = checkpointed

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.used, batch, use_reentrant=True) if self.checkpointed else self.used(batch)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.table = nn.Linear(2, 2), nn.Embedding(2, 2, sparse=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.used(batch)


def step(ddp: nn.Module) -> None:
    ddp(torch.ones(1, 2, requires_grad=True)).sum().backward()


def unfinished() -> None:
    ddp = DistributedDataParallel(Parts())
    for _ in range(2):
        step(ddp)


def ready_twice() -> None:
    step(DistributedDataParallel(Parts(checkpointed=True), find_unused_parameters=True))


def sparse() -> None:
    step(DistributedDataParallel(Table(), find_unused_parameters=True))


def changed_graph() -> None:
    module = Parts()
    ddp = DistributedDataParallel(module, static_graph=True)
    for _ in range(3):
        step(ddp)
        module.checkpointed = False
        module.used, module.unused = module.unused, module.used


def other_model() -> None:
    DistributedDataParallel(nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + dist.get_rank())]))


def no_graph() -> None:
    torch.zeros(()).backward()


def time_out() -> None:
    group = dist.new_group(timeout=timedelta(milliseconds=100), backend="gloo")
    if dist.get_rank() == 1:
        raise RuntimeError(QUIET)
    dist.all_reduce(torch.ones(1), group=group)


def closed() -> None:
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        raise RuntimeError(QUIET)
    dist.all_reduce(torch.ones(1), group=group)


QUIET = "the other rank's part"

TRIGGERS = {
    "Expected to have finished reduction in the prior iteration": unfinished,
    "Expected to mark a variable ready only once": ready_twice,
    "Expected sparse gradient to be defined": sparse,
    "Your training graph has changed in this iteration": changed_graph,
    "DDP expects same model across all ranks": other_model,
    "element 0 of tensors does not require grad and does not have a grad_fn": no_graph,
    "Timed out waiting … for … operation to complete": time_out,
    "Connection … by peer": closed,
}


def message_of(call: Callable[[], None]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("quotation", TRIGGERS)
def test_torch_says_what_is_quoted(ranks: Ranks, quotation: str) -> None:
    messages = ranks(2).run(message_of, TRIGGERS[quotation])
    assert any(says(message, quotation) for message in messages), messages
    assert all(says(message, quotation) or message == QUIET for message in messages), messages


def test_each_quotation_of_torch_is_tried_but_the_one_that_needs_a_gpu() -> None:
    assert set(quoted("torch")) - set(TRIGGERS) == {"Watchdog caught collective operation timeout"}

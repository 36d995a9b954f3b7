"""The strategy on a GPU; skipped without one. ``python -m pytest tests/test_cuda.py -s`` prints the figures too.

Two Gloo ranks that share one GPU, and one rank under NCCL: equal weights, no synchronisation of the device in a clean
step that plain DDP does not have, the peak of memory over a fallback.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks import cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), ("nccl", 1)])
def test_equal_bits_and_no_synchronisation_more_than_plain_ddp(backend: str, world_size: int) -> None:
    assert cuda.run("cuda", [(backend, world_size)]) == []

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Call it with a world size for a group of that many ranks."""
    pool = Ranks()
    yield pool
    pool.kill()

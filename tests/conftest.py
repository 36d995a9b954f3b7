from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import PACKAGES, Ranks

# What trains without Lightning, or says itself which package it is about.
OF_NO_PACKAGE = {
    "test_bare_loop",
    "test_benchmarks",
    "test_conventions",
    "test_docs",
    "test_error_texts",
    "test_guides",
    "test_packages",
    "test_reducer",
    "test_tally",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have each behaviour test run under both Lightning packages."""
    if "ranks" in metafunc.fixturenames and metafunc.module.__name__ not in OF_NO_PACKAGE:
        metafunc.parametrize("ranks", PACKAGES, indirect=True, scope="session")


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Call it with a world size for a group of that many ranks."""
    pool = Ranks(getattr(request, "param", PACKAGES[0]))
    yield pool
    pool.kill()

"""Every registry name, through the launcher it stands for, in a process of its own as a user would start it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BOUND_S = 120


def run_script(*arguments: str) -> None:
    """Run a test program as a user would; kill it and its ranks when it takes too long."""
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(tests), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        cwd=tests,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=BOUND_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output


@pytest.mark.parametrize("name", ["ddp_adaptive", "ddp_adaptive_spawn", "ddp_adaptive_fork", "ddp_adaptive_notebook"])
def test_a_name_trains_through_its_launcher(name: str, tmp_path: Path) -> None:
    run_script("programs/launch.py", name, str(tmp_path))
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["flag"] is True
    assert found[0]["state"] == "on"
    assert found[0]["missed_by"] == [1]
    assert found[0]["strategy"] == "adaptive_ddp.pytorch_lightning"

"""The demonstration, run once as a newcomer runs it, and read as one reads it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# It takes a tenth of this on two idle cores.
BOUND_S = 400
# What the server of the ranks may take to notice the end of the program, if it is still importing.
LINGER_S = 30
MARKER = "ADAPTIVE_DDP_TEST_MARKER"


@dataclass
class Program:
    """``python -m adaptive_ddp`` in a session of its own; its processes are known by a variable that they inherit."""

    marker: str
    process: subprocess.Popen[str]

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, out, err

    def living(self) -> list[str]:
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARKER}={self.marker}".encode() in environment.read_bytes().split(b"\0"):
                    found.append(environment.parent.name)
        return found

    def all_gone(self) -> bool:
        deadline = time.monotonic() + LINGER_S
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.living()


@contextlib.contextmanager
def started(*arguments: str, python: tuple[str, ...] = ("-m", "adaptive_ddp")) -> Iterator[Program]:
    marker = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *python, *arguments],
        env={**os.environ, MARKER: marker},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Program(marker, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def table(output: str) -> dict[str, dict[str, str]]:
    """The rows of the table by strategy; columns are two spaces or more apart."""
    lines = output.splitlines()
    head = next(index for index, line in enumerate(lines) if "equal weights" in line and "time/step" in line)
    columns = re.split(r"\s{2,}", lines[head].strip())
    rows = [re.split(r"\s{2,}", line) for line in lines[head + 1 : head + 4]]
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows}


@dataclass
class Result:
    status: int
    out: str
    err: str
    gone: bool


@pytest.fixture(scope="module")
def run() -> Result:
    with started() as program:
        status, out, err = program.finish()
        return Result(status, out, err, program.all_gone())


def test_it_succeeds_and_prints_no_more_than_its_own_lines(run: Result) -> None:
    assert run.status == 0, run.out + run.err
    assert run.err == ""
    assert len(run.out.splitlines()) < 30


def test_the_table_has_the_three_strategies(run: Result) -> None:
    assert list(table(run.out)) == ["ddp", "ddp_find_unused_parameters_true", "ddp_adaptive"]


def test_plain_ddp_fails_after_its_ranks_diverged(run: Result) -> None:
    row = table(run.out)["ddp"]
    assert row["ended"].startswith("failed: ")
    assert row["accuracy"] == row["time/step"] == "-"
    assert row["equal weights"] == "no, from step 1"


def test_the_flag_and_the_adaptive_strategy_train_to_the_same(run: Result) -> None:
    flag, adaptive = table(run.out)["ddp_find_unused_parameters_true"], table(run.out)["ddp_adaptive"]
    for row in (flag, adaptive):
        assert row["ended"] == "trained"
        assert row["equal weights"] == "yes"
        assert float(row["accuracy"].rstrip("%")) > 90
    assert flag["accuracy"] == adaptive["accuracy"]
    assert flag["steps"] == adaptive["steps"]


def test_the_ranks_differ_in_most_steps(run: Result) -> None:
    found = re.search(r"In (\d+)% of the steps the ranks used different experts", run.out)
    assert found is not None
    assert int(found[1]) > 50


def test_the_warning_is_shown_once_and_names_the_head(run: Result) -> None:
    assert run.out.count("UnusedParametersWarning: ") == 1
    assert re.search(r"on every rank: +unused_head\.\{weight,bias\}", run.out)


@pytest.mark.skipif(sys.platform != "linux", reason="looks the processes up in /proc")
def test_no_process_is_left(run: Result) -> None:
    assert run.gone


def test_the_status_is_1_when_the_accuracy_is_not_reached() -> None:
    with started("--epochs", "1") as program:
        status, out, err = program.finish()
    assert status == 1, out + err
    assert re.search(r"NO +it is right on over 90% of new images", out)
    assert re.search(r"yes +its final weights equal", out)


@pytest.mark.skipif(sys.platform != "linux", reason="looks the processes up in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_an_interrupted_program(sent: signal.Signals) -> None:
    with started(python=("-u", "-m", "adaptive_ddp")) as program:
        assert program.process.stdout is not None
        # The ranks of the second training are starting.
        while not (line := program.process.stdout.readline()).startswith("ddp ..."):
            assert line
        os.kill(program.process.pid, sent)
        status, _, err = program.finish()
        assert program.all_gone()
    assert (status, err) == ((130, "\nInterrupted; all ranks are stopped.\n") if sent == signal.SIGINT else (-sent, ""))


def test_help_says_what_the_status_means() -> None:
    with started("--help") as program:
        status, out, err = program.finish()
    assert status == 0, err
    assert "--devices N" in out
    assert "--epochs N" in out
    assert "The exit status is 0 only if ddp_adaptive is right on over 90 % of new images" in out


@pytest.mark.parametrize("argument", ["--devices", "--epochs"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", ""])
def test_a_bad_value_is_refused_with_what_to_write_instead(
    argument: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from adaptive_ddp.__main__ import main

    with pytest.raises(SystemExit) as refused:
        main([argument, value])
    assert refused.value.code == 2
    message = capsys.readouterr().err
    assert f"argument {argument}: {value!r} is not a whole number above 0; write for example 2" in message


def test_without_scikit_learn_it_says_what_to_install() -> None:
    without = "import sys; sys.modules['sklearn'] = None; from adaptive_ddp.__main__ import main; sys.exit(main([]))"
    with started(python=("-c", without)) as program:
        status, _, err = program.finish()
    assert status == 1
    assert "pip install adaptive-ddp[demo]" in err

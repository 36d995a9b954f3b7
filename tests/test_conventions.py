"""The ways in which Lightning's users start their runs: the command line, several nodes, SLURM, a notebook.

The programs are started together, since most of their time goes into imports; each test waits for its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import SomeRanks
from pytorch_lightning.cli import LightningCLI
from ranks import Ranks
from torch import Tensor
from torch.utils.data import DataLoader

from adaptive_ddp import AdaptiveDDPStrategy
from adaptive_ddp.decision import State

TESTS = Path(__file__).parent
BOUND_S = 120

# -- programs ---------------------------------------------------------------------------------------------------------


class Program:
    """Processes that belong together, and what they say."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._processes: list[tuple[subprocess.Popen[str], Path]] = []
        self._deadline = time.monotonic() + BOUND_S

    def start(self, command: list[str], stdin: Path | None = None, **environment: str) -> None:
        output = self.directory / f"output-{len(self._processes)}"
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        with output.open("w") as to, (stdin or Path(os.devnull)).open() as source:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", **environment},
                cwd=TESTS,
                stdin=source,
                stdout=to,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._processes.append((process, output))

    def wait(self) -> str:
        """What the processes printed, once all of them have ended well."""
        try:
            codes = [process.wait(max(0, self._deadline - time.monotonic())) for process, _ in self._processes]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            self.kill()
        text = "\n".join(f"--- {path.name}\n{path.read_text()}" for _, path in self._processes)
        assert not any(codes), text
        return text

    def kill(self) -> None:
        for process, _ in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def read(self, name: str) -> Any:
        return json.loads((self.directory / name).read_text())


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun(node: int, rendezvous: str, address: str, directory: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint={rendezvous}", f"--local-addr={address}", "--rdzv-id=two-nodes"),
        # Otherwise found out from the name of the machine, which both nodes share here.
        f"--rdzv-conf=is_host={node == 0}",
        *("programs/launch.py", "ddp_adaptive", str(directory), "2"),
    ]


def start_torchrun(program: Program) -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    for node in range(2):
        program.start(torchrun(node, rendezvous, "127.0.0.1", program.directory))


def start_slurm(program: Program) -> None:
    port = free_port()
    for node in range(2):
        program.start(
            [sys.executable, "programs/launch.py", "ddp_adaptive", str(program.directory), "2"],
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            SLURM_JOB_ID="1234567",
            SLURM_JOB_NAME="train",
            SLURM_NNODES="2",
            SLURM_NTASKS="2",
            SLURM_NTASKS_PER_NODE="1",
            SLURM_NODEID=str(node),
            SLURM_PROCID=str(node),
            SLURM_LOCALID="0",
        )


def start_notebook(program: Program) -> None:
    command = [sys.executable, "-i", "-", str(program.directory)]
    program.start(command, stdin=TESTS / "programs" / "notebook.py")


class Hosts:
    """Two network namespaces, joined by a pair of virtual Ethernet devices; nothing leads out of them."""

    # Addresses that are set aside for documentation (RFC 5737), so that they are nobody's.
    ADDRESSES = ("192.0.2.1", "192.0.2.2")

    def __init__(self) -> None:
        self.names = [f"adaptive-ddp-{os.getpid()}-{node}" for node in range(2)]

    def make(self) -> None:
        devices = [f"adp{os.getpid() % 10**8}{node}" for node in "ab"]
        for name in self.names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            devices[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            devices[1],
            "netns",
            self.names[1],
        )
        for name, device, address in zip(self.names, devices, self.ADDRESSES, strict=True):
            _ip("-n", name, "link", "set", device, "name", "eth0")
            _ip("-n", name, "address", "add", f"{address}/30", "dev", "eth0")
            for each in ("lo", "eth0"):
                _ip("-n", name, "link", "set", each, "up")

    def remove(self) -> None:
        """The devices go with their namespaces."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=10, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def start_on_hosts(program: Program, hosts: Hosts) -> None:
    for node, (name, address) in enumerate(zip(hosts.names, hosts.ADDRESSES, strict=True)):
        command = torchrun(node, f"{hosts.ADDRESSES[0]}:29400", address, program.directory)
        program.start(["ip", "netns", "exec", name, *command], GLOO_SOCKET_IFNAME="eth0")


class Programs(dict[str, Program]):
    """The programs by name, and the reason for which one is not there."""

    reason = ""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    started = Programs()
    hosts = Hosts()
    try:
        for start in (start_torchrun, start_slurm, start_notebook):
            name = start.__name__.removeprefix("start_")
            started[name] = Program(tmp_path_factory.mktemp(name))
            start(started[name])
        try:
            if shutil.which("ip") is None:
                raise OSError("there is no command ip (package iproute2)")
            hosts.make()
        except OSError as error:
            started.reason = str(error)
        else:
            started["hosts"] = Program(tmp_path_factory.mktemp("hosts"))
            start_on_hosts(started["hosts"], hosts)
        yield started
    finally:
        for program in started.values():
            program.kill()
        hosts.remove()


def check_two_nodes(program: Program, environment: str) -> None:
    program.wait()
    first, second = (program.read(f"rank-{rank}.json") for rank in range(2))
    assert (first.pop("nodes"), second.pop("nodes")) == ([0, 2], [1, 2])
    assert first == second
    assert (first["state"], first["flag"], first["missed_by"]) == ("on", True, [1])
    assert first["environment"] == environment


def test_two_nodes_under_torchrun(programs: Programs) -> None:
    check_two_nodes(programs["torchrun"], "TorchElasticEnvironment")


def test_two_nodes_under_slurm(programs: Programs) -> None:
    check_two_nodes(programs["slurm"], "SLURMEnvironment")


def test_two_hosts_under_torchrun(programs: Programs) -> None:
    if programs.reason:
        pytest.skip(f"no network namespaces: {programs.reason}")
    check_two_nodes(programs["hosts"], "TorchElasticEnvironment")


def test_a_notebook(programs: Programs) -> None:
    program = programs["notebook"]
    text = program.wait()
    session = program.read("session.json")
    assert "not compatible with an interactive" in session["refused"]
    for fit in ("by-name", "again"):
        first, second = (program.read(f"{fit}-{rank}.json") for rank in range(2))
        assert first == second == [session["flag"], "on"]
        # The ranks' weights have come back to the session's own module.
        assert session[fit] == session["flag"]
    assert "UnusedParametersWarning: DDP left 4 of 14 parameters" in text


# -- LightningCLI -----------------------------------------------------------------------------------------------------

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def configuration(directory: Path, strategy: object, **trainer: object) -> list[str]:
    """LightningCLI's arguments for a file with this configuration; JSON is YAML too."""
    path = directory / "config.yaml"
    path.write_text(
        json.dumps({"trainer": {"accelerator": "cpu", "max_epochs": 1, **QUIET, **trainer, "strategy": strategy}})
    )
    return ["--config", str(path)]


def written(**init_args: object) -> dict[str, object]:
    return {"class_path": "adaptive_ddp.AdaptiveDDPStrategy", "init_args": init_args}


class LateModel(models.Branches):
    """Rank 1 leaves a branch unused from the second batch on."""

    def __init__(self) -> None:
        super().__init__(SomeRanks(1, 1))

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(16, 4), batch_size=4)


def fit_by_cli(strategy: object, *arguments: str) -> tuple[dict[str, Tensor], Any]:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = configuration(Path(directory), strategy, devices=2)
        args = ["fit", *config, *arguments]
        cli = LightningCLI(LateModel, seed_everything_default=7, save_config_callback=None, args=args)
    return cli.model.state_dict(), cli.trainer.strategy


def compare_with_the_flag() -> list[tuple[list[str], State, int, Any]]:
    expected, _ = fit_by_cli("ddp_find_unused_parameters_true")
    found = []
    for weights, strategy in (
        fit_by_cli("ddp", "--trainer.strategy", "ddp_adaptive"),
        fit_by_cli(written(fallback="finish", bucket_cap_mb=7)),
    ):
        different = [name for name in expected if not torch.equal(weights[name], expected[name])]
        decision = strategy.decision
        found.append((different, decision.state, decision.step, strategy._ddp_kwargs.get("bucket_cap_mb")))
    return found


def test_a_name_on_the_command_line_and_a_class_in_a_file_train(ranks: Ranks) -> None:
    for by_name, by_class in ranks(2).run(compare_with_the_flag):
        assert by_name == ([], State.ON, 2, None)
        assert by_class == ([], State.FINISH, 2, 7)


@pytest.mark.filterwarnings("ignore")
def test_a_file_gives_every_argument(tmp_path: Path) -> None:
    init_args = {"fallback": "finish", "on_unused": "raise", "gradient_as_bucket_view": True}
    arguments = configuration(tmp_path, written(**init_args))
    cli = LightningCLI(LateModel, run=False, save_config_callback=None, args=arguments)
    strategy = cli.trainer.strategy
    assert type(strategy) is AdaptiveDDPStrategy
    assert (strategy._fallback, strategy._on_unused) == ("finish", "raise")
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("argument", "value", "complaint"),
    [
        ("fallback", "finnish", 'Parser key "fallback"'),
        ("on_unused", "error", 'Parser key "on_unused"'),
        ("bucket_size", 3, "Option 'bucket_size' is not accepted"),
        ("find_unused_parameters", True, "AdaptiveDDPStrategy(find_unused_parameters=True)"),
        ("static_graph", True, "AdaptiveDDPStrategy(static_graph=True)"),
    ],
)
def test_a_file_with_a_bad_argument_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, value: object, complaint: str
) -> None:
    arguments = configuration(tmp_path, written(**{argument: value}))
    with pytest.raises((SystemExit, ValueError)) as refused:
        LightningCLI(LateModel, run=False, save_config_callback=None, args=arguments)
    assert complaint in capsys.readouterr().err + str(refused.value)

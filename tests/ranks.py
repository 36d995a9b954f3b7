"""Groups of ranks: real processes in a Gloo group on loopback, each group serving many cases.

A rank is forked from a server process that has torch and Lightning imported, so that a group is up in a fraction of a
second. Every case has a bound in time; a group in which a case failed or ran over it is killed, and the next case gets
a fresh one.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Well under the bound of a case, so that a rank that waits for a dead one says so itself.
GROUP_TIMEOUT = timedelta(seconds=20)
CASE_BOUND_S = 45.0
# What the other ranks get, once one has failed, to fail too.
GRACE_S = 2.0

# The package whose Trainer a group trains with, which ``package.py`` goes by, and the variable that says it.
PACKAGES = ("pytorch_lightning", "lightning")
TESTED_PACKAGE = "ADAPTIVE_DDP_TESTED_PACKAGE"

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "pytorch_lightning", "lightning.pytorch", "adaptive_ddp"]
)


class RankError(AssertionError):
    """A case failed on some rank, or did not end in time."""


class RankGroup:
    """``world_size`` processes in one process group, which train with the given Lightning package."""

    def __init__(self, world_size: int, package: str = PACKAGES[0]) -> None:
        self.world_size = world_size
        self._store = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, world_size, package, str(self._store), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, bound_s: float = CASE_BOUND_S) -> list[Any]:
        """Call ``function(*args)`` on every rank; return the ranks' results in order."""
        for connection in self._connections:
            connection.send((function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + bound_s
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, OSError):
                    succeeded, value = False, self._how_it_ended(rank)
                (results if succeeded else errors)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not errors and not waiting:
            return [results[rank] for rank in range(self.world_size)]
        self.kill()
        errors.update({rank: f"no answer within {bound_s} s" for rank in waiting.values() if not errors})
        raise RankError("\n".join(f"--- rank {rank} of {self.world_size}\n{text}" for rank, text in errors.items()))

    def _how_it_ended(self, rank: int) -> str:
        # A negative status is the number of the signal, which tells a crash from a kill.
        self._processes[rank].join(1)
        return f"the process ended with status {self._processes[rank].exitcode}"

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()


class Ranks:
    """One living group per world size, made when first asked for; all of them train with one Lightning package."""

    def __init__(self, package: str = PACKAGES[0]) -> None:
        self.package = package
        self._groups: dict[int, RankGroup] = {}

    def __call__(self, world_size: int) -> RankGroup:
        group = self._groups.get(world_size)
        if group is None or not group.is_alive:
            group = self._groups[world_size] = RankGroup(world_size, self.package)
        return group

    def kill(self) -> None:
        for group in self._groups.values():
            if group.is_alive:
                group.kill()


def pipe() -> tuple[Connection, Connection]:
    """The two ends of a pipe, the second for a process."""
    return _context.Pipe()


def process_under(package: str, function: Callable[..., Any], *args: Any, connection: Connection) -> mp.Process:
    """A process that calls ``function(*args, connection)``, and trains with the given Lightning package.

    It is to be started, and is then forked from the server.
    """
    call = pickle.dumps((function, args))
    return _context.Process(target=_call_under, args=(package, call, connection))


def _call_under(package: str, call: bytes, connection: Connection) -> None:
    # Before any test is imported here, which the call's own unpickling does.
    os.environ[TESTED_PACKAGE] = package
    function, args = pickle.loads(call)
    function(*args, connection)


def _serve(rank: int, world_size: int, package: str, store: str, connection: Connection) -> None:
    # Before any test is imported here.
    os.environ[TESTED_PACKAGE] = package
    # A crash in C++ then says where in Python it came from.
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        # What torchrun sets, so that a Trainer takes this process for the rank it is and launches nothing.
        TORCHELASTIC_RUN_ID="tests",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    for name in ("pytorch_lightning", "lightning_fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)

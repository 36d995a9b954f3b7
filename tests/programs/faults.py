"""A user's script in which one rank meets a fault: in its third backward, or in the hook that follows.

The moment goes to a file; and so does the fact, should the run get past it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import models
import torch
from models import Branches
from package import AdaptiveDDPStrategy, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader


class Faulty(Branches):
    def __init__(self, fault: str, rank: int, directory: str) -> None:
        super().__init__(models.never_last)
        self.fault = fault
        self.rank = rank
        self.directory = directory

    def strike(self, fault: str) -> None:
        if (fault, self.global_rank, self.trainer.global_step) != (self.fault, self.rank, 2):
            return
        Path(self.directory, "struck").write_text(str(time.monotonic()))
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planned")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.strike("killed"))
        return loss

    def on_after_backward(self) -> None:
        self.strike("raises")


def main(start_method: str, fault: str, rank: str, directory: str) -> None:
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        # Lightning has the ranks find each other within this time too, which takes them as long as their imports.
        strategy=AdaptiveDDPStrategy(start_method=start_method, timeout=timedelta(seconds=60)),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Faulty(fault, int(rank), directory), DataLoader(torch.randn(64, 4), batch_size=4))
    Path(directory, "unnoticed").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A user's script in which rank 1 leaves a branch unused from the second batch on, which is to be an error."""

from __future__ import annotations

import torch
from models import Branches, SomeRanks
from pytorch_lightning import Trainer, seed_everything
from torch.utils.data import DataLoader

from adaptive_ddp import AdaptiveDDPStrategy


def main() -> None:
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AdaptiveDDPStrategy(on_unused="raise", start_method="fork"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Branches(SomeRanks(1, 1)), DataLoader(torch.randn(32, 4), batch_size=4))


if __name__ == "__main__":
    main()

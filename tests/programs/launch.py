"""A user's script: train under the strategy named on the command line, and write down what each rank ended with."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from models import Branches, SomeRanks
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

import adaptive_ddp


class WriteDown(Callback):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = b"".join(tensor.numpy().tobytes() for tensor in pl_module.state_dict().values())
        found = {
            "digest": hashlib.sha256(weights).hexdigest(),
            "flag": trainer.strategy.model.find_unused_parameters,
            "state": trainer.strategy.decision.state.value,
            "missed_by": sorted({parameter.missed_by for parameter in trainer.strategy.decision.unused}),
            "strategy": type(trainer.strategy).__module__,
            "environment": type(trainer.strategy.cluster_environment).__name__,
            "nodes": [trainer.strategy.node_rank, trainer.num_nodes],
        }
        Path(self.directory, f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


def main(strategy: str, directory: str, nodes: str = "1") -> None:
    """Two ranks on one node, or one on each of two."""
    assert adaptive_ddp.__all__
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2 // int(nodes),
        num_nodes=int(nodes),
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[WriteDown(directory)],
    )
    trainer.fit(Branches(SomeRanks(1, 1)), DataLoader(torch.randn(32, 4), batch_size=4))


if __name__ == "__main__":
    main(*sys.argv[1:])

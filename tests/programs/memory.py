"""Train a model with 400 MB of gradients for two steps, and print the peak of resident memory over that."""

from __future__ import annotations

import json
import os
import resource
import sys

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from adaptive_ddp import AdaptiveDDPStrategy


class Wide(LightningModule):
    """Eight layers of 50 MB, and one of 5.7 MB that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3536, 3536, bias=False) for _ in range(8)])
        self.unused = nn.Linear(3536, 400, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(contender: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    strategy = AdaptiveDDPStrategy() if contender == "adaptive" else DDPStrategy(find_unused_parameters=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Wide(), DataLoader(torch.randn(4, 3536), batch_size=2))
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


if __name__ == "__main__":
    main(sys.argv[1])

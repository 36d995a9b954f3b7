"""Print the verdict of docs/smoke-run.md again: ``python docs/scripts/smoke_run.py``.

Three batches on two CPU ranks of a classifier whose pooler nothing uses, and whose second head only some ranks use.
"""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import adaptive_ddp  # noqa: F401  (registers the strategy)

WIDTH = 16


class Classifier(pl.LightningModule):
    """Layers, a pooler and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({"topic": nn.Linear(WIDTH, 4), "mood": nn.Linear(WIDTH, 2)})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Only the batches of rank 0 come with a mood."""
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        loss = self.heads["topic"](batch).logsumexp(1).mean()
        if self.global_rank == 0:
            loss = loss + self.heads["mood"](batch).logsumexp(1).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_adaptive",
        fast_dev_run=3,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(list(torch.randn(64, WIDTH)), batch_size=8))

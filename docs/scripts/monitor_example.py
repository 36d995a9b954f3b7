"""Draw the pictures of docs/monitor.md again: ``python docs/scripts/monitor_example.py docs/images``.

Real fits on four CPU ranks of a network with layer drop and of a GAN; about twenty seconds on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from adaptive_ddp import GradientUsageMonitor

WIDTH = 8
RANKS = 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class LayerDrop(pl.LightningModule):
    """Blocks of which each rank skips some, the later ones more often; and a pooler that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def on_train_start(self) -> None:
        """Have each rank skip blocks of its own."""
        torch.manual_seed(self.global_rank)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Skip the last block on 40 % of the steps."""
        x = self.embed(batch)
        for number, layer in enumerate(self.layers):
            if torch.rand(()) >= 0.4 * number / len(self.layers):
                x = layer(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Gan(pl.LightningModule):
    """Two networks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """One step of the generator, one of the discriminator."""
        first, second = self.optimizers()
        self.manual_backward(-self.discriminator(self.generator(batch)).mean())
        first.step()
        second.zero_grad()
        fake = self.discriminator(self.generator(batch).detach())
        self.manual_backward(fake.mean() - self.discriminator(batch).mean())
        second.step()
        first.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One for each."""
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)]


def draw(model: pl.LightningModule, steps: int, path: Path) -> None:
    """Fit the model, and keep the picture."""
    pl.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy="ddp_adaptive_fork",
            max_epochs=1,
            callbacks=[GradientUsageMonitor(picture="picture.png")],
            default_root_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader([torch.randn(4, WIDTH)] * steps, batch_size=None))
        path.write_bytes((Path(directory) / "picture.png").read_bytes())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    draw(LayerDrop(), 120, directory / "gradient_usage_layer_drop.png")
    draw(Gan(), 60, directory / "gradient_usage_gan.png")


if __name__ == "__main__":
    main()

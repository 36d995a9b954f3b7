"""What is typed into an interactive session; the ranks and the session itself write down what they ended with.

Each block ends with an empty line and holds none, as such a session asks for.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from models import Branches, SomeRanks
from pytorch_lightning import Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from adaptive_ddp import AdaptiveDDPStrategy

torch.set_num_threads(1)
directory = Path(sys.argv[1])
options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False}
options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
found = {}


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in module.state_dict().values())).hexdigest()


class Model(Branches):
    def on_train_end(self) -> None:
        decision = getattr(self.trainer.strategy, "decision", None)
        state = decision and decision.state.value
        (directory / f"{fit}-{self.global_rank}.json").write_text(json.dumps([digest(self), state]))


def train(strategy: object) -> str:
    seed_everything(7, verbose=False)
    model = Model(SomeRanks(1, 1))
    Trainer(strategy=strategy, **options).fit(model, DataLoader(torch.randn(32, 4), batch_size=4))
    return digest(model)


try:
    Trainer(strategy="ddp_adaptive", **options)
except Exception as error:
    found["refused"] = str(error)

fit = "by-name"
found[fit] = train("ddp_adaptive_notebook")

fit = "again"
found[fit] = train(AdaptiveDDPStrategy(start_method="fork"))

fit = "flag"
found[fit] = train("ddp_notebook_find_unused_parameters_true")

(directory / "session.json").write_text(json.dumps(found))

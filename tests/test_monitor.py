"""The monitor: what it records under each strategy and kind of step, what it leaves alone, and its files."""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from differential import CONTENDERS, Case, batches_of_this_rank, make_trainer
from models import WIDTH, InMicroBatch, SomeRanks
from package import (
    AdaptiveDDPStrategy,
    Callback,
    CSVLogger,
    DDPStrategy,
    GradientUsageMonitor,
    LightningModule,
    Logger,
    Trainer,
    seed_everything,
)
from ranks import RankError, RankGroup, Ranks
from torch import Tensor, nn

from adaptive_ddp import picture
from adaptive_ddp.picture import LEGEND, UsageHistory, describe_finding, draw, fold
from adaptive_ddp.usage_table import Record, read_names, read_table

STRATEGIES: dict[str, Callable[..., DDPStrategy]] = {
    **CONTENDERS,
    "static graph": lambda **kwargs: DDPStrategy(static_graph=True, **kwargs),
    "bucket view": lambda: DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True),
    "adaptive bucket view": lambda: AdaptiveDDPStrategy(gradient_as_bucket_view=True),
}


# -- what is recorded, in a group of ranks ----------------------------------------------------------------------------


def record(
    make: Callable[[], LightningModule], strategy: str, batches: int = 5, every_n_steps: int = 1, **trainer: Any
) -> tuple[list[str], list[tuple[int, int, dict[str, int | None]]]]:
    """Fit with and without the monitor; give where the weights differ and, from rank zero, what the table holds."""
    directory = Path(tempfile.mkdtemp())
    weights = []
    monitor = GradientUsageMonitor(every_n_steps, table=directory / "usage.csv", picture=None)
    for callbacks in ([], [monitor]):
        seed_everything(7, verbose=False)
        model = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_trainer(STRATEGIES[strategy](), callbacks, **trainer).fit(
                model, batches_of_this_rank(Case(make, batches))
            )
        weights.append(model.state_dict())
        assert not any(parameter._backward_hooks for parameter in model.parameters())
    differences = [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]
    if dist.get_rank() > 0:
        assert list(directory.iterdir()) == []
        return differences, []
    rows = [
        (row.step, row.backward, dict(zip(read_names(directory / "usage.csv"), row.received, strict=True)))
        for row in read_table(directory / "usage.csv")
    ]
    return differences, rows


def of_module(rows: list[tuple[int, int, dict[str, int | None]]], prefix: str) -> list[int | None]:
    """One count a row: that of a module's parameters, which have to be alike."""
    counts = [{count for name, count in received.items() if name.startswith(prefix)} for _, _, received in rows]
    assert all(len(found) == 1 for found in counts), counts
    return [found.pop() for found in counts]


@pytest.mark.parametrize(
    ("strategy", "usage", "expected"),
    [
        ("plain", models.all_used, [2] * 5),
        ("static graph", models.all_used, [2] * 5),
        ("static graph", models.never_first, [2] * 5),
        ("flag", SomeRanks(3, 1), [2, 2, 2, 1, 1]),
        ("bucket view", SomeRanks(3, 0, 1), [2, 2, 2, 0, 0]),
        ("adaptive", SomeRanks(3, 1), [2, 2, 2, 1, 1]),
        ("adaptive", SomeRanks(0, 0, 1), [0] * 5),
        ("adaptive bucket view", models.OnlyOnce(2, 0, 1), [2, 2, 0, 2, 2]),
    ],
    ids=lambda value: models.usage_id(value) if callable(value) else str(value),
)
def test_counts_ranks_under_every_strategy_and_changes_no_bit(
    ranks: Ranks, strategy: str, usage: models.Usage, expected: list[int]
) -> None:
    (differences, rows), (others, _) = ranks(2).run(record, partial(models.Branches, usage), strategy)
    assert differences == others == []
    assert [row[:2] for row in rows] == [(step, 1) for step in range(1, 6)]
    assert of_module(rows, "branches.1") == expected
    assert of_module(rows, "trunk") == [2] * 5
    never = 0 if usage is models.never_first else 2
    assert of_module(rows, "branches.0") == [never] * 5


def test_a_window_is_one_step_and_counts_what_any_micro_batch_used(ranks: Ranks) -> None:
    make = partial(models.Branches, InMicroBatch(0, 3, 1))
    for strategy in ("flag", "adaptive"):
        (differences, rows), _ = ranks(2).run(partial(record, accumulate_grad_batches=3), make, strategy, 9)
        assert differences == []
        assert [row[:2] for row in rows] == [(1, 1), (2, 1), (3, 1)]
        assert of_module(rows, "branches.1") == [1, 1, 1]


def test_gradients_of_earlier_steps_do_not_count(ranks: Ranks) -> None:
    for model in (models.KeepsZeros, models.NeverZeroes):
        (_, rows), _ = ranks(2).run(record, partial(model, SomeRanks(2, 0, 1)), "flag")
        assert of_module(rows, "branches.1") == [2, 2, 0, 0, 0]


@pytest.mark.parametrize("toggle", [False, True])
def test_each_backward_of_a_gan_is_recorded(ranks: Ranks, toggle: bool) -> None:
    (differences, rows), (others, _) = ranks(2).run(record, partial(models.Gan, toggle), "adaptive", 3)
    assert differences == others == []
    assert [row[:2] for row in rows] == [(step, backward) for step in (1, 2, 3) for backward in (1, 2)]
    assert of_module(rows, "generator") == [2, 0] * 3
    # Toggled off it is missing all the same: between steps it is trainable.
    assert of_module(rows, "discriminator") == [0 if toggle else 2, 2] * 3


def test_every_n_steps_begins_with_the_first(ranks: Ranks) -> None:
    (differences, rows), _ = ranks(2).run(record, partial(models.Branches, SomeRanks(3, 1)), "adaptive", 8, 3)
    assert differences == []
    assert [row[0] for row in rows] == [1, 4, 7]
    assert of_module(rows, "branches.1") == [2, 1, 1]


def test_frozen_parameters_have_no_count(ranks: Ranks) -> None:
    make = partial(models.Freezes, models.all_used, {1: {1: True}, 3: {2: False}}, {1: False})
    (differences, rows), _ = ranks(2).run(record, make, "adaptive")
    assert differences == []
    assert of_module(rows, "branches.1") == [None, 2, 2, 2, 2]
    assert of_module(rows, "branches.2") == [2, 2, 2, None, None]


KINDS = {
    "a function that returns None": (partial(models.BlockedBranch, models.never_last), "branches.2", [0] * 5),
    "reentrant": (partial(models.CheckpointedBranches, models.never_last), "branches.2", [0] * 5),
    "inside a reentrant": (partial(models.PartlyCheckpointed, SomeRanks(1, 1)), "branches.1", [2, 1, 1, 1, 1]),
    "sparse": (partial(models.SparseBranches, SomeRanks(2, 1)), "tables.1", [2, 2, 1, 1, 1]),
    "ignored by DDP": (partial(models.IgnoringBranches, SomeRanks(2, 1)), "branches.1", [2, 2, 1, 1, 1]),
    "sits out": (partial(models.SitsOut, models.all_used, (2,), (1,), "None"), "", [2, 2, 1, 2, 2]),
    "constant": (partial(models.SitsOut, models.all_used, (0,), (0, 1), "constant"), "", [0, 2, 2, 2, 2]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(ranks: Ranks, kind: str) -> None:
    make, prefix, expected = KINDS[kind]
    (differences, rows), (others, _) = ranks(2).run(record, make, "adaptive")
    assert differences == others == []
    assert of_module(rows, prefix) == expected


def test_a_tied_parameter_is_recorded_once_under_its_first_name(ranks: Ranks) -> None:
    (_, rows), _ = ranks(2).run(record, partial(models.SharedBranches, models.never_last), "adaptive")
    names = rows[0][2]
    assert "branches.0.2.weight" in names
    assert "branches.1.2.weight" not in names
    # Branch 2 goes unused, but its first layer is that of branch 1.
    assert of_module(rows, "branches.1.0") == [2] * 5
    assert of_module(rows, "branches.2") == [0] * 5


def test_several_closures_a_step_are_its_backwards(ranks: Ranks) -> None:
    (differences, rows), _ = ranks(2).run(record, partial(models.LbfgsBranches, models.all_used), "flag", 2)
    assert differences == []
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert {row[0] for row in rows} == {1, 2}
    assert max(row[1] for row in rows) > 1


def run_under_the_oracle() -> str:
    with pytest.raises(RuntimeError, match="GradientUsageMonitor") as caught:
        record(partial(models.Branches, models.all_used), "oracle", 1)
    return str(caught.value)


def test_a_strategy_that_is_not_ddp_is_refused_by_name(ranks: Ranks) -> None:
    for message in ranks(2).run(run_under_the_oracle):
        assert "under OracleStrategy" in message
        assert "ddp_adaptive" in message


# -- when a run ends early --------------------------------------------------------------------------------------------


class EndsAt(models.Branches):
    """On the given batch the given ranks raise an error, or end without one."""

    def __init__(self, batch: int, ranks: tuple[int, ...], exits: bool = False) -> None:
        super().__init__(SomeRanks(0, 1))
        self.ends, self.exits = (batch, ranks), exits

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == self.ends[0] and dist.get_rank() in self.ends[1]:
            if self.exits:
                os._exit(1)
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


def fit_until_it_ends(directory: Path, ranks: tuple[int, ...], exits: bool) -> None:
    monitor = GradientUsageMonitor(table=directory / "usage.csv", picture=directory / "usage.svg")
    model = EndsAt(3, ranks, exits)
    trainer = make_trainer(CONTENDERS["adaptive"](), [monitor])
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(model, batches_of_this_rank(Case(models.Branches)))
        except Exception as caught:
            error = type(caught).__name__
    hooks = sum(bool(parameter._backward_hooks) for parameter in model.parameters())
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps([error, hooks]))


@pytest.mark.parametrize("exits", [False, True], ids=["all raise", "one dies"])
def test_the_files_are_complete_after_an_exception(ranks: Ranks, tmp_path: Path, exits: bool) -> None:
    if exits:
        group = RankGroup(2)
        with pytest.raises(RankError, match="the process ended"):
            group.run(fit_until_it_ends, tmp_path, (1,), True)
    else:
        ranks(2).run(fit_until_it_ends, tmp_path, (0, 1), False)
    error, hooks = json.loads((tmp_path / "0.json").read_text())
    assert hooks == 0
    assert error == "ArithmeticError" if not exits else error != "ArithmeticError"
    rows = list(read_table(tmp_path / "usage.csv"))
    # What a rank sends while it dies may be lost with it.
    assert [row.step for row in rows] in ([[1, 2, 3], [1, 2]] if exits else [[1, 2, 3]])
    branch = read_names(tmp_path / "usage.csv").index("branches.1.0.weight")
    assert [row.received[branch] for row in rows] == [1] * len(rows)
    assert (tmp_path / "usage.svg").stat().st_size > 0


class LeavesAfter(Callback):
    """Ends rank 1 a while after the given batch, during which a process group that has been disturbed would end it."""

    def __init__(self, batch: int, directory: Path) -> None:
        self.batch, self.directory = batch, directory

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and trainer.global_rank == 1:
            time.sleep(0.5)
            (self.directory / "alive").touch()
            os._exit(0)


def fit_unfinished(directory: Path, ranks: tuple[int, ...], leaves: bool) -> tuple[str, list[str], list[int]]:
    table = directory / "usage.csv"
    callbacks = [GradientUsageMonitor(table=table, picture=None), *([LeavesAfter(1, directory)] if leaves else [])]
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make_trainer("ddp", callbacks).fit(
                models.Branches(SomeRanks(1, *ranks)), batches_of_this_rank(Case(models.Branches))
            )
        except RuntimeError as raised:
            error = str(raised)
    steps = [row.step for row in read_table(table)] if dist.get_rank() == 0 else []
    return error, [str(w.message) for w in caught if "GradientUsageMonitor" in str(w.message)], steps


def test_what_plain_ddp_leaves_unfinished_ends_as_without_the_monitor(ranks: Ranks, tmp_path: Path) -> None:
    for rank, (error, told, steps) in enumerate(ranks(2).run(fit_unfinished, tmp_path, (0, 1), False)):
        assert "parameters that were not used in producing the loss" in error
        assert len(told) == 1
        assert f"On rank {rank} plain DDP left the reduction of step 2 unfinished" in told[0]
        assert "branches.1.0.weight, branches.1.0.bias" in told[0]
        assert steps == ([] if rank else [1])
    # That group's reducers were left unfinished.
    ranks(2).kill()


def fit_unreached(directory: Path) -> tuple[int, ...]:
    monitor = GradientUsageMonitor(table=directory / "usage.csv", picture=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer("ddp", [monitor], max_steps=1).fit(
            models.OneParameter(lambda batch_idx, rank, world_size: ()), batches_of_this_rank(Case(models.Branches))
        )
    return tuple("left the reduction of step 1 unfinished" in str(w.message) for w in caught)


def test_a_backward_that_reached_nothing_is_told_from_one_that_was_reduced(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2).run(fit_unreached, tmp_path):
        assert sum(told) == 1
    assert not (tmp_path / "usage.csv").exists()
    ranks(2).kill()


def test_ranks_that_wait_in_their_backward_are_not_disturbed(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2\nthe process ended"):
        RankGroup(2).run(fit_unfinished, tmp_path, (1,), True)
    assert (tmp_path / "alive").exists()


# -- on a single device -----------------------------------------------------------------------------------------------


class Plain(LightningModule):
    """A trunk and a head that some batches do not use; on some batches there is no loss."""

    def __init__(
        self, head_on: tuple[int, ...] = (0, 1, 2), none_on: tuple[int, ...] = (), manual: bool = False
    ) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_parameter("codes", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
        self.head_on, self.none_on = head_on, none_on
        self.automatic_optimization = not manual
        self.adds_at: int | None = None

    def on_train_epoch_start(self) -> None:
        if self.adds_at == self.current_epoch:
            self.late = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx in self.none_on:
            return None
        hidden = self.trunk(batch)
        loss = (self.head(hidden) if batch_idx in self.head_on else hidden).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([torch.ones(2, WIDTH)] * 6, batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.trunk.parameters(), *self.head.parameters()], lr=0.1)


def fit_plain(monitor: Callback, model: LightningModule, ckpt_path: Path | None = None, **kwargs: Any) -> Trainer:
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **kwargs}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[monitor],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        warnings.filterwarnings("always", message="GradientUsageMonitor")
        trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def head_counts(table: Path) -> list[tuple[int, int | None]]:
    column = read_names(table).index("head.weight")
    return [(row.step, row.received[column]) for row in read_table(table)]


@pytest.mark.parametrize("manual", [False, True])
def test_a_single_device(tmp_path: Path, manual: bool) -> None:
    monitor = GradientUsageMonitor(table=tmp_path / "usage.csv", picture=None)
    fit_plain(monitor, Plain(manual=manual, none_on=(1,)))
    # A step without a loss has no row, and takes its number all the same.
    assert head_counts(tmp_path / "usage.csv") == [(1, 1), (3, 1), (4, 0), (5, 0), (6, 0)]
    assert "codes" not in read_names(tmp_path / "usage.csv")


def test_accumulation_on_a_single_device(tmp_path: Path) -> None:
    monitor = GradientUsageMonitor(table=tmp_path / "usage.csv", picture=None)
    fit_plain(monitor, Plain(), accumulate_grad_batches=2)
    assert head_counts(tmp_path / "usage.csv") == [(1, 1), (2, 1), (3, 0)]


def test_files_go_to_the_run_directory_and_never_over_those_of_another_run(tmp_path: Path) -> None:
    for expected in ("gradient_usage", "gradient_usage-v1"):
        monitor = GradientUsageMonitor()
        fit_plain(monitor, Plain(), default_root_dir=tmp_path)
        assert monitor.table_path == tmp_path / f"{expected}.csv"
        assert monitor.picture_path == tmp_path / f"{expected}.png"
        assert monitor.picture_path.stat().st_size > 0
    logger = CSVLogger(tmp_path, name="logs")
    monitor = GradientUsageMonitor(table="sub/usage.parquet", picture=None)
    fit_plain(monitor, Plain(), logger=logger)
    assert monitor.table_path == Path(logger.log_dir) / "sub/usage.parquet"


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_resumed_run_goes_on_with_its_files(tmp_path: Path, suffix: str) -> None:
    def make() -> GradientUsageMonitor:
        return GradientUsageMonitor(table=f"usage{suffix}", picture="usage.svg")

    # As after a crash: there are rows of steps that come after the checkpoint.
    class SavesHalfway(Plain):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_step == 3:
                self.trainer.save_checkpoint(tmp_path / "run.ckpt")

    fit_plain(make(), SavesHalfway(), default_root_dir=tmp_path, max_steps=5)
    assert [step for step, _ in head_counts(tmp_path / f"usage{suffix}")] == [1, 2, 3, 4, 5]
    monitor = make()
    fit_plain(monitor, Plain(head_on=()), tmp_path / "run.ckpt", default_root_dir=tmp_path, max_steps=8, max_epochs=9)
    assert monitor.table_path == tmp_path / f"usage{suffix}"
    expected = [(1, 1), (2, 1), (3, 1), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0)]
    assert head_counts(tmp_path / f"usage{suffix}") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.ckpt", f"usage{suffix}", "usage.svg"]


def test_a_table_that_cannot_be_continued_is_left_alone(tmp_path: Path) -> None:
    fit_plain(GradientUsageMonitor(picture=None), Plain(), default_root_dir=tmp_path, max_steps=2)
    (tmp_path / "gradient_usage.csv").write_text("something else\n")
    monitor = GradientUsageMonitor(picture=None)
    monitor.load_state_dict({"table": str(tmp_path / "gradient_usage.csv")})
    with pytest.warns(UserWarning, match="begins a new table"):
        fit_plain(monitor, Plain(), default_root_dir=tmp_path, max_steps=2)
    assert (tmp_path / "gradient_usage.csv").read_text() == "something else\n"
    assert len(head_counts(tmp_path / "gradient_usage-v1.csv")) == 2


def test_added_parameters_are_named_in_a_warning(tmp_path: Path) -> None:
    model = Plain()
    model.adds_at = 1
    with pytest.warns(UserWarning, match=r"late\.weight, late\.bias") as caught:
        fit_plain(GradientUsageMonitor(table=tmp_path / "usage.csv", picture=None), model, max_epochs=4)
    assert len([w for w in caught if "GradientUsageMonitor" in str(w.message)]) == 1


def test_a_full_disk_costs_the_table_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monitor = GradientUsageMonitor(table=tmp_path / "file" / "usage.csv", picture=None)
    with pytest.warns(UserWarning, match="Training is not affected"):
        trainer = fit_plain(monitor, Plain())
    assert trainer.global_step == 6


def test_steps_that_are_not_recorded_have_no_hooks(tmp_path: Path) -> None:
    seen = []

    class Looks(Plain):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            seen.append(sum(bool(p._backward_hooks) for p in self.parameters()))
            return super().training_step(batch, batch_idx)

    fit_plain(GradientUsageMonitor(4, table=tmp_path / "usage.csv", picture=None), Looks())
    assert seen == [4, 0, 0, 0, 4, 0]


# -- loggers ----------------------------------------------------------------------------------------------------------


class Recording(Logger):
    """A logger that keeps what it was given."""

    def __init__(self, experiment: Any = None) -> None:
        super().__init__()
        self._experiment = experiment
        self.given: list[Any] = []

    @property
    def experiment(self) -> Any:
        return self._experiment

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass


class LikeWandb(Recording):
    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        assert all(Path(image).exists() for image in images)
        self.given.append(key)


class LikeLit(Recording):
    def log_file(self, path: str) -> None:
        self.given.append(Path(path).stem)


class Writer:
    """The experiments of TensorBoard, MLflow, Comet and Neptune, by the methods that they have."""

    def __init__(self) -> None:
        self.given: list[Any] = []


class TensorBoardWriter(Writer):
    def add_figure(self, tag: str, figure: Any, global_step: int | None = None, close: bool = True) -> None:
        figure.canvas.draw()
        self.given.append((tag, global_step, close))


class MlflowClient(Writer):
    def log_figure(self, run_id: str, figure: Any, artifact_file: str) -> None:
        self.given.append((run_id, artifact_file))


class CometExperiment(Writer):
    def log_figure(self, figure_name: str | None = None, figure: Any = None, step: int | None = None) -> None:
        self.given.append((figure_name, step))


class NeptuneRun(Writer):
    def __getitem__(self, key: str) -> NeptuneRun:
        self.given.append(key)
        return self

    def upload(self, path: str) -> None:
        self.given.append(Path(path).suffix)


class LikeMlflow(Recording):
    run_id = "run"


class NeptuneLogger(Recording):
    pass


class Refuses(LikeWandb):
    def log_image(self, *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network")


def test_loggers_get_the_picture_by_what_they_offer(tmp_path: Path) -> None:
    wandb, lit, plain, refuses = LikeWandb(), LikeLit(), Recording(Writer()), Refuses()
    tensorboard, mlflow = Recording(TensorBoardWriter()), LikeMlflow(MlflowClient())
    comet, neptune = Recording(CometExperiment()), NeptuneLogger(NeptuneRun())
    loggers = [plain, refuses, wandb, lit, tensorboard, mlflow, comet, neptune, CSVLogger(tmp_path)]
    with pytest.warns(UserWarning, match="Refuses: ConnectionError"):
        fit_plain(GradientUsageMonitor(), Plain(), logger=loggers, default_root_dir=tmp_path)
    assert wandb.given == lit.given == ["gradient_usage"]
    assert tensorboard.experiment.given == [("gradient_usage", 6, False)]
    assert mlflow.experiment.given == [("run", "gradient_usage.png")]
    assert comet.experiment.given == [("gradient_usage", 6)]
    assert neptune.experiment.given == ["gradient_usage", ".png"]
    assert plain.experiment.given == []
    wandb.given.clear()
    fit_plain(GradientUsageMonitor(log_picture=False), Plain(), logger=[wandb], default_root_dir=tmp_path)
    assert wandb.given == []


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"every_n_steps": 0}, ValueError, "every_n_steps=0"),
        ({"every_n_steps": 2.0}, TypeError, "every_n_steps=2.0"),
        ({"every_n_steps": True}, TypeError, "whole number"),
        ({"most_rows": 1}, ValueError, "most_rows=1"),
        ({"table": "usage.txt"}, ValueError, r"\.csv or \.parquet"),
        ({"table": 3}, TypeError, "table=3"),
        ({"picture": "usage.csv"}, ValueError, r"\.png or \.svg or \.pdf"),
        ({"log_picture": "yes"}, TypeError, "True or False"),
        ({"table": None, "picture": None}, ValueError, "without keeping anything"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        GradientUsageMonitor(**arguments)


def test_missing_packages_are_named_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("picture", "usage_table"):
        monkeypatch.setattr(f"adaptive_ddp.{module}.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install adaptive-ddp\[plot\]"):
        GradientUsageMonitor()
    with pytest.raises(ImportError, match="pyarrow"):
        GradientUsageMonitor(table="usage.parquet", picture=None)
    GradientUsageMonitor(picture=None)


# -- the picture ------------------------------------------------------------------------------------------------------


def history_of(
    names: list[str], rows: Iterator[tuple[int, int, list[int | None]]], world_size: int = 4
) -> UsageHistory:
    history = UsageHistory(names)
    for step, backward, received in rows:
        history.add(Record(step, backward, 0, 0, world_size, received))
    return history


def finding(history: UsageHistory) -> str:
    return describe_finding(*history.counts(), history.missed_everywhere)


def rows_of(history: UsageHistory, most_rows: int = 40) -> list[str]:
    return [row.label for row in fold(history.names, *history.counts(), most_rows).rows]


def test_a_history_of_any_length_keeps_its_size_and_its_means() -> None:
    steps = 10_000
    history = history_of(["a", "b"], ((step, 1, [4, step % 2 * 4]) for step in range(1, steps + 1)))
    received, possible = history.counts()
    assert received.shape[2] <= 240
    assert received.sum(dim=2).tolist() == [[4 * steps, 2 * steps]]
    assert possible.sum(dim=2).tolist() == [[4 * steps, 4 * steps]]
    assert (received[0, 1, :-1] * 2 == possible[0, 1, :-1]).all()
    many = UsageHistory([str(index) for index in range(50_000)])
    many.add(Record(1, 1, 0, 0, 4, [4] * 50_000))
    assert sum(grid.numel() for grid in many._received) <= 2_000_000


NAMES = ["in.weight", "in.bias", *(f"layers.{k}.{x}.weight" for k in range(4) for x in "ab"), "aux.x", "aux.y", "aux.z"]


def test_rows_show_what_differs_and_fold_what_does_not() -> None:
    layers = [4, 4, 2, 2, 2, 2, 0, 4]
    history = history_of(NAMES, ((step, 1, [4, 4, *layers, step % 2, 0, 0]) for step in range(8)))
    assert rows_of(history) == ["layers.3.a", "aux.{y,z}", "layers.{1,2}", "aux.x"]
    folded = fold(history.names, *history.counts(), 40)
    assert folded.always == (0, 1, 2, 3, 9)
    assert folded.frozen == ()


@pytest.mark.parametrize("most_rows", [2, 7, 40])
def test_rows_are_bounded_and_hold_every_parameter_once(most_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    names = [f"stages.{s}.{k}.{x}" for s in range(5) for k in range(60) for x in ("weight", "bias")]
    names += ["head.weight", "heads.a.weight", "heads.b.weight", "heads.c.weight"]
    fixed: list[int | None] = [4, 0, 0, None]
    history = history_of(
        names, ((s, 1, [*torch.randint(0, 5, (600,), generator=generator).tolist(), *fixed]) for s in range(20))
    )
    folded = fold(history.names, *history.counts(), most_rows)
    assert len(folded.rows) + bool(folded.always) <= max(most_rows, 3)
    members = [index for row in folded.rows for index in row.members] + [*folded.always, *folded.frozen]
    assert sorted(members) == list(range(len(names)))
    # What the title counts is never folded into something else.
    assert any(row.members == (601, 602) for row in folded.rows)


def test_the_title_is_the_main_finding() -> None:
    def of(*rows: list[int | None], backwards: int = 1) -> str:
        return finding(history_of(["a", "b"], ((n // backwards, n % backwards + 1, row) for n, row in enumerate(rows))))

    assert of([4, 4], [4, 4]) == "All 2 parameters received a gradient on every rank in every recorded step"
    assert of([4, 0], [4, 0]) == "1 of 2 parameters never received a gradient"
    assert of([3, 0], [4, 0]) == "1 of 2 parameters never received a gradient; 1 more missed one at times"
    assert of([4, 3], [4, 4]) == "1 of 2 parameters missed a gradient at times, on some ranks only"
    assert of([4, 0], [4, 4]) == "1 of 2 parameters missed a gradient at times, on all ranks at once"
    assert of([3, 0], [4, 4]) == "2 of 2 parameters missed a gradient at times, 1 of them on all ranks at once"
    assert of([4, None], [4, None]) == "The only parameter received a gradient on every rank in every recorded step"
    assert of([None, None]) == "Every parameter was frozen"
    gan = of([4, 4], [0, 4], [4, 4], [0, 4], backwards=2)
    assert gan == "In each step the 2nd backward misses 1 of 2 parameters"


@pytest.mark.parametrize("world_size", [1, 4, 64])
def test_the_figure_says_what_its_colours_mean(tmp_path: Path, world_size: int) -> None:
    rows = [[world_size, 0], [world_size, None], [0, world_size], [world_size, 1]]
    figure = draw(history_of(["a.weight", "b.weight"], ((s, 1 + s % 2, row) for s, row in enumerate(rows)), world_size))
    texts = [text.get_text() for ax in figure.axes for text in (ax.title, ax._left_title)] + [
        text.get_text() for text in figure.texts
    ]
    assert LEGEND in texts
    assert finding(history_of(["a", "b"], ((s, 1 + s % 2, row) for s, row in enumerate(rows)), world_size)) in texts
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["frozen, or not recorded"]
    for suffix in picture.PICTURE_SUFFIXES:
        figure.savefig(tmp_path / f"picture{suffix}")
        assert (tmp_path / f"picture{suffix}").stat().st_size < 150_000


def test_an_empty_history_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(UsageHistory(["a"]))


def test_the_command_draws_a_table_that_is_still_being_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "usage.csv"
    monitor = GradientUsageMonitor(table=table, picture=None)
    fit_plain(monitor, Plain())
    with table.open("a") as file:
        file.write("7,1,0,6,1,1,")
    picture.main([str(table), "-o", str(tmp_path / "usage.svg")])
    assert (tmp_path / "usage.svg").stat().st_size > 0
    assert [step for step, _ in head_counts(table)] == [1, 2, 3, 4, 5, 6]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit):
        picture.main([str(tmp_path / "other.csv")])
    assert "is not a table of gradient usage" in capsys.readouterr().err

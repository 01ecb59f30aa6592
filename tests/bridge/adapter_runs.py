"""Short runs with adapters on a Hugging Face folder, and the checks that all kinds of trained parts have in common."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from models.reference import CASES, random_reference
from peft_formula import adapt, assert_equal_folders
from torch.nn.functional import cross_entropy

import megalith
from megalith.bridge.adapters.adapter_folder import export_adapters
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.exporter import export_hf
from megalith.config import RunConfig
from megalith.errors import CheckpointError
from megalith.generation.engine import Engine
from megalith.generation.sync import engine_for, sync
from megalith.parity.job import start
from megalith.planner.layout import build_layout


def run_config(
    base: Path, output: Path, lora: Mapping[str, object], settings: Mapping[str, object] | None = None
) -> RunConfig:
    train = {"train_iters": 3, "micro_batch_size": 2, "global_batch_size": 4, "eval_iters": 0}
    tree = {
        "model": {"init_from": str(base)},
        "lora": dict(lora),
        "data": {"mock": True, "seq_length": 16},
        "optim": {"lr": 1e-2, "weight_decay": 0.0},
        "train": train | {"output_dir": str(output)},
    }
    return RunConfig.from_tree(tree).with_settings(settings or {})


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


class ExportedRun:
    """A run on the folder of a case in CASES, and the reference with the adapters that the run has exported.

    `model` and `reference` have the gradients of the cross-entropy of `ids`; `rows` is what `adapt` returns.
    """

    def __init__(self, case: str, base: Path, lora: Mapping[str, object], ids: torch.Tensor, folder: Path):
        self.step = megalith.train(run_config(base, folder / "run", lora)).checkpoint
        self.peft = folder / "peft"
        export_adapters(self.step, self.peft, show_progress=False)
        self.settings = json.loads((self.peft / "adapter_config.json").read_bytes())
        self.model, self.reference = megalith.load(self.step), random_reference(CASES[case][0]())
        with torch.no_grad():
            untrained = self.reference(ids).logits
        self.rows = adapt(self.reference, self.peft)
        logits, self.logits = self.model(ids), self.reference(ids).logits
        assert difference(self.logits, untrained) > 1e-4
        self.error = difference(logits, self.logits)
        for each in (logits, self.logits):
            cross_entropy(each.flatten(0, 1), ids.roll(-1).flatten(), reduction="sum").backward()

    @torch.no_grad()
    def check_merged(self, ids: torch.Tensor) -> None:
        """Check the logits of the merged run and of its export to Hugging Face against the reference's."""
        folder = self.peft.parent
        merge(self.step, folder / "merged", show_progress=False)
        export_hf(folder / "merged", folder / "hf", show_progress=False)
        for name in ("merged", "hf"):
            assert difference(megalith.load(folder / name)(ids), self.logits) < 1e-6


def check_there_and_back(base: Path, lora: Mapping[str, object], folder: Path) -> Path:
    """Check that a run which loads exported adapters exports the same ones. Return the step of the first run."""
    step = megalith.train(run_config(base, folder / "run", lora)).checkpoint
    export_adapters(step, folder / "peft", show_progress=False)
    still = {"optim.lr": 0.0, "train.train_iters": 1}
    loaded = run_config(base, folder / "again", {"load": str(folder / "peft")}, still)
    export_adapters(megalith.train(loaded).checkpoint, folder / "same", show_progress=False)
    assert_equal_folders(folder / "peft", folder / "same")
    return step


def check_resume(
    base: Path, lora: Mapping[str, object], other: Mapping[str, object], message: str, folder: Path
) -> Path:
    """Check that a run resumes bitwise, and that a resume with the settings `other` raises an error with `message`.

    Return the step of an uninterrupted run.
    """
    whole = megalith.train(run_config(base, folder / "whole", lora))
    part = run_config(base, folder / "part", lora, {"checkpoint.load": str(folder / "part")})
    assert megalith.train(part.with_settings({"train.exit_interval": 2})).step == 2
    ends = [megalith.load(run.checkpoint).state_dict() for run in (whole, megalith.train(part))]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    with pytest.raises(CheckpointError, match=message):
        megalith.train(part.with_settings({**other, "train.train_iters": 4}))
    return whole.checkpoint


def stored_tensors(step: Path) -> set[str]:
    """Return the names of the model's tensors in a checkpoint."""
    return {*json.loads((step / "manifest.json").read_bytes())["tensors"]["model"]}


def check_engine(config: RunConfig) -> tuple[megalith.ParallelModel, Engine]:
    """Check that a sync copies what a run trains, and nothing else, into an engine. Return the model and the engine."""
    model = start(config).model
    engine = engine_for(model, max_rows=1, max_tokens=8)
    trained = [parameter for parameter in model.chunks[0].parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1)
    assert sync(engine, model).bytes == sum(parameter.nbytes for parameter in trained) > 0
    shards = model.parameters.shards
    assert all(torch.equal(each.values, shards[name].values) for name, each in engine.shards.items())
    return model, engine


def check_plan(config: RunConfig) -> None:
    """Check the planned bytes of weights and optimizer state against the run's parameters."""
    run = start(config)
    parameters = [*run.model.chunks[0].parameters()]
    memory = build_layout(run.config, 1).stages[0].memory
    assert memory.weights == pytest.approx(sum(each.nbytes for each in parameters), rel=1e-4)
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    assert memory.optimizer == pytest.approx(8 * trained, rel=1e-3)

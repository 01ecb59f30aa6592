"""A reference model that follows the policy: TRL's update, in every layout, bitwise after a resume."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from default_cases import in_full
from models.reference import CASES, random_reference
from trained_runs import comparable

sys.path.append(str(Path(__file__).parents[1] / "rl"))
from small_policy import configuration, metrics

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job, start
from megalith.rl.dpo import PreferenceTask, train_dpo
from megalith.rl.grpo import train_grpo
from megalith.rl.kto import KtoTask

SEQ, VOCAB = 32, 151
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run of five steps from a tiny Llama of transformers, over 16 records of tokens."""
    folder, rng = tmp_path_factory.mktemp("sync"), random.Random(3)
    random_reference(CASES["llama"][0]()).save_pretrained(folder / "base")
    pairs = [
        {
            name: [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 9))]
            for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        }
        for _ in range(16)
    ]
    answers = [
        {"prompt_ids": one["prompt_ids"], "completion_ids": one["chosen_ids"], "label": number % 3 == 0}
        for number, one in enumerate(pairs)
    ]
    for name, records in (("pairs", pairs), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return {
        "model": {"init_from": str(folder / "base"), "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "data": {"train_data_path": str(folder / "pairs.jsonl"), "seq_length": SEQ, "num_workers": 0},
        "optim": {"lr": 1e-3, "lr_warmup_iters": 0, "lr_decay_style": "constant"},
        "train": {"train_iters": 5, "micro_batch_size": 2, "global_batch_size": 4, "output_dir": str(folder / "run")},
    }  # fmt: skip


def config_of(tree: dict, section: str, settings: dict, **sections) -> RunConfig:
    data = {"train_data_path": tree["data"]["train_data_path"]}
    if section == "kto":
        data["train_data_path"] = data["train_data_path"].replace("pairs", "answers")
    sections |= {section: {"enabled": True} | settings, "data": data}
    return RunConfig.from_tree(tree | {name: tree.get(name, {}) | more for name, more in sections.items()})


def job(config: RunConfig) -> Outcome:
    return run_job(config, task=KtoTask() if config.kto.enabled else PreferenceTask())


@pytest.mark.parametrize(("section", "task"), [("dpo", PreferenceTask), ("kto", KtoTask)])
def test_the_reference_is_mixed_as_trls(tree: dict, section: str, task):
    """By SyncRefModelCallback._sync_target_model, at the steps of its on_step_end."""
    run = start(config_of(tree, section, SYNC), task())
    expected = [(name, weight.clone()) for name, weight in run.model.parameters.named]
    with run.data.train_loader(0, 0, run.device) as batches:
        for step in range(1, 6):
            run.train_step(batches)
            if step % 2 == 0:
                for name, weight in expected:
                    weight.mul_(1.0 - 0.25).add_(dict(run.model.parameters.named)[name], alpha=0.25)
            reference = dict(run.task.synced.model.parameters.named)
            assert all(torch.equal(reference[name], weight) for name, weight in expected)
    policy = dict(run.model.parameters.named)
    assert any(not torch.equal(policy[name], weight) for name, weight in expected)


@pytest.mark.parametrize(
    "names", [("dp2-zero2",), in_full(("tp2-sp", "pp2", "dp2-zero1", "dp2-zero3"))], ids="+".join
)
def test_every_layout_equals_one_process(pool, tree: dict, names: tuple[str, ...]):
    cases = {}
    for section in ("dpo", "kto"):
        for name in names:
            parallel = dict(LAYOUTS[name].parallel)
            if name == "pp2":
                parallel["decoder_first_pipeline_num_layers"] = 1  # the model has 3 layers
            cases[f"{section} {name}"] = (config_of(tree, section, SYNC, parallel=parallel),)
    ones = {section: job(config_of(tree, section, SYNC)) for section in ("dpo", "kto")}
    for name, ranks in pool.run_cases(job, cases, size=2).items():
        errors = compare(ranks, ones[name[:3]])
        assert errors.within(), (name, errors)
    fixed = job(config_of(tree, "dpo", {}))
    assert fixed.losses[:2] == ones["dpo"].losses[:2] and fixed.losses[2:] != ones["dpo"].losses[2:]


def test_a_resumed_run_continues_with_its_reference(tree: dict, tmp_path: Path):
    def run(folder: str, steps: int, **checkpoint) -> list[dict]:
        train = dict(exit_interval=steps, deterministic=True, output_dir=str(tmp_path / folder))
        train_dpo(config_of(tree, "dpo", SYNC, train=train, checkpoint=checkpoint))
        return comparable(tmp_path / folder)

    whole = run("whole", 5)
    run("parts", 3)
    assert run("parts", 5, load=str(tmp_path / "parts")) == whole
    torch.use_deterministic_algorithms(False)
    manifest = tmp_path / "whole" / "checkpoints" / "step_00000005" / "manifest.json"
    tensors = json.loads(manifest.read_text())["tensors"]
    assert tensors["reference"].keys() == tensors["model"].keys()


def test_a_policy_of_grpo_is_followed_between_rollout_batches(tmp_path: Path):
    rl = dict(beta=0.1, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0)

    def run(folder: str, steps: int, synced: bool = True, **checkpoint) -> list[dict]:
        train = dict(exit_interval=steps, deterministic=True, output_dir=str(tmp_path / folder))
        settings = rl | dict(sync_ref_model=True) if synced else dict(beta=0.1)
        train_grpo(configuration(tmp_path, rl=settings, train=train, checkpoint=checkpoint))
        return metrics(tmp_path / folder)

    whole, fixed = run("whole", 4), run("fixed", 4, synced=False)
    run("parts", 2)
    parts = run("parts", 4, load=str(tmp_path / "parts"))
    torch.use_deterministic_algorithms(False)
    assert [one["loss"] for one in parts] == [one["loss"] for one in whole]
    assert all(abs(one["kl"]) < 1e-6 for one in whole)  # the reference is the policy that samples
    assert fixed[0]["kl"] == pytest.approx(0, abs=1e-6) and fixed[-1]["kl"] > 1e-4


def test_what_cannot_be_followed_is_refused(tree: dict, tmp_path: Path):
    for settings, lora, message in (
        (SYNC | {"loss_type": "orpo"}, {}, "dpo.loss_type orpo reads no reference model"),
        (SYNC, {"rank": 2}, "lora.rank is 2, but with adapters the reference is the model without them"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(config_of(tree, "dpo", settings, lora=lora), PreferenceTask())
    with pytest.raises(ConfigError, match=r"rl.sync_ref_model is true, but with rl.beta 0"):
        train_grpo(configuration(tmp_path, rl=dict(sync_ref_model=True, beta=0.0)))

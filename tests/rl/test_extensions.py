"""Losses, advantage estimators and rewards of a user, and new built-in ones, go through the same registry."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_policy import configuration, metrics

from megalith.config import RlConfig
from megalith.config.extensions import ADVANTAGE_ESTIMATORS, LOSSES, REWARDS
from megalith.errors import ConfigError, DataError
from megalith.rl import GrpoLoss
from megalith.rl.advantages.advantages import compute_advantages, load_estimator
from megalith.rl.grpo import train_grpo
from megalith.rl.losses.grpo_loss import load_loss
from megalith.rl.rewards.rewards import reward_function

PAGE = Path(__file__).parents[2] / "docs" / "grpo_objective.md"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The files of the page, in the current folder."""
    text = PAGE.read_text(encoding="utf-8").partition("## Your own loss")[2]
    blocks = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert sorted(blocks) == ["my_advantages.py", "my_loss.py", "my_reward.py"]
    for name, code in blocks.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    load_loss.cache_clear()
    load_estimator.cache_clear()
    return tmp_path


def losses(folder: Path, **rl) -> list[float]:
    rl = dict(reward_workers=0, packing=True) | rl
    train_grpo(configuration(folder, rl=rl, train=dict(train_iters=2, output_dir=str(folder / "run"))))
    return [step["loss"] for step in metrics(folder / "run")]


def test_a_run_with_the_pages_loss_estimator_and_reward_trains(page):
    settings = dict(
        loss_type="my_loss.py:SequenceSum",
        advantage_estimator="my_advantages.py:above_batch_mean",
        reward_funcs=["length", "my_reward.py:brevity"],
    )
    own = losses(page, **settings)
    steps = metrics(page / "run")
    assert len(own) == 2 and all(np.isfinite(own)) and abs(steps[0]["advantages_mean"]) < 1e-9
    others = settings | dict(loss_type="luspo", count_masked_sequences=False)
    (page / "again").mkdir()
    assert losses(page / "again", **others) == own


def test_a_function_is_the_policy_term_of_a_mean_over_tokens(page):
    rl = RlConfig(loss_type="my_loss.py:unclipped")
    loss, dapo = load_loss(rl.loss_type), load_loss("dapo")
    ratio, advantages = torch.tensor([[3.0, 0.1]]), torch.tensor([[1.0, -1.0]])
    assert torch.equal(loss.token_losses(rl, ratio, ratio.log(), advantages), torch.tensor([[-3.0, 0.1]]))
    assert not torch.equal(dapo.token_losses(rl, ratio, ratio.log(), advantages), torch.tensor([[-3.0, 0.1]]))
    tokens = torch.tensor([3.0, 0.0])
    assert loss.divisor(rl, tokens) == dapo.divisor(rl, tokens) == 3


def test_a_new_built_in_one_is_a_file_and_a_row(page, monkeypatch):
    monkeypatch.syspath_prepend(page)
    monkeypatch.setitem(LOSSES, "sequence_sum", "my_loss:SequenceSum")
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "above_batch_mean", "my_advantages:above_batch_mean")
    monkeypatch.setitem(REWARDS, "constant", "constant_reward:constant")
    (page / "constant_reward.py").write_text("def constant(text, prompt, ids, max_tokens):\n    return 0.5\n")
    rl = RlConfig(loss_type="sequence_sum", advantage_estimator="above_batch_mean")
    assert isinstance(load_loss(rl.loss_type), GrpoLoss)
    rewards = np.array([[[1.0], [0.0]], [[2.0], [np.nan]]])
    assert compute_advantages(rl, rewards, np.ones((2, 2), int)).values.tolist() == [[0.0, -1.0], [1.0, 0.0]]
    assert reward_function("constant").is_builtin
    for name in ("my_loss", "my_advantages", "constant_reward"):
        sys.modules.pop(name)
    load_loss.cache_clear()
    load_estimator.cache_clear()


BAD = {
    "no file": ("loss_type", "absent.py:f", "rl.loss_type has 'absent.py:f', but there is no file absent.py"),
    "no name": ("loss_type", "my_loss.py:f", "my_loss.py has no function f; correct the name"),
    "another class": (
        "loss_type",
        "my_class.py:Loss",
        "a class that does not derive from megalith.rl.GrpoLoss",
    ),
    "raises": ("advantage_estimator", "raises.py:f", "importing it raised ValueError: no; correct the file"),
}


@pytest.mark.parametrize("fault", BAD)
def test_what_cannot_be_loaded_is_named_with_its_setting(page, fault):
    setting, value, sentence = BAD[fault]
    Path("my_class.py").write_text("class Loss: pass\n")
    Path("raises.py").write_text("raise ValueError('no')\n")
    rl = RlConfig(**{setting: value})
    load = load_loss if setting == "loss_type" else load_estimator
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(getattr(rl, setting))


def test_an_unknown_name_is_refused_with_the_configuration():
    for setting, value in (
        ("loss_type", "dapoo"),
        ("advantage_estimator", "gaee"),
        ("loss_type", "my_loss:f"),
    ):
        with pytest.raises(
            ConfigError, match=rf"rl.{setting} is '{value}': write a built-in name or path.py:object"
        ):
            configuration(Path("."), rl={setting: value, "prompts": "p.jsonl"})


def test_advantages_that_are_not_one_finite_number_each_are_refused(page):
    Path("bad.py").write_text(
        "def few(rl, rewards): return rewards[0]\ndef absent(rl, rewards): return rewards\n"
    )
    for name in ("few", "absent"):
        with pytest.raises(DataError, match=rf"rl.advantage_estimator bad.py:{name} returned"):
            rewards = np.array([[[1.0], [np.nan]]])
            compute_advantages(RlConfig(advantage_estimator=f"bad.py:{name}"), rewards, np.ones((1, 2), int))

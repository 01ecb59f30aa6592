"""Rewards by reward models: transformers' scores of the completions, in every layout and with another tokenizer."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from default_cases import in_full
from models.reference import random_parameters
from small_policy import VOCAB, configuration, metrics

from megalith.config import RunConfig
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import ConfigError
from megalith.parallel.mesh import build_mesh
from megalith.parity.check import LAYOUTS
from megalith.rl import train_grpo
from megalith.rl.model_rewards import RewardModel, ScoredText, reward_model_config
from megalith.rl.prompts import Prompt
from megalith.training.build import prepare

IDS = [[(3 * k + i) % 15 for i in range(2 + k % 5)] for k in range(7)]


def save_model(folder: Path, vocab_size: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(3)
    model = random_parameters(transformers.LlamaForSequenceClassification(config))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("judge")
    return folder / "judge", save_model(folder / "judge", VOCAB)


def score(model: torch.nn.Module, ids: list[int]) -> float:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.item()


def test_completions_have_the_scores_of_transformers_model(tmp_path: Path, models):
    folder, theirs = models
    rl = dict(reward_models=str(folder), reward_weights=[0.0, 2.0], log_completions=True)
    config = configuration(tmp_path, rl=rl, train=dict(train_iters=2))
    train_grpo(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    for line in lines:
        ids = [int(word) for word in line["prompt"].split() + line["completion"].split()]
        assert line["rewards"]["judge"] == pytest.approx(score(theirs, ids), abs=2e-5), line
    means = [np.mean([2 * one["rewards"]["judge"] for one in lines[k : k + 8]]) for k in (0, 8)]
    assert [one["rewards_mean"] for one in metrics(tmp_path / "run")] == pytest.approx(means, abs=1e-4)


def scores_of(config: RunConfig) -> list[float]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    config, tokenizer, _ = prepare(config, size)
    mesh = build_mesh(config.parallel, size, "cpu")
    run = SimpleNamespace(config=config, mesh=mesh, device=torch.device("cpu"), tokenizer=tokenizer)
    (path,) = config.rl.reward_model_paths
    texts = [ScoredText(Prompt(k, IDS[k], ""), [k], "", True) for k in range(len(IDS))]
    return RewardModel(run, path).scores(texts).tolist()


@pytest.mark.parametrize("names", [("tp2-sp",), in_full(("dp2-zero2", "pp2", "cp2"))], ids="+".join)
def test_every_layout_gives_the_same_scores(pool, tmp_path: Path, models, names: tuple[str, ...]):
    folder, theirs = models
    rl, cases = dict(reward_models=str(folder)), {}
    for name in names:
        parallel = LAYOUTS[name].parallel
        cases[name] = (configuration(tmp_path, rl=rl, parallel=parallel),)
    expected = [score(theirs, [*ids, k]) for k, ids in enumerate(IDS)]
    assert scores_of(configuration(tmp_path, rl=rl)) == pytest.approx(expected, abs=1e-5)
    for name, ranks in pool.run_cases(scores_of, cases, size=2).items():
        for scores in ranks:
            assert scores == pytest.approx(expected, abs=1e-5), name


def test_a_model_reads_its_own_tokens_and_its_own_template(tmp_path: Path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "sum of 1 2 3 is 6, user assistant "}) + "\n")
    train_tokenizer([tmp_path / "text.jsonl"], 280, tmp_path / "judge")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path / "judge")
    theirs = save_model(tmp_path / "judge", tokenizer.vocab_size)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    (tmp_path / "judge" / "chat_template.jinja").write_text(template)
    config = configuration(tmp_path, rl=dict(reward_models=str(tmp_path / "judge")))
    config, own, _ = prepare(config, 1)
    run = SimpleNamespace(config=config, mesh=build_mesh(config.parallel, 1, "cpu"), device=torch.device("cpu"),
                          tokenizer=own)  # fmt: skip
    messages = [{"role": "user", "content": "sum of 1 2"}]
    text = Prompt(0, [5], "sum of 1 2 is ")
    texts = [
        ScoredText(text, [6], "3", True), ScoredText(text, [6], "3", False),
        ScoredText(Prompt(1, [5], "", messages), [6], "3", True),
    ]  # fmt: skip
    scores = RewardModel(run, str(tmp_path / "judge")).scores(texts)
    plain, chat = (
        list(tokenizer.encode(one)) for one in ("sum of 1 2 is 3", "user: sum of 1 2;assistant: 3;")
    )
    expected = [score(theirs, ids) for ids in ([*plain, tokenizer.eod], plain, chat)]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_language_model_is_refused(tmp_path: Path):
    config = transformers.LlamaConfig(vocab_size=17, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                      intermediate_size=8, max_position_embeddings=64)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "lm")
    with pytest.raises(ConfigError, match="is a language model, which gives no score"):
        reward_model_config(configuration(tmp_path), str(tmp_path / "lm"))
    with pytest.raises(ConfigError, match="2 weights for 1 reward_funcs; give one each"):
        train_grpo(configuration(tmp_path, rl=dict(reward_weights=[1.0, 2.0])))

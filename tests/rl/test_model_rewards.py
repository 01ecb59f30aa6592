"""Rewards by reward models: transformers' scores of the completions, in every layout and with another tokenizer."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import ClassVar

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
from megalith.errors import ConfigError, TrainingError
from megalith.parallel.mesh import build_mesh
from megalith.parity.check import LAYOUTS
from megalith.rl import train_grpo
from megalith.rl.rewards.model_rewards import RewardModel, reward_model_config
from megalith.rl.rewards.scored_text import ScoredText
from megalith.rl.rewards.served_reward_model import ServedRewardModel
from megalith.rl.rollouts.prompts import Prompt
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
    with pytest.raises(ConfigError, match="a language model without a score"):
        reward_model_config(configuration(tmp_path), str(tmp_path / "lm"))
    with pytest.raises(ConfigError, match="2 weights for 1 reward_funcs; list one weight"):
        train_grpo(configuration(tmp_path, rl=dict(reward_weights=[1.0, 2.0])))


class Judge(BaseHTTPRequestHandler):
    """OpenRLHF's protocol: the reward is the number of characters of the completion, unless `answer` is set."""

    bodies: ClassVar[list[dict]] = []
    answer: ClassVar[object] = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body | {"path": self.path})
        rewards = [len(query) - len(prompt) for query, prompt in zip(body["query"], body["prompts"])]
        content = json.dumps({"rewards": rewards} if self.answer is None else self.answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    Judge.bodies.clear()
    Judge.answer = None
    yield f"http://127.0.0.1:{server.server_address[1]}/get_reward"
    server.shutdown()
    server.server_close()


def test_a_server_scores_completions_by_openrlhfs_protocol(tmp_path: Path, judge: str):
    records = [{"id": f"q{k}", "prompt": f"{k} {k + 1}", "answer": k} for k in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    rl = dict(reward_models=judge, reward_weights=[0.0, 1.0], log_completions=True)
    train_grpo(configuration(tmp_path, rl=rl, train=dict(train_iters=2)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    asked = {
        (query, label)
        for body in Judge.bodies
        for query, label in zip(body["query"], body["labels"], strict=True)
    }
    assert {body["path"] for body in Judge.bodies} == {"/get_reward"} and len(lines) == 16
    assert {label for _, label in asked} == {query.split()[0] for query, _ in asked}
    for line in lines:
        queries = [query for query, _ in asked if query.startswith(line["prompt"] + " " + line["completion"])]
        rewards = {len(query) - len(line["prompt"]) for query in queries}
        assert line["rewards"]["get_reward"] in rewards


@pytest.mark.parametrize("answer", [{"rewards": [1.0]}, {"scores": []}, [1, 2], {"rewards": [None] * 8}])
def test_a_server_without_a_number_for_each_completion_ends_the_run(tmp_path: Path, judge: str, answer):
    Judge.answer = answer
    with pytest.raises(TrainingError, match="for 8 completions; it must return"):
        train_grpo(configuration(tmp_path, rl=dict(reward_models=judge), train=dict(train_iters=1)))


def served_scores(config: RunConfig) -> list[float]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    config, tokenizer, _ = prepare(config, size)
    mesh = build_mesh(config.parallel, size, "cpu")
    run = SimpleNamespace(config=config, mesh=mesh, tokenizer=tokenizer)
    texts = [ScoredText(Prompt(k, IDS[k], ""), [k] * (k + 1), "", True) for k in range(len(IDS))]
    return ServedRewardModel(run, config.rl.reward_model_paths[0]).scores(texts).tolist()


def test_ranks_share_the_completions_of_a_server(pool, tmp_path: Path, judge: str):
    config = configuration(tmp_path, rl=dict(reward_models=judge))
    alone = served_scores(config)
    assert alone == [2.0 * (k + 1) for k in range(len(IDS))]  # a digit and a space per token
    assert all(one == alone for one in pool.run(served_scores, config, size=2))
    assert sorted(len(body["query"]) for body in Judge.bodies) == [3, 4, 7]
    with pytest.raises(ConfigError, match=r"rl\.reward_models has a user name"):
        train_grpo(configuration(tmp_path, rl=dict(reward_models="http://me@host/score")))

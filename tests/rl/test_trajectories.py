"""Training on trajectories: transformers gives the same loss, files the same run, and only sampled tokens count."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from small_policy import metrics
from test_environments import Guessing
from test_grpo_layouts import run_of
from tool_policy import TEMPLATE, add, write_tokenizer

from megalith.config import RunConfig
from megalith.errors import ConfigError, DataError
from megalith.rl import GRPOTrainer
from megalith.rl.grpo import train_grpo
from megalith.rl.rollouts.rollout_reader import load_rollouts
from megalith.rl.rollouts.rollouts import PromptGroup, RatedCompletion, Rollouts, save_rollouts

VOCAB, SEQ = 272, 96
LLAMA = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=160, tie_word_embeddings=False)  # fmt: skip
SEGMENTS = [(5, 7, 4), (3,), (2, 9, 1, 4, 6), (4, 2, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny Llama with the tools' tokenizer, whose turns end early."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, initializer_range=0.2))
    write_tokenizer(folder, TEMPLATE.partition("\n")[2])  # without the tools' schemas, which are long
    eod = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][1]["id"]
    llama.lm_head.weight.data[eod] *= 8
    llama.save_pretrained(folder)
    return folder


def trajectories() -> Rollouts:
    """Two prompts with two trajectories each, of which one has a prompt of its own."""
    rng, groups = np.random.default_rng(0), []
    for number in range(2):
        completions = []
        for k, segments in enumerate(SEGMENTS[2 * number : 2 * number + 2]):
            ids = rng.integers(0, VOCAB, sum(segments))
            logprobs = (-5 - rng.random(len(ids))).astype(np.float32)
            one = RatedCompletion(ids, np.array([float(k)]), logprobs, np.array([0]), segments=segments)
            logprobs[~one.sampled if len(segments) > 1 else []] = np.nan
            own = rng.integers(0, VOCAB, 6) if (number, k) == (1, 1) else None
            messages = [{"role": "assistant", "content": "a"}]
            completions.append(
                RatedCompletion(ids, one.rewards, logprobs, one.version, segments=segments, prompt_ids=own,
                                messages=messages)
            )  # fmt: skip
        groups.append(PromptGroup(rng.integers(0, VOCAB, 4 + number), completions))
    return Rollouts(groups, ["right"])


def tree(model: Path, folder: Path, **rl) -> dict:
    return {
        "model": {"init_from": str(model)},
        "data": {"seq_length": SEQ},
        "optim": {"lr": 1e-3, "lr_decay_style": "constant"},
        "train": {"train_iters": 1, "micro_batch_size": 2, "global_batch_size": 4, "output_dir": str(folder / "run")},
        "rl": {"num_generations": 2, "max_completion_length": 24} | rl,
        "runtime": {"device": "cpu", "compile": False},
        "log": {"layout_report": False},
    }  # fmt: skip


def test_files_keep_trajectories(tmp_path):
    whole = trajectories()
    save_rollouts(tmp_path / "a.jsonl", whole)
    back = load_rollouts(tmp_path / "a.jsonl")
    for ours, theirs in zip(back.groups, whole.groups, strict=True):
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            assert (a.segments, a.messages) == (b.segments, b.messages) and np.array_equal(a.ids, b.ids)
            assert np.array_equal(ours.prompt_of(a), theirs.prompt_of(b))
            assert np.array_equal(a.logprobs, b.logprobs, equal_nan=True)
    header, *lines = (tmp_path / "a.jsonl").read_text().splitlines()
    for wrong in ([5, 7, 3], [5, -1, 12], [16, 1], "all", [5.0, 7, 4]):
        group = json.loads(lines[0])
        group["samples"][0]["segments"] = wrong
        (tmp_path / "b.jsonl").write_text(f"{header}\n{json.dumps(group)}\n")
        with pytest.raises(DataError, match=r"line 2, sample 0 has segments .* for 16 completion_ids"):
            load_rollouts(tmp_path / "b.jsonl")


@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_is_that_of_transformers_over_sampled_tokens(tmp_path, model, packing):
    """The ratio is to the rollouts' log-probabilities, token by token, with PPO's clip."""
    save_rollouts(tmp_path / "a.jsonl", trajectories())
    rl = dict(rollouts=str(tmp_path / "a.jsonl"), old_logprobs="rollout", packing=packing, log_entropy=True)
    run = run_of(RunConfig.from_tree(tree(model, tmp_path, **rl)))
    with run.data.train_loader(0, 0, run.device) as batches:
        step = run.train_step(batches)
    llama, losses, entropies = transformers.LlamaForCausalLM.from_pretrained(model), [], []
    for group in trajectories().groups:
        for one, reward in zip(group.completions, (0.0, 1.0)):
            prompt = group.prompt_of(one)
            ids = torch.from_numpy(np.concatenate([prompt, one.ids]))[None]
            with torch.no_grad():
                logprobs = llama(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
            ratio = (chosen - torch.from_numpy(one.logprobs)).exp()
            advantage = (reward - 0.5) / (0.5**0.5 + 1e-4)
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            mask = torch.from_numpy(one.sampled)
            losses.append(loss[mask])
            entropies.append(-(logprobs.exp() * logprobs).sum(-1)[mask])
    assert sum(map(len, losses)) == sum(sum(segments[::2]) for segments in SEGMENTS)
    assert step.loss.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert step.extra_metrics()["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)


CHATTY = [{"prompt": f"{n} + 1?", "answer": n + 1, "number": n} for n in range(4)]


def settings(model: Path, folder: Path, **more) -> dict:
    sections = tree(model, folder, prompts="train_dataset", reward_funcs="length", num_generations=2,
                    max_completion_length=90, max_turns=3, tool_workers=1, save_rollouts=True, packing=True) | {
        "data": {"seq_length": 150, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)}
    }  # fmt: skip
    sections["train"]["train_iters"] = 2
    for name, values in more.items():
        sections[name] = sections[name] | values
    return sections


def calls_by_the_way(text, context):
    """A format in which every turn that is not the last calls the environment."""
    from megalith.data.chat.call_formats import ParsedTurn, ToolCall

    return ParsedTurn({"role": "assistant", "content": "…"}, [ToolCall("guess", {"number": len(text) % 4})])


def test_a_run_with_an_environment_is_repeated_and_trains_alike_from_its_files(tmp_path, model):
    """Its format finds a call in every turn, for the policy is random; its own engine samples all turns."""
    form = f"{Path(__file__)}:calls_by_the_way"
    for name in ("one", "two"):
        config = settings(
            model, tmp_path, rl={"tool_call_format": form}, train={"output_dir": str(tmp_path / name)}
        )
        train_grpo(RunConfig.from_tree(config), "length", CHATTY, environment_factory=Guessing)
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert [step["loss"] for step in one] == [step["loss"] for step in two]
    assert (
        one[0]["turns"] > 1
        and one[0]["environments_lost"] == 0
        and one[0]["mismatch"] == pytest.approx(1, abs=1e-4)
    )
    assert one[0]["completion_length"] < one[0]["trajectory_length"]
    files = sorted(map(str, (tmp_path / "one" / "rollouts").iterdir()))
    samples = [one for path in files for group in load_rollouts(path).groups for one in group.completions]
    assert any(len(sample.segments) == 5 for sample in samples)
    rl = {"rollouts": files, "num_generations": 2, "max_completion_length": 90, "packing": True}
    again = settings(model, tmp_path, train={"output_dir": str(tmp_path / "again")}) | {"rl": rl}
    train_grpo(RunConfig.from_tree(again))
    assert [step["loss"] for step in metrics(tmp_path / "again")] == [step["loss"] for step in one]


def test_trls_trainer_takes_tools_and_environments(tmp_path, model):
    args = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 20,
            "max_prompt_length": 100,
            "max_tool_calling_iterations": 2, "output_dir": str(tmp_path / "run")}  # fmt: skip
    more = {
        "data.seq_length": 150,
        "runtime.device": "cpu",
        "runtime.compile": False,
        "train.precision": "fp32",
    }
    trainer = GRPOTrainer(
        str(model), args=args, train_dataset=CHATTY, tools=[add], environment_factory=Guessing, settings=more
    )
    assert trainer.config.rl.max_turns == 3
    trainer.train()
    [step] = metrics(tmp_path / "run")
    assert 0 <= step["rewards_mean"] <= 1 and step["turns"] >= 1
    with pytest.raises(ConfigError, match="environment_factory is a dict of 1 environments"):
        GRPOTrainer(str(model), "length", args, CHATTY, environment_factory={"a": Guessing})

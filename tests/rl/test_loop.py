"""The loop: the same rollouts and losses in every layout, from its own files, and after a kill in any phase."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zstandard
from default_cases import by_default
from small_policy import MODEL, VOCAB, configuration, metrics, tree, write_prompts

import megalith
from megalith.checkpoint.store import StepFolder
from megalith.cli import rollout_command
from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.data.tokenizers.plain import NullTokenizer
from megalith.errors import ConfigError, DataError
from megalith.parallel.mesh import build_mesh
from megalith.parity.differences import BOUND
from megalith.report.report import Report
from megalith.rl import GRPOTrainer
from megalith.rl.engines.rollout_engine import engine_sizes
from megalith.rl.grpo import PolicyTask, train_grpo
from megalith.rl.rewards.rewards import Rewards
from megalith.rl.rollouts.prompts import run_prompts
from megalith.rl.rollouts.rollout_reader import load_rollouts
from megalith.rl.sampling.live_rollouts import LiveRollouts
from megalith.rl.sampling.rollout_sampler import RolloutSampler
from megalith.training.build import prepare
from megalith.training.run_state import Run
from megalith.training.training_job import train

PHASES = dict(num_iterations=2, mini_batches=2, beta=0.1, packing=True, temperature=0.9, save_rollouts=True)


def losses(folder) -> list[float]:
    return [step["loss"] for step in metrics(folder)]


def contents(folder) -> dict[str, list[dict]]:
    """The rollout files of a run: tokens and rewards exactly, log-probabilities apart."""
    found = {}
    for path in sorted((Path(folder) / "rollouts").glob("*.zst")):
        lines = zstandard.decompress(path.read_bytes(), max_output_size=1 << 24).splitlines()
        found[path.name] = [json.loads(line) for line in lines]
    return found


def without_logprobs(files: dict) -> dict:
    def plain(group: dict) -> dict:
        samples = [{k: v for k, v in one.items() if k != "logprobs"} for one in group.get("samples", [])]
        return group | {"samples": samples}

    return {name: [plain(group) for group in groups] for name, groups in files.items()}


def run_of(config: RunConfig, size: int) -> Run:
    config, tokenizer, _ = prepare(config, size)
    return Run(config, tokenizer, build_mesh(config.parallel, size, "cpu"), torch.device("cpu"), PolicyTask())


HELD_OUT = dict(num_generations_eval=3, max_eval_prompts=5)


def layout_losses(folder: str, name: str, parallel: dict) -> tuple[list[float], dict[str, float]]:
    """Of 8 steps, whose rollouts are left in folder/name; and what is said of held-out prompts after them."""
    held_out = HELD_OUT | dict(eval_prompts=f"{folder}/held_out/prompts.jsonl")
    sections = tree(Path(folder), parallel=parallel, rl=PHASES | held_out)
    sections["train"] |= dict(train_iters=8, output_dir=str(Path(folder) / name))
    sections["optim"]["lr"] = 1e-3  # the losses of many large steps would amplify the rounding
    run = run_of(RunConfig.from_tree(sections), 2 if parallel else 1)
    with run.data.train_loader(0, 0, run.device) as batches:
        found = [run.train_step(batches).loss.item() for _ in range(8)]
    figures = run.task.evaluate(run, lambda done, total: None, lambda: None)
    return found, {name: value for name, value in figures.items() if name != "seconds"}


LAYOUTS = {
    "tp2": dict(tensor_model_parallel_size=2),
    "dp2": dict(data_parallel_sharding_strategy="optim_grads_params"),
    "pp2": dict(pipeline_model_parallel_size=2),
}


@pytest.mark.parametrize("names", by_default([["tp2"], ["dp2", "pp2"]], ["tp2"]), ids="+".join)
def test_every_layout_gives_the_rollouts_losses_and_evaluation_of_one_process(pool, tmp_path, names):
    write_prompts(tmp_path)
    (tmp_path / "held_out").mkdir()
    write_prompts(tmp_path / "held_out", count=8, seed=1)
    one, judged = layout_losses(str(tmp_path), "one", {})
    cases = {name: (str(tmp_path), name, LAYOUTS[name]) for name in names}
    found = pool.run_cases(layout_losses, cases, size=2)
    rollouts = contents(tmp_path / "one")
    assert len(rollouts) == 2 and len(rollouts["batch_00000001.jsonl.zst"]) == 5  # a header and 16 / 4 groups
    for name, ranks in found.items():
        assert without_logprobs(contents(tmp_path / name)) == without_logprobs(rollouts), name
        for mine, said in ranks:  # a policy's loss is around 0: the largest is the measure
            assert np.abs(np.subtract(mine, one)).max() / np.abs(one).max() < BOUND, name
            assert said == judged and said["prompts"] == 5 and said["rewards_std"] > 0, name


def test_stop_strings_end_completions_and_are_their_last_tokens(tmp_path):
    samples = {}
    for name, stop in (("plain", None), ("stopped", [" 7 ", " 1"])):
        output = tmp_path / name
        settings = dict(rl=dict(save_rollouts=True, stop_strings=stop), train=dict(train_iters=1))
        settings["train"]["output_dir"] = str(output)
        train_grpo(configuration(tmp_path, **settings))
        (file,) = contents(output).values()
        samples[name] = [one for group in file for one in group.get("samples", [])]
    ended = 0
    for one, other in zip(samples["stopped"], samples["plain"], strict=True):
        ids = other["completion_ids"]
        texts = [" ".join(map(str, ids[:count])) for count in range(len(ids) + 1)]
        stopped = [count for count, text in enumerate(texts) if " 7 " in text or " 1" in text]
        count = min(stopped, default=len(ids))
        ended += count < len(ids)
        assert one["completion_ids"] == ids[:count] and len(one["logprobs"]) == count
        assert one["truncated"] == (other["truncated"] and not stopped)
    assert ended >= 2


def test_a_run_from_its_own_rollouts_has_its_losses(tmp_path):
    train_grpo(
        configuration(tmp_path, rl=PHASES, train=dict(train_iters=8, output_dir=str(tmp_path / "live")))
    )
    files = sorted(map(str, (tmp_path / "live" / "rollouts").iterdir()))
    again = {"rollouts": files, "num_generations": 4, "max_completion_length": 8}
    again |= {name: value for name, value in PHASES.items() if name != "save_rollouts"}
    sections = tree(tmp_path, train=dict(train_iters=8, output_dir=str(tmp_path / "replay"))) | {"rl": again}
    train_grpo(RunConfig.from_tree(sections))
    assert losses(tmp_path / "live") == losses(tmp_path / "replay")


class Killed(BaseException):
    """Takes the place of SIGKILL: nothing catches it."""


KILLS = {  # where, and in which of its calls
    "after the sync": (RolloutSampler, "sample_batch", 2),
    "between generation and rewards": (Rewards, "__call__", 8),  # behind two evaluations
    "after a rollout file": (LiveRollouts, "_save", 2),
    "in training": (PolicyTask, "step_metrics", 7),
    "in a save": (StepFolder, "commit", 2),
}


def run_in_phases(prompts: Path, folder: Path, **held_out) -> None:
    """Train eight steps into `folder`, or go on there, on the prompts in the folder `prompts`."""
    sections = tree(
        prompts,
        rl=PHASES | dict(num_iterations=1) | held_out,
        train=dict(train_iters=8, output_dir=str(folder), eval_interval=1),
    )
    sections["checkpoint"] = dict(save_interval=2) | ({"load": str(folder)} if folder.exists() else {})
    train_grpo(RunConfig.from_tree(sections))


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory) -> Path:
    """Train without being killed; return the folder of the run, which lies in the folder of the prompts."""
    folder = tmp_path_factory.mktemp("never_killed") / "whole"
    run_in_phases(folder.parent, folder)
    return folder


@pytest.mark.parametrize("moment", by_default(KILLS, "after a rollout file"))
def test_a_run_killed_in_any_phase_goes_on_with_the_same_rollouts(
    never_killed, tmp_path, monkeypatch, moment
):
    """Also where the one that is killed evaluates after each step, and the other never does."""
    prompts, cut = never_killed.parent, tmp_path / "cut"
    held_out = HELD_OUT | dict(eval_prompts=str(prompts / "prompts.jsonl"))
    owner, method, call = KILLS[moment]
    real, calls = getattr(owner, method), []

    def dies(*args, **more):
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return real(*args, **more)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, method, dies)
        run_in_phases(prompts, cut, **held_out)
    run_in_phases(prompts, cut, **held_out)
    assert contents(cut) == contents(never_killed)
    assert losses(cut) == losses(never_killed)


@pytest.mark.parametrize("old", by_default(["rollout", "policy"], "policy"))
def test_a_run_that_stopped_inside_of_a_rollout_batch_goes_on_with_it(tmp_path, old):
    """And with the old policy's log-probabilities, which its weights no longer give."""
    rl = dict(mini_batches=2, num_iterations=2, old_logprobs=old, packing=True)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, train_ in ((whole, {}), (cut, dict(exit_interval=6)), (cut, {})):
        sections = tree(tmp_path, rl=rl, train=dict(train_iters=8, output_dir=str(folder)) | train_)
        sections["checkpoint"] = {"load": str(folder)} if folder.exists() else {}
        train_grpo(RunConfig.from_tree(sections))
    assert losses(cut) == losses(whole)


def test_groups_without_spread_are_asked_again_and_the_position_is_kept(tmp_path):
    def rare(completions, completion_ids, **columns):
        return [float(ids[0] == 3) for ids in completion_ids]

    rl = dict(filter_zero_std=True, max_resamples=3)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, train_ in ((whole, {}), (cut, dict(exit_interval=2)), (cut, {})):
        sections = tree(tmp_path, rl=rl, train=dict(train_iters=4, output_dir=str(folder)) | train_)
        sections["checkpoint"] = {"load": str(folder)} if folder.exists() else {}
        train_grpo(RunConfig.from_tree(sections), rare)
    found = metrics(whole)
    assert found[-1]["prompts_consumed"] == sum(step["prompts_asked"] for step in found) > 2 * len(found)
    assert losses(cut) == losses(whole)


def test_what_a_user_sees(tmp_path, capsys, monkeypatch):
    """Where figures are read at the end of the log interval too, as on a GPU."""
    real = Report.__init__

    def reads_late(self, *args, **given):
        real(self, *args, **given)
        self._interval = self._config.log.log_interval

    monkeypatch.setattr(Report, "__init__", reads_late)
    (tmp_path / "own.py").write_text(
        "def shout(completions, log_extra, log_metric, **columns):\n"
        "    log_metric('mean_words', 2.0)\n"
        "    log_extra('loud', [c.upper() for c in completions])\n"
        "    log_metric('loss', 7.0), log_metric('time_training', 7.0)\n"
        "    log_extra('completion', [''] * len(completions))\n"
        "    return [float(len(c)) for c in completions]\n"
        "def silent(completions, **columns):\n"
        "    return [None] * len(completions)\n"
    )
    write_prompts(tmp_path)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    again = [line.replace('"q5', '"q4') for line in lines]
    (tmp_path / "prompts.jsonl").write_text("".join(again))
    own = [f"{tmp_path}/own.py:{name}" for name in ("shout", "silent")]
    rl = dict(reward_funcs=["length", *own], reward_weights=[1.0, 0.1, 1.0], log_completions=True)
    result = megalith.grpo(configuration(tmp_path, rl=rl, train=dict(train_iters=3)))
    out, found = capsys.readouterr().out, metrics(tmp_path / "run")[1]
    assert re.findall(r"^step (\d+) \| reward ", out, re.MULTILINE) == ["1", "2", "3"]
    for words in (
        "rewards: length, shout, silent",
        "note: 11 prompts have the id of an earlier one, so logs and files cannot tell them apart: 'q4' of ",
        "prompts.jsonl, line 6 is also in ",
        "prompts.jsonl, line 5; 'q40' of ",
        "a reward logs the metric loss, but the run has a metric of that name, so the metric of the reward is ",
        "the metric of the reward is logged as reward/loss",
        "step 1: the reward silent is None or NaN for all 8 completions and has no effect; correct",
        "step 2: the reward silent is None or NaN for all 8 completions (2 rollout batches in a row) and has no effect",
        "| drift 1.00000",
        "generation ",
        "tok/s/GPU",
        "prompt q",
    ):
        assert words in out, words
    names = (
        "rewards_mean groups_without_spread entropy clip_high mismatch drift_k3 drift_largest drift_above_1"
    )
    for name in [
        *names.split(),
        "drift_canary",
        "time_generation",
        "time_rewards",
        "time_training",
        "mean_words",
    ]:
        assert isinstance(found[name], float), name
    assert found["mismatch"] < 1.0001 and found["ratio"] == 1.0
    assert found["reward/loss"] == found["reward/time_training"] == 7.0 != found["loss"]
    assert (
        found["time_training"] != 7.0 and out.count("the metric of the reward is logged as reward/loss") == 1
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert all(line["completion"] and line["reward/completion"] == "" for line in lines)
    assert len(lines) == 24 and lines[-1]["step"] == 3 and lines[0]["loud"] == lines[0]["loud"].upper()
    manifest = json.loads((Path(result.checkpoint) / "manifest.json").read_text())
    assert manifest["counters"] == {"prompts": 6, "engine_version": 2}


def test_an_evaluation_judges_what_the_weights_of_then_answer(tmp_path, capsys):
    """Greedily, against passes of the loaded model; at an interval, after the last step, and without training."""
    (tmp_path / "held_out").mkdir()
    path = write_prompts(tmp_path / "held_out", count=6, seed=1)
    rl = dict(eval_prompts=str(path), num_generations_eval=1, eval_temperature=0.0)
    config = configuration(tmp_path, rl=rl, train=dict(train_iters=4, eval_interval=3))
    result, lengths = megalith.grpo(config), []
    model = megalith.load(str(tmp_path / "run"))
    for line in path.read_text().splitlines():
        ids, answer = [int(word) for word in json.loads(line)["prompt"].split()], []
        while len(answer) < 8 and answer[-1:] != [VOCAB - 1]:
            answer.append(model(torch.tensor([ids + answer]))[0, -1].argmax().item())
        lengths.append(len(answer))
    text = (tmp_path / "run" / "evaluations.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert [one["step"] for one in found] == [3, 4] and found[-1]["validation_loss"] is None
    assert (
        found[-1]["validation_completion_length"]
        == np.mean(lengths)
        == result.validation_figures["completion_length"]
    )
    assert found[-1]["validation_rewards_mean"] == pytest.approx(1 - np.mean(lengths) / 8)
    out = capsys.readouterr().out
    assert "validation at iteration 4 | rewards_mean: " in out and "6 held-out prompts" in out
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*"))
    again = megalith.grpo(
        config.with_settings({"train.skip_train": True, "checkpoint.load": str(tmp_path / "run")})
    )
    assert again.validation_figures["rewards_mean"] == found[-1]["validation_rewards_mean"]
    assert before == sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*"))


def test_a_reward_that_fails_ends_the_run_on_every_rank(pool, tmp_path):
    (tmp_path / "own.py").write_text(
        "def bad(completions, **columns):\n    return [1 / 0 for c in completions]\n"
    )
    write_prompts(tmp_path)
    found = pool.run(_failing, str(tmp_path), size=2)
    assert all("it raised ZeroDivisionError" in said and "completion 0" in said for said in found)


def _failing(folder: str) -> str:
    run = run_of(
        configuration(Path(folder), rl=dict(reward_funcs=f"{folder}/own.py:bad", reward_workers=0)), 2
    )
    with pytest.raises(DataError) as raised:
        run.data.step(0)
    run.task.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("rl", "said"),
    [
        (dict(reward_funcs=None), "neither rl.reward_funcs nor rl.reward_models is"),
        (dict(top_p=0.9), "rl.top_p is 0.9"),
        (dict(top_k=5), "rl.top_k is 5"),
        (dict(min_p=0.1), "rl.min_p is 0.1"),
        (
            dict(repetition_penalty=1.1),
            "rl.repetition_penalty is 1.1, but the trainer's probabilities have no penal",
        ),
        (dict(presence_penalty=0.1), "rl.presence_penalty is 0.1"),
        (dict(frequency_penalty=0.1), "rl.frequency_penalty is 0.1"),
        (dict(stop_strings=["a", ""]), r"rl\.stop_strings has an empty string"),
        (
            dict(stop_strings="a", engine="sglang"),
            r"rl\.engine is sglang, but stop strings are supported only by Megalith's engine,",
        ),
        (dict(rollouts="r.jsonl"), "leave one of the two out"),
        (dict(reward_weights=[1.0, 2.0]), "2 weights for 1 reward_funcs"),
        (dict(max_completion_length=25), "max_completion_length 25 leaves no room for a prompt"),
        (dict(max_prompt_length=20), "together exceed"),
        (
            dict(num_generations=1),
            (
                r"rl\.num_generations is 1, but an advantage compares a completion with the prompt's "
                "other completions,"
            ),
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, rl, said):
    with pytest.raises(ConfigError, match=said):
        train_grpo(configuration(tmp_path, rl=rl))


def test_the_trainer_with_trls_signature(tmp_path):
    train(RunConfig.from_tree(tree(tmp_path, model=MODEL, train=dict(train_iters=1)) | {"rl": {}}
                              | {"data": dict(mock=True, seq_length=24, tokenizer_type="NullTokenizer")}))  # fmt: skip

    def reward(prompts, completions, answer, **more):
        return [float(str(number) in text.split()) for number, text in zip(answer, completions)]

    args = dict(max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
                max_completion_length=8, max_prompt_length=16, learning_rate=1e-3, output_dir=str(tmp_path / "trl"),
                logging_steps=1, beta=0.0, loss_type="grpo")  # fmt: skip
    records = [{"prompt": "1 2 3", "answer": 3}, {"prompt": "4 5 6", "answer": 6}]
    settings = {"data.tokenizer_type": "NullTokenizer", "runtime.device": "cpu", "runtime.compile": False}
    args |= dict(eval_strategy="steps", eval_steps=1, num_generations_eval=2)
    trainer = GRPOTrainer(str(tmp_path / "run"), reward, args, records, records[:1], settings=settings)
    result = trainer.train()
    assert result.step == 2 and 0 <= result.validation_figures["accuracy"] <= 1
    said = (tmp_path / "trl" / "evaluations.jsonl").read_text().splitlines()
    assert len(said) == 2 and json.loads(said[0])["validation_prompts"] == 1
    steps = metrics(tmp_path / "trl")
    assert steps[-1]["global_batch_size"] == 8 and np.isfinite(steps[-1]["rewards_mean"])
    for given, said in (
        (dict(args=dict(learning_rat=1)), "no argument 'learning_rat'; did you mean"),
        (dict(processing_class="x"), "takes no processing_class: the tokenizer is that of the weights"),
        (dict(callbacks=[1]), "takes no callbacks; omit it"),
        (
            dict(peft_config=dict(r=2, target_modules=["q_proj"], bias="all")),
            "bias 'all', but only plain LoRA",
        ),
        (dict(peft_config=dict(r=2)), "has no target_modules"),
    ):
        with pytest.raises(ConfigError, match=said):
            GRPOTrainer(str(tmp_path / "run"), reward, train_dataset=records, **given)
    peft = SimpleNamespace(
        r=4, lora_alpha=2, use_rslora=True, target_modules={"v_proj", "q_proj"}, bias="none"
    )
    args |= dict(output_dir=str(tmp_path / "lora"), max_steps=1, reward_weights=[1.0, 0.5])
    both = [reward, "length"]
    trainer = GRPOTrainer(
        str(tmp_path / "run"), both, args, iter(records), peft_config=peft, settings=settings
    )
    lora = trainer.config.lora
    assert (lora.rank, lora.alpha, lora.use_rslora) == (4, 2, True) and lora.targets == ["q_proj", "v_proj"]
    assert trainer.train().step == 1 and (tmp_path / "lora" / "checkpoints").is_dir()
    args |= dict(output_dir=str(tmp_path / "short"), reward_weights=None)
    for args["max_prompt_length"] in (None, 512):  # TRL's default, beyond the 25 positions of the model
        trainer = GRPOTrainer(str(tmp_path / "run"), reward, args, records, settings=settings)
        assert trainer.config.data.seq_length == 25
    assert trainer.train().step == 1
    args["output_dir"] = str(tmp_path / "long")
    long = [{"prompt": " ".join(["1"] * 18), "answer": 1}]
    with pytest.raises(DataError, match="a prompt of 18 tokens, but at most 17 fit"):
        GRPOTrainer(str(tmp_path / "run"), reward, args, long, settings=settings).train()


def test_the_trainer_with_trls_signature_on_conversations_of_a_run_with_its_own_tokenizer(tmp_path):
    """Prompts and completions have TRL's shape; tokenizer and chat template are the checkpoint's."""
    text = [{"text": "What is one plus two? It is three."}] * 4
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))
    made = ["tokenizer", "train", "--input", str(tmp_path / "text.jsonl"), "--vocab-size", "300"]
    assert main([*made, "--output", str(tmp_path / "tokenizer")]) == 0
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    data = dict(mock=True, seq_length=24, tokenizer_type="HuggingFaceTokenizer",
                tokenizer_model=str(tmp_path / "tokenizer"))  # fmt: skip
    model = MODEL | dict(vocab_size=None, make_vocab_size_divisible_by=128)
    train(
        RunConfig.from_tree(tree(tmp_path, model=model, train=dict(train_iters=1)) | {"rl": {}, "data": data})
    )

    def reward(prompts, completions, answer, log_extra, **more):
        assert prompts == [[{"role": "user", "content": f"one plus {answer[0]}"}]] * 4
        assert [[message["role"] for message in one] for one in completions] == [["assistant"]] * 4
        return [float(len(one[0]["content"])) for one in completions]

    records = [{"prompt": [{"role": "user", "content": f"one plus {n}"}], "answer": n} for n in range(4)]
    args = dict(max_steps=1, per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
                max_prompt_length=16, output_dir=str(tmp_path / "trl"))  # fmt: skip
    settings = {"runtime.device": "cpu", "runtime.compile": False}
    trained = GRPOTrainer(str(tmp_path / "run"), reward, args, records, settings=settings).train()
    assert trained.step == 1


def test_rollout_and_dry_run_from_the_command_line(tmp_path, capsys, monkeypatch):
    sizes, real = {}, rollout_command.engine_for
    monkeypatch.setattr(
        rollout_command, "engine_for", lambda model, **given: sizes.update(given) or real(model, **given)
    )
    config = configuration(tmp_path, train=dict(train_iters=1), rl=dict(save_rollouts=True))
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert main(["grpo", str(tmp_path / "run.yaml"), "--dry-run", "--world-size", "2"]) == 0
    assert "layout: 2 ranks" in capsys.readouterr().out
    assert main(["grpo", str(tmp_path / "run.yaml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for words in (
        "64 of 3 to 3 tokens; 0 dropped",
        "reward         length of",
        "2 prompts × 4 completions",
        "8 rows of 16 tokens on a rank",
        "memory",
    ):
        assert words in out, words
    assert not (tmp_path / "run").exists()
    train_grpo(config)
    command = [
        "rollout",
        str(tmp_path / "run"),
        str(tmp_path / "prompts.jsonl"),
        "--reward",
        "length",
        "--limit",
        "6",
    ]
    options = ["--num-generations", "4", "--max-completion-length", "8", "--pass-at", "0.5", "--json"]
    assert main([*command, *options, "--output", "r.jsonl", "--device", "cpu"]) == 0
    assert sizes == {
        "max_rows": 24,
        "max_tokens": 11,
        "speculation": None,
    }  # and not of all positions that the model has
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    groups = load_rollouts("r.jsonl").groups
    passed = [sum(one.rewards[0] >= 0.5 for one in group.completions) for group in groups]
    assert figures["pass@1"] == pytest.approx(np.mean(passed) / 4) and figures["prompts"] == len(groups) == 6
    assert figures["pass@4"] == np.mean([count > 0 for count in passed]) and "pass@8" not in figures
    penalized = [*command, *options, "--output", "r.jsonl", "--presence-penalty", "0.5", "--device", "cpu"]
    assert main(penalized) != 0
    assert "the trainer computes probabilities without penalties" in capsys.readouterr().err


def test_the_engine_has_room_for_what_is_sampled_and_not_for_the_trainers_rows(tmp_path):
    """A row of the trainer packs many completions; a replica of several samples its share."""
    config = configuration(tmp_path, rl=dict(packing=True), train=dict(global_batch_size=64))
    prompts = run_prompts(config, NullTokenizer(vocab_size=16)).prompts
    assert [engine_sizes(config, prompts, replicas) for replicas in (1, 3, 64)] == [
        (64, 16),
        (24, 16),
        (4, 16),
    ]
    few = configuration(
        tmp_path, rl=dict(generation_rows=6, max_completion_length=22), data=dict(seq_length=24)
    )
    assert engine_sizes(few, prompts, 1) == (6, 25)


@pytest.mark.parametrize("rl", [{}, dict(beta=0.1, mini_batches=2)])
def test_a_model_with_more_rows_than_its_tokenizer_has_entries(tmp_path, rl):
    """The engine chooses among the tokenizer's, and so do the trainer's log-probabilities: of even logits over 400 rows
    and over 257 they would differ by 0.44."""
    train_grpo(
        configuration(
            tmp_path,
            model=dict(vocab_size=400, init_method_std=0.02),
            data=dict(tokenizer_type="ByteTokenizer"),
            rl=rl,
        )
    )
    assert all(step["mismatch"] < 1.0001 and step["ratio"] < 1.1 for step in metrics(tmp_path / "run"))


def test_rollout_files_carry_the_prompts_ids(tmp_path):
    train_grpo(configuration(tmp_path, rl=dict(save_rollouts=True), train=dict(train_iters=1)))
    found = load_rollouts(tmp_path / "run" / "rollouts" / "batch_00000000.jsonl.zst")
    assert all(str(group.id).startswith("q") for group in found.groups) and found.rewards == ["length"]

"""Reward models and KTO: TRL's and transformers' values, in every layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from default_cases import in_full
from models.reference import CASES, random_parameters
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from tuning_runs import VOCAB, config_of, token_pairs, tuning_tree

import megalith
from megalith.bridge.adapters.adapter_folder import export_adapters
from megalith.bridge.exporter import export_hf
from megalith.config import RunConfig
from megalith.errors import ConfigError, DataError
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, gradients_by_name, run_job, start
from megalith.rl.dpo import PreferenceTask
from megalith.rl.kto import KtoTask
from megalith.rl.reward_model import RewardTask, train_reward

SEQ = 32
TASKS = {"dpo": PreferenceTask, "kto": KtoTask, "reward": RewardTask}


def records(count: int) -> list[dict]:
    """Pairs with margins."""
    return [pair | {"margin": 0.25 * (k % 3)} for k, pair in enumerate(token_pairs(count, least=1))]


def answers(count: int) -> list[dict]:
    """Answers with labels, made of the pairs."""
    pairs = records(count)
    return [
        {"prompt_ids": one["prompt_ids"], "completion_ids": one["rejected_ids" if k % 3 else "chosen_ids"],
         "label": k % 3 == 0}
        for k, one in enumerate(pairs)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run of two steps from a tiny Llama of transformers, over 16 records of tokens."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers(16)))
    return tuning_tree(folder, {"train_data_path": records(16)}, seq=SEQ, micro=2, batch=4)


def reward_config(tree: dict, **sections) -> RunConfig:
    return config_of(tree, reward={"enabled": True} | sections.pop("reward", {}), **sections)


def kto_config(tree: dict, **sections) -> RunConfig:
    data = {
        "train_data_path": tree["data"]["train_data_path"].replace("train_data_path.jsonl", "answers.jsonl")
    }
    kto = {"enabled": True, "desirable_weight": 1.5, "undesirable_weight": 0.7} | sections.pop("kto", {})
    return config_of(tree, kto=kto, data=data | sections.pop("data", {}), **sections)


KINDS = {  # function that makes the configuration, and settings of its section
    "reward": (reward_config, {}),
    "kto": (kto_config, {}),
    "bco": (kto_config, {"loss_type": "bco"}),
    "aot": (config_of, {"enabled": True, "loss_type": ["aot", "aot_unpaired"], "beta": 1.0}),
}


def job(config: RunConfig) -> Outcome:
    return run_job(config, task=TASKS[config.chat.name]())


PP2 = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}  # of 3 layers
LAYOUT_NAMES = ("tp2-sp", "pp2", "cp2", "tp2", "dp2-zero2", "dp2-zero3")
GRID = [(kind, layout) for kind in ("reward", "kto", "bco", "aot") for layout in LAYOUT_NAMES]


# Packing takes context parallelism, as documents do.
@pytest.mark.parametrize(
    "cases",
    [[("reward", "tp2-sp"), ("kto", "pp2"), ("bco", "dp2-zero2"), ("aot", "dp2-zero2")], in_full(GRID)],
    ids=["some", "all"],
)
def test_every_layout_equals_one_process(pool, tree: dict, cases: list[tuple[str, str]]):
    ones, jobs = {}, {}
    for kind, layout in cases:
        make, settings = KINDS[kind]
        section = {
            "kto" if kind == "bco" else "dpo" if kind == "aot" else kind: settings
            | {"packing": layout == "cp2"}
        }
        if (kind, layout == "cp2") not in ones:
            ones[kind, layout == "cp2"] = job(make(tree, **section))
        parallel = PP2 if layout == "pp2" else LAYOUTS[layout].parallel
        jobs[f"{kind} {layout}"] = (make(tree, parallel=parallel, **section),)
    for name, ranks in pool.run_cases(job, jobs, size=2).items():
        kind, _, layout = name.partition(" ")
        errors = compare(ranks, ones[kind, layout == "cp2"])
        assert errors.within(), (name, errors)
    assert "score.weight" in ones["reward", False].gradients
    assert ones["kto", False].losses[0] != pytest.approx(ones["kto", False].losses[-1], rel=1e-6)


def hf_scores(model, pairs: list[dict], side: str) -> torch.Tensor:
    sequences = [one["prompt_ids"] + one[side] for one in pairs]
    return torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids in sequences])


def reward_step(config: RunConfig):
    run = start(config, RewardTask())
    with run.data.train_loader(0, 0, run.device) as batches:
        loss = run.gradients([next(batches) for _ in range(run.batch_sizes.micro_batches(0))])
    return run, loss.item()


def test_pairs_have_trls_loss_and_gradients_through_transformers_model(tree: dict, tmp_path: Path):
    """RewardTrainer.compute_loss of TRL 1.16.0, with margins and centred rewards."""
    hf_config = CASES["llama"][0]()
    hf_config.num_labels, hf_config.pad_token_id = 1, 0
    torch.manual_seed(1)
    theirs = random_parameters(transformers.AutoModelForSequenceClassification.from_config(hf_config))
    theirs.save_pretrained(tmp_path / "hf")
    run, loss = reward_step(
        reward_config(
            tree | {"model": {**tree["model"], "init_from": str(tmp_path / "hf")}},
            reward={"center_rewards_coefficient": 0.05},
            train={"global_batch_size": 16},
        )
    )
    pairs = records(16)
    chosen, rejected = (hf_scores(theirs, pairs, side) for side in ("chosen_ids", "rejected_ids"))
    margins = torch.tensor([one["margin"] for one in pairs])
    expected = -logsigmoid(chosen - rejected - margins).mean() + 0.05 * torch.mean((chosen + rejected) ** 2)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    gradients = gradients_by_name(run)
    for ours, name in (("score.weight", "score.weight"), ("final_layernorm.weight", "model.norm.weight"),
                       ("layers.0.mlp.linear_fc2.weight", "model.layers.0.mlp.down_proj.weight")):  # fmt: skip
        reference = dict(theirs.named_parameters())[name].grad
        error = (gradients[ours] - reference).norm() / reference.norm()
        assert error < 1e-4, (ours, error)
    figures = run.task.step_metrics(run)()
    assert figures["accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert figures["margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-4)


@pytest.mark.parametrize("name", ["qwen2, tied", *map(in_full, ("llama", "gpt2", "mixtral", "gemma3"))])
def test_a_reward_model_of_transformers_goes_in_and_out_bitwise(name: str, tmp_path: Path):
    from safetensors.torch import load_file

    from megalith.bridge.importer import import_hf

    hf_config = CASES[name][0]()
    hf_config.num_labels, hf_config.pad_token_id = 1, 0
    theirs = random_parameters(transformers.AutoModelForSequenceClassification.from_config(hf_config))
    theirs.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run", show_progress=False)
    export_hf(tmp_path / "run", tmp_path / "out", show_progress=False)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    texts = [(tmp_path / folder / "config.json").read_text() for folder in ("hf", "out")]
    assert json.loads(texts[0]) == json.loads(texts[1])
    ids = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids).logits
        scores = megalith.load(tmp_path / "run")(ids)[:, -1]
    assert (scores - expected).abs().max() <= 1e-5 * expected.abs().max()


def kto_step(config: RunConfig, scale: float = 0.9):
    """Loss, gradients and metrics of a step, by another reference than the policy."""
    run = start(config, KtoTask())
    with torch.no_grad():
        for _, plain in run.model.parameters.named:
            plain.mul_(scale)
    with run.data.train_loader(0, 0, run.device) as batches:
        loss = run.gradients([next(batches) for _ in range(run.batch_sizes.micro_batches(0))])
    return run, loss.item(), gradients_by_name(run), run.task.step_metrics(run)()


def log_prob(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + answer])
    logprobs = torch.log_softmax(model(ids).logits.double()[0, :-1], -1)
    return logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


@pytest.mark.parametrize("loss_type", ["kto", in_full("apo_zero_unpaired"), "bco"])
def test_marked_answers_have_trls_loss_and_gradients_through_transformers_model(tree: dict, loss_type: str):
    """KTOTrainer._compute_loss of TRL 1.16.0, whose dataset rotates completions by one for the KL estimate, and
    BCOTrainer.bco_loss of TRL 0.24.0, whose running mean has the rewards of the first step."""
    config = kto_config(tree, kto={"loss_type": loss_type}, train={"global_batch_size": 16})
    _, loss, gradients, figures = kto_step(config)
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(tree["model"]["init_from"]) for _ in range(2)
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.9)
    rows, beta = answers(16), 0.1
    ratios, kls = [], []
    for i, row in enumerate(rows):
        prompt, mismatched = row["prompt_ids"], rows[i - 1]["completion_ids"][: SEQ - len(row["prompt_ids"])]
        with torch.no_grad():
            base = log_prob(reference, prompt, row["completion_ids"])
            kls.append(log_prob(policy, prompt, mismatched) - log_prob(reference, prompt, mismatched))
        ratios.append(log_prob(policy, prompt, row["completion_ids"]) - base)
    kl = {
        "kto": torch.stack(kls).mean().clamp(min=0),
        "apo_zero_unpaired": torch.zeros(()),
        "bco": torch.stack(ratios).mean().detach(),
    }[loss_type]

    def term(logit: torch.Tensor) -> torch.Tensor:
        return -logsigmoid(logit) if loss_type == "bco" else 1 - torch.sigmoid(logit)

    losses = [
        1.5 * term(beta * (ratio - kl)) if row["label"] else 0.7 * term(beta * (kl - ratio))
        for row, ratio in zip(rows, ratios)
    ]
    expected = torch.stack(losses).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    shift = figures["delta"] / beta if loss_type == "bco" else figures["kl"]
    assert shift == pytest.approx(kl.item(), rel=1e-3) and (kl > 0.005) == (loss_type != "apo_zero_unpaired")
    chosen = [beta * ratio.item() for row, ratio in zip(rows, ratios) if row["label"]]
    assert figures["rewards/chosen"] == pytest.approx(np.mean(chosen), rel=1e-4)
    for ours, name in (("output_layer.weight", "lm_head.weight"), ("final_layernorm.weight", "model.norm.weight"),
                       ("layers.0.mlp.linear_fc2.weight", "model.layers.0.mlp.down_proj.weight")):  # fmt: skip
        grad = dict(policy.named_parameters())[name].grad
        error = (gradients[ours] - grad).norm() / grad.norm()
        assert error < 1e-4, (ours, error)


def test_the_shift_of_bco_is_the_mean_over_all_steps_also_after_resuming(tree: dict, tmp_path: Path):
    """RunningMoments.mean of TRL 0.24.0."""
    kto = {"enabled": True, "loss_type": "bco", "beta": 0.5}
    optim = {"lr": 0.02, "lr_decay_style": "constant"}
    for steps in (2, 4):  # the second run resumes
        train = {"output_dir": str(tmp_path), "train_iters": steps}
        load = {"load": str(tmp_path)} if steps == 4 else {}
        megalith.rl.train_kto(kto_config(tree, kto=kto, optim=optim, train=train, checkpoint=load))
    whole = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(whole) == 4
    means = [
        one["desirable"] * one["rewards/chosen"] + (1 - one["desirable"]) * one["rewards/rejected"]
        for one in whole
    ]
    for step, one in enumerate(whole):
        assert one["delta"] == pytest.approx(np.mean(means[: step + 1]), rel=1e-5, abs=1e-7)
    assert abs(means[-1] - np.mean(means)) > 1e-3


def test_graded_pairs_have_the_loss_of_ordinal_feedback(tree: dict, tmp_path: Path):
    """Equation 4 of Liu et al. 2024: the cross-entropy of σ(s_chosen − s_rejected) with the grade, and its gradient."""
    grades = [0.0, 0.25, 0.5, 1.0]
    rows = [
        {key: value for key, value in one.items() if key != "margin"} | {"preference": grade}
        for one, grade in zip(records(4), grades)
    ]
    del rows[3]["preference"]  # the default
    data = written(tmp_path / "graded.jsonl", *rows)
    config = reward_config(tree, reward={"loss_type": "ordinal"}, data=data)
    run = start(config, RewardTask())
    with run.data.train_loader(0, 0, run.device) as batches:
        steps = [next(batches) for _ in range(2)]
    loss, scores, total = run.task.loss, [], 0.0
    for batch in steps:
        outputs = run.model.all_logprobs([batch])[0].double().requires_grad_()
        total += loss(outputs, None, batch)
        scores.append((outputs, batch))
    pairs = torch.cat([outputs[batch.loss_mask > 0].view(-1, 2) for outputs, batch in scores]).double()
    by_answer = {(*one["prompt_ids"], *one["chosen_ids"]): grade for one, grade in zip(rows, grades)}
    chosen = [(batch.input_ids[row], batch.loss_mask[row]) for _, batch in scores for row in (0, 2)]
    seen = torch.tensor([by_answer[tuple(ids[: ends.nonzero()[-1] + 1].tolist())] for ids, ends in chosen])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        pairs[:, 0] - pairs[:, 1], seen.double(), reduction="sum"
    )
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    leaves = [outputs for outputs, _ in scores]
    for mine, theirs in zip(
        torch.autograd.grad(total, leaves, retain_graph=True), torch.autograd.grad(expected, leaves)
    ):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-9)
    bad = written(tmp_path / "bad.jsonl", rows[0] | {"preference": 2})
    with pytest.raises(DataError, match="its preference is 2, but must be a number from 0"):
        start(reward_config(tree, reward={"loss_type": "ordinal"}, data=bad), RewardTask())


def test_adapters_of_a_reward_model_go_to_peft_with_its_score_and_back(tree: dict, tmp_path: Path):
    """transformers' model with PEFT's formula, W + alpha / r · B · A, has the scores of the trained run."""
    lora = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "linear_fc2"]}
    train = {"output_dir": str(tmp_path / "run")}
    config = reward_config(tree, lora=lora, optim={"lr": 0.05}, train=train)
    train_reward(config)
    export_adapters(tmp_path / "run", tmp_path / "peft", show_progress=False)
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tree["model"]["init_from"], num_labels=1, pad_token_id=0
    )
    weights = theirs.state_dict()
    with torch.no_grad():
        weights["score.weight"].copy_(stored.pop("base_model.model.score.weight"))
        for name in [name for name in stored if ".lora_A." in name]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += 2.0 * stored[name.replace("lora_A", "lora_B")] @ stored[name]
    assert len(stored) == 2 * 2 * 3  # A and B of two matrices in three layers
    again = {"lora": {"load": str(tmp_path / "peft")}, "train": {"output_dir": str(tmp_path / "again")}}
    run = start(reward_config(tree, **again), RewardTask())
    with run.data.train_loader(0, 0, run.device) as batches:
        batch = next(batches)
    scores = run.model.all_logprobs([batch])[0][batch.loss_mask > 0]
    with torch.no_grad():
        rows = [(batch.input_ids[row], ends.nonzero()[-1, 0]) for row, ends in enumerate(batch.loss_mask)]
        expected = torch.stack([theirs(ids[None, : end + 1]).logits[0, 0] for ids, end in rows])
    assert torch.allclose(scores, expected, rtol=1e-5, atol=1e-5)
    assert scores.std() > 0.01


def written(path: Path, *rows: dict) -> dict:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train_data_path": str(path)}


def test_a_pair_is_two_marked_answers_and_mismatched_ones_are_of_other_records(tree: dict, tmp_path: Path):
    pairs = [
        {"prompt_ids": [k, k], "chosen_ids": [10 + k] * 2, "rejected_ids": [20 + k] * 3} for k in (1, 2, 3)
    ]
    config = kto_config(tree, data=written(tmp_path / "pairs.jsonl", *pairs))
    data = start(config, KtoTask()).data.train
    rows = [data[i] for i in range(len(data))]
    assert len(rows) == 6
    prompts = [row[0, 0, 0] for row in rows]
    labels = [row[0, 4, 0].view(np.float64) for row in rows]
    assert sorted(zip(prompts, labels)) == [(k, label) for k in (1, 2, 3) for label in (0.0, 1.0)]
    for row in rows:
        assert row[1, 0, 0] == row[0, 0, 0]  # the prompt's
        assert row[1, 0, 2] % 10 != row[0, 0, 2] % 10  # another record's answer


def test_a_pair_of_weight_two_counts_twice(tree: dict, tmp_path: Path):
    pairs = [{key: value for key, value in one.items() if key != "margin"} for one in records(4)]
    results = []
    for name, rows, size in (("weighted", [{**pairs[0], "weight": 2}, pairs[2]], 2),
                             ("repeated", [pairs[0], pairs[0], pairs[2]], 3)):  # fmt: skip
        data = written(tmp_path / f"{name}.jsonl", *rows)
        train = {"global_batch_size": size, "micro_batch_size": 1}
        run = start(config_of(tree, dpo={"enabled": True}, data=data, train=train), PreferenceTask())
        with torch.no_grad():
            for _, plain in run.model.parameters.named:
                plain.mul_(1.1)
        with run.data.train_loader(0, 0, run.device) as batches:
            results.append(run.gradients([next(batches) for _ in range(size)]).item())
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_labels_of_answers_and_steps_are_read_at_their_last_tokens(tree: dict, tmp_path: Path):
    rows = [{"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "label": 0.5},
            {"prompt_ids": [6], "completion_ids": [7], "label": -2}]  # fmt: skip
    config = reward_config(
        tree, reward={"loss_type": "mse"}, data=written(tmp_path / "a.jsonl", *rows),
        train={"global_batch_size": 2},
    )  # fmt: skip
    run, loss = reward_step(config)
    with run.data.train_loader(0, 0, run.device) as batches:
        batch = next(batches)
    at = batch.loss_mask > 0
    assert sorted(zip(batch.input_ids[at].tolist(), batch.values[at].tolist())) == [(5, 0.5), (7, -2.0)]
    scores = run.model.all_logprobs([batch])[0]
    assert loss == pytest.approx((scores[at] - batch.values[at]).square().mean().item(), rel=1e-5)
    with pytest.raises(DataError, match="bce needs labels from 0 to 1"):
        start(replace_loss(config, "bce"), RewardTask())


def replace_loss(config: RunConfig, name: str) -> RunConfig:
    return config.with_settings({"reward.loss_type": name})


def test_a_model_with_scores_trains_by_megalith_reward_alone(tree: dict, tmp_path: Path):
    with pytest.raises(ConfigError, match="only `megalith reward` trains"):
        start(config_of(tree, model={"score_head": True}))
    for task in ("kto", "reward"):
        with pytest.raises(ConfigError, match=f"{task}.enabled requires `megalith {task}`"):
            start(config_of(tree, **{task: {"enabled": True}}))
    bad = written(tmp_path / "bad.jsonl", {"prompt": "a", "completion": "b", "label": "good"})
    with pytest.raises(DataError, match="its label is 'good'; it must be true"):
        start(kto_config(tree, data=bad), KtoTask())


def test_a_reward_model_starts_from_a_run_and_goes_on_from_its_own(tree: dict, tmp_path: Path):
    """The language model's output matrix is left out, and the score has initial values; then all is as saved."""
    train = tree["train"] | {"train_iters": 1, "output_dir": str(tmp_path / "lm")}
    data = {"mock": True, "seq_length": SEQ, "num_workers": 0}
    language_model = RunConfig.from_tree(
        {"model": tree["model"], "data": data, "optim": tree["optim"], "train": train}
    )
    megalith.train(language_model)
    first = reward_config(
        tree, model={"init_from": str(tmp_path / "lm")},
        train={"train_iters": 1, "output_dir": str(tmp_path / "rm")},
    )  # fmt: skip
    weights = dict(start(first, RewardTask()).model.parameters.named)
    assert weights["score.weight"].abs().sum() > 0 and "output_layer.weight" not in weights
    trained = megalith.load(tmp_path / "lm").state_dict()
    assert torch.equal(weights["final_layernorm.weight"], trained["final_layernorm.weight"])
    train_reward(first)
    again = start(reward_config(tree, model={"init_from": str(tmp_path / "rm")}), RewardTask())
    saved = megalith.load(tmp_path / "rm").state_dict()
    for name, value in again.model.parameters.named:
        assert torch.equal(value, saved[name]), name

"""A teacher in GRPO: its advantages, loss and gradients are the published formula's, in every layout and from every
kind of teacher."""

import pytest
import torch
import transformers
from default_cases import in_full
from engine_stand_ins import SglangStandIn, VllmStandIn
from models.reference import LLAMA, random_reference
from rollout_files import configuration
from test_grpo_layouts import assert_same, outcome, run_of

from megalith.config import RunConfig
from megalith.config.rules.distill_rules import check_distillation
from megalith.errors import ConfigError
from megalith.parity.check import LAYOUTS

# Compared for three steps: see test_layouts_change_rloo_less_than_weights_that_differ_by_rounding.
RLOO = dict(teacher=None, loss_type="rloo", advantage_estimator="rloo", beta=0.2, use_kl_in_reward=True,
            whiten_advantages=True, reward_clip_range=[0.1, 1.5])  # fmt: skip
ONE_STEP = dict(vllm_importance_sampling_correction=False, log_entropy=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    """The policy and a teacher of another shape."""
    folder, made = tmp_path_factory.mktemp("teacher"), {}
    for name, more in (
        ("policy", {"num_hidden_layers": 2}),
        ("teacher", {"hidden_size": 96, "num_hidden_layers": 4}),
    ):
        made[name] = random_reference(transformers.LlamaConfig(**LLAMA | more))
        made[name].save_pretrained(folder / name)
    return made | {"folder": folder}


def teacher_run(models: dict, parallel=None, lora=None, **rl) -> RunConfig:
    folder = models["folder"]
    model = {"init_from": str(folder / "policy"), "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = configuration(
        folder, parallel, lora=lora, lr=1e-3, **{"teacher": str(folder / "teacher"), **ONE_STEP} | rl
    )
    tree = config.model_dump(exclude_unset=True)
    return RunConfig.from_tree(tree | {"model": model, "train": tree["train"] | {"train_iters": 3}})


def test_loss_and_gradients_are_the_published_formulas(models):
    plain, taught = run_of(teacher_run(models, teacher=None)), run_of(teacher_run(models, teacher_coef=0.5))
    taken = []
    for run in (plain, taught):
        with run.data.train_loader(0, 0, run.device) as batches:
            taken.append([next(batches) for _ in range(run.data.micro_batches(0))])
    loss = taught.gradients(taken[1]).item()
    policy, tokens = models["policy"], sum(batch.loss_mask.sum() for batch in taken[0])
    policy.zero_grad()
    gaps, expected = [], 0.0
    for without, batch in zip(*taken):
        mask = batch.loss_mask > 0
        with torch.no_grad():
            theirs = models["teacher"](batch.input_ids).logits.log_softmax(-1)
        theirs = theirs.gather(-1, batch.labels[..., None])[..., 0]
        gap = torch.where(mask, theirs - batch.rollout_logprobs, 0.0)
        advantages = without.advantages + 0.5 * gap
        torch.testing.assert_close(batch.advantages[mask], advantages[mask], rtol=1e-5, atol=1e-5)
        own = policy(batch.input_ids).logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
        ratio = (own - own.detach()).exp()
        term = -(ratio * advantages * mask).sum() / tokens
        term.backward()
        expected += term.item()
        gaps.append(gap[mask])
    assert loss == pytest.approx(expected, rel=1e-5)
    norm = torch.stack([x.grad.norm() for x in policy.parameters()]).norm().item()
    mine = torch.stack([plain.grad.norm() for _, plain in taught.model.parameters.named]).norm().item()
    assert mine == pytest.approx(norm, rel=1e-5)
    divergence = taught.task.step_metrics(taught)()["teacher_kl"]
    assert divergence == pytest.approx(-torch.cat(gaps).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    "layouts", [("tp2-sp",), in_full(("pp2", "cp2", "dp2", "rloo"))], ids=["some", "more"]
)
def test_every_layout_is_one_process(pool, models, layouts):
    more = {"mini_batches": 2, "packing": True}
    ones = {"": outcome(teacher_run(models, **more)), "rloo": outcome(teacher_run(models, **more | RLOO))}
    assert ones["rloo"]["figures"][0]["reward_kl"] == 0 != ones["rloo"]["figures"][-1]["reward_kl"]
    cases = {
        name: (teacher_run(models, LAYOUTS[name].parallel, **more),) for name in layouts if name != "rloo"
    }
    if "rloo" in layouts:
        cases["rloo"] = (teacher_run(models, LAYOUTS["dp2"].parallel, **more | RLOO),)
    for name, ranks in pool.run_cases(outcome, cases, size=2).items():
        assert_same(ranks[0], ones.get(name, ones[""]), name)


def losses(config: RunConfig, moved: float = 0.0) -> list[float]:
    """Return the losses of a run's steps from weights that are multiplied by 1 + `moved` · noise."""
    run, generator = run_of(config), torch.Generator().manual_seed(1)
    for _, parameter in run.model.parameters.named:
        parameter.data.mul_(1 + moved * torch.randn(parameter.shape, generator=generator))
    with run.data.train_loader(0, 0, run.device) as batches:
        return [run.train_step(batches).loss.item() for _ in range(run.total_steps)]


@pytest.mark.full
def test_layouts_change_rloo_less_than_weights_that_differ_by_rounding(pool, models):
    """Later steps of RLOO amplify rounding, because its loss nearly cancels."""
    longer = {"train.train_iters": 8}
    more = {"mini_batches": 2, "packing": True} | RLOO
    config = teacher_run(models, **more).with_settings(longer)
    one, moved = losses(config), losses(config, 1e-7)
    in_two = teacher_run(models, LAYOUTS["dp2"].parallel, **more).with_settings(longer)
    dp2 = pool.run(losses, in_two, size=2)[0]
    largest = max(map(abs, one))
    of_layout, of_rounding = (max(abs(a - b) for a, b in zip(one, each)) / largest for each in (dp2, moved))
    print(f"differences of the largest loss: DP2 {of_layout:.1e}, weights moved by 1e-7 {of_rounding:.1e}")
    assert 0 < of_layout < of_rounding


def test_adapters_off_and_servers_teach_like_a_folder(models):
    lora = {"rank": 2, "alpha": 8}
    initial = str(models["folder"] / "policy")
    one = outcome(teacher_run(models, lora=lora, teacher=initial))
    assert_same(outcome(teacher_run(models, lora=lora, teacher="without_adapters")), one, "adapters")
    one = outcome(teacher_run(models))
    for kind, stand_in in (("vllm", VllmStandIn), ("sglang", SglangStandIn)):
        server = stand_in(models["teacher"].config.to_dict())
        server.model.load_state_dict(models["teacher"].state_dict())
        try:
            url = f"http://127.0.0.1:{server._server.server_port}"
            assert_same(outcome(teacher_run(models, teacher=url, teacher_engine=kind)), one, kind)
        finally:
            server.close()


def test_settings_that_contradict_a_teacher_are_refused(models):
    for more, sentence in (
        (
            {"teacher": "http://h:1", "temperature": 0.5},
            r"rl\.temperature is 0\.5, but the server http://h:1",
        ),
        ({"teacher": "without_adapters"}, r"rl\.teacher is without_adapters, but the run trains no adapters"),
        ({"advantage_estimator": "gae"}, r"gae computes advantages from the critic's values"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_distillation(teacher_run(models, **more))

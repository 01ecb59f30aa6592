"""GRPO from one file of rollouts is one process's run in every layout; so is packing; on policy the ratio is 1."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from default_cases import by_default
from rollout_files import configuration

from megalith.config import RunConfig
from megalith.parallel.gather import global_tensors
from megalith.parallel.mesh import build_mesh
from megalith.parity.check import LAYOUTS, PP2, VIRTUAL
from megalith.parity.differences import BOUND, gradient_errors, relative_error
from megalith.rl.grpo import PolicyTask
from megalith.training.build import prepare
from megalith.training.resume import load_run
from megalith.training.run_state import Run

STEPS = 3


def run_of(config: RunConfig) -> Run:
    size = dist.get_world_size() if dist.is_initialized() else 1
    config, tokenizer, _ = prepare(config, size)
    mesh = build_mesh(config.parallel, size, "cpu", has_experts=config.model.num_experts is not None)
    run = Run(config, tokenizer, mesh, torch.device("cpu"), PolicyTask())
    load_run(run)
    return run


def gradients_of(run: Run) -> dict:
    shards = run.model.parameters.shards
    trained = [(name, plain) for name, plain in run.model.parameters.named if plain.requires_grad]
    own = {name: replace(shards[name], values=plain.grad) for name, plain in trained}
    return {name: x.gather() for name, x in global_tensors(own, run.mesh.world).items()}


def outcome(config: RunConfig) -> dict:
    """The first step's gradients, on rank 0, and of every step loss, norm and figures."""
    run = run_of(config)
    found = {"losses": [], "norms": [], "figures": [], "gradients": None}

    def before_update(loss, micro_batches):
        found["gradients"] = found["gradients"] or gradients_of(run)
        return loss

    with run.data.train_loader(0, 0, run.device) as batches:
        for _ in range(run.total_steps):
            step = run.train_step(batches, before_update)
            found["losses"].append(step.loss.item())
            found["norms"].append(step.grad_norm.item())
            found["figures"].append(step.extra_metrics())
    if run.mesh.world.rank:
        found["gradients"] = None
    return found


def outcomes(configs: list[RunConfig]) -> list[dict]:
    return [outcome(config) for config in configs]


def assert_same(found: dict, one: dict, what: object) -> None:
    # a policy's loss is a sum of advantages of both signs that may come to nothing: it is held by the run's largest
    of_losses = [abs(a - b) for a, b in zip(found["losses"], one["losses"], strict=True)]
    assert max(of_losses) < BOUND * max(map(abs, one["losses"])), what
    assert relative_error(found["norms"], one["norms"]) < BOUND, what
    if found["gradients"] is not None:
        assert max(gradient_errors(found["gradients"], one["gradients"]).values()) < BOUND, what
    for mine, theirs in zip(found["figures"], one["figures"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == (value and pytest.approx(value, rel=1e-5, abs=1e-6)), (what, name)


PART = dict(
    vllm_importance_sampling_mode="token_truncate"
)  # as much as the rollouts' log-probabilities are made up
OFF_POLICY = dict(
    mini_batches=2, num_iterations=2, beta=0.1, entropy_coef=0.01, temperature=0.8, loss_type="grpo"
)
SEQUENCE = dict(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, num_iterations=3,
                overlong_buffer_len=8, mask_truncated_completions=True, clip_ratio_c=3.0,
                entropy_coef=0.05)  # fmt: skip
SELECTED = dict(mini_batches=2, loss_type="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.0, epsilon=0.9,
                top_entropy_quantile=0.6, entropy_coef=0.05, **PART)  # fmt: skip
REJECTED = dict(mini_batches=2, entropy_coef=0.05, rollout_is_batch_normalize=True, packing=True,
                rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold="0.5,6.0", **PART)  # fmt: skip
RUNS = {"padded": OFF_POLICY | PART, "packed": SEQUENCE | PART | dict(packing=True), "selected": SELECTED,
        "rejected": REJECTED}  # fmt: skip
DENSE = [("tp2-sp", "padded"), ("tp2-sp", "packed"), ("cp2", "packed"), ("pp2", "padded"), ("pp2", "packed"),
         ("dp2-zero3", "packed"), ("dp2-zero3", "selected"), ("cp2", "selected"), ("pp2", "selected"),
         ("cp2", "rejected"), ("pp2", "rejected"), ("dp2-zero3", "rejected")]  # fmt: skip


def at(folder, layout: str, kind: str, **more) -> RunConfig:
    """At a tenth of the files' learning rate: from 1e-2, weights that differ by one rounding give losses and norms
    that differ by 2e-5 after three steps of one process, from 1e-3 by 5e-7, and a third of the tokens is clipped."""
    parallel = LAYOUTS[layout].parallel if layout else None
    return configuration(folder, parallel, train=dict(train_iters=STEPS + 1), lr=1e-3, **RUNS[kind], **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grpo")


@pytest.fixture(scope="module")
def ones(folder) -> dict[str, dict]:
    return {kind: outcome(at(folder, "", kind)) for kind in RUNS}


@pytest.mark.parametrize(
    ("layout", "kind"), by_default(DENSE, ("tp2-sp", "padded"), ("cp2", "packed"), ("dp2-zero3", "rejected"))
)
def test_every_layout_is_one_process(pool, folder, ones, layout, kind):
    for mine in pool.run(outcome, at(folder, layout, kind), size=2):
        assert_same(mine, ones[kind], (layout, kind))


@pytest.mark.parametrize(
    "cases", by_default([[PP2 | VIRTUAL], [PP2]], [PP2 | VIRTUAL]), ids=["interleaved", "1f1b"]
)
def test_packed_rows_of_any_number_go_through_an_interleaved_pipeline(pool, folder, cases):
    """Empty rows fill up the last round. 1F1B takes the rows as they are."""
    train = dict(train_iters=STEPS, micro_batch_size=1, global_batch_size=8)

    def packed(parallel: dict | None) -> RunConfig:
        return configuration(folder, parallel, train=train, lr=1e-3, **RUNS["packed"])

    one = outcome(packed(None))
    assert all(figures["packing_rows"] % 2 for figures in one["figures"])
    for rank in pool.run(outcomes, [packed(parallel) for parallel in cases], size=2):
        for parallel, mine in zip(cases, rank, strict=True):
            assert_same(mine, one, parallel)
    if PP2 in cases:
        parallel = LAYOUTS["pp2-interleaved-dp2-zero2"].parallel
        assert_same(pool.run(outcome, packed(parallel), size=4)[0], one, "dp2")


def test_experts_are_one_process(pool, folder):
    model = dict(num_experts=4, moe_router_topk=2, num_layers=2)
    one = outcome(at(folder, "", "padded", model=model))
    found = pool.run(outcome, at(folder, "ep2", "padded", model=model), size=2)
    assert_same(found[0], one, "ep2")


def test_selected_tokens_do_not_depend_on_micro_batches(folder):
    """Tokens of high entropy, and those that Clip-Cov draws at random."""
    one, several = (
        outcome(configuration(folder, train=dict(train_iters=2, micro_batch_size=size), lr=1e-3, **SELECTED))
        for size in (8, 1)
    )
    assert_same(several, one, "micro-batches")
    plain = outcome(
        configuration(folder, train=dict(train_iters=1), lr=1e-3, **SELECTED | dict(clip_cov_ratio=1e-9))
    )
    assert abs(plain["norms"][0] - one["norms"][0]) > 1e-3 * one["norms"][0]  # the choice matters


def test_some_tokens_are_rejected(ones):
    assert all(0.05 < one["rollout_rejected"] < 0.95 for one in ones["rejected"]["figures"])


@pytest.mark.full  # test_every_layout_is_one_process has each axis
@pytest.mark.parametrize("layout", ["tp2-sp-cp2", "cp2-dp2"])
def test_several_axes_are_one_process(pool, folder, ones, layout):
    assert_same(pool.run(outcome, at(folder, layout, "padded"))[0], ones["padded"], layout)


@pytest.mark.parametrize("level", by_default(["token", "sequence"], "token"))
def test_packed_is_padded(folder, level):
    runs = [
        outcome(at(folder, "", "padded", importance_sampling_level=level, packing=packing))
        for packing in (False, True)
    ]
    for figures in runs[1]["figures"]:
        assert figures.pop("packing_rows") < 8 and 0.5 < figures.pop("packing_filled") <= 1
    assert_same(runs[1], runs[0], level)


def test_on_policy_the_ratio_is_1_and_the_kl_0_bitwise(folder):
    """Also where the old log-probabilities have a pass of their own, and the reference a model of its own."""
    for rl in (dict(num_iterations=2), dict()):
        lora = dict(rank=2) if rl else {}
        found = outcome(configuration(folder, beta=0.1, train=dict(train_iters=1), lora=lora, **rl))
        assert (found["figures"][0]["ratio"], found["figures"][0]["kl"]) == (1.0, 0.0)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
def test_with_adapters_the_reference_is_the_model_without_them_in_every_layout(pool, folder, layout):
    """As it is by the first step's weights: adapters begin as nothing."""
    lora = dict(rank=2, alpha=64)
    one = outcome(at(folder, "", "padded", lora=lora))
    assert one["figures"][0]["kl"] == 0 and one["figures"][-1]["kl"] > 1e-6
    found = pool.run(outcome, at(folder, layout, "padded", lora=lora), size=2)
    assert_same(found[0], one, layout)


def test_the_reference_stays_while_the_policy_moves(folder):
    """A second model: its log-probabilities of the rollout batch that is met again are those of the first step."""
    config = configuration(folder, beta=0.1, train=dict(train_iters=6, global_batch_size=16))
    run = run_of(config)
    seen = []
    with run.data.train_loader(0, 0, run.device) as batches:
        for _ in range(2):
            taken = [next(batches) for _ in range(run.data.micro_batches(0))]
            seen.append([batch.reference_logprobs for batch in taken])
            run.train_step(iter(taken))
        moved = run.model.all_logprobs(taken)
    for first, again, policy in zip(*seen, moved, strict=True):
        assert torch.equal(first, again) and not torch.allclose(policy, first, atol=1e-4)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo"])
def test_the_entropy_bonus_is_the_mean_over_the_steps_tokens_in_any_micro_batches(tmp_path, loss_type):
    """Truncated completions leave the loss, so that micro-batches have other numbers of tokens."""
    rl = dict(loss_type=loss_type, entropy_coef=0.5, mask_truncated_completions=True)
    sizes = (dict(train_iters=1, micro_batch_size=size) for size in (8, 1))
    one, several = outcomes([configuration(tmp_path, train=train, **rl) for train in sizes])
    assert_same(several, one, loss_type)
    [figures] = one["figures"]
    [without] = outcomes([configuration(tmp_path, train=dict(train_iters=1), **rl | {"entropy_coef": 0.0})])
    assert one["losses"][0] - without["losses"][0] == pytest.approx(-0.5 * figures["entropy"], rel=1e-4)

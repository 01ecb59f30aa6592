"""Adapters that are no longer zero, on a published model's weights: every gradient of A and of B in any layout."""

from typing import NamedTuple

import pytest
import torch
from bridge.peft_formula import random_adapters, save
from default_cases import by_default, in_full
from models.reference import CASES, random_reference
from parity_cases import BASE, DROPOUT

from megalith.config import RunConfig
from megalith.errors import TrainingError
from megalith.parallel.shards import LocalParameters
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job, start
from megalith.training import resume, run_state
from megalith.training.run_state import Run

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run from a Hugging Face folder and a folder of adapters in PEFT's format."""
    folder = tmp_path_factory.mktemp("published")
    reference = random_reference(CASES["qwen3"][0]())
    reference.save_pretrained(folder / "base")
    adapters = save(
        random_adapters(reference, TARGETS, rank=3), folder / "adapters", 5.0, target_modules=TARGETS
    )
    train = BASE["train"] | {"train_iters": 2}
    return BASE | {
        "model": {"init_from": str(folder / "base")} | DROPOUT,
        "lora": {"load": str(adapters), "dropout": 0.2},
        "train": train,
    }


@pytest.fixture(scope="module")
def alone(tree: dict) -> Outcome:
    return run_job(RunConfig.from_tree(tree))


# Parity shows adapters that begin at zero in other layouts too.
@pytest.mark.parametrize("layout", by_default(["tp2-sp", "pp2", "tp4", "cp2", "dp2-zero3"], "pp2"))
def test_gradients_of_both_halves_equal_one_process(pool, tree: dict, alone: Outcome, layout: str) -> None:
    split = {"decoder_first_pipeline_num_layers": 1} if layout == "pp2" else {}  # the model has 3 layers
    config = RunConfig.from_tree(tree | {"parallel": {**LAYOUTS[layout].parallel, **split}})
    errors = compare(pool.run(run_job, config, size=LAYOUTS[layout].processes), alone)
    assert errors.within(), errors
    halves = [sum(half in name for name in alone.gradients) for half in ("lora_A", "lora_B")]
    assert halves == [3 * 7, 3 * 7] and len(alone.gradients) == sum(halves)
    assert all(gradient.norm() > 0 for gradient in alone.gradients.values())


@pytest.mark.parametrize("layout", by_default(["tp2-sp", "tp2", "tp4", "dp2-zero3"], "tp2-sp"))
def test_dora_equals_one_process_in_any_layout(pool, tree: dict, layout: str) -> None:
    lora = {"rank": 3, "targets": TARGETS, "use_dora": True}
    config = RunConfig.from_tree(tree | {"lora": lora, "parallel": LAYOUTS[layout].parallel})
    alone = run_job(RunConfig.from_tree(tree | {"lora": lora}))
    errors = compare(pool.run(run_job, config, size=LAYOUTS[layout].processes), alone)
    assert errors.within(), errors
    lengths = [gradient for name, gradient in alone.gradients.items() if "lora_magnitude" in name]
    assert len(lengths) == 3 * 7 and all(gradient.norm() > 0 for gradient in lengths)


@pytest.mark.parametrize("method", ["pissa", in_full("olora")])
@pytest.mark.parametrize("layout", by_default(["tp2-sp", "pp2", "tp4", "dp2-zero3"], "tp2-sp"))
def test_factors_of_the_base_are_trained_alike_in_any_layout(
    pool, tree: dict, method: str, layout: str
) -> None:
    """The first A and B of PiSSA are determined up to the sign of each pair, which one rank decides for all."""
    lora = {"rank": 3, "targets": TARGETS, "init_lora_weights": method, "dropout": 0.2}
    split = {"decoder_first_pipeline_num_layers": 1} if layout == "pp2" else {}
    parallel = {**LAYOUTS[layout].parallel, **split}
    config = RunConfig.from_tree(tree | {"lora": lora, "parallel": parallel})
    alone = run_job(RunConfig.from_tree(tree | {"lora": lora}))
    errors = compare(pool.run(run_job, config, size=LAYOUTS[layout].processes), alone)
    assert errors.within(), errors
    halves = [sum(half in name for name in alone.gradients) for half in ("lora_A", "lora_B", "initial")]
    assert halves == [3 * 7, 3 * 7, 0]
    assert all(gradient.norm() > 0 for gradient in alone.gradients.values())


OF_EXPERTS = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2-sp-ep2": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    ),
    "tp2-etp2": (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "tp2-ep2-etp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "expert_model_parallel_size": 2,
        },
    ),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}),
    "ep2-zero3": (4, {"expert_model_parallel_size": 2, **LAYOUTS["dp2-zero3"].parallel}),
}
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def latent_tree(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run of DeepSeek-V2 (latent attention, a dense layer, experts and shared experts) with adapters on all of it."""
    folder = tmp_path_factory.mktemp("latent")
    reference = random_reference(CASES["deepseek-v2, a latent for queries, groups"][0]())
    reference.save_pretrained(folder / "base")
    adapters = save(random_adapters(reference, LATENT, 2, experts=True), folder / "adapters", 3.0)
    return BASE | {
        "model": {"init_from": str(folder / "base")},
        "lora": {"load": str(adapters)},
        "train": BASE["train"] | {"train_iters": 2},
    }


@pytest.fixture(scope="module")
def latent_alone(latent_tree: dict) -> Outcome:
    return run_job(RunConfig.from_tree(latent_tree))


@pytest.mark.parametrize("layout", by_default(OF_EXPERTS, "tp2-sp-ep2", "tp2-etp2"))
def test_adapters_of_experts_and_latents_equal_one_process(
    pool, latent_tree: dict, latent_alone: Outcome, layout: str
) -> None:
    size, parallel = OF_EXPERTS[layout]
    errors = compare(
        pool.run(run_job, RunConfig.from_tree(latent_tree | {"parallel": parallel}), size=size), latent_alone
    )
    assert errors.within(), errors
    assert sum(".experts.linear_fc" in name for name in latent_alone.gradients) == 2 * 2 * 2
    assert all(gradient.norm() > 0 for gradient in latent_alone.gradients.values())


class Frozen(NamedTuple):
    """A run's outcome, the dtypes of its frozen matrices and the fingerprint of its base."""

    outcome: Outcome
    loaded: set[torch.dtype]  # after loading
    ended: set[torch.dtype]  # after the run, when FSDP2 has sharded them again
    base: str | None


def stored(config: RunConfig) -> Frozen:
    runs, loaded, remember = [], [], resume._remember_base

    def and_look(run, checkpoint):
        remember(run, checkpoint)
        runs.append(run)
        loaded.append(frozen_dtypes(run))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "_remember_base", and_look)
        outcome = run_job(config)
    return Frozen(outcome, loaded[0], frozen_dtypes(runs[0]), runs[0].base)


def frozen_dtypes(run: Run) -> set[torch.dtype]:
    state = [x for chunk in run.model.chunks for x in chunk.parameters()]
    state += [x for _, x in run.model.parameters.named]
    return {x.dtype for x in state if x.ndim > 1 and not x.requires_grad}


def in_fp32(config: RunConfig) -> Frozen:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_state, "stored_dtypes", lambda _: {})
        patch.setattr(LocalParameters, "store_frozen", lambda *_: None)
        return stored(config)


@pytest.mark.parametrize(
    "layouts",
    [[""], in_full(["dp2-zero3"]), in_full(["tp2-sp", "dp2", "dp2-zero1", "cp2"])],
    ids="+".join,
)
def test_in_bf16_a_frozen_base_is_stored_as_it_is_used_and_trains_bitwise_the_same(
    pool, tree: dict, tmp_path, layouts
) -> None:
    """A base that bf16 does not hold exactly stays as it is."""
    reference = random_reference(CASES["qwen3"][0]())
    train = tree["train"] | {"precision": "bf16"}
    exact = RunConfig.from_tree(tree | {"train": train})
    assert stored(exact).ended == {torch.float32}
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = tree["model"] | {"init_from": str(tmp_path / "base")}
    for name in layouts:
        parallel = dict(LAYOUTS[name].parallel) if name else {}
        config = RunConfig.from_tree(tree | {"train": train, "model": model, "parallel": parallel})
        size = LAYOUTS[name].processes if name else 1
        for short, long in zip(
            *(pool.run(run, config, size=size) if name else [run(config)] for run in (stored, in_fp32))
        ):
            assert long.ended == {torch.float32} and short.outcome.losses == long.outcome.losses
            assert short.loaded == short.ended == {torch.bfloat16}, name
            assert short.base == long.base
            gradients = short.outcome.gradients
            assert all(torch.equal(gradients[each], grad) for each, grad in long.outcome.gradients.items())


def flipped_in_the_base(config: RunConfig) -> str:
    """What the comparison of replicas says once a frozen matrix has another bit on the second of them."""
    run = start(config)
    run.replicas.check(0)
    frozen = next(p for p in run.model.chunks[0].parameters() if p.dtype == torch.bfloat16)
    if run.mesh.dp.rank:
        frozen.view(-1)[:1].view(torch.int16).bitwise_xor_(1)
    with pytest.raises(TrainingError) as raised:
        run.replicas.check(0)
    return str(raised.value)


def test_replicas_of_a_frozen_base_are_compared_as_they_are_stored(pool, tree: dict, tmp_path) -> None:
    random_reference(CASES["qwen3"][0]()).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    config = RunConfig.from_tree(tree).with_settings(
        {
            "model.init_from": str(tmp_path / "base"),
            "train.precision": "bf16",
            "runtime.check_weight_hash_across_dp_replicas_interval": 1,
        }
    )
    for message in pool.run(flipped_in_the_base, config, size=2):
        assert "differ, without a majority that agrees" in message

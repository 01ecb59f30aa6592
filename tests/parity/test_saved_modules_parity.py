"""Modules trained in full beside adapters: the gradients of both in any layout are those of one process."""

import itertools

import pytest
import torch
from bridge.peft_formula import PREFIX, random_adapters, save
from default_cases import by_default
from models.reference import CASES, random_reference
from parity_cases import BASE

from megalith.config import RunConfig
from megalith.parallel.data.data_parallel import reshard_parameters
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job, start
from megalith.rl.auxiliary_models.reference import without_adapters

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
FIRST_STAGE = {"decoder_first_pipeline_num_layers": 1}  # the models have 3 layers
PIPELINE = {"pipeline_model_parallel_size": 2, **FIRST_STAGE}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
DENSE = {
    "tp2-sp": (2, TENSOR),
    "tp4": (4, {"tensor_model_parallel_size": 4}),
    "pp2": (2, PIPELINE),
    "pp2-zero_bubble": (2, {**PIPELINE, "pipeline_schedule": "zero_bubble"}),
    "tp2-sp-pp2": (4, {**TENSOR, **PIPELINE}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2-zero1": (2, {"data_parallel_sharding_strategy": "optim"}),
    "dp2-zero3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "tp2-sp-dp2-zero3": (4, {**TENSOR, "data_parallel_sharding_strategy": "optim_grads_params"}),
}
MODULES = {  # of a tied and of an untied model
    "gemma": ["embed_tokens", "norm"],
    "qwen3": ["embed_tokens", "lm_head", "norm"],
}


def tree_of(folder, name: str, modules: list[str], targets: list[str], experts: bool = False) -> dict:
    """A run from a Hugging Face folder and adapters that are not zero."""
    reference = random_reference(CASES[name][0]())
    reference.save_pretrained(folder / "base")
    tensors = random_adapters(reference, targets, rank=3, experts=experts)
    tied = reference.config.tie_word_embeddings
    saved = [*modules, *["lm_head"] * tied]
    for module_name, module in reference.named_modules():
        if module_name.endswith(tuple(saved)):
            state = module.state_dict(prefix=f"{PREFIX}{module_name}.")
            tensors |= {key: value.clone() for key, value in state.items()}
    config = {"modules_to_save": modules, "ensure_weight_tying": tied}
    given = save(tensors, folder / "adapters", 5.0, target_modules=targets, **config)
    return BASE | {
        "model": {"init_from": str(folder / "base")},
        "lora": {"load": str(given)},
        "train": BASE["train"] | {"train_iters": 3},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, Outcome]]:
    trees = {
        name: tree_of(tmp_path_factory.mktemp("published"), name, modules, TARGETS)
        for name, modules in MODULES.items()
    }
    return {name: (tree, run_job(RunConfig.from_tree(tree))) for name, tree in trees.items()}


@pytest.mark.parametrize(
    ("layout", "name"),
    by_default(
        itertools.product(DENSE, MODULES),
        ("tp2-sp", "gemma"), ("tp2-sp", "qwen3"), ("pp2", "gemma"), ("dp2-zero3", "qwen3"),
    ),
)  # fmt: skip
def test_gradients_equal_one_process(pool, runs, name: str, layout: str) -> None:
    (tree, alone), (size, parallel) = runs[name], DENSE[layout]
    errors = compare(pool.run(run_job, RunConfig.from_tree(tree | {"parallel": parallel}), size=size), alone)
    assert errors.within(), errors
    saved = [gradient for key, gradient in alone.gradients.items() if ".adapter." not in key]
    assert len(saved) == {"gemma": 1 + 2 * 3 + 1, "qwen3": 2 + 4 * 3 + 1}[name]
    assert all(gradient.norm() > 0 for gradient in alone.gradients.values())


WITH_EXPERTS = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2-sp-ep2": (2, {**TENSOR, "expert_model_parallel_size": 2}),
    "tp2-ep2-etp2": (
        4,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    ),
    "ep2-zero3": (
        4,
        {"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "pp2": (2, PIPELINE),
}


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Outcome]:
    name, modules = "qwen2-moe, a dense layer", ["gate", "norm", "embed_tokens"]
    tree = tree_of(tmp_path_factory.mktemp("experts"), name, modules, ["q_proj", "o_proj"], experts=True)
    return tree, run_job(RunConfig.from_tree(tree))


@pytest.mark.parametrize("layout", by_default(WITH_EXPERTS, "tp2-sp-ep2"))
def test_routers_are_trained_alike_in_any_layout(pool, with_experts, layout: str) -> None:
    (tree, alone), (size, parallel) = with_experts, WITH_EXPERTS[layout]
    errors = compare(pool.run(run_job, RunConfig.from_tree(tree | {"parallel": parallel}), size=size), alone)
    assert errors.within(), errors
    names = ("router", "shared_expert_gate")
    routers = [gradient for key, gradient in alone.gradients.items() if key.split(".")[-2] in names]
    assert len(routers) == 4 and all(gradient.norm() > 0 for gradient in routers)


def evaluated(config: RunConfig) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of the trained model and of its reference, then again of both after another change."""
    run, ids = start(config), torch.arange(16)[None] + 1
    trained, reference = [], []
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in run.model.parameters.named:
                if parameter.requires_grad and name.startswith(("embedding", "output_layer", "final")):
                    parameter.mul_(1.5)
        reshard_parameters(run.model.chunks)
        trained.append(run.model.eval()(ids))
        with without_adapters(run) as model:
            reference.append(model(ids))
    return trained, reference


# Logits of whole sequences are computed without context parallelism.
@pytest.mark.parametrize(
    "layout", by_default([name for name in DENSE if name != "cp2"], "tp2-sp", "dp2-zero3")
)
def test_a_reference_is_the_base_in_any_layout(pool, runs, layout: str) -> None:
    tree, (size, parallel) = runs["gemma"][0], DENSE[layout]
    trained, reference = evaluated(RunConfig.from_tree(tree))
    assert torch.equal(*reference) and not torch.equal(trained[0], reference[0])
    for logits in pool.run(evaluated, RunConfig.from_tree(tree | {"parallel": parallel}), size=size):
        for ours, alone in zip(logits, (trained, reference)):
            for one, other in zip(ours, alone):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

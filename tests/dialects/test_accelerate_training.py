"""Accelerate's loops on Megalith give the losses, gradients and weights of plain PyTorch in one process."""

import itertools

import pytest
from accelerate_job import BATCH, checked, reference
from default_cases import by_default

KINDS = ("gpt2", "llama", "mixtral")
# The blocks of Accelerate's guide.
BASIC = dict(tp_degree=2, pp_degree=2, num_micro_batches=4, gradient_clipping=1.0, sequence_parallelism=False,
             recompute_activations=True, use_distributed_optimizer=True,
             custom_prepare_model_function=None)  # fmt: skip
FULL_SCRIPT = dict(tp_degree=2, pp_degree=2, num_micro_batches=4, gradient_clipping=1.0)
RECOMPUTED = dict(recompute_activations=True, checkpoint_num_layers=1, distribute_checkpointed_activations=True,
                  partition_activations=True, check_for_nan_in_loss_and_grad=True)  # fmt: skip
LAYOUTS = {
    1: {"two micro-batches": dict(num_micro_batches=2), "recomputed": RECOMPUTED},
    2: {
        "TP2 + SP": dict(tp_degree=2, sequence_parallelism=True),
        "PP2": dict(pp_degree=2, num_micro_batches=4),
        "DP2": dict(),
        "TP2, two micro-batches": dict(tp_degree=2, num_micro_batches=2),
        "TP2, recomputed": dict(tp_degree=2, **RECOMPUTED),
        "DP2, ZeRO": dict(use_distributed_optimizer=True),
    },
    4: {
        "TP2 PP2": dict(tp_degree=2, pp_degree=2, num_micro_batches=4, sequence_parallelism=True),
        "PP2 DP2, ZeRO": dict(pp_degree=2, num_micro_batches=2, use_distributed_optimizer=True),
        "PP4": dict(pp_degree=4, num_micro_batches=16, batch=16),
        "TP4 + SP": dict(tp_degree=4, sequence_parallelism=True),
        "the full script": FULL_SCRIPT,
        "the basic setup": BASIC,
    },
    8: {
        "TP4 DP2": dict(tp_degree=4, sequence_parallelism=True),
        "the full script": FULL_SCRIPT,
        "the basic setup": BASIC,
    },
}
GRADIENT = dict(optimizer="sgd", steps=1)  # its step has nothing else in it


@pytest.mark.parametrize(
    ("kind", "accumulation"),
    by_default(itertools.product(KINDS, [1, 4]), ("llama", 4)),
)
def test_one_process_is_plain_pytorch(kind, accumulation):
    wanted, gradient = reference(kind, accumulation), reference(kind, accumulation, clip=0.0, **GRADIENT)
    for layout in LAYOUTS[1].values():
        checked(wanted, kind, accumulation, layout)
    layout = {**LAYOUTS[1]["two micro-batches"], "gradient_clipping": 0.0}
    checked(gradient, kind, accumulation, layout, **GRADIENT)


def cases_of(size, every, kinds=KINDS):
    """Losses and weights, model, accumulation and layout by name; not `every` one of them in make test."""
    cases = {}
    for number, kind in enumerate(kinds):
        for place, (name, layout) in enumerate(LAYOUTS[size].items()):
            for accumulation in (1, 4) if every else (1,) * (kind == "gpt2" or place == number):
                wanted = reference(kind, accumulation, batch=layout.get("batch", BATCH))
                cases[kind, name, accumulation] = (wanted, kind, accumulation, layout)
            if every or (kind, place) == ("llama", 3):
                gradient = reference(kind, clip=0.0, batch=layout.get("batch", BATCH), **GRADIENT)
                case = gradient, kind, 1, {**layout, "gradient_clipping": 0.0}, *GRADIENT.values()
                cases[kind, name, "gradient"] = case
    if not every:
        cases["accumulation"] = (reference("llama", 4), "llama", 4, LAYOUTS[size]["TP2 + SP"])
    return cases


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_is_plain_pytorch(pool, size, kind):
    """The first of them are in test_accelerate_loop.py."""
    for name, case in cases_of(size, True, [kind]).items():  # one at a time: the pool's patience is for each
        pool.run_cases(checked, {name: case}, size=size)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_eight_processes_are_plain_pytorch(pool_of_eight, kind):
    for name, case in cases_of(8, True, [kind]).items():
        pool_of_eight.run_cases(checked, {name: case}, size=8)

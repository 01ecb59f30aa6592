"""Accelerate's loops on Megalith give the losses, gradients and weights of plain PyTorch in one process."""

import pytest
from accelerate_job import check, checked, reference, run

KINDS = ("gpt2", "llama", "mixtral")
LAYOUTS = {
    2: {
        "TP2 + SP": dict(tp_degree=2, sequence_parallelism=True),
        "PP2": dict(pp_degree=2, num_micro_batches=4),
        "DP2": dict(),
        "TP2, two micro-batches": dict(tp_degree=2, num_micro_batches=2),
    },
    4: {
        "TP2 PP2": dict(tp_degree=2, pp_degree=2, num_micro_batches=4, sequence_parallelism=True),
        "PP2 DP2, ZeRO": dict(pp_degree=2, num_micro_batches=2, use_distributed_optimizer=True),
    },
}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_is_plain_pytorch(kind, accumulation):
    check(run(kind, accumulation, num_micro_batches=2), reference(kind, accumulation))


def cases_of(size, every):
    """(losses and weights, model, accumulation, layout) by name; not `every` one of them in make test."""
    cases = {}
    for number, kind in enumerate(KINDS):
        wanted = {accumulation: reference(kind, accumulation) for accumulation in ((1, 4) if every else (1,))}
        for place, (name, layout) in enumerate(LAYOUTS[size].items()):
            for accumulation in wanted if every or kind == "gpt2" or place == number else ():
                cases[kind, name, accumulation] = (wanted[accumulation], kind, accumulation, layout)
    if not every:
        cases["accumulation"] = (reference("llama", 4), "llama", 4, LAYOUTS[size]["TP2 + SP"])
    layout = dict(tp_degree=2, num_micro_batches=2, gradient_clipping=0.0)
    gradient = reference("llama", 1, "sgd", steps=1, clip=0.0)
    cases["the gradient"] = (gradient, "llama", 1, {**layout, "pp_degree": size // 2}, "sgd", 1)
    return cases


@pytest.mark.full
@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_is_plain_pytorch(pool, size):
    """The first of them are in test_accelerate_loop.py."""
    pool.run_cases(checked, cases_of(size, every=True), size=size)

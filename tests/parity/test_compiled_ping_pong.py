"""Micro-batches in two halves, in layers compiled by Inductor: one process's run, and collectives behind products."""

import functools
import re
from unittest import mock

import pytest
import torch
from parity_cases import run_config
from torch._inductor.utils import run_and_get_code

from megalith.config import RunConfig
from megalith.parallel.overlap import interleave
from megalith.parallel.overlap.inductor import prepare_compiler
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job

SMALL = {"model": {"num_layers": 2}, "train": {"train_iters": 2}}
QUICK = {  # plain C++, which ranks and later runs share; the code of each graph is made anew
    "aot_inductor.debug_compile": True,
    "cpp.vec_isa_ok": False,
    "compile_threads": 1,
    "fx_graph_cache": False,
}
RATES = dict(FLOPS=1e12, LATENCY=0.0)  # of a device on which the tiny products hide the tiny collectives
COLLECTIVE = re.compile(r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(?!wait)\w+\.default\((\w+)")
WAIT = re.compile(r"_c10d_functional\.wait_tensor\.default\((\w+)\)")
PRODUCT = re.compile(r"extern_kernels\.\w*mm\(|torch\.ops\.aten\._scaled_dot_product\w+\.default\(")


def run_compiled(config: RunConfig) -> tuple[Outcome, list[str]]:
    """The outcome of a run, and the code of its layers' graphs that have collectives."""
    prepare_compiler()
    anew = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(QUICK), anew, mock.patch.multiple(interleave, **RATES):
        outcome, codes = run_and_get_code(run_job, config)
    torch._dynamo.reset()
    return outcome, [code for code in codes if COLLECTIVE.search(code)]


def hidden(code: str) -> tuple[int, int]:
    """How many collectives have a product between their start and their wait, and how many there are."""
    under_way: dict[str, bool] = {}
    ended = []
    for line in code.splitlines():
        if started := COLLECTIVE.search(line):
            under_way[started[1] or started[2]] = False
        elif waited := WAIT.search(line):
            ended.append(under_way.pop(waited[1]))
        elif PRODUCT.search(line):
            under_way = dict.fromkeys(under_way, True)
    assert not under_way
    return sum(ended), len(ended)


@functools.cache
def alone() -> Outcome:
    return run_job(run_config("gpt2 dropout", None, "", **SMALL))


# By default parallel/test_inductor.py shows the order in halves that are traced.
@pytest.mark.full
@pytest.mark.parametrize(
    "layout, expected",
    [  # of a layer's forward pass, of its backward pass, and in evaluation: how many are hidden, and of how many
        ("tp2-sp-overlap", [(6, 8), (7, 8), (6, 8)]),
        # With the keys of attention's dropout, gathered.
        ("cp2-a2a-overlap", [(6, 6), (4, 4), (4, 4)]),
    ],
)
def test_compiled_layers_hide_collectives_and_equal_one_process(pool, layout, expected):
    config = run_config("gpt2 dropout", layout, "", **SMALL, runtime={"compile": True})
    ranks = pool.run(run_compiled, config, size=2)
    errors = compare([outcome for outcome, _ in ranks], alone())
    assert errors.within(), errors
    for _, codes in ranks:  # one graph of each kind for all layers
        assert [hidden(code) for code in codes] == expected

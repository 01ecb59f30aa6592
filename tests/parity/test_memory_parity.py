"""What is recomputed or offloaded, in the layouts whose code it wraps, equals one process that keeps everything."""

import functools

import pytest
from default_cases import by_default
from memory_job import run_offloading
from parity_cases import layers, run_config, samples

from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job

EACH_LAYER = {"recompute_granularity": "full"}
PAIRS = EACH_LAYER | {"recompute_num_layers": 2}
BLOCK = EACH_LAYER | {"recompute_method": "block", "recompute_num_layers": 1}
SAVES = {"recompute_saves_attention": True}
DISTRIBUTED = {"distribute_saved_activations": True}
CORE = {"recompute_granularity": "selective"}
MODULES = CORE | {"recompute_modules": ["core_attn", "mlp", "layernorm"]}
OFFLOAD = {"cpu_offloading_num_layers": 1}
GPT2, LLAMA, MOE = "gpt2 untied, documents, dropout", "llama dropout", "moe dropping, dropout"
DOCUMENTS = "llama tied, documents"
MULTI_TOKEN = "multi-token prediction"
# Layout, run, what is done for memory. `make test` shows each way in a layout that it interacts with: parts of saved
# inputs under TP, gathered weights under ZeRO-3, exchanges under ping-pong and CP, stages, experts.
CASES = [
    ("tp2-sp", GPT2, OFFLOAD | MODULES),
    ("pp2-uneven", LLAMA, {"cpu_offloading_num_layers": 2} | BLOCK),
    ("ep2", MOE, MODULES),
    (
        "ep2-dp4-zero3",
        MULTI_TOKEN,
        {"cpu_offloading_num_layers": 4},
    ),  # experts are freed before their layer ends
    ("pp2-zero_bubble", LLAMA, CORE | {"recompute_modules": ["core_attn", "layernorm"]}),
]
MORE = [
    ("tp2-sp-overlap", DOCUMENTS, PAIRS | SAVES),
    ("dp2-zero3", LLAMA, OFFLOAD | BLOCK),
    ("cp2-a2a", LLAMA, OFFLOAD | CORE),
    ("tp2", GPT2, EACH_LAYER | DISTRIBUTED),
    ("dp2-zero3", GPT2, PAIRS),
    ("cp2-a2a", DOCUMENTS, EACH_LAYER | SAVES),
    ("tp2-sp-overlap", GPT2, OFFLOAD | EACH_LAYER),
    ("tp2-pp2-interleaved", LLAMA, BLOCK | DISTRIBUTED),
    ("pp2-interleaved", GPT2, OFFLOAD),
    ("cp2-all_gather", GPT2, MODULES),
    ("cp2", LLAMA, OFFLOAD | EACH_LAYER),
    ("tp2-dp2-zero2", GPT2, EACH_LAYER | DISTRIBUTED),
    ("tp2-cp2", LLAMA, PAIRS | DISTRIBUTED),
    ("tp2-sp", GPT2, PAIRS),
    ("tp2-sp", LLAMA, MODULES),
    ("cp2", GPT2, CORE),
    ("dp2-zero1", GPT2, OFFLOAD),
    ("dp2-zero3", LLAMA, MODULES),
    ("dp2-zero3", GPT2, BLOCK),
    ("dp2-zero3", GPT2, OFFLOAD),
    ("pp2", GPT2, PAIRS),
    ("pp2-interleaved", LLAMA, BLOCK),
    ("ep4-zero3", MOE, OFFLOAD | BLOCK),
    ("ep4-zero3", "moe", EACH_LAYER | SAVES),
    ("tp2-pp2-interleaved", DOCUMENTS, BLOCK | DISTRIBUTED | SAVES),
    ("cp2-a2a-overlap", DOCUMENTS, EACH_LAYER | SAVES),
]


def changes(layout: str, memory: dict) -> dict:
    """Two steps of 2 layers, 4 where the stages or the groups of layers take as many."""
    some = memory.get("cpu_offloading_num_layers", 1) > 1 or memory.get("recompute_num_layers", 1) > 1
    train = {"train_iters": 2, "global_batch_size": samples(layout)}
    return dict(model={"num_layers": 4 if some else layers(layout)}, train=train)


@functools.cache
def alone(run: str, num_layers: int, samples: int, corpus: str) -> Outcome:
    train = {"train_iters": 2, "global_batch_size": samples}
    return run_job(run_config(run, None, corpus, model={"num_layers": num_layers}, train=train))


@pytest.mark.parametrize("layout, run, memory", by_default(CASES + MORE, *CASES))
def test_saving_memory_changes_nothing_else(pool, corpus, layout, run, memory):
    config = run_config(run, layout, corpus, **changes(layout, memory), parallel=memory)
    ranks = pool.run(run_offloading, config, size=LAYOUTS[layout].processes)
    errors = compare(ranks, alone(run, config.model.num_layers, samples(layout), corpus))
    assert errors.within(), errors

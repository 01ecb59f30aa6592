"""A model in pipeline stages against one process: loss, every parameter's gradient, evaluation and generation."""

import functools
from itertools import pairwise

import pytest
import torch
from default_cases import by_default, cases_that_run
from pipeline_job import GPT2, LLAMA, assert_equal, run, run_alone, step_of

from megalith.config import ParallelConfig
from megalith.errors import ConfigError
from megalith.launch.pool import RankFailed
from megalith.parallel.pipeline.stages import assign_layers, run_schedule

FAMILIES = {"gpt2, tied": GPT2, "llama, untied": LLAMA}
ZERO_BUBBLE = {"pipeline_schedule": "zero_bubble"}

# On two ranks and on four: settings besides the pipeline's size, and micro-batches.
TWO = {
    "1f1b": ({}, 5),
    "1f1b, one micro-batch": ({}, 1),
    "1f1b, three layers and one": ({"decoder_first_pipeline_num_layers": 3}, 3),
    "interleaved": ({"virtual_pipeline_model_parallel_size": 2}, 6),
    "interleaved, in groups of three": (
        {
            "pipeline_model_parallel_layout": "Et|t|t*2|L",
            "microbatch_group_size_per_virtual_pipeline_stage": 3,
        },
        5,
    ),
    "zero_bubble": (ZERO_BUBBLE, 5),
}
FOUR = {
    "1f1b": ({}, 6),
    "1f1b, a stage without layers": ({"pipeline_model_parallel_layout": "Ett||t|tL"}, 3),
    "interleaved, embedding and loss alone": ({"pipeline_model_parallel_layout": "E|t|t||t||t|L"}, 8),
    "zero_bubble": (ZERO_BUBBLE, 6),
    "zero_bubble, two micro-batches": (ZERO_BUBBLE, 2),
}
BOTH_FAMILIES = ("1f1b", "interleaved, embedding and loss alone")
# With other axes beside two stages, on four ranks; parity shows the others.
COMBINED = {
    "tensor, zero_bubble": {"tensor_model_parallel_size": 2, **ZERO_BUBBLE},
    "data, zero_bubble": ZERO_BUBBLE,
    "data, ZeRO-3, interleaved": {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "virtual_pipeline_model_parallel_size": 2,
    },
}


def families(size: int, layout: str) -> list[str]:
    """Both where it is asked for, else one after the other."""
    if layout in BOTH_FAMILIES:
        return list(FAMILIES)
    return [list(FAMILIES)[list(TWO if size == 2 else FOUR).index(layout) % 2]]


CASES = [
    (size, family, layout)
    for size, layouts in ((2, TWO), (4, FOUR))
    for layout in layouts
    for family in families(size, layout)
]
CHOSEN = [
    case
    for case in CASES
    if case[2] not in ("1f1b, three layers and one", "zero_bubble, two micro-batches", "interleaved")
    and case[::2] != (4, "1f1b")
    and not (case[2] in BOTH_FAMILIES and case[1] == "llama, untied")
]


@functools.cache
def alone(family: str, micro_batches: int):
    return run_alone(FAMILIES[family], micro_batches)


@pytest.fixture(scope="module")
def runs(pool, request):
    """What each rank gives, by number of stages, family and layout; those beside other axes by their layout."""
    runs, that_run = {}, cases_that_run(request, CASES, "size", "family", "layout")
    for size, layouts in ((2, TWO), (4, FOUR)):
        cases = {}
        for case in that_run:
            if case[0] == size:
                settings, n = layouts[case[2]]
                parallel = ParallelConfig(pipeline_model_parallel_size=size, **settings)
                cases[case] = (FAMILIES[case[1]], parallel, n)
        if size == 4:
            cases |= {
                name: (GPT2, ParallelConfig(pipeline_model_parallel_size=2, **settings), 4)
                for name, settings in COMBINED.items()
            }
        runs |= pool.run_cases(run, cases, size)
    return runs


@pytest.mark.parametrize(("size", "family", "layout"), by_default(CASES, *CHOSEN))
def test_every_schedule_equals_one_process(runs, size, family, layout):
    settings, micro_batches = (TWO if size == 2 else FOUR)[layout]
    parallel = ParallelConfig(pipeline_model_parallel_size=size, **settings)
    results = runs[size, family, layout]
    expected = alone(family, micro_batches)
    for result in results:
        assert_equal(result, expected)
    assert set().union(*(result.gradients for result in results)) == set(expected.gradients)
    schedule = run_schedule(parallel, micro_batches)
    measured = results[0].timeline.spans
    assert [[span.action for span in spans] for spans in measured] == schedule.actions
    assert all(first.end <= second.start for spans in measured for first, second in pairwise(spans))


@pytest.mark.parametrize("layout", COMBINED)
def test_two_stages_beside_another_axis_equal_one_process(runs, layout):
    for result in runs[layout]:
        assert_equal(result, alone("gpt2, tied", 4))


def test_both_stages_have_the_tied_gradient_to_the_bit(runs):
    first, last = runs[2, "gpt2, tied", "1f1b"]
    name = "embedding.word_embeddings.weight"
    assert torch.equal(first.gradients[name], last.gradients[name])
    assert "embedding.position_embeddings.weight" not in last.gradients


@pytest.mark.parametrize(
    ("size", "settings"), [(2, {}), (4, ZERO_BUBBLE)], ids=["1f1b", "zero_bubble beside data"]
)
def test_bf16_hidden_states_travel_in_bf16(pool, size, settings):
    parallel = ParallelConfig(pipeline_model_parallel_size=2, **settings)
    expected = run_alone(GPT2, 4, torch.bfloat16)
    for result in pool.run(run, GPT2, parallel, 4, torch.bfloat16, size=size):
        assert_equal(result, expected, bound=1e-2)


def test_micro_batches_that_do_not_divide_are_refused_by_every_rank(pool):
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    with pytest.raises(RankFailed) as failure:
        pool.run(functools.partial(step_of, 5, **layout), size=2)
    assert isinstance(failure.value.__cause__, ConfigError)
    assert "5 micro-batches per step are not divisible" in str(failure.value.__cause__)


def test_stages_of_the_combined_layouts_are_as_the_assignment_says():
    parallel = ParallelConfig(pipeline_model_parallel_size=4, pipeline_model_parallel_layout="E|t|t||t||t|L")
    stages = assign_layers(GPT2, parallel)
    assert [[stage.layers for stage in chunks] for chunks in stages] == [
        [(), (2,)],
        [(0,), ()],
        [(1,), (3,)],
        [(), ()],
    ]

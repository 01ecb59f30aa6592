"""Which layers each stage holds, and what is left of the model there."""

from dataclasses import replace

import pytest
import torch

from megalith.comm.collectives import Axis
from megalith.config import ModelConfig, ParallelConfig, RunConfig
from megalith.config.rules.parallel_rules import check_parallel
from megalith.errors import ConfigError
from megalith.models.transformer import Transformer
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.pipeline_rules import check_pipeline
from megalith.parallel.pipeline.stage_layout import expand_layout
from megalith.parallel.pipeline.stages import assign_layers, schedule_kind, split_stages, virtual_size
from megalith.parallel.pipeline.tied_parameters import counted_elsewhere


def parallel(stages: int, **settings) -> ParallelConfig:
    return ParallelConfig(pipeline_model_parallel_size=stages, **settings)


def layers_of(layers: int, settings: ParallelConfig) -> list[list[list[int]]]:
    """Layer numbers by rank and chunk."""
    stages = assign_layers(ModelConfig(num_layers=layers), settings)
    return [[list(stage.layers) for stage in chunks] for chunks in stages]


def counts(layers: int, settings: ParallelConfig) -> list[list[int]]:
    return [[len(chunk) for chunk in chunks] for chunks in layers_of(layers, settings)]


def test_layers_are_split_evenly_and_chunks_go_around_the_ranks():
    assert layers_of(4, parallel(1)) == [[[0, 1, 2, 3]]]
    assert layers_of(6, parallel(3)) == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert layers_of(8, parallel(2, virtual_pipeline_model_parallel_size=2)) == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]


def test_embedding_is_on_the_first_chunk_of_the_first_rank_and_the_head_on_the_last_of_the_last():
    stages = assign_layers(ModelConfig(num_layers=8), parallel(4, virtual_pipeline_model_parallel_size=2))
    flat = [stage for chunks in stages for stage in chunks]
    assert [(s.rank, s.chunk) for s in flat if s.embedding] == [(0, 0)]
    assert [(s.rank, s.chunk) for s in flat if s.head] == [(3, 1)]


@pytest.mark.parametrize(
    ("layers", "settings", "expected"),
    [
        (10, {"decoder_first_pipeline_num_layers": 1}, [[1], [3], [3], [3]]),
        (10, {"decoder_last_pipeline_num_layers": 4}, [[2], [2], [2], [4]]),
        (
            9,
            {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 1},
            [[2], [3], [3], [1]],
        ),
        (
            14,
            {"decoder_last_pipeline_num_layers": 2, "virtual_pipeline_model_parallel_size": 2},
            [[2, 2], [2, 2], [2, 2], [1, 1]],
        ),
        (11, {"account_for_embedding_in_pipeline_split": True}, [[2], [3], [3], [3]]),
        (11, {"account_for_loss_in_pipeline_split": True}, [[3], [3], [3], [2]]),
        (
            14,
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
                "virtual_pipeline_model_parallel_size": 2,
            },
            [[1, 2], [2, 2], [2, 2], [2, 1]],
        ),
        (7, {"pipeline_model_parallel_layout": "Et*3|t,t||t*2L"}, [[3], [2], [0], [2]]),
        (8, {"pipeline_model_parallel_layout": "E|(tt|)*3t||t|L"}, [[0, 1], [2, 0], [2, 1], [2, 0]]),
    ],
)
def test_uneven_splits(layers, settings, expected):
    assert counts(layers, parallel(4, **settings)) == expected


def test_megatrons_example_layout_without_its_extra_prediction_layer():
    settings = parallel(16, pipeline_model_parallel_layout="Et*3|(tt|)*29,|L")
    stages = counts(61, settings)
    assert virtual_size(settings) == 2
    assert schedule_kind(settings) == "interleaved"
    assert stages[0] == [3, 2] and stages[14] == [2, 0] and stages[15] == [2, 0]
    assert all(stage == [2, 2] for stage in stages[1:14])


@pytest.mark.parametrize(
    ("layout", "expanded"),
    [
        ("Et*3|(tt|)*2,L", "Ettt|tt|tt|L"),
        ("E (tt|t|)*2 tL", "Ett|t|tt|t|tL"),
        ("E(t(t|)*2)*2L", "Ett|t|tt|t|L"),
        ("Et*0|tL", "E|tL"),
    ],
)
def test_layouts_written_out(layout, expanded):
    assert expand_layout(layout) == expanded


@pytest.mark.parametrize(
    ("layers", "settings", "message"),
    [
        (10, {}, r"model.num_layers 10 is not divisible by pipeline \(4\) × virtual \(1\) = 4 stages; set "
                 r"pipeline_model_parallel_size to one of 1, 2, 5, 10, or "
                 r"pipeline_model_parallel_layout to 'Et\*2\|t\*3\|t\*3\|t\*2L'"),
        (9, {"account_for_loss_in_pipeline_split": True}, "model.num_layers 9 \\+ loss = 10 is not divisible"),
        (10, {"decoder_first_pipeline_num_layers": 2}, "= 8 layers are not divisible by the other 3 pipeline ranks"),
        (10, {"decoder_first_pipeline_num_layers": 11}, "= -1 layers are not divisible"),
        (
            10,
            {"decoder_first_pipeline_num_layers": 1, "account_for_loss_in_pipeline_split": True},
            "exclude account_for_embedding_… and account_for_loss_in_pipeline_split; leave out the settings",
        ),
        (
            10,
            {"decoder_first_pipeline_num_layers": 1, "virtual_pipeline_model_parallel_size": 2},
            "rank 0 has 1 layer, which virtual_pipeline_model_parallel_size 2 does not divide",
        ),
        (4, {"pipeline_model_parallel_layout": "Ett|t|tL"}, "has 3 stages, but pipeline_model_parallel_size is 4"),
        (
            4,
            {"pipeline_model_parallel_layout": "Et|t|t|tL", "virtual_pipeline_model_parallel_size": 2},
            "has 4 stages, .* with 2 chunks per rank; write 8 stages",
        ),
        (5, {"pipeline_model_parallel_layout": "Et|t|t|tL"},
         r"has 4 layers \(t\), but model.num_layers is 5; .*'Et\|t\|t\*2\|tL'"),
        (4, {"pipeline_model_parallel_layout": "tt|t|t|EL"}, "must begin with its only E"),
        (4, {"pipeline_model_parallel_layout": "Et|t|t|m|L"}, "has a 'm'; it takes E"),
        (4, {"pipeline_model_parallel_layout": "E(t|t|tL"}, r"has a '\(' that is not closed"),
        (4, {"pipeline_model_parallel_layout": "Et)|t|tL"}, r"has '\)' without '\('"),
        (4, {"pipeline_model_parallel_layout": "Et*|t|tL"}, r"has a '\*' without a number"),
        (4, {"pipeline_model_parallel_layout": "E((t*99999)*99999)*99999L"}, "more than 100,000 letters"),
        (
            4,
            {"pipeline_model_parallel_layout": "Et|t|t|tL", "decoder_last_pipeline_num_layers": 1},
            "and so does decoder_last_pipeline_num_layers; leave one",
        ),
    ],
)  # fmt: skip
def test_impossible_splits_are_refused_with_the_arithmetic_and_the_way_out(layers, settings, message):
    with pytest.raises(ConfigError, match=message):
        assign_layers(ModelConfig(num_layers=layers), parallel(4, **settings))


def test_a_rank_with_two_copies_of_relative_positions_is_refused():
    shape = ModelConfig(num_layers=4, model_type="t5", position_embedding_type="relative")
    with pytest.raises(
        ConfigError, match="2 copies of the relative positions, whose gradients are summed only over ranks"
    ):
        assign_layers(shape, parallel(2, virtual_pipeline_model_parallel_size=2))


def model(**fields) -> ModelConfig:
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    return ModelConfig(**sizes, max_position_embeddings=8, **fields)


def of_stage(rank: int) -> Mesh:
    """The mesh of two stages as one of them sees it."""
    return replace(Mesh.alone(), pp=Axis(2, rank), tied=Axis(2, rank))


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_hold_every_parameter_once_under_its_name_and_a_tied_head_its_copy(untied, virtual):
    config = model(untie_embeddings_and_output_weights=untied)
    settings = parallel(2, virtual_pipeline_model_parallel_size=virtual)
    assignment = assign_layers(config, settings)
    names = []
    for rank in range(2):
        whole = Transformer(config, device="meta")
        chunks = split_stages(whole, assignment, rank)
        local = [name for chunk in chunks for name, _ in chunk.named_parameters()]
        names += [name for name in local if name not in counted_elsewhere(chunks, of_stage(rank))]
        assert [[*chunk.layers] for chunk in chunks] == [[*map(str, s.layers)] for s in assignment[rank]]
    assert sorted(names) == sorted(dict(Transformer(config, device="meta").named_parameters()))
    last = chunks[-1]
    assert (last.embedding is None) == untied
    if not untied:
        assert counted_elsewhere(chunks, of_stage(1)) == {"embedding.word_embeddings.weight"}
        assert [name for name, _ in last.embedding.named_parameters()] == ["word_embeddings.weight"]


def test_stages_one_after_the_other_compute_what_the_whole_model_does():
    config = model()
    torch.manual_seed(0)
    whole = Transformer(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(16, (2, 8))
    expected = whole.eval()(tokens)
    assignment = assign_layers(config, parallel(4))
    streams = None
    for rank in range(4):
        (stage,) = split_stages(whole, assignment, rank)
        streams = stage.eval()(tokens, streams=streams)
    assert torch.equal(streams, expected)


def run_config(**settings) -> RunConfig:
    tree = {"model": model().model_dump(), "parallel": {}, "runtime": {}}
    for name, value in settings.items():
        tree["runtime" if name == "compile" else "parallel"][name] = value
    return RunConfig.from_tree(tree)


def test_a_run_is_warned_of_few_micro_batches_only():
    config = run_config(pipeline_model_parallel_size=4)
    assert check_pipeline(config, [8, 4]) == []
    (warning,) = check_pipeline(config, [8, 2, 8])
    assert warning.startswith("2 micro-batches per step are fewer than the 4 pipeline stages")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data_parallel_sharding_strategy": "optim_grads"},
            "zero_bubble defers wgrads; choose optim or no_shard, or another schedule",
        ),
        ({"recompute_granularity": "full"}, "recompute core_attn or layernorm only"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            "recompute core_attn or layer",
        ),
        (
            {"compile": True},
            "runtime.compile is true, but compiled layers compute dgrad and wgrad together",
        ),
    ],
)
def test_what_zero_bubble_cannot_have_is_refused(settings, message):
    config = run_config(pipeline_model_parallel_size=2, pipeline_schedule="zero_bubble", **settings)
    with pytest.raises(ConfigError, match=message):
        check_parallel(config, 2)


def test_chunks_on_a_single_rank_are_refused():
    with pytest.raises(ConfigError, match="there is only one pipeline rank"):
        check_pipeline(run_config(virtual_pipeline_model_parallel_size=2), [4])

"""The layout of a run: what stands where, what it is expected to take, and what it says on the screen."""

import pytest
from default_cases import by_default
from layout_job import configuration, large, printed_by_run, weights_expected_and_held

from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine
from megalith.parallel.mesh import Coordinates
from megalith.parallel.pipeline.schedules import build_schedule, in_flight_bound
from megalith.parallel.pipeline.timeline import read_timeline
from megalith.planner.layout import alternative, build_layout, fullest, max_in_flight
from megalith.planner.layout_text import layout_text
from megalith.planner.memory_choices import with_recomputation, with_static_dispatch, with_unsharded_layers
from megalith.planner.micro_batches import micro_batch_notes

FIELD = "parallel.fsdp_unsharded_layers"


def test_ranks_stand_with_tensor_fastest_and_pipeline_slowest():
    layout = large(16, pipeline_model_parallel_size=2, tensor_model_parallel_size=2, context_parallel_size=2)
    assert layout.size == Coordinates(2, 2, 2, 2)
    assert layout.coordinates[13] == Coordinates(pp=1, dp=1, cp=0, tp=1)
    assert layout.stage_of(13).number == 1


@pytest.mark.parametrize("kind, virtual", [("1f1b", 1), ("interleaved", 3), ("zero_bubble", 1)])
def test_max_in_flight_is_the_bound_that_the_schedule_states(kind, virtual):
    schedule = build_schedule(kind, 4, 12, virtual)
    for rank in range(4):
        assert max_in_flight(schedule, rank, [1] * virtual) == in_flight_bound(schedule, rank)


def test_first_stage_holds_the_activations_of_every_stage_behind_it():
    layout = large(4, 1, pipeline_model_parallel_size=4)
    assert [stage.in_flight for stage in layout.stages] == [4, 3, 2, 1]
    second, third = (layout.stages[number].memory.activations for number in (1, 2))
    assert second / third == 3 / 2
    assert layout.bubble == pytest.approx(3 / 67)
    assert layout.weighed_bubble > layout.bubble  # the head is work, too


def test_parameters_of_the_stages_are_the_models_and_a_copy_of_a_tied_embedding():
    whole, halves = large(1), large(2, pipeline_model_parallel_size=2)
    assert whole.stages[0].parameters == 774_090_240  # vocabulary padded
    assert sum(stage.parameters for stage in halves.stages) == 774_090_240 + 50304 * 1280


LAYOUTS = {
    "tensor": dict(tensor_model_parallel_size=2),
    "tensor, a KV group of two ranks": dict(tensor_model_parallel_size=2),
    "tensor, norms over all heads": dict(tensor_model_parallel_size=2),
    "pipeline": dict(pipeline_model_parallel_size=2),
    "data, whole": dict(data_parallel_sharding_strategy="no_shard"),
    "data, sharded": dict(data_parallel_sharding_strategy="optim_grads_params"),
    "tensor and pipeline": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tensor and context": dict(
        tensor_model_parallel_size=2, context_parallel_size=2, data_parallel_sharding_strategy="optim"
    ),
}
MODELS = {
    "tensor, a KV group of two ranks": dict(num_query_groups=1),
    "tensor, norms over all heads": dict(
        qk_layernorm=True, qk_layernorm_full_width=True, normalization="RMSNorm"
    ),
    "pipeline": dict(mtp_num_layers=1, position_embedding_type="rope"),
}


@pytest.mark.parametrize("name", by_default(LAYOUTS, *list(LAYOUTS)[1::2]))
def test_expected_weights_and_moments_are_those_that_ranks_hold(pool, tmp_path, name):
    parallel = LAYOUTS[name]
    config = configuration(tmp_path, parallel=parallel, model=MODELS.get(name, {}))
    for expected, held, moments, held_moments in pool.run(
        weights_expected_and_held, config, size=4 if " and " in name else 2
    ):
        # a shard of few rows is padded to the longest one
        assert held == pytest.approx(expected, rel=0.02 if "optim" in str(parallel) else 0)
        assert held_moments == pytest.approx(moments, rel=0.02 if "optim" in str(parallel) else 0)


EXPERTS = dict(num_experts=4, add_bias_linear=False, add_mlp_bias=True)


@pytest.mark.parametrize(
    "parallel",
    [
        dict(expert_model_parallel_size=2),
        dict(tensor_model_parallel_size=2),
        dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=2),
    ],
    ids=str,
)
def test_experts_beside_sharded_state_count_among_the_weights(pool, tmp_path, parallel):
    """Of the experts each rank has its own alone, or FSDP2 shards them and nothing else."""
    parallel = parallel | dict(data_parallel_sharding_strategy="optim_grads_params")
    config = configuration(tmp_path, model=EXPERTS, parallel=parallel)
    for expected, held, *_ in pool.run(weights_expected_and_held, config, size=2):
        assert held == pytest.approx(expected, rel=0.02)


def test_each_axis_moves_what_its_page_says():
    layout = large(
        8,
        1,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        data_parallel_sharding_strategy="optim",
    )
    sent = {transfer.axis: transfer.bytes for transfer in layout.transfers}
    stream, micro_batches = 1024 * 1280 * 2, 32
    assert sent["tensor"] == stream // 2 * (18 * 10 + 2) * micro_batches  # A = (n − 1)/n · N·h·e
    assert sent["pipeline"] == stream // 2 * micro_batches  # sequence parallelism halves it
    layers, ends = 18 * 9_840_640, (50304 // 2 + 1024) * 1280
    assert sent["data × context"] == pytest.approx(((2 + 4) * layers + (4 + 4) * ends) / 2, rel=0.01)


def test_replicas_of_shards_all_reduce_a_shard_of_the_gradients():
    def sent(gpus: int, **parallel) -> int:
        return large(gpus, 1, **parallel).transfers[-1].bytes

    replicated = sent(2, data_parallel_sharding_strategy="no_shard")
    sharded = sent(2, data_parallel_sharding_strategy="optim")
    hybrid = sent(4, data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=2)
    assert hybrid - sharded == pytest.approx(replicated / 2, rel=1e-6)


def test_layers_of_multi_token_prediction_are_sent_like_others():
    def sent(**model):
        config = large(2).config.with_settings({f"model.{name}": value for name, value in model.items()})
        (data,) = build_layout(config, 2).transfers
        return data.bytes

    layer = sent(num_layers=37) - sent()
    join, norms = 2 * 1280 * 1280, 3 * 2 * 1280
    assert sent(mtp_num_layers=1) - sent() == layer + 4 * (join + norms)


@pytest.mark.parametrize("kind, pieces", [("p2p", 4), ("all_gather", 4), ("a2a", 2)])
def test_context_parallelism_moves_keys_and_values_or_heads(kind, pieces):
    layout = large(2, context_parallel_size=2, cp_comm_type=kind)
    (context,) = [transfer for transfer in layout.transfers if transfer.axis == "context"]
    piece = 2 * (8 * 512) * 20 * 64 * 2  # a rank's keys and values, bf16; as many query heads as KV heads
    assert context.bytes == 36 * 8 * pieces * piece


def test_screen_answers_where_the_split_is_and_why_memory_is_uneven():
    text = layout_text(large(2, pipeline_model_parallel_size=2), ["node-a", "node-b"])
    assert "2 ranks = pipeline 2 × data 1 × context 1 × tensor 1" in text
    assert "E 0–17" in text and "18–35 L" in text and "node-b" in text
    assert "stage 0 takes 5.99 GB more than stage 1: activations and cast weights, 2 in flight" in " ".join(
        text.split()
    )
    assert "8 micro-batches per step: ranks are expected to wait 11.1%" in text
    assert max(map(len, text.splitlines())) <= 100


def test_many_ranks_are_shown_by_ranges_and_even_stages_without_a_reason():
    layout = large(64, 1, tensor_model_parallel_size=4)
    text = layout_text(layout)
    assert "60–63   0    15   0    0–3   E 0–35 L" in text
    assert "uneven" not in text and "bubble" not in text


def test_auto_leaves_as_many_layers_gathered_as_nine_tenths_of_the_memory_hold():
    config = large(2, data_parallel_sharding_strategy="optim_grads_params").config

    def total(layers: int) -> int:
        return build_layout(config.with_settings({FIELD: layers}), 2).stages[0].memory.total

    for memory, layers in (
        (0, 0),
        (total(0), 0),
        (total(7) / 0.9 + 1, 7),
        (total(9) / 0.9 - 1, 8),
        (10**13, 36),
    ):
        found, notes = with_unsharded_layers(config, 2, int(memory))
        assert found.parallel.fsdp_unsharded_layers == layers and len(notes) == bool(memory)
    by_hand = config.with_settings({FIELD: 3})
    assert with_unsharded_layers(by_hand, 2, 10**13) == (by_hand, [])
    sent = [build_layout(by_hand.with_settings({FIELD: n}), 2).transfers[0].bytes for n in (0, 36)]
    layers, micro_batches = 36 * 2 * 9_840_640, 4
    assert sent[0] - sent[1] == pytest.approx((2 * micro_batches - 1) * 2 * layers / 2, rel=0.01)


def test_auto_recomputes_what_is_cheapest_where_a_run_would_not_fit():
    """Activation functions, then norms too, then norms and MLPs, then layers; what takes least, where that is less
    than the device has."""
    config = large(1).config
    ways = [
        {},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp_act"]},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
        {"recompute_granularity": "full"},
    ]
    ways = [{f"parallel.{name}": value for name, value in way.items()} for way in ways]
    totals = [fullest(config.with_settings(way), 1) for way in ways]
    assert totals == sorted(totals, reverse=True)

    def chosen(memory: float, settings: dict | None = None) -> int | None:
        found, notes = with_recomputation(config.with_settings(settings or {}), 1, int(memory))
        assert len(notes) == (0 < memory < totals[0] / 0.9 and not settings)
        parallel = found.parallel
        same = (
            parallel.recompute_granularity == way.get("parallel.recompute_granularity")
            and way.get("parallel.recompute_modules", parallel.recompute_modules)
            == parallel.recompute_modules
            for way in ways
        )
        return list(same).index(True)

    assert [chosen(total / 0.9 + 1) for total in totals] == [0, 1, 2, 3, 4]
    assert [chosen(total / 0.9 - 1) for total in totals[:4]] == [1, 2, 3, 4]
    assert chosen(totals[4] + 1) == 4 and chosen(totals[4] - 1) == chosen(0) == 0
    for settings in ({"runtime.activation_memory_budget": 1.0}, {"parallel.recompute_granularity": "full"}):
        assert chosen(totals[1], settings) == (4 if "parallel.recompute_granularity" in settings else 0)
    zero_bubble = RunConfig.load(None, [*LENGTHS, "model.preset=llama3-8b", "parallel.pipeline_schedule=zero_bubble",
        "parallel.pipeline_model_parallel_size=2"])  # fmt: skip
    found, [note] = with_recomputation(zero_bubble, 2, 10**11)
    assert found.parallel.recompute_granularity is None
    assert "parallel.recompute_granularity null" in note and " at least; see `megalith plan`" in note


def test_auto_does_not_recompute_where_weights_that_are_cast_once_leave_the_memory():
    strategy = "parallel.data_parallel_sharding_strategy=optim"
    fp8 = RunConfig.load(None, ["model.preset=llama3-8b", *LENGTHS, strategy, "train.fp8_format=hybrid"])
    once, at_use = (
        fullest(fp8.with_settings({"train.fp8_cache_weights": value}), 2) for value in (True, False)
    )
    assert once < at_use
    for total, recomputed in ((once + 1, False), (once - 1, True)):
        found, _ = with_recomputation(fp8, 2, int(total / 0.9) + 1)
        assert (found.parallel.recompute_granularity is not None) == recomputed


def test_auto_recomputes_what_is_cheap_rather_than_gather_layers_again():
    config = large(2, data_parallel_sharding_strategy="optim_grads_params").config
    acts, norms = (
        config.with_settings(
            {"parallel.recompute_granularity": "selective", "parallel.recompute_modules": modules}
        )
        for modules in (["mlp_act"], ["layernorm", "mlp_act"])
    )

    def total(way: RunConfig, kept: int) -> float:
        return fullest(way.with_settings({FIELD: kept}), 2) / 0.9

    def chosen(memory: float, settings: dict | None = None) -> list[str] | None:
        found, _ = with_recomputation(config.with_settings(settings or {}), 2, int(memory))
        again = found.parallel.recompute_granularity
        return again and found.parallel.recompute_modules

    freed = total(config, 0)
    assert chosen(total(config, 36) + 1) is None
    assert chosen(total(acts, 36) + 1) == ["mlp_act"]
    assert chosen(total(norms, 36) + 1) == ["layernorm", "mlp_act"]
    assert chosen(freed + 1, {FIELD: 0}) is None
    config = large(2, 1, data_parallel_sharding_strategy="optim_grads_params").config  # few tokens
    norms = config.with_settings(
        {
            "parallel.recompute_granularity": "selective",
            "parallel.recompute_modules": ["layernorm", "mlp_act"],
        }
    )
    short = int(total(norms, 36) - 1)
    plain, saving = (
        with_unsharded_layers(way, 2, short)[0].parallel.fsdp_unsharded_layers for way in (config, norms)
    )
    assert 0 < plain < saving and chosen(short) == ["layernorm", "mlp_act"]


def test_auto_says_by_its_name_what_recomputes_and_what_gathers_tokens_again():
    def said(**train) -> str:
        """With the least memory that suffices where tokens are gathered again."""
        config = large(2, tensor_model_parallel_size=2, sequence_parallel=True).config
        config = config.with_settings({f"train.{name}": value for name, value in train.items()})
        ways = {"parallel.save_gathered_inputs": False}
        if not train:
            ways |= {
                "parallel.recompute_granularity": "selective",
                "parallel.recompute_modules": ["layernorm", "mlp_act"],
            }
        found, [note] = with_recomputation(config, 2, int(fullest(config.with_settings(ways), 2) / 0.9) + 1)
        assert not found.parallel.save_gathered_inputs
        return note.partition(" (")[0]

    gathers, of = "parallel.save_gathered_inputs false", "parallel.recompute_granularity selective of"
    assert said() == f"{of} layernorm and mlp_act and {gathers}"
    assert said(fp8_format="hybrid") == gathers


LENGTHS = ["train.precision=bf16", "data.mock=true", "data.seq_length=8192", "train.global_batch_size=4"]
QWEN3 = [
    "model.preset=qwen3-30b-a3b", "model.num_layers=8", "model.moe_grouped_gemm=true", "model.moe_permute_fusion=true",
    "train.precision=bf16",
    "data.mock=true", "data.seq_length=4096", "train.global_batch_size=8",
]  # fmt: skip


def test_auto_dispatches_in_static_buffers_where_that_sends_few_more_tokens_and_fits():
    reasons: set[str] = set()

    def chosen(size: int, memory: float = 10**12, **settings) -> bool | str:
        changes = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
        ranks = f"parallel.expert_model_parallel_size={size}"
        config = RunConfig.load(None, [*QWEN3, ranks, *changes])
        config, notes = with_static_dispatch(config, size, Machine(memory=int(memory)))
        assert notes or config.parallel.moe_static_dispatch is not True
        reasons.update(notes)
        return config.parallel.moe_static_dispatch

    # 2.0 of 2 ranks, 3.6 of 4 and 5.3 of 8 have experts of a token
    assert chosen(2) and chosen(4) and not chosen(8) and chosen(1) == "auto"
    assert chosen(8, parallel__moe_token_dispatcher_type="allgather")
    assert not chosen(2, memory=0) and not chosen(2, train__precision="fp32")
    assert not chosen(2, model__moe_grouped_gemm="false") and not chosen(2, model__moe_ffn_hidden_size=772)
    assert not chosen(2, model__moe_expert_capacity_factor=1, model__moe_pad_expert_input_to_capacity="true")
    config = RunConfig.load(None, [*QWEN3, "parallel.expert_model_parallel_size=4"])
    found = [
        build_layout(config.with_settings({"parallel.moe_static_dispatch": on}), 4) for on in (False, True)
    ]
    exact, static = (layout.stages[0].memory.total for layout in found)
    rows = 3 * 8 * (2048 + 3 * 768)  # times what a balanced token's 8 rows, gates, ups and their product take
    assert static - exact == 8 * 2 * 4096 * rows
    assert not chosen(4, static / 0.9 - 1) and chosen(4, static / 0.9 + 1)
    for why in (
        "5.3 of 8 ranks have experts of a token: it would send 1.5 times",
        "no grouped kernel",
        "expected with true on",
    ):
        assert any(why in each for each in reasons)
    sent = [layout.transfers[-1].bytes for layout in found]
    assert (
        sent[1] == sent[0] * 4 // 8
    )  # the estimate of exact sizes counts a row for each of a token's 8 experts


def test_larger_micro_batch_that_fits_is_named():
    def noted(memory: int, **settings) -> str:
        sections = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
        sharded = "parallel.data_parallel_sharding_strategy=optim_grads_params"
        config = RunConfig.load(None, ["model.preset=llama3-8b", *LENGTHS, sharded, *sections])
        return "".join(micro_batch_notes(config, 2, Machine(2, True, True, memory, ranks=2)))

    def named(memory: int, **settings) -> str:
        return noted(memory, **settings)[:28]

    h200, h100 = 150_754_000_000, 85_521_000_000
    assert named(h200) == "try train.micro_batch_size 2"
    assert named(h200, train__global_batch_size=16) == "try train.micro_batch_size 2"  # 4 would not fit
    assert (
        named(10**12, train__global_batch_size=16) == "try train.micro_batch_size 4"
    )  # 8 are enough tokens alone
    assert not named(h100) and not named(0) and not named(h200, train__micro_batch_size=2)
    assert not named(10**12, parallel__pipeline_model_parallel_size=2)
    assert "is expected to fit with mlp_act recomputed (" in noted(h200)
    assert (
        named(h200, parallel__reduce_scatter_with_fp32_accumulation=False) == "try train.micro_batch_size 2"
    )
    strategy = "parallel__data_parallel_sharding_strategy"
    alone = {strategy: "no_shard", "parallel__tensor_model_parallel_size": 2}
    alone |= {"parallel__sequence_parallel": True}
    assert "is expected to fit with mlp_act recomputed (" in noted(126_000_000_000, **alone)
    assert "batches gathers and casts weights, and reduces" in noted(
        10**12, parallel__context_parallel_size=2
    )
    assert "micro-batches casts weights, and reduces and" in noted(10**12, **{strategy: "optim_grads"})
    assert "micro-batches casts weights and accumulates" in noted(10**12, **{strategy: "optim"})


def test_alternative_that_the_trainer_refuses_is_none():
    layout = large(2, tensor_model_parallel_size=2)
    assert alternative(layout, {"parallel.tensor_model_parallel_size": 4}) is None
    cut = alternative(layout, {"parallel.sequence_parallel": True})
    assert cut.stages[0].memory.activations < 0.95 * layout.stages[0].memory.activations


def test_run_prints_its_layout_then_what_a_step_took_on_each_rank(pool, tmp_path):
    parallel = dict(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)
    text, *others = pool.run(printed_by_run, configuration(tmp_path, parallel=parallel))
    assert others == ["", "", ""]
    assert "layout: 4 ranks = pipeline 2 × data 1 × context 1 × tensor 2" in text
    assert "hint: every tensor-parallel rank keeps the whole residual stream" in text
    assert "measured in step 5, under the profiler" in text
    _, table = text.split("measured in step 5")
    rows = [line.split() for line in table.splitlines()[3:7]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        step, compute, communication, bubble = map(float, row[7:11])
        assert step == pytest.approx(compute + communication + bubble, abs=0.3)
        assert communication > 0 and bubble > 0
    assert "(expected 11.1% for equal stages, " in " ".join(table.split())
    timeline = read_timeline(tmp_path)  # of step 6
    assert [len(spans) for spans in timeline.spans] == [16, 16]  # 8 micro-batches forward and back
    assert 0 < timeline.bubble < 1 and f"bubble {timeline.bubble:.1%}" in text


def test_layout_report_can_be_turned_off(pool, tmp_path):
    config = configuration(tmp_path, log=dict(layout_report=False))
    text = pool.run(printed_by_run, config, size=2)[0]
    assert "layout: 2 ranks" in text
    assert "measured" not in text

"""FP8 in other layouts against one process: the first step's weight scales to the bit, runs of some steps near."""

import functools
from types import SimpleNamespace

import pytest
import torch
from default_cases import by_default
from fp8_job import (
    MIXERS,
    STEPS,
    Fp8Outcome,
    block_config,
    casts_of_weights,
    encoder_config,
    expert_config,
    figures_of_steps,
    fp8_config,
    latent_config,
    mixer_config,
    run_counting_casts,
    run_fp8_job,
    run_with_failures,
)
from parity_cases import train

from megalith.checkpoint.manifest import TensorRecord
from megalith.checkpoint.state import load_amaxes
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.rules.fp8_rules import check_fp8
from megalith.errors import CheckpointError, ConfigError
from megalith.ops.fp8.codes import E4M3, quantize
from megalith.ops.fp8.recipes import AmaxTable
from megalith.parallel.fp8_counts import KINDS, count
from megalith.parallel.fp8_linears import apply_fp8, casts_weights_once, fp8_modules
from megalith.parallel.memory import activation_offload
from megalith.parallel.step_casts import step_cast_tensors
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import start, state_by_name
from megalith.planner.memory_choices import with_cached_weights
from megalith.training.build import build_meta_model

RECIPES = "delayed", "tensorwise", "blockwise"
ENCODERS = {
    "bert": "bert post-LN, dropout",
    "t5": "t5 dropout",
    "t5 recompute": "t5 learned positions, untied, recompute all",
}
MAKERS = {
    "delayed": fp8_config,
    "tensorwise": functools.partial(fp8_config, fp8_recipe="tensorwise"),
    "a group shared": functools.partial(fp8_config, groups=1),
    "blockwise": block_config,
    "experts": expert_config,
    **{mixer: functools.partial(mixer_config, mixer=mixer) for mixer in MIXERS},
    **{f"latent {recipe}": functools.partial(latent_config, recipe=recipe) for recipe in RECIPES},
} | {
    f"{name} {recipe}": functools.partial(encoder_config, run=run, recipe=recipe)
    for name, run in ENCODERS.items()
    for recipe in RECIPES
}


LINEARS = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"


@functools.cache
def alone(kind: str) -> Fp8Outcome:
    return run_fp8_job(MAKERS[kind](None))


# The first step's gradients and the steps' losses. A rounding before a cast may flip a code; a scale that is no power
# of two (delayed after the first step, experts) moves with it, and with it other codes; blocks' where they cross one.
CASES = [
    ("delayed", "pp2-zero_bubble", 1e-7, 1e-6),
    ("delayed", "tp2-sp-dp2-zero3", 1e-6, 1e-4),
]
MORE = [  # test_the_scale_of_a_tensor… shows context parallelism's axis by default
    ("blockwise", "tp2-sp", 5e-3, 5e-4),
    ("a group shared", "tp2-sp", 1e-6, 1e-4),
    ("experts", "tp2-etp2", 5e-6, 1e-4),
    *((mixer, "tp2-sp", 1e-6, 1e-4) for mixer in MIXERS if mixer != "delta net"),
    ("delta net", "tp2-sp", 5e-6, 1e-4),  # the gradient of its decay; in fp32 the layouts differ as much
    ("mamba", "pp2", 1e-7, 1e-6),
    ("short convolution", "cp2", 1e-4, 1e-4),
    ("bert delayed", "cp2", 1e-6, 1e-6),
    ("t5 recompute delayed", "tp2-sp-pp2", 1e-6, 1e-6),
    ("delayed", "cp2", 1e-4, 1e-4),
    ("experts", "ep2", 1e-6, 1e-4),
    ("experts", "cp4-a2a", 1e-6, 1e-4),
    ("delayed", "tp2-sp", 1e-6, 1e-4),
    ("tensorwise", "tp2-sp", 1e-6, 1e-4),
    ("tensorwise", "cp2", 1e-4, 1e-4),
    ("tensorwise", "pp2", 1e-7, 1e-6),
    ("blockwise", "pp2", 1e-7, 1e-6),
    ("bert tensorwise", "cp2", 1e-6, 1e-6),
    *((f"bert {recipe}", "pp2-zero_bubble", 1e-6, 1e-6) for recipe in RECIPES),
    *((f"{name} {recipe}", "tp2-sp-dp2-zero3", 1e-6, 1e-5) for name in ("bert", "t5") for recipe in RECIPES),
    *((f"t5 {recipe}", "tp2-sp-pp2", 1e-6, 1e-5) for recipe in RECIPES),
    *((f"t5 {recipe}", "cp2-a2a", 1e-6, 1e-6) for recipe in ("delayed", "tensorwise")),
    *((f"latent {recipe}", "tp2-sp-dp2-zero3", 1e-6, 1e-5) for recipe in RECIPES),
    ("latent tensorwise", "cp2", 1e-4, 1e-4),
    ("latent blockwise", "pp2-zero_bubble", 1e-7, 1e-5),
    ("t5 recompute delayed", "cp2-a2a", 1e-6, 1e-6),
    ("t5 recompute tensorwise", "tp2", 1e-6, 1e-6),
    ("t5 recompute blockwise", "pp2", 1e-7, 1e-5),
]


@pytest.mark.parametrize(
    ("kind", "layout", "gradients", "losses"),
    by_default(CASES + MORE, *CASES),
)
def test_a_layout_trains_as_one_process(pool, kind, layout, gradients, losses):
    one = alone(kind)
    found = pool.run(run_fp8_job, MAKERS[kind](layout), size=LAYOUTS[layout].processes)
    errors = compare([rank.outcome for rank in found], one.outcome)
    assert errors.loss < 1e-6 and errors.gradient < gradients and errors.losses < losses, errors
    # a greedy token may fall otherwise where two are within a flipped code of each other
    assert set(errors.different) <= {"generated tokens"}, errors
    if one.first_scale is not None:
        for rank in found:
            assert torch.equal(rank.first_scale[:, 1], one.first_scale[:, 1])  # weights'
            torch.testing.assert_close(rank.first_scale, one.first_scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("length", [1, 3])
def test_a_resumed_run_is_bitwise_the_one_that_went_on(tmp_path, length):
    settings = {"output_dir": str(tmp_path), "train_iters": 4, "fp8_amax_history_len": length}
    settings |= {"fp8_amax_compute_algo": "max"}
    straight = start(fp8_config(None, **settings))
    train(straight, 2)
    straight.save()
    resumed = start(fp8_config(None, **settings).with_settings({"checkpoint.load": str(tmp_path)}))
    assert torch.equal(resumed.model.amaxes.history, straight.model.amaxes.history)
    assert train(straight, 2) == train(resumed, 2)
    states = state_by_name(straight), state_by_name(resumed)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["delayed", pytest.param("blockwise", marks=pytest.mark.full)])
def test_counts_are_of_the_whole_run_and_change_nothing(pool, kind):
    counted = {"log.log_fp8_interval": 2}
    one, plain = (figures_of_steps(MAKERS[kind](None).with_settings(s)) for s in (counted, {}))
    assert one.losses == plain.losses and one.figures[0] == one.figures[2] == {} == plain.figures[1]
    names = {f"layers.{n}.{name}" for n in (0, 1) for name in LINEARS}
    keys = {f"fp8_{f}/{n}.{k}" for f in ("amax", "overflow", "underflow") for n in names for k in KINDS}
    assert one.figures[1].keys() == keys
    if kind == "delayed":
        assert all(one.figures[1][key] == amax for key, amax in one.amaxes.items())
    layout = MAKERS[kind]("tp2-sp").with_settings(counted)
    first, second = pool.run(figures_of_steps, layout, size=2)
    assert second.figures[1] == {} and first.figures[1] == pytest.approx(one.figures[1], rel=2e-2, abs=2e-3)


def test_a_code_is_counted_where_it_is_the_largest_or_lost_a_number():
    x = torch.tensor([[0.0, 2.0**-20, -3.0, 500.0], [1.0, -0.0, 900.0, -2000.0]])
    sums = torch.tensor([7.0, 1, 1, 1], dtype=torch.float64)
    codes = quantize(x, torch.tensor(1.0), E4M3)
    assert torch.equal(count(codes, x, sums).float(), codes.float())
    assert sums.tolist() == [
        2000.0,
        9,
        4,
        2,
    ]  # 500, 900 and −2000 are cut to 448; one of seven others became 0


def test_an_infinity_that_the_clamp_hides_skips_the_step_and_leaves_the_scales():
    run = start(fp8_config(None, train_iters=4))
    train(run, 1)
    before = run.model.amaxes.scale.clone()
    weight = dict(run.model.parameters.named)["layers.1.mlp.linear_fc2.weight"]
    with torch.no_grad():
        kept, weight[0, 0] = weight[0, 0].item(), float("inf")
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        assert run.train_step(batches).skipped
    assert torch.equal(run.model.amaxes.scale, before)
    with torch.no_grad():
        weight[0, 0] = kept
    train(run, 1)
    assert not torch.equal(run.model.amaxes.scale, before)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.fp8_recipe": "mxfp8"}, "capability 10"),
        ({"train.fp8_recipe": "blockwise"}, "set train.fp8_format to e4m3"),
        ({"train.fp8_recipe": "blockwise", "train.fp8_format": "e4m3"}, "multiples of 128"),
        (
            {"train.fp8_recipe": "blockwise", "train.fp8_format": "e4m3", "data.seq_length": 128}
            | {"parallel.context_parallel_size": 2},
            "a rank's chunk 32",
        ),
        ({"model.ffn_hidden_size": 40}, "ffn_hidden_size 40"),
        (
            {"model.model_type": "t5", "model.num_query_groups": 0, "data.decoder_seq_length": 24}
            | {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True},
            "tokens under sequence_parallel in the decoder 24",
        ),
        ({"train.first_last_layers_bf16": True, "train.num_layers_at_end_in_bf16": 3}, "leave none of the 2"),
    ],
)
def test_what_cannot_be_is_refused_with_its_sizes(settings, words):
    config: RunConfig = fp8_config(None).with_settings(settings)
    with pytest.raises(ConfigError, match=words):
        check_fp8(config)


def test_as_many_first_and_last_layers_as_are_asked_for_stay_in_the_compute_dtype():
    train = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1}
    config = fp8_config(None, **train).with_settings({"model.num_layers": 4})
    assert {name.split(".")[1] for name in fp8_modules(build_meta_model(config), config)} == {"2"}


def test_latents_are_made_in_fp8():
    config = latent_config(None, "delayed")
    latents = {f"linear_{of}_{way}_proj" for of in ("q", "kv") for way in ("down", "up")}
    found = {name for name in fp8_modules(build_meta_model(config), config) if "self_attention" in name}
    assert found == {
        f"layers.{n}.self_attention.{name}" for n in (0, 1) for name in latents | {"linear_proj"}
    }


def test_projections_of_mixers_are_in_fp8():
    names = {"mamba": "zxbcdt", "short convolution": "bcx", "delta net": "in"}
    for mixer, inputs in names.items():
        config = mixer_config(None, mixer)
        first = {
            name for name in fp8_modules(build_meta_model(config), config) if ".0.self_attention" in name
        }
        assert first == {f"layers.0.self_attention.linear_{name}" for name in (inputs, "out")}
    with pytest.raises(ConfigError, match=r"rows of Mamba-2's linear_zxbcdt .* 244"):
        check_fp8(mixer_config(None, "mamba").with_settings({"model.mamba_num_heads": 20}))


def test_both_stacks_of_an_encoder_decoder_compute_in_fp8():
    config = encoder_config(None, ENCODERS["t5"])
    cross = [f"layers.1.cross_attention.{name}" for name in ("linear_q", "linear_kv", "linear_proj")]
    stacks = [f"{stack}.{name}" for stack in ("encoder.layers.0", "layers.1") for name in LINEARS]
    assert {*fp8_modules(build_meta_model(config), config)} == {*stacks, *cross}


def test_the_scale_of_a_tensor_is_that_of_all_ranks_that_hold_shards_of_it():
    axes = {"tp": Axis(2, 0), "cp": Axis(2, 1), "etp": Axis(4, 0)}
    model = build_meta_model(config := expert_config(None).with_settings({"train.fp8_recipe": "tensorwise"}))
    apply_fp8(model, config, SimpleNamespace(**axes), torch.device("meta"), None)
    layer = model.layers["0"]
    assert layer.self_attention.linear_qkv.gemm.scaling.axes == (axes["tp"], axes["cp"])
    cuts = [(fc.gemm.axis.size, fc.gemm.gradient_axis.size) for fc in layer.mlp.experts.children()]
    assert cuts == [(1, 4), (4, 1)]  # of what fc1 gives and fc2 takes


def test_a_checkpoint_with_scales_of_another_shape_is_refused():
    table, other = (AmaxTable(["a"], "hybrid", 1, "max", 0, torch.device("cpu")) for _ in range(2))
    stored = {name: TensorRecord(dtype="F32", shape=[2, 2]) for name in other.state()}
    checkpoint = SimpleNamespace(folder="there", manifest=SimpleNamespace(tensors={"amaxes": stored}))
    with pytest.raises(CheckpointError, match=r"there has FP8 scales of another shape: .*a.scale \[2, 2\]"):
        load_amaxes(checkpoint, table)


@pytest.mark.parametrize("kind", by_default(["delayed", "tensorwise", "blockwise"], "delayed", "blockwise"))
def test_weights_are_cast_once_a_step_and_nothing_else_changes(kind):
    """Two steps of two micro-batches, every layer recomputed: by the seven casts of it, or by one."""
    found = {}
    for once in (True, False):
        settings = {"train.fp8_cache_weights": once, "train.global_batch_size": 4}
        with casts_of_weights() as casts:
            run = start(MAKERS[kind](None).with_settings(settings | EVERY_LAYER))
            losses = train(run, 2)
        found[once] = losses, state_by_name(run), sum(casts)
        assert all(
            linear.gemm.step_codes is None or linear.gemm.step_codes.operands is None
            for linear in linears(run)
        )
    assert found[True][0] == found[False][0]
    assert all(torch.equal(value, found[False][1][name]) for name, value in found[True][1].items())
    matrices = len(LINEARS) * 2
    assert (found[True][2], found[False][2]) == (2 * matrices, 2 * 2 * 2 * matrices)


RECOMPUTED = {"parallel.recompute_granularity": "full", "parallel.recompute_method": "uniform"}
EVERY_LAYER = RECOMPUTED | {"parallel.recompute_method": "block", "parallel.recompute_num_layers": 9}


def linears(run):
    return fp8_modules(run.model.chunks[0], run.config).values()


def test_codes_that_stay_for_a_step_are_not_offloaded(monkeypatch):
    settings = {"train.fp8_cache_weights": True, "parallel.cpu_offloading_num_layers": 1}
    run, sent = start(MAKERS["blockwise"](None).with_settings(settings)), []

    class Watched(activation_offload._SavedStorage):
        def __init__(self, streams, storage):
            super().__init__(streams, storage)
            codes = step_cast_tensors(run.model.chunks[0])
            sent.append(storage.data_ptr() in {each.untyped_storage().data_ptr() for each in codes})

    monkeypatch.setattr(activation_offload, "_SavedStorage", Watched)
    monkeypatch.setattr(activation_offload, "SMALLEST", 1)
    train(run, 1)
    assert sent and not any(sent) and not step_cast_tensors(run.model.chunks[0])


def test_casts_that_fail_leave_no_codes_of_a_step_behind(monkeypatch):
    run = start(MAKERS["blockwise"](None).with_settings({"train.fp8_cache_weights": True}))
    last = [*linears(run)][-1].gemm

    def fails(weight):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(last, "cast_for_step", fails)
    with pytest.raises(torch.OutOfMemoryError), run.model.step_casts:
        pass
    assert all(linear.gemm.step_codes.operands is None for linear in linears(run))


LAST_STAYS = {"parallel.fsdp_unsharded_layers": 1}
OVERFLOWS = {"train.precision": "fp16", "optim.initial_loss_scale": 2.0**23, "optim.hysteresis": 1}
# How many layers of a rank stay whole for a step, and how often it would cast each weight in two micro-batches: in a
# pipeline and where others are freed, for dgrad too.
ONCE = [
    ("delayed", "pp2-zero_bubble-dp2-zero1", {}, 1, 4),
]
MORE_ONCE = [
    ("blockwise", "dp2-zero3", LAST_STAYS, 1, 4),
    ("delayed", "pp2-zero_bubble", {}, 1, 8),
    ("delayed", "dp2-zero1", OVERFLOWS, 2, 2),
    ("delayed", "dp2-zero1", {"parallel.cpu_offloading_num_layers": 1}, 2, 2),
    ("delayed", "dp2-zero2", {"lora.rank": 4}, 2, 2),
    ("delayed", "tp2-sp-dp2-zero1", {"log.log_fp8_interval": 2}, 2, 2),
    ("tensorwise", "dp2-zero2", RECOMPUTED | {"parallel.recompute_num_layers": 2}, 2, 4),
    ("tensorwise", "dp2-zero3", LAST_STAYS, 1, 4),
    ("blockwise", "dp2-zero1", {}, 2, 2),
    ("experts", "ep2-dp4-zero1", {"train.global_batch_size": 16}, 2, 2),
]


@pytest.mark.parametrize(
    ("kind", "layout", "settings", "layers", "at_use"),
    by_default(ONCE + MORE_ONCE, *ONCE),
)
def test_a_layout_casts_once_what_stays_whole_and_nothing_else_changes(
    pool, kind, layout, settings, layers, at_use
):
    """Three steps, with an evaluation and a generation between them, which cast where they compute."""
    config = MAKERS[kind](layout).with_settings({"train.global_batch_size": 8, **settings})
    cached, plain = (
        pool.run(
            run_counting_casts,
            config.with_settings({"train.fp8_cache_weights": value}),
            size=LAYOUTS[layout].processes,
        )[0]
        for value in (True, False)
    )
    once, each = cached.outcome, plain.outcome
    assert once.losses == each.losses and once.skipped == each.skipped
    assert (once.evaluation, once.generated) == (each.evaluation, each.generated)
    assert all(torch.equal(value, each.state[name]) for name, value in once.state.items())
    matrices = layers * (len(LINEARS) - 2 * (kind == "experts"))
    assert plain.casts - cached.casts == STEPS * matrices * (at_use - 1)
    are_freed = "dp" in layout and "log.log_fp8_interval" not in settings
    assert (cached.freed, plain.freed) == ({matrices * are_freed}, {0})
    assert not settings.get("optim.hysteresis") or {*once.skipped} == {True, False}


@pytest.mark.full
def test_weights_whose_memory_was_freed_are_gathered_again_after_a_step_that_fails(pool):
    config = fp8_config("dp2-zero1").with_settings({"train.global_batch_size": 8})
    once, each = (
        pool.run(run_with_failures, config.with_settings({"train.fp8_cache_weights": value}), size=2)[0]
        for value in (True, False)
    )
    assert once[0] == each[0]
    assert all(torch.equal(value, each[1][name]) for name, value in once[1].items())


ALL_SHARDED = {"parallel.data_parallel_sharding_strategy": "optim_grads_params"}
SHARDED = {"parallel.data_parallel_sharding_strategy": "optim"}
ONE_MICRO_BATCH = {"train.global_batch_size": 4}


def test_auto_caches_where_it_takes_no_more_or_a_step_casts_more_than_once_and_memory_suffices():
    config = fp8_config(None, precision="bf16")
    config = config.with_settings({"train.global_batch_size": 8, "train.micro_batch_size": 2})
    for settings, memory, cached in (
        ({}, 80 * 10**9, True),
        ({}, 10**5, False),
        ({}, 0, False),
        (ONE_MICRO_BATCH, 80 * 10**9, False),
        (ONE_MICRO_BATCH | RECOMPUTED, 80 * 10**9, True),
        (SHARDED, 10**5, True),
        (SHARDED | ONE_MICRO_BATCH, 80 * 10**9, True),
        (SHARDED | ONE_MICRO_BATCH | {"log.log_fp8_interval": 1}, 80 * 10**9, False),
        (ALL_SHARDED, 80 * 10**9, False),
        (ALL_SHARDED | LAST_STAYS, 10**5, True),
    ):
        found, notes = with_cached_weights(config.with_settings(settings), 2, memory)
        expected = any("fp8_cache_weights true" in line for line in notes)
        assert found.train.fp8_cache_weights == expected == cached, settings
        assert casts_weights_once(found) == cached

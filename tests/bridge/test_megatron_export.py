"""Exports to Megatron can be imported again unchanged and have the structure that Megatron core expects.

That Megatron core itself loads it is what `make megatron-core` shows (against_megatron_core.py).
"""

import errno
import math
from pathlib import Path

import pytest
import torch
from default_cases import by_default
from megatron_checkpoint import core_state, save_run
from torch.distributed import checkpoint as dcp

import megalith
from megalith.bridge.megatron.megatron_exporter import convert, export_megatron
from megalith.bridge.megatron.megatron_importer import import_megatron
from megalith.bridge.megatron.megatron_writer import CoreTensors
from megalith.bridge.megatron.table import GPT
from megalith.bridge.megatron.table import HYBRID as HYBRID_CORE
from megalith.bridge.verify import same_bits
from megalith.cli.main import main
from megalith.config import ModelConfig, RunConfig
from megalith.dialects.megatron.door import run_command
from megalith.errors import CheckpointError, ConfigError
from megalith.models.transformer import Transformer
from megalith.optim.schedule import build_schedule
from megalith.training.build import prepare

SHAPE = dict(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=151, max_position_embeddings=64)
LLAMA = dict(SHAPE, ffn_hidden_size=48, num_query_groups=2, kv_channels=12, position_embedding_type="rope", swiglu=True,
             normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True)  # fmt: skip
EXPERTS = dict(LLAMA, num_experts=4, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=32)
LATENT = dict(SHAPE, ffn_hidden_size=48, position_embedding_type="rope", swiglu=True, normalization="RMSNorm",
              add_bias_linear=False, multi_latent_attention=True, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4,
              v_head_dim=6, untie_embeddings_and_output_weights=True)  # fmt: skip
HYBRID = dict(
    SHAPE,
    ffn_hidden_size=48,
    num_query_groups=2,
    kv_channels=12,
    position_embedding_type="none",
    activation="squared_relu",
    normalization="RMSNorm",
    add_bias_linear=False,
    mamba_num_heads=8,
    mamba_head_dim=6,
    mamba_state_dim=5,
    mamba_num_groups=4,
    untie_embeddings_and_output_weights=True,
)
MODELS = {
    "gpt": ModelConfig(**SHAPE),
    "llama": ModelConfig(**LLAMA, qk_layernorm=True, rope_scaling={"type": "llama3", "factor": 4.0}),
    "experts": ModelConfig(**EXPERTS, moe_shared_expert_gate=True),
    "some experts": ModelConfig(
        **EXPERTS, moe_layer_freq=2, moe_grouped_gemm=True, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
    "windows": ModelConfig(
        **EXPERTS, window_size=[15, 0], window_attn_skip_freq=2, softmax_type="learnable", attention_dropout=0.0,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    ),
    "latent": ModelConfig(
        **LATENT, q_lora_rank=8, mtp_num_layers=2, window_size=[15, 0], num_experts=4, moe_ffn_hidden_size=16,
        moe_layer_freq=[0, 1, 1, 1], moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 0.7,
                      "mscale_all_dim": 0.9},
    ),
    "latent without norms": ModelConfig(
        **{**LATENT, "add_bias_linear": True}, q_lora_rank=8, latent_layernorm=False, add_position_embedding=True,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096,
                      "attention_factor": 1.13},
    ),
    "latent keys": ModelConfig(**{**LATENT, "normalization": "LayerNorm"}, moe_grouped_gemm=True, num_experts=4),
    "bert": ModelConfig(**SHAPE, model_type="bert", lm_head_activation="gelu"),
    "delta nets": ModelConfig(
        **EXPERTS, moe_shared_expert_gate=True, attention_output_gate=True, qk_layernorm=True, mtp_num_layers=1,
        rotary_percent=0.5, experimental_attention_variant="gated_delta_net", linear_attention_freq=[1, 0, 1, 1],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=5, linear_value_head_dim=6,
        linear_conv_kernel_dim=3,
    ),
    "hybrid": ModelConfig(
        **HYBRID, hybrid_layer_pattern="ME*-", num_experts=4, moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=32, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
    "hybrid with delta nets": ModelConfig(
        **HYBRID, hybrid_layer_pattern="MG*-", linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=5,
        linear_value_head_dim=6,
    ),
    "only mamba": ModelConfig(**{**HYBRID, "position_embedding_type": "rope"}, hybrid_layer_pattern="MMMM"),
}  # fmt: skip
FORMS = [
    dict(ckpt_format="torch_dist", tp=2, pp=2),
    dict(ckpt_format="torch_dist", transformer_impl="local", with_optimizer=True),
    dict(ckpt_format="torch"),
    dict(ckpt_format="torch", tp=2, transformer_impl="local"),
    dict(ckpt_format="torch", tp=2, pp=4),
]


def assert_same(run: Path, model: Transformer) -> None:
    loaded, expected = megalith.load(run), model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    rows = {
        name: 151 if "word_embeddings" in name or "output_layer" in name or "vocabulary" in name else None
        for name in expected
    }
    for name, value in loaded.state_dict().items():
        assert same_bits(value[: rows[name]], expected[name][: rows[name]]), name


@pytest.mark.parametrize("name", by_default(MODELS, "experts", "bert"))
def test_what_is_exported_comes_back_bitwise(name: str, tmp_path: Path) -> None:
    model = save_run(tmp_path / "run", MODELS[name])
    needs_engine = MODELS[name].recurrent_mixers
    for number, form in enumerate(FORMS):
        if needs_engine:
            form = {**form, "transformer_impl": "transformer_engine"}
        out, back = tmp_path / f"megatron{number}", tmp_path / f"back{number}"
        export_megatron(tmp_path / "run", out, **form)
        import_megatron(out, back, show_progress=False)  # what it writes needs no trust
        assert_same(back, model)


def test_megatron_stores_norms_of_delta_nets_without_the_one_that_it_adds(tmp_path: Path) -> None:
    shape = MODELS["delta nets"].model_dump(exclude_unset=True) | {"layernorm_zero_centered_gamma": True}
    model = save_run(tmp_path / "run", ModelConfig(**shape))
    out = export_megatron(tmp_path / "run", tmp_path / "out", ckpt_format="torch")
    state = torch.load(out / "mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    stored = state["decoder.layers.2.self_attention.out_norm.weight"]
    assert torch.equal(stored, model.state_dict()["layers.2.self_attention.out_norm.weight"] - 1)
    import_megatron(tmp_path / "out", tmp_path / "back", show_progress=False)
    loaded = megalith.load(tmp_path / "back").state_dict()
    for name, value in model.state_dict().items():
        rows = 151 if "word_embeddings" in name or name.startswith("output_layer") else len(value)
        torch.testing.assert_close(
            loaded[name][:rows], value[:rows], rtol=0, atol=1e-6 * ("out_norm" in name)
        )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "hybrid",
            {"layernorm_epsilon": 1e-6},
            r"norm_epsilon 1e-06, but the norms of Mamba-2's mixers use 1e-05",
        ),
        ("hybrid", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3, not 4"),
        ("hybrid", {"mamba_rms_norm": False}, "mamba_rms_norm False, not True"),
        (
            "delta nets",
            {"swiglu": False, "activation": "gelu"},
            "gated delta nets without swiglu; Megatron core then uses an activation other than",
        ),
    ],
)
def test_mixers_that_megatron_core_computes_otherwise_are_refused(
    name: str, changes: dict, message: str, tmp_path: Path
) -> None:
    shape = MODELS[name].model_dump(exclude_unset=True) | changes
    save_run(tmp_path / "run", ModelConfig(**shape))
    with pytest.raises(ConfigError, match=message):
        export_megatron(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match="only with Transformer Engine; choose transformer_engine"):
        save_run(tmp_path / "other", MODELS[name])
        export_megatron(tmp_path / "other", tmp_path / "out", transformer_impl="local")


def test_patterns_of_hybrid_models_are_read_or_refused_by_name() -> None:
    args = HYBRID_CORE.write_config(MODELS["hybrid"])
    read = HYBRID_CORE.read_config
    assert read(args | {"hybrid_override_pattern": "ME|*-"}).hybrid_layer_pattern == "ME*-"
    newer = {"hybrid_override_pattern": None, "hybrid_layer_pattern": "ME*-", "num_layers": None}
    assert read(args | newer).num_layers == 4
    with pytest.raises(ConfigError, match=r"layer pattern ME\*-/\*E, in which '/' is not supported"):
        read(args | {"hybrid_override_pattern": "ME*-/*E"})
    for other in ({"norm_epsilon": 1e-6}, {"layernorm_epsilon": 1e-6}):
        without = {name: value for name, value in args.items() if name != "norm_epsilon"}
        with pytest.raises(
            ConfigError, match=f"has {next(iter(other))} 1e-06, but the norms of Mamba-2's mixers"
        ):
            read(without | other | {"hybrid_override_pattern": "ME*-"})
    with pytest.raises(
        ConfigError, match=r"hybrid_attention_ratio 0\.2 and hybrid_mlp_ratio 0\.0 without a pattern"
    ):
        read(args | {"hybrid_override_pattern": None, "hybrid_attention_ratio": 0.2})
    with pytest.raises(ConfigError, match="experimental_attention_variant 'dsa'; supported: gated_delta_net"):
        GPT.read_config(GPT.write_config(MODELS["llama"]) | {"experimental_attention_variant": "dsa"})
    with pytest.raises(
        ConfigError, match="experimental_attention_variant mamba2; Megatron core has gated_delta_net"
    ):
        GPT.write_config(ModelConfig(**LLAMA, experimental_attention_variant="mamba2", mamba_num_heads=8))


@pytest.mark.parametrize("attention_factor", [None, 0.1 * math.log(4) + 1, 1.13, 0.83])
def test_an_explicit_attention_factor_is_written_as_mscale(attention_factor: float | None) -> None:
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": attention_factor,
    }
    expected = attention_factor or 0.1 * math.log(4) + 1
    for shape in [LLAMA, LATENT] if expected >= 1 else [LLAMA]:
        theirs = GPT.write_config(ModelConfig(**shape, rope_scaling=scaling))
        above, below = (0.1 * theirs[name] * math.log(4) + 1 for name in ("mscale", "mscale_all_dim"))
        assert above / below == pytest.approx(expected)
    if expected < 1:
        with pytest.raises(ConfigError, match=r"attention_factor 0\.83"):
            GPT.write_config(ModelConfig(**LATENT, rope_scaling=scaling))


def test_rotary_arguments_that_latents_do_not_read_change_nothing() -> None:
    """Megatron core scales the positions of latents by YaRN alone, and reads rotary_percent without YaRN alone."""
    plain = GPT.write_config(ModelConfig(**LATENT))
    scaled = {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2, "add_qkv_bias": True}
    assert GPT.read_config(plain | scaled) == GPT.read_config(plain)
    yarn = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale_all_dim": 0.7}
    assert GPT.read_config(plain | yarn | {"rotary_percent": 0.5}) == GPT.read_config(plain | yarn)
    with pytest.raises(
        ConfigError, match=r"mscale_all_dim 0\.7 and rotary_scaling_factor 4\.0 with rope_type rope"
    ):
        GPT.read_config(plain | yarn | {"rope_type": "rope"})
    with pytest.raises(ConfigError, match="no qk_layernorm"):
        GPT.read_config({name: value for name, value in plain.items() if name != "qk_layernorm"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("original_max_position_embeddings", 16), ("beta_fast", 16.0), ("beta_slow", 2.0), ("truncate", False)],
)
def test_settings_of_yarn_that_megatron_fixes_for_latents_are_refused(name: str, value: object) -> None:
    """Fields of Megatron's MLATransformerConfig lack the prefix of its --yarn-* arguments, which do not set them."""
    plain = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    scaling = plain | {name: value}
    GPT.write_config(ModelConfig(**LLAMA, rope_scaling=scaling))
    with pytest.raises(
        ConfigError, match=rf"rope_scaling\.{name} is {value}, but Megatron-LM always computes"
    ):
        GPT.write_config(ModelConfig(**LATENT, rope_scaling=scaling))
    theirs = GPT.write_config(ModelConfig(**LATENT, rope_scaling=plain))
    argument = "correction_range_round_to_int" if name == "truncate" else name
    assert GPT.read_config(theirs | {f"yarn_{argument}": value}) == GPT.read_config(theirs)
    if name != "truncate":  # no field of Megatron's
        assert getattr(GPT.read_config(theirs | {name: value}).rope_scaling, name) == value


def test_a_distributed_checkpoint_has_megatrons_tensors_and_optimizer(tmp_path: Path) -> None:
    model = save_run(tmp_path / "run", MODELS["experts"], precision="bf16")
    folder = export_megatron(tmp_path / "run", tmp_path / "out", with_optimizer=True)
    assert folder == tmp_path / "out/iter_0000002"
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "2"
    assert {path.name for path in folder.iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "common.pt",
        "metadata.json",
    }
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()
               if hasattr(one, "size")}  # fmt: skip
    dcp.load(tensors, checkpoint_id=folder)
    checkpoint = megalith.checkpoint.open_existing(tmp_path / "run", ("model", "optimizer"))
    checked = {"": None, "optimizer.state.param.": None, "optimizer.state.fp32_param.": None,
               "optimizer.state.exp_avg.": "exp_avg", "optimizer.state.exp_avg_sq.": "exp_avg_sq"}  # fmt: skip
    for prefix, part in checked.items():
        if part:
            values = {
                name: checkpoint.read("optimizer", f"optim.{name}.{part}") for name in model.state_dict()
            }
            for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                values[name] = torch.cat([values[name], torch.zeros(256 - 151, 32)])
            model.load_state_dict(values)
        for name, value in core_state(model, te=True).items():
            found = tensors[prefix + stacked(name)]
            found = found[int(name.split(".")[2])] if name.startswith("decoder.layers.") else found
            found = (
                found[int(name.split("local_experts.")[1].split(".")[0])]
                if "local_experts" in name
                else found
            )
            value = value if prefix else value.bfloat16()
            rows = 151 if "word_embeddings" in name or name == "output_layer.weight" else None
            assert same_bits(found[:rows], value[:rows]), (prefix, name)
            assert rows is None or not found[rows:].any()
    assert "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_3.2_4.4" in stored
    assert "decoder.layers.self_attention.core_attention._extra_state/shard_0_4" in stored
    common = torch.load(folder / "common.pt", weights_only=False)
    assert (common["args"].padded_vocab_size, common["args"].num_experts, common["args"].bf16) == (
        256,
        4,
        True,
    )
    assert [group["wd_mult"] for group in common["optimizer"]["param_groups"]] == [1.0, 0.0]
    assert common["opt_param_scheduler"]["num_steps"] == 8 and not common["args"].no_save_optim


def test_the_schedule_does_not_count_steps_that_fp16_skipped(tmp_path: Path) -> None:
    save_run(tmp_path / "run", MODELS["gpt"], precision="fp16", skipped=1)
    folder = export_megatron(tmp_path / "run", tmp_path / "out", with_optimizer=True)
    common = torch.load(folder / "common.pt", weights_only=False)
    config = RunConfig.from_tree(
        megalith.checkpoint.open_existing(tmp_path / "run", ("model",)).manifest.config
    )
    rate = build_schedule(config.optim, config.train).learning_rate(1, 4)
    assert common["opt_param_scheduler"]["num_steps"] == 4
    assert [group["lr"] for group in common["optimizer"]["param_groups"]] == [rate] * 2
    args = common["args"]
    assert (args.iteration, args.consumed_train_samples) == (2, 8) and common["iteration"] == 2


def stacked(name: str) -> str:
    """The name of the stored tensor that one of Megatron's is in."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        del words[2]
    if "local_experts" in words:
        at = words.index("local_experts")
        words[at : at + 2] = ["experts"]
    return ".".join(words)


def test_rank_files_have_the_names_of_the_layers_that_load_them(tmp_path: Path) -> None:
    save_run(tmp_path / "run", MODELS["some experts"])
    files = {}
    for implementation in ("local", "transformer_engine"):
        out = tmp_path / implementation
        folder = export_megatron(
            tmp_path / "run", out, ckpt_format="torch", tp=2, pp=2, transformer_impl=implementation
        )
        assert {path.name for path in folder.iterdir()} == {
            f"mp_rank_{tp:02d}_{pp:03d}" for tp in (0, 1) for pp in (0, 1)
        }
        files[implementation] = torch.load(folder / "mp_rank_01_001/model_optim_rng.pt", weights_only=False)
    local, engine = (files[name]["model"] for name in ("local", "transformer_engine"))
    assert local["decoder.layers.0.mlp.experts.weight1"].shape == (32, 4 * 16)
    assert local["decoder.layers.0.mlp.experts.weight2"].shape == (4 * 8, 32)
    assert engine["decoder.layers.0.mlp.experts.linear_fc1.weight3"].shape == (16, 32)
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in engine  # apart, before experts
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in engine
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in local
    assert (
        engine["output_layer.weight"].shape == (256 // 2, 32)
        and "embedding.word_embeddings.weight" not in engine
    )
    assert engine["output_layer._extra_state"] is None and files["local"]["checkpoint_version"] == 3.0


def test_bad_input_is_refused_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_run(tmp_path / "run", MODELS["llama"])
    save_run(tmp_path / "sgd", MODELS["gpt"], "sgd")
    biased = ModelConfig(**SHAPE, num_experts=4)
    save_run(tmp_path / "biased", biased)
    save_run(tmp_path / "scaled", ModelConfig(**LLAMA, embedding_multiplier=2.0))
    sparse = dict(num_experts=4, moe_router_score_function="sparsemixer")
    save_run(tmp_path / "sparse", ModelConfig(**LLAMA, **sparse))
    further = dict(window_size=[15, 0], window_attn_skip_freq=2, mtp_num_layers=1)
    save_run(tmp_path / "further", ModelConfig(**LLAMA, **further))
    before = set(tmp_path.iterdir())
    for source, options, message in (
        ("run", dict(tp=4), "tp is 4, which does not divide num_query_groups 2"),
        ("run", dict(pp=3), "pp is 3, which does not divide num_layers 4"),
        ("run", dict(tp=0), "tp is 0"),
        ("run", dict(ckpt_format="torch", with_optimizer=True), "is written only in the format torch_dist"),
        ("sgd", dict(with_optimizer=True), "has optimizer state of sgd"),
        ("biased", {}, "its router has none"),
        ("sparse", {}, "cannot express this model: moe_router_score_function sparsemixer, which Megatron-LM"),
        ("scaled", {}, "cannot express this model: it has embedding_multiplier"),
        (
            "further",
            {},
            "cannot express this model: mtp_num_layers, if only one of the first and last layers",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            export_megatron(tmp_path / source, tmp_path / "out", **options)
    assert set(tmp_path.iterdir()) == before
    (tmp_path / "out").mkdir()
    (tmp_path / "out/own").write_text("kept")
    assert main(["export-megatron", str(tmp_path / "run"), str(tmp_path / "out")]) == 4
    assert "already exists" in capsys.readouterr().err
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial/own").write_text("kept")
    with pytest.raises(CheckpointError, match="was not created by a conversion"):
        export_megatron(tmp_path / "run", tmp_path / "new")
    assert {path.name for path in (*tmp_path.glob("out/*"), *tmp_path.glob("new*/*"))} == {"own"}


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_a_disk_that_is_full_leaves_nothing(ckpt_format: str, tmp_path: Path, monkeypatch) -> None:
    save_run(tmp_path / "run", MODELS["gpt"])

    def refused(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CoreTensors, "value", refused)
    with pytest.raises(
        CheckpointError,
        match="out could not be written: No space left on device; the partial output was removed: free disk",
    ):
        export_megatron(tmp_path / "run", tmp_path / "out", ckpt_format=ckpt_format)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_convert_goes_between_all_forms(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_run(tmp_path / "run", MODELS["llama"].model_copy(update={"qk_layernorm": False}))

    def convert_by_command(source: str, target: str, path: str, out: str, *more: str) -> int:
        words = ["--source", source, "--target", target, "--input-path", path, "--output-path", out, *more]
        return main(["convert", *words])

    megatron = [
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
        "--ckpt-format",
        "torch",
    ]
    Path("run/latest_checkpointed_iteration.txt").write_text("2")  # as Megatron's door leaves it
    assert convert_by_command("megatron", "hf", "run", "hf") == 0
    assert convert_by_command("hf", "megatron", "hf", "tp2", *megatron) == 0
    assert Path("tp2/release/mp_rank_01_001/model_optim_rng.pt").is_file()
    resharded = ["--source-tp", "2", "--source-pp", "2", "--target-tp", "1", "--target-pp", "4"]
    resharded[1] = "4"
    capsys.readouterr()
    assert convert_by_command("megatron", "megatron", "tp2", "pp4", *resharded) == 2
    assert "--source-tp is 4, but tp2 was written with 2" in capsys.readouterr().err
    resharded[1] = "2"
    assert convert_by_command("megatron", "megatron", "tp2", "pp4", *resharded) == 0
    assert convert_by_command("megatron", "hf", "pp4", "hf2") == 0
    assert convert_by_command("megatron", "megalith", "pp4", "again", "--trust") == 0
    assert_same(Path("again"), model)
    assert_same(Path("hf2"), model)
    for source, target, path in (
        ("hf", "hf", "hf"),
        ("hf", "megatron", "run"),
        ("megalith", "megalith", "run"),
    ):
        assert convert_by_command(source, target, path, "no") == 2 and not Path("no").exists()
    words = "--model-type GPT --loader core --saver core --load-dir pp4 --save-dir tools"
    assert run_command(["convert-checkpoint", *words.split(), "--target-tensor-parallel-size", "2"]) == 0
    assert len(list(Path("tools/release").glob("mp_rank_*"))) == 2


def test_a_run_begins_from_a_checkpoint_of_megatrons(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = save_run(tmp_path / "run", MODELS["llama"])
    export_megatron(tmp_path / "run", tmp_path / "megatron", make_vocab_size_divisible_by=1)
    settings = {
        "checkpoint": {"load": str(tmp_path / "megatron")},
        "data": {"mock": True, "seq_length": 16, "num_workers": 0},
        "optim": {"lr": 0.0, "weight_decay": 0.0},
        "train": {
            "train_iters": 1,
            "micro_batch_size": 2,
            "global_batch_size": 2,
            "output_dir": str(tmp_path / "out"),
        },
        "runtime": {"device": "cpu"},
    }
    with pytest.raises(ConfigError, match="num_layers 2, not 4"):
        prepare(RunConfig.from_tree({**settings, "model": {"num_layers": 2}}), 1)
    with pytest.raises(ConfigError, match="both give initial weights"):
        prepare(RunConfig.from_tree({**settings, "model": {"init_from": "elsewhere"}}), 1)
    megalith.train(RunConfig.from_tree(settings))
    assert "only its weights are loaded" in capsys.readouterr().out
    assert_same(tmp_path / "out", model)
    flags = "--use-checkpoint-args --seq-length 16 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --load"
    words = ["pretrain-gpt", *flags.split(), str(tmp_path / "megatron"), "--trust", "--emit", "-"]
    assert run_command(words) == 0
    assert "trust: true" in capsys.readouterr().out


def test_a_run_begins_from_a_hugging_face_folder_that_load_names(tmp_path: Path) -> None:
    save_run(tmp_path / "run", MODELS["gpt"])
    convert(tmp_path / "run", tmp_path / "hf", "hf")
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere; check"):
        convert(tmp_path / "nowhere", tmp_path / "new", "hf", source="megatron")
    tree = {
        "checkpoint": {"load": str(tmp_path / "hf")},
        "data": {"mock": True, "seq_length": 16},
        "optim": {"lr": 0.01},
        "train": {"train_iters": 1, "micro_batch_size": 2, "global_batch_size": 2},
    }
    prepared = prepare(RunConfig.from_tree(tree), 1).config
    assert (prepared.model.init_from, prepared.checkpoint.load) == (str(tmp_path / "hf"), None)
    assert prepared.model.num_layers == 4

"""A run that goes on from a checkpoint: bitwise as if it had never stopped, told where it cannot be, or refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from default_cases import by_default
from trained_runs import comparable, configuration, losses, stored

from megalith.checkpoint.manifest import content_checksum
from megalith.config import ModelConfig, RunConfig
from megalith.config.base import Decides
from megalith.data.indexed import IndexedWriter
from megalith.errors import CheckpointError
from megalith.parallel.mesh import build_mesh
from megalith.report.metrics import read_records
from megalith.training.build import prepare
from megalith.training.resume import check_same_model, load_run
from megalith.training.run_state import Run

CASES = {
    "plain": dict(),
    "dropout, accumulation, ramp-up, blend": dict(
        data=dict(data_path="BLEND"),
        model=dict(hidden_dropout=0.1, attention_dropout=0.1),
        train=dict(micro_batch_size=2, rampup_batch_size=[2, 2, 30]),
        optim=dict(lr_warmup_iters=3, weight_decay=0.1, clip_grad=0.5),
    ),
    "counted in samples, in order": dict(
        train=dict(train_iters=None, train_samples=72), data=dict(dataloader_type="single", num_workers=1)
    ),
    "documents apart, bf16, sgd": dict(
        train=dict(precision="bf16"),
        optim=dict(optimizer="sgd", lr=0.1),
        model=dict(preset="tiny-llama", num_query_groups=1),
        data=dict(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True),
    ),
    "fp16, mock, adam": dict(
        train=dict(precision="fp16"),
        data=dict(data_path=None, mock=True),
        optim=dict(optimizer="adam", initial_loss_scale=2.0**34, loss_scale_window=3, hysteresis=1),
    ),
}


@pytest.mark.parametrize(
    "case",
    by_default(CASES, "dropout, accumulation, ramp-up, blend"),
)
@pytest.mark.fault(9)
def test_going_on_from_a_checkpoint_is_bitwise_going_straight_on(run, corpus, tmp_path, case):
    sections = {section: dict(values) for section, values in CASES[case].items()}
    if sections.get("data", {}).get("data_path") == "BLEND":
        sections["data"]["data_path"] = ["0.7", corpus, "0.3", corpus]
    sections["train"] = {"deterministic": True, "train_iters": 9, **sections.get("train", {})}
    straight = run("straight", **sections)
    folder = str(tmp_path / "stopped")
    first = {**sections["train"], "exit_interval": 5}
    stopped = run("stopped", **{**sections, "train": first}, checkpoint=dict(load=folder))
    assert (stopped.step, stopped.ended) == (5, "exit_interval")
    resumed = run("stopped", **sections, checkpoint=dict(load=folder))
    assert (resumed.step, resumed.consumed_samples) == (straight.step, straight.consumed_samples)
    assert comparable(tmp_path / "stopped") == comparable(tmp_path / "straight")
    assert stored(resumed.checkpoint) == stored(straight.checkpoint)
    last = [read_records(tmp_path / n / "evaluations.jsonl")[-1] for n in ("straight", "stopped")]
    assert last[0] == last[1]


def test_going_back_to_an_earlier_step_of_the_same_folder_repeats_the_same_steps(run, tmp_path):
    whole = run(checkpoint=dict(save_interval=3), train=dict(deterministic=True))
    before, weights = comparable(tmp_path / "run"), stored(whole.checkpoint)
    early = tmp_path / "run" / "checkpoints" / "step_00000003"
    again = run(checkpoint=dict(load=str(early)), train=dict(deterministic=True))
    assert comparable(tmp_path / "run") == before
    assert stored(again.checkpoint) == weights


def test_without_the_optimizers_state_the_weights_go_on_and_the_moments_start_anew(run, tmp_path):
    first = run("first", checkpoint=dict(save_optim=False), train=dict(train_iters=4))
    assert not (first.checkpoint / "optimizer-00000-000.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"optimizer.*load_optim"):
        run("second", checkpoint=dict(load=str(tmp_path / "first")))
    second = run("second", checkpoint=dict(load=str(tmp_path / "first"), load_optim=False))
    assert second.step == 8 and len(losses(tmp_path / "second")) == 4


def test_moments_that_are_loaded_go_on_and_those_that_are_not_begin_at_zero(run, corpus, tmp_path):
    """Under Megatron's name of the setting, which says the opposite."""
    run(train=dict(train_iters=2))
    found = {}
    for left_out in (True, False):
        config = configuration(corpus, tmp_path / "again", checkpoint=dict(load=str(tmp_path / "run")))
        tree = config.to_tree()
        del tree["checkpoint"]["load_optim"]
        tree["checkpoint"]["no_load_optim"] = left_out
        config, tokenizer, _ = prepare(RunConfig.from_tree(tree), 1)
        again = Run(config, tokenizer, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"))
        load_run(again)
        found[left_out] = sum(value["exp_avg"].abs().sum().item() for value in again.optimizer.state.values())
    assert found[True] == 0 < found[False]


def contents(folder):
    """Every file with its content and when it was written; the lock's is for a message only."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_finished_run_that_is_started_again_writes_nothing_whatever_it_is_given(run, tmp_path, capsys):
    first = run(train=dict(train_iters=2))
    assert "the run is finished" not in capsys.readouterr().out
    before = contents(tmp_path / "run")
    other = dict(data=dict(dataloader_type="single"), log=dict(tensorboard=True))
    again = run(train=dict(train_iters=2, seed=7), checkpoint=dict(load=str(tmp_path / "run")), **other)
    assert "is at step 2 of 2; to continue, raise" in capsys.readouterr().out
    assert contents(tmp_path / "run") == before
    assert (again.step, again.consumed_samples, again.ended) == (2, 16, "train_iters")
    assert again.checkpoint == first.checkpoint
    elsewhere = run("new", train=dict(train_iters=2), checkpoint=dict(load=str(first.checkpoint)))
    assert elsewhere.checkpoint == first.checkpoint and not (tmp_path / "new").exists()


def test_a_finished_run_that_was_killed_before_its_export_gets_it_when_it_is_started_again(run, tmp_path):
    run(train=dict(train_iters=2))
    written = []
    for _ in range(2):
        run(train=dict(train_iters=2), checkpoint=dict(load=str(tmp_path / "run"), export_hf=True))
        written.append(contents(tmp_path / "run" / "hf_model"))
    assert written[0] and written[0] == written[1]


@pytest.mark.parametrize(
    ("data", "steps", "told"), [({}, 9, False), ({}, 400, True), ({"mock": True}, 9, True)]
)
def test_a_run_made_longer_is_told_where_its_samples_come_in_another_order(run, capsys, data, steps, told):
    """Of the corpus while it takes no more epochs; made-up samples are permuted all together."""
    data = dict(data, data_path=None, split="1") if data else data
    first = run(data=data, train=dict(train_iters=8, exit_interval=2))
    capsys.readouterr()
    again = dict(train_iters=steps, exit_interval=4)
    run("again", data=data, train=again, checkpoint=dict(load=str(first.checkpoint)))
    printed = " ".join(capsys.readouterr().out.split())
    sentence = f"the run is {8 * steps:,} samples long, but that of {first.checkpoint} was 64"
    assert (sentence in printed) == told


def test_a_run_that_goes_on_with_other_data_says_which_settings_differ_and_how_to_begin_anew(run, capsys):
    first = run(train=dict(train_iters=4, exit_interval=2))
    capsys.readouterr()
    other = dict(train=dict(train_iters=4, seed=77), data=dict(dataloader_type="single"))
    run("again", **other, checkpoint=dict(load=str(first.checkpoint)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "data.dataloader_type was 'cyclic' and is 'single'; train.seed was 1234 and is 77" in printed
    assert "training continues after the first 16 samples of the current settings" in printed
    anew = run("anew", **other, model=dict(init_from=str(first.checkpoint)))
    assert (anew.step, anew.consumed_samples) == (4, 32)
    assert "samples may differ" not in capsys.readouterr().out


def test_load_of_the_own_empty_folder_is_a_first_start_and_any_other_without_a_checkpoint_is_refused(
    run, tmp_path
):
    for number, named in enumerate(("", "checkpoints")):
        folder = tmp_path / f"run{number}"
        assert run(f"run{number}", checkpoint=dict(load=str(folder / named))).step == 8
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*elsewhere.*correct the path"):
        run("other", checkpoint=dict(load=str(tmp_path / "elsewhere")))
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_of_another_model_or_tokenizer_is_refused(run, tmp_path):
    run("first", train=dict(train_iters=1))
    load = dict(load=str(tmp_path / "first"))
    with pytest.raises(CheckpointError, match=r"model\.ffn_hidden_size was 128 and is 64"):
        run("wider", model=dict(ffn_hidden_size=64), checkpoint=load)
    with pytest.raises(CheckpointError, match=r"another model: model\.num_attention_heads was 2 and is 4"):
        run("heads", model=dict(num_attention_heads=4), checkpoint=load)
    with pytest.raises(CheckpointError, match=r"model\.activation was 'gelu_tanh' and is 'relu'"):
        run("activation", model=dict(activation="relu"), checkpoint=load)
    null = dict(data_path=None, mock=True, tokenizer_type="NullTokenizer")
    with pytest.raises(
        CheckpointError, match=r"trained with another tokenizer .*257 entries.*use the one in"
    ):
        run("tokenizer", model=dict(vocab_size=257), data=null, checkpoint=load)
    with pytest.raises(CheckpointError, match="does not fit the optimizer"):
        run("sgd", optim=dict(optimizer="sgd"), checkpoint=load)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


WHOLE = {  # a model that reads every setting but those of MLA
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 100,
    "max_position_embeddings": 64, "position_embedding_type": "rope", "add_bias_linear": False,
    "window_size": [7, 0], "rotary_base_local": 5e3, "rope_scaling": {"type": "linear", "factor": 2.0},
    "qk_layernorm": True, "normalization": "RMSNorm", "num_experts": 8, "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
SIDE_BY_SIDE = {**WHOLE, "parallel_attn_mlp": True}
LLAMA4 = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "qk_l2_norm": True, "query_scaling_beta": 0.1,
    "num_experts": 8, "moe_router_topk": 1,
}  # fmt: skip
LATENT = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64,
    "position_embedding_type": "rope", "add_bias_linear": False, "multi_latent_attention": True,
}  # fmt: skip
LEARNED = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
ENCODER = LEARNED | {"model_type": "bert"}
HEADLESS = ENCODER | {"bert_binary_head": False}
GATED = LEARNED | {"swiglu": True}
HYBRID = LEARNED | {"experimental_attention_variant": "gated_delta_net"}
MAMBA = LEARNED | {"experimental_attention_variant": "mamba2"}
FALCON = MAMBA | {"parallel_mixers": True}
BOTH = LEARNED | {"model_type": "t5", "position_embedding_type": "relative"}
SINUSOIDAL = LEARNED | {"position_embedding_type": "sinusoidal"}

# Every setting that decides which function the weights are: another value, and the model where that is another one.
OTHER_FUNCTIONS = {
    "num_layers": (6, WHOLE), "hidden_size": (128, WHOLE), "ffn_hidden_size": (96, WHOLE),
    "num_attention_heads": (8, WHOLE), "num_query_groups": (4, WHOLE), "kv_channels": (32, WHOLE),
    "vocab_size": (101, WHOLE), "max_position_embeddings": (128, LEARNED),
    "position_embedding_type": ("learned_absolute", LATENT), "embedding_layernorm": (True, WHOLE),
    "rotary_base": (5e5, WHOLE), "rotary_base_local": (1e4, WHOLE), "rotary_percent": (0.5, WHOLE),
    "qk_l2_norm": (True, LEARNED), "rotary_interleaved": (True, WHOLE), "no_rope_freq": (2, WHOLE),
    "add_output_bias": (True, WHOLE), "model_type": ("bert", LEARNED), "num_tokentypes": (3, ENCODER),
    "add_lm_head_dense_bias": (False, ENCODER),
    "add_first_input_layernorm": (False, LEARNED | {"embedding_layernorm": True}),
    "add_lm_head": (False, ENCODER), "lm_head_activation": ("gelu", ENCODER),
    "bert_binary_head": (False, ENCODER), "add_pooler": (True, HEADLESS),
    "apply_residual_connection_post_layernorm": (True, LEARNED),
    "encoder_num_layers": (1, BOTH), "scale_decoder_outputs": (True, BOTH),
    "relative_attention_num_buckets": (16, BOTH), "relative_attention_max_distance": (64, BOTH),
    "rope_scaling": ({"type": "linear", "factor": 4.0}, WHOLE), "window_size": ([8, 0], WHOLE),
    "window_attn_skip_freq": (2, WHOLE), "scale_embeddings": (True, WHOLE), "normalization": ("LayerNorm", WHOLE),
    "layernorm_epsilon": (1e-6, WHOLE), "layernorm_zero_centered_gamma": (True, WHOLE),
    "norm_placement": ("post", WHOLE), "parallel_attn_mlp": (True, WHOLE), "shared_layernorm": (True, SIDE_BY_SIDE),
    "activation": ("relu", WHOLE), "gated_linear_unit": (True, WHOLE),
    "swiglu": (True, WHOLE), "add_bias_linear": (True, WHOLE), "add_qkv_bias": (True, WHOLE),
    "add_proj_bias": (True, WHOLE), "add_mlp_bias": (True, WHOLE), "qk_layernorm": (False, WHOLE),
    "qk_layernorm_full_width": (True, WHOLE), "qk_layernorm_per_head": (True, WHOLE),
    "query_pre_attn_scalar": (20, WHOLE),
    "attn_logit_softcapping": (50.0, WHOLE), "final_logit_softcapping": (30.0, WHOLE),
    "untie_embeddings_and_output_weights": (True, WHOLE), "multi_latent_attention": (True, LEARNED),
    "q_lora_rank": (24, LATENT), "kv_lora_rank": (256, LATENT), "qk_head_dim": (64, LATENT),
    "qk_pos_emb_head_dim": (32, LATENT), "v_head_dim": (64, LATENT),
    "latent_layernorm": (False, LATENT), "add_position_embedding": (True, LATENT), "mtp_num_layers": (1, WHOLE),
    "num_experts": (16, WHOLE), "moe_layer_freq": (2, WHOLE), "moe_ffn_hidden_size": (48, WHOLE),
    "moe_shared_expert_intermediate_size": (64, WHOLE), "moe_shared_expert_gate": (True, WHOLE),
    "moe_router_topk": (4, WHOLE), "moe_router_score_function": ("softmax", WHOLE),
    "moe_router_pre_softmax": (True, WHOLE), "moe_router_topk_scaling_factor": (2.5, WHOLE),
    "moe_router_num_groups": (2, WHOLE), "moe_router_group_topk": (1, WHOLE),
    "moe_router_enable_expert_bias": (True, WHOLE), "moe_router_force_load_balancing": (True, WHOLE),
    "embedding_multiplier": (12.0, WHOLE), "residual_multiplier": (0.2, WHOLE), "logits_scaling": (8.0, WHOLE),
    "softmax_scale": (0.2, LEARNED), "add_norm_bias": (False, LEARNED),
    "add_norm_weight": (False, LEARNED), "clip_qkv": (8.0, LEARNED),
    "softmax_type": ("learnable", LEARNED | {"attention_dropout": 0.0}), "add_router_bias": (True, WHOLE),
    "activation_func_clamp_value": (7.0, GATED), "glu_linear_offset": (1.0, GATED),
    "experimental_attention_variant": ("gated_delta_net", LEARNED), "attention_output_gate": (True, LEARNED),
    "linear_attention_freq": (3, HYBRID), "linear_conv_kernel_dim": (2, HYBRID), "linear_key_head_dim": (64, HYBRID),
    "use_mup": (True, WHOLE), "mup_attn_scale_power": (0.5, WHOLE | {"use_mup": True}),
    "mup_base_hidden_size": (16, WHOLE | {"use_mup": True}), "mup_base_head_dim": (4.0, WHOLE | {"use_mup": True}),
    "mup_base_num_layers": (1, WHOLE | {"use_mup": True}), "score_head": (True, LEARNED),
    "mup_depth_alpha": (0.5, WHOLE | {"use_mup": True, "mup_base_num_layers": 1}),
    "linear_value_head_dim": (64, HYBRID), "linear_num_key_heads": (8, HYBRID), "linear_num_value_heads": (16, HYBRID),
    "linear_allow_neg_eigval": (True, HYBRID), "linear_norm_epsilon": (1e-6, HYBRID),
    "linear_norm_placement": ("post", HYBRID),
    "hybrid_layer_pattern": ("M-*M", LEARNED), "parallel_mixers": (True, MAMBA), "mamba_state_dim": (16, MAMBA),
    "mamba_head_dim": (32, MAMBA | {"mamba_num_groups": 1, "mamba_num_heads": 2}), "mamba_num_heads": (8, MAMBA),
    "mamba_num_groups": (2, MAMBA), "mamba_conv_bias": (False, MAMBA), "mamba_proj_bias": (True, MAMBA),
    "mamba_out_bias": (True, MAMBA), "mamba_rms_norm": (False, MAMBA), "mamba_norm_before_gate": (True, MAMBA),
    "mamba_dt_limit": ([0.1, 0.5], MAMBA), "ssm_in_multiplier": (2.0, MAMBA), "ssm_out_multiplier": (2.0, MAMBA),
    "ssm_multipliers": ([0.5, 1.0, 1.0, 1.0, 2.0], MAMBA), "attention_in_multiplier": (2.0, FALCON),
    "attention_out_multiplier": (2.0, FALCON), "key_multiplier": (0.5, WHOLE),
    "mlp_multipliers": ([0.5, 2.0], GATED),
    "short_conv_bias": (True, LEARNED | {"experimental_attention_variant": "short_conv"}),
    "attention_chunk_size": (16, LLAMA4), "qk_l2_norm_rope_only": (True, LLAMA4),
    "qk_layernorm_after_rope": (True, WHOLE), "query_scaling_beta": (0.2, LLAMA4),
    "query_scaling_length": (4096, LLAMA4), "query_scaling_layers": ("no_rope", LLAMA4),
    "moe_apply_probs_on_input": (True, LLAMA4), "moe_router_norm_topk_prob": (False, WHOLE),
    "proj_bias_in_last_layer_only": (True, WHOLE | {"add_proj_bias": True}),
    "moe_average_shared_expert": (True, WHOLE | {"moe_shared_expert_intermediate_size": 64}),
    "moe_sparsemixer_jitter_eps": (0.1, WHOLE | {"moe_router_score_function": "sparsemixer"}),
    "moe_post_layernorm": (True, WHOLE), "add_decoder_lm_head": (True, LEARNED),
    "padding_positions": (2, LEARNED), "positions_skip_padding": (True, LEARNED | {"padding_positions": 2}),
    "relative_attention_per_layer": (True, BOTH),
    "sinusoidal_first_position": (2, SINUSOIDAL), "sinusoidal_spacing": ("inclusive", SINUSOIDAL),
    "separate_encoder_positions": (True, BOTH), "decoder_start_token_id": (2, BOTH),
    "decoder_positions_after_layernorm": (True, BOTH | {"separate_encoder_positions": True}),
}  # fmt: skip


def test_every_setting_of_the_model_is_known_to_decide_the_function_or_not():
    """One that says nothing decides it, so that a new one is refused until it says that it does not."""
    assert OTHER_FUNCTIONS.keys() == set(ModelConfig.fields_deciding(Decides.FUNCTION, Decides.REACH))
    for section in RunConfig.model_fields:
        kind = RunConfig.model_fields[section].annotation
        each = [name for what in Decides for name in kind.fields_deciding(what)]
        assert sorted(each) == sorted(kind.model_fields)


@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_going_on_with_another_function_is_refused_with_both_values_and_the_way_out(name):
    value, model = OTHER_FUNCTIONS[name]
    before = RunConfig.from_tree({"model": model})
    check_same_model(Path("run/step"), before, before)
    now = RunConfig.from_tree({"model": {**model, name: value}})
    with pytest.raises(CheckpointError) as refused:
        check_same_model(Path("run/step"), before, now)
    said = {
        "window_attn_skip_freq": "window_size was [8, 8, 8, 8] and is [8, None, 8, None]",
        "swiglu": "activation was 'gelu_tanh' and is 'silu'; model.gated_linear_unit was False and is True",
        "add_bias_linear": "add_qkv_bias was False and is True; model.add_proj_bias was False and is True",
        "window_size": "window_size was [8, 8, 8, 8] and is [9, 9, 9, 9]",
        "no_rope_freq": "no_rope_freq was None and is [0, 1, 0, 1]",
        "linear_attention_freq": "linear_attention_freq was [0, 1, 2] and is [0, 1, 3]",
        "moe_layer_freq": "moe_layer_freq was [0, 1, 2, 3] and is [0, 2]",
        "multi_latent_attention": "multi_latent_attention was False and is True",
    }
    plain = f"{name} was {getattr(before.model, name)!r} and is {getattr(now.model, name)!r}"
    resolved = f"{name} was .* and is {re.escape(repr(getattr(now.model, name)))}"
    assert re.search(
        re.escape(said[name]) if name in said else f"{re.escape(plain)}|{resolved}", str(refused.value)
    )
    assert "restore the model settings" in str(refused.value)
    of_positions = name in ("rotary_base", "rope_scaling")
    assert of_positions == (name in ModelConfig.fields_deciding(Decides.REACH))
    assert ("or start a new run with model.init_from=run/step" in str(refused.value)) == of_positions


@pytest.mark.parametrize(
    ("section", "other", "told"),
    [
        ("model", {"num_layers": None}, "manifest.json: model.num_layers is not set"),
        ("model", {"hidden_size": 10**6}, "do not match its model config: .*needed"),
        ("model", {"num_layers": 9_999}, "9,999 layers, but lists"),
        ("train", {"global_batch_size": 10**12, "rampup_batch_size": [1, 1, 10**13]}, "999,999,999,999 incr.* at most"),
        ("train", {"global_batch_size": None}, "manifest.json: train.global_batch_size is not set"),
        ("optim", {"lr": None}, "manifest.json: optim.lr is not set"),
    ],
)  # fmt: skip
def test_a_manifest_with_a_configuration_that_no_run_can_have_had_is_refused(run, section, other, told):
    step = run(train=dict(train_iters=1)).checkpoint
    content = json.loads((step / "manifest.json").read_text())
    del content["checksum"]
    content["config"][section] |= other
    (step / "manifest.json").write_text(json.dumps({"checksum": content_checksum(content), **content}))
    with pytest.raises(CheckpointError, match=told):
        run("on", checkpoint=dict(load=str(step)))


def test_settings_of_training_and_those_that_the_model_does_not_read_are_no_other_function():
    changes = {
        "init_method_std": 0.5, "hidden_dropout": 0.3, "moe_aux_loss_coeff": 0.1, "make_vocab_size_divisible_by": 64,
        "max_position_embeddings": 128,  # rotary positions have no table
        "kv_lora_rank": 64, "mtp_loss_scaling_factor": 0.5, "kv_channels": 16,
    }  # fmt: skip
    before = RunConfig.from_tree({"model": WHOLE})
    check_same_model(Path("run/step"), before, RunConfig.from_tree({"model": {**WHOLE, **changes}}))
    before = RunConfig.from_tree({"model": LEARNED})
    changes = {"moe_router_topk": 4, "moe_router_pre_softmax": True, "rotary_base": 5e5}
    check_same_model(Path("run/step"), before, RunConfig.from_tree({"model": {**LEARNED, **changes}}))


def goes_on(name, run, capsys, folder, **sections) -> str:
    """What the run `name` says that goes on from `folder` for one step."""
    capsys.readouterr()
    sections["train"] = {"train_iters": 8, "exit_interval": 1, **sections.get("train", {})}
    run(name, **sections, checkpoint=dict(load=str(folder)))
    return " ".join(capsys.readouterr().out.split())


def test_a_run_that_goes_on_with_other_updates_says_which_settings_differ(run, capsys):
    folder = run(train=dict(train_iters=8, exit_interval=4)).checkpoint
    same = goes_on("same", run, capsys, folder, train=dict(micro_batch_size=2), optim=dict(adam_eps=1e-8))
    assert "training continues differently" not in same and "samples may differ" not in same
    other = goes_on(
        "other",
        run,
        capsys,
        folder,
        optim=dict(lr=5e-3),
        model=dict(hidden_dropout=0.1),
        train=dict(global_batch_size=16),
    )
    assert (
        f"training continues differently from the run of {folder}: model.hidden_dropout was 0.0 and is 0.1; "
        "optim.lr was 0.01 and is 0.005; train.global_batch_size was 8 and is 16; the learning rate of the next step "
        "would have been 0.005 and is now 0.0025"
    ) in other
    longer = goes_on("longer", run, capsys, folder, train=dict(train_iters=400))
    assert (
        "train.train_iters was 8 and is 400; the learning rate of the next step would have been 0.005"
        in longer
    )


def test_a_run_that_goes_on_with_other_files_under_the_same_name_says_so(run, capsys, tmp_path):
    prefix, data = tmp_path / "data", dict(data_path=str(tmp_path / "data"))

    def write(lengths: list[int]) -> None:
        with IndexedWriter(prefix, "u1", overwrite=True) as writer:
            for length in lengths:
                writer.add_document(list(range(length)))

    write([40, 50, 60] * 9)
    folder = run(data=data, train=dict(train_iters=8, exit_interval=4)).checkpoint
    assert "samples may differ" not in goes_on("same", run, capsys, folder, data=data)
    write([50, 40, 60] * 9)  # as large, in another order
    said = goes_on("other", run, capsys, folder, data=data)
    assert (
        f"may differ from those that the run of {folder} would have read: idx_sha256 of {prefix} was " in said
    )
    write([40, 50, 61] * 9)
    assert f"read: bin_bytes of {prefix} was 1350 and is 1359; idx_sha256" in goes_on(
        "longer", run, capsys, folder, data=data
    )

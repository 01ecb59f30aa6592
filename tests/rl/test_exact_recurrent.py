"""rl.exact and train.batch_invariant with recurrent mixers: gated delta nets, Kimi Delta Attention, Mamba-2 and short
convolutions."""

import itertools

import pytest
import torch
from default_cases import by_default, in_full
from exact_cases import (
    EXPERTS,
    LONG_PROMPTS,
    VOCAB,
    context_layouts,
    engine_samples,
    equal_samples,
    exact_in_layout,
    grpo_steps,
    parallel_model,
    pretraining,
    run_config,
    same_in_smaller_batches,
    scores,
    tensor_layouts,
    trained,
)
from small_policy import configuration

from megalith.config import RunConfig

HEADS = dict(linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=10)
DELTA = dict(
    HEADS,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq=[1, 0],
    linear_num_key_heads=2,
)
MAMBA = dict(mamba_num_heads=8, mamba_head_dim=10, mamba_num_groups=2, mamba_state_dim=12)
MAMBA_LAYERS = MAMBA | dict(experimental_attention_variant="mamba2", linear_attention_freq=[1, 0])
MODELS = {
    "qwen3-next": DELTA | EXPERTS | dict(
        attention_output_gate=True, qk_layernorm=True, layernorm_zero_centered_gamma=True, kv_channels=16,
        rotary_percent=0.5, moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=True,
    ),
    "kimi-linear": DELTA | dict(
        experimental_attention_variant="kimi_delta_attention", linear_num_key_heads=4, multi_latent_attention=True,
        kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12, position_embedding_type="none",
    ),
    "delta net, norms by layer": DELTA | dict(
        linear_allow_neg_eigval=True, linear_norm_placement="pre", linear_norm_epsilon=1e-4, norm_placement="post",
    ),
    "bamba": MAMBA_LAYERS,
    "falcon-h1": MAMBA_LAYERS | dict(
        linear_attention_freq=[1, 1], parallel_mixers=True, mamba_rms_norm=False, key_multiplier=0.7,
        ssm_multipliers=[0.5, 0.7, 1.1, 1.3, 0.9],
    ),
    "nemotron-h": MAMBA | dict(
        num_layers=3, hybrid_layer_pattern="M*-", swiglu=False, activation="squared_relu"
    ),
    "lfm2": dict(
        experimental_attention_variant="short_conv", linear_attention_freq=[1, 0], short_conv_bias=True,
        linear_conv_kernel_dim=3,
    ),
}  # fmt: skip


IN_BF16 = [(name, "bf16") for name in MODELS if name not in ("qwen3-next", "lfm2")]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in MODELS),
        ("qwen3-next", "bf16"),
        ("lfm2", "bf16"),
        *(in_full(*case) for case in IN_BF16),
    ],
)
def test_engine_and_trainer_have_the_same_bits_in_every_batch(tmp_path, name, precision):
    train = dict(precision=precision, micro_batch_size=2, global_batch_size=8)
    config = run_config(tmp_path, MODELS[name], train=train)
    model = parallel_model(config)
    samples = engine_samples(model, 10, LONG_PROMPTS)
    assert len({tuple(each.completion.ids) for each in samples}) > 5
    assert same_in_smaller_batches(model, samples, LONG_PROMPTS)
    for packing, micro in ((False, 1), (True, 4)):
        ours, engines = scores(config, model, samples, packing, micro)
        assert len(ours) > 60 and torch.equal(ours, engines), (packing, micro)


LAYERS = {
    "qwen3-next": MODELS["qwen3-next"],
    "kimi-linear": MODELS["kimi-linear"],
    "bamba": MODELS["bamba"],
    "bamba, one group": MAMBA_LAYERS | dict(mamba_num_groups=1),
    "falcon-h1": MODELS["falcon-h1"],
    "lfm2": MODELS["lfm2"],
}
LAYOUTS = tensor_layouts(2) | context_layouts(2) | dict(
    pp2=dict(pipeline_model_parallel_size=2),
    fsdp=dict(data_parallel_sharding_strategy="optim_grads_params"),
    recomputed=dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, context_parallel_size=2,
        cp_comm_type="a2a",
    ),
)  # fmt: skip
FEW = [
    ("qwen3-next", "tp2 sp"),
    ("bamba, one group", "tp2 sp"),
    ("kimi-linear", "recomputed"),
    ("lfm2", "cp2 all_gather"),
    ("falcon-h1", "pp2"),
]
FOUR = dict(
    list((tensor_layouts(4) | context_layouts(4)).items()),
    ep2_cp2_tp2=dict(
        expert_model_parallel_size=2,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        cp_comm_type="all_gather",
    ),
)

WIDE = dict(linear_num_key_heads=4, linear_num_value_heads=8)  # a key head for each of four ranks


@pytest.mark.parametrize("kind", ["few", in_full("two ranks"), in_full("four ranks")])
def test_parallel_engines_and_trainers_have_the_bits_of_one_process(pool, tmp_path, kind):
    layouts = FOUR if kind == "four ranks" else LAYOUTS
    chosen = (
        FEW if kind == "few" else [each for each in itertools.product(LAYERS, layouts) if each not in FEW]
    )
    cases, alone = {}, {}
    for name, layout in chosen:
        if layout.startswith("ep") and "num_experts" not in LAYERS[name]:
            continue
        wide = WIDE if kind == "four ranks" and name == "qwen3-next" else {}
        config = run_config(tmp_path, LAYERS[name] | wide)
        if name not in alone:
            alone[name] = engine_samples(parallel_model(config), 4, LONG_PROMPTS)
        settings = {f"parallel.{key}": value for key, value in layouts[layout].items()}
        cases[name, layout] = (config.with_settings(settings), LONG_PROMPTS)
    size = 4 if kind == "four ranks" else 2
    for (name, layout), ranks in pool.run_cases(exact_in_layout, cases, size=size).items():
        for samples, is_exact in ranks:
            assert is_exact and equal_samples(samples, alone[name]), (name, layout)


RUNS = [
    ("qwen3-next", "cp2 a2a"),
    ("bamba, one group", "tp2 sp"),
]


@pytest.mark.parametrize("few", [True, in_full(False)])
def test_on_policy_the_ratio_is_1_in_every_step(pool, tmp_path, few):
    chosen = RUNS if few else [each for each in itertools.product(LAYERS, LAYOUTS) if each not in RUNS]
    cases = {}
    for name, layout in chosen:
        config = configuration(
            tmp_path,
            model=LAYERS[name],
            parallel=LAYOUTS[layout],
            optim=dict(lr=1e-3),
            train=dict(train_iters=4),
            rl=dict(exact=True, temperature=0.9, reward_workers=0, packing="2" in layout),
        )
        cases[name, layout] = (config,)
    for case, ranks in pool.run_cases(grpo_steps, cases, size=2).items():
        for step in itertools.chain(*ranks):
            assert (step["ratio"], step["mismatch"]) == (1.0, 1.0), case
            assert (step["drift"], step["drift_largest"]) == (0.0, 0.0), case
        assert len({step["rewards_mean"] for step in ranks[0]}) > 2, case


@pytest.mark.parametrize(
    ("name", "layout"),
    by_default(
        itertools.product(
            ("qwen3-next", "bamba, one group", "kimi-linear", "lfm2"), ("cp2 all_gather", "tp2 sp")
        ),
        ("qwen3-next", "cp2 all_gather"),
    ),
)
def test_runs_have_the_same_bits_for_every_micro_batch_and_data_parallel_size(pool, tmp_path, name, layout):
    def config(micro: int, **parallel) -> RunConfig:
        return pretraining(tmp_path, micro, model=LAYERS[name], seq=72, parallel=parallel)

    expected = trained(config(1))
    for losses, *tensors in (trained(config(4)), *pool.run(trained, config(2), size=2)):
        assert losses == expected[0]
        for ours, theirs in zip(tensors, expected[1:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    changed = {"train.batch_invariant": False, "optim.clip_grad": 0.0}
    ordinary = trained(config(1).with_settings(changed))
    unclipped = trained(config(1).with_settings({"optim.clip_grad": 0.0}))
    for ours, theirs in zip(unclipped[1], ordinary[1], strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm().clamp(min=1e-6)
    for losses, *_ in pool.run(trained, config(4, **LAYOUTS[layout]), size=2):
        assert losses[0] == expected[0][0] and losses == pytest.approx(expected[0], rel=1e-4)


def logits(config: RunConfig) -> torch.Tensor:
    """The logits of a batch, which every rank computes whole."""
    ids = torch.arange(2 * 72).view(2, 72) * 7 % VOCAB
    return parallel_model(config).eval()(ids)


def test_calls_of_the_model_are_exact_under_context_parallelism(pool, tmp_path):
    models = {"attention": dict(num_query_groups=2), "delta": LAYERS["qwen3-next"], "mamba": LAYERS["bamba"]}
    cases, alone = {}, {}
    for name, model in models.items():
        config = run_config(tmp_path, model)
        alone[name] = logits(config)
        cases[name] = (
            config.with_settings({"parallel.context_parallel_size": 2, "parallel.cp_comm_type": "a2a"}),
        )
    for name, ranks in pool.run_cases(logits, cases, size=2).items():
        assert all(torch.equal(each, alone[name]) for each in ranks), name

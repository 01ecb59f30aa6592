"""Kimi-Linear: the published config.json, and layouts that its delta rule with decays per channel could get wrong."""

import functools

import pytest
import transformers
from models.reference import CASES

from megalith.bridge.families.kimi_linear import KIMI_LINEAR
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.launch.pool import Pool
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job

LINEAR = {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16,
          "short_conv_kernel_size": 3}  # fmt: skip
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 64, "head_dim": 72,
    "intermediate_size": 112, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
    "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "linear_attn_config": LINEAR, "first_k_dense_replace": 1, "mla_use_nope": True, "model_max_length": 4096,
    "moe_intermediate_size": 40, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1, "topk_group": 1, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1,
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "use_grouped_topk": True, "vocab_size": 151,
    "hidden_act": "silu",
}  # fmt: skip

DOCUMENTS = {
    "tokenizer_type": "NullTokenizer",
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
}


def test_the_published_config_json_is_read_as_transformers_reads_it() -> None:
    model = KIMI_LINEAR.read_config(PUBLISHED)
    theirs = transformers.KimiLinearConfig(**PUBLISHED)
    assert [model.recurrent_mixer(n) is not None for n in range(5)] == [
        kind == "linear_attention" for kind in theirs.layer_types
    ]
    assert model.expert_layers == [n for n, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"]
    sizes = theirs.linear_num_heads, theirs.linear_head_dim, theirs.linear_conv_kernel_dim
    assert sizes == (model.linear_num_key_heads, model.linear_key_head_dim, model.linear_conv_kernel_dim)
    assert model.max_position_embeddings == theirs.model_max_length == 4096
    written = KIMI_LINEAR.write_config(model)
    assert written["linear_attn_config"] == LINEAR and written["first_k_dense_replace"] == 1
    assert written.items() <= (PUBLISHED | {"pad_token_id": None} | written).items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_attn_config": LINEAR | {"kda_layers": [1, 2, 3]}},
            "do not list each of the layers 1 to 5 once",
        ),
        ({"linear_attn_config": 3}, "linear_attn_config 3, which is not an object"),
        ({"mla_use_nope": False}, "mla_use_nope False"),
        ({"moe_renormalize": None}, "moe_renormalize null"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KIMI_LINEAR.read_config(PUBLISHED | changes)


def run_config(layout: str | None) -> RunConfig:
    model = CASES["kimi-linear"][1] | {
        "num_layers": 4,
        "linear_attention_freq": 2,
        "moe_layer_freq": [0, 1, 1, 1],
    }
    return RunConfig.from_tree(
        {
            "model": model | {"hidden_dropout": 0.1, "attention_dropout": 0.0},
            "parallel": LAYOUTS[layout].parallel if layout else {},
            "data": {"mock": True, "seq_length": 64, "num_workers": 0} | DOCUMENTS,
            "optim": {"lr": 3e-3, "clip_grad": 0.5},
            "train": {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 4, "eval_iters": 1},
            "runtime": {"device": "cpu", "compile": False},
        }
    )


@functools.cache
def alone() -> Outcome:
    return run_job(run_config(None))


@pytest.mark.parametrize(
    "layout",
    [
        "tp2-sp",
        "cp2",
        "ep2",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("pp2", "cp4", "tp2-sp-cp2", "cp2-ep2", "dp2-zero3")
        ),
    ],
)
def test_a_layout_trains_as_one_process(pool: Pool, layout: str) -> None:
    errors = compare(pool.run(run_job, run_config(layout), size=LAYOUTS[layout].processes), alone())
    assert errors.within(), errors

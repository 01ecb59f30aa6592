"""Families that transformers runs with Llama's class: EXAONE 3.0 and 3.5, InternLM3 and IQuest-Coder.

They differ from Llama in defaults and in config.json's keys. EXAONE's files have tensor names of their own.
"""

from __future__ import annotations

from megalith.bridge.families.llama import IGNORED, LLAMA
from megalith.bridge.family import Family
from megalith.bridge.rows import gate_up, qkv, same
from megalith.bridge.settings import RequiredKeys, WrittenKeys

# fmt: off
LAYER = "transformer.h.{layer}."
EXAONE = Family(
    architecture="ExaoneForCausalLM",
    transformers_class="LlamaForCausalLM",
    model_type="exaone",
    aliases={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps",
             "activation_function": "hidden_act"},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    tensors={
        "embedding.word_embeddings.weight":
            same("transformer.wte.weight"),
        "layers.{layer}.input_layernorm.weight":
            same(f"{LAYER}ln_1.weight"),
        **{f"layers.{{layer}}.self_attention.linear_qkv.{part}":
            qkv(*(f"{LAYER}attn.attention.{name}_proj.{part}" for name in "qkv")) for part in ("weight", "bias")},
        **{f"layers.{{layer}}.self_attention.linear_proj.{part}":
            same(f"{LAYER}attn.attention.out_proj.{part}") for part in ("weight", "bias")},
        "layers.{layer}.pre_mlp_layernorm.weight":
            same(f"{LAYER}ln_2.weight"),
        **{f"layers.{{layer}}.mlp.linear_fc1.{part}":
            gate_up(*(f"{LAYER}mlp.c_fc_{number}.{part}" for number in (0, 1))) for part in ("weight", "bias")},
        **{f"layers.{{layer}}.mlp.linear_fc2.{part}":
            same(f"{LAYER}mlp.c_proj.{part}") for part in ("weight", "bias")},
        "final_layernorm.weight":
            same("transformer.ln_f.weight"),
        "output_layer.weight":
            same("lm_head.weight"),
    },
    settings=LLAMA.settings,
    tied="lm_head.weight",
    ignored=IGNORED,
    prefix="transformer.",
)

INTERNLM3 = Family(
    architecture="InternLM3ForCausalLM",
    transformers_class="LlamaForCausalLM",
    model_type="internlm3",
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    tensors=LLAMA.tensors,
    settings=LLAMA.settings,
    tied="lm_head.weight",
    ignored=IGNORED,
)

IQUEST_CODER = Family(
    architecture="IQuestCoderForCausalLM",
    transformers_class="LlamaForCausalLM",
    model_type="iquestcoder",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    tensors=LLAMA.tensors,
    settings=(
        *LLAMA.settings,
        RequiredKeys(clip_qkv=None, use_sliding_window=False),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (EXAONE, INTERNLM3, IQUEST_CODER)

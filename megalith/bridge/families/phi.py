"""Phi-3: Llama with fused matrices, in some releases a window, LongRoPE, or heads that turn in part (Phi-4 mini)."""

from __future__ import annotations

from megalith.bridge.families.llama import IGNORED, SIZES, TENSORS, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rows import gate_up, qkv
from megalith.bridge.settings import LongRope, Ours, Theirs, Window, Writes

# fmt: off
PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    absent={"rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv("model.layers.{layer}.self_attn.qkv_proj.weight"),
        "layers.{layer}.mlp.linear_fc1.weight":
            gate_up("model.layers.{layer}.mlp.gate_up_proj.weight"),
    },
    settings=(
        *SIZES,
        UNTIED,
        LongRope(),
        Window(default=None),
        Ours(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0),
        Theirs(hidden_act="silu"),
        Writes(pad_token_id=None),  # by default an entry that a smaller vocabulary does not have
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

"""The language model of Qwen3-VL with experts: Qwen3 with one tensor for the matrices of all experts.

The published files have each expert's matrices as [in, out]; files that transformers 5 saves have them as [out, in].
transformers has no class for this language model alone, so an export without the vision tower is Qwen3 with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megalith.bridge.families.experts import EXPERTS, QWEN3_MOE, SparseLayers
from megalith.bridge.families.llama import IGNORED, QK_NORMS, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rows import Rule, gate_up, same, stacked
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys

LAYER = "model.layers.{layer}."
FC2 = "mlp.experts.down_proj"


def _tensors(transposed: bool) -> dict[str, Rule]:
    gates = stacked(gate_up(LAYER + "mlp.experts.gate_up_proj"), transposed=transposed)
    return {
        **TENSORS,
        **QK_NORMS,
        **EXPERTS,
        "layers.{layer}.mlp.experts.linear_fc1.weight": gates,
        "layers.{layer}.mlp.experts.linear_fc2.weight": stacked(same(LAYER + FC2), transposed=transposed),
    }


class _ByShape(Family):
    """A family whose expert matrices are stored in one of two dimension orders; the shape decides."""

    def stored_as(self, shapes: Mapping[str, tuple[int, ...]]) -> Family:
        hidden = shapes.get("model.norm.weight", (None,))[0]
        stored = [shape for name, shape in shapes.items() if name.endswith(FC2) and len(shape) == 3]
        return (
            self if not stored or stored[0][1] == hidden else replace(self, tensors=_tensors(transposed=True))
        )


# fmt: off
QWEN3_VL_MOE = _ByShape(
    architecture="Qwen3VLMoeTextModel",
    model_type="qwen3_vl_moe_text",
    exported_as=QWEN3_MOE.architecture,
    defaults={"num_key_value_heads": 16, "rope_theta": 500000.0, "tie_word_embeddings": True},
    tensors=_tensors(transposed=False),
    settings=(
        *SETTINGS,
        Field("num_experts", "num_experts", default=60, alias="num_local_experts"),
        Field("moe_router_topk", "num_experts_per_tok", default=4),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=1408),
        SparseLayers(),
        FixedSettings(qk_layernorm=True),
        RequiredKeys(attention_bias=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

FAMILIES = (QWEN3_VL_MOE,)

"""The parameters of one layer by part, whole or on a rank that has a part of it. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalith.config import ModelConfig


@dataclass(frozen=True)
class LayerSize:
    """Parameters of a layer on a rank. Biases are counted with their part."""

    attention: int
    mlp: int
    """The MLP; or of a layer with experts the router and the shared expert."""
    experts: int
    norms: int

    @property
    def dense(self) -> int:
        """All but the experts, which are spread and copied over other ranks."""
        return self.attention + self.mlp + self.norms

    @property
    def total(self) -> int:
        return self.dense + self.experts


def layer_size(model: ModelConfig, has_experts: bool, tensor: int = 1, experts_over: int = 1) -> LayerSize:
    """A layer on one of `tensor` tensor-parallel ranks, its experts spread over `experts_over` (expert · expert
    tensor)."""
    attention, norms = (
        _latent_attention(model, tensor) if model.multi_latent_attention else _attention(model, tensor)
    )
    norm = 2 if model.normalization == "LayerNorm" else 1  # weight and bias, or weight
    experts = 0
    if has_experts:
        mlp = model.hidden_size * (model.num_experts + model.moe_shared_expert_gate)
        if shared := model.moe_shared_expert_intermediate_size:
            mlp += mlp_size(model, shared, tensor)
        experts = model.num_experts * mlp_size(model, model.expert_size) // experts_over
    else:
        mlp = mlp_size(model, model.ffn_size, tensor)
    norms = norm * (norms + model.norms_in_layer * model.hidden_size)
    return LayerSize(attention=attention, mlp=mlp, experts=experts, norms=norms)


def mlp_size(model: ModelConfig, width: int, tensor: int = 1) -> int:
    """The parameters of an MLP, or of an expert, of this width on one of `tensor` tensor-parallel ranks."""
    biases = (2 if model.gated else 1) * width // tensor + model.hidden_size if model.mlp_bias else 0
    return mlp_weights(model, width) // tensor + biases


def mlp_weights(model: ModelConfig, width: int) -> int:
    """The matrices of an MLP, or of an expert, of this width."""
    return model.hidden_size * width * (3 if model.gated else 2)


def weights_beside_experts(model: ModelConfig) -> int:
    """The matrices that every token meets in a layer of experts: router, shared expert, its gate."""
    router = model.hidden_size * (model.num_experts + model.moe_shared_expert_gate)
    return router + mlp_weights(model, model.moe_shared_expert_intermediate_size or 0)


def attention_weights(model: ModelConfig) -> int:
    """The matrices that a token meets in attention, whole."""
    if model.multi_latent_attention:
        return _latent_attention(model, 1)[0]
    return model.hidden_size * model.head_dim * 2 * (model.num_attention_heads + model.query_groups)


def _attention(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Parameters without norms, and the norms' width."""
    hidden, size = model.hidden_size, model.head_dim
    query, key = model.num_attention_heads * size, model.query_groups * size
    # Ranks that share a KV group hold its rows whole.
    rows = (query + 2 * key) // tensor if model.query_groups >= tensor else query + 2 * key
    total = rows * hidden + query // tensor * hidden + rows * model.qkv_bias + hidden * model.proj_bias
    norms = 0
    if model.qk_layernorm_full_width:
        norms = (query + key) // tensor
    elif model.qk_layernorm:
        norms = 2 * size
    return total, norms


def _latent_attention(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """As _attention. The narrow matrices are whole on every rank."""
    hidden, heads = model.hidden_size, model.num_attention_heads // tensor
    latent, query_latent = model.kv_lora_rank, model.q_lora_rank or 0
    total = hidden * (query_latent + latent + model.qk_pos_emb_head_dim)
    total += (query_latent or hidden) * heads * model.head_dim
    total += latent * heads * (model.qk_head_dim + model.v_head_dim) + heads * model.v_head_dim * hidden
    return total, latent + query_latent

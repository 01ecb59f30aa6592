"""Mixture-of-experts models of transformers with random weights, and the same weights in ours."""

from collections.abc import Callable

import torch
import transformers
from models.reference import LLAMA, OURS
from torch import nn

from megalith.config import ModelConfig
from megalith.models.mlp import MLP
from megalith.models.moe import MoE
from megalith.models.transformer import Transformer


def copy_(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.zero_()
        parameter[: len(value)] = value


def grouped_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, head_dim: int
) -> torch.Tensor:
    """Rows of three projections, gathered by group: its queries, its key, its value."""
    parts = [x.view(groups, -1, head_dim, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """[…, gate then up, hidden] → gate and up row by row."""
    gate, up = gate_up.chunk(2, dim=-2)
    return torch.stack([gate, up], dim=-2).flatten(-3, -2)


def copy_mlp(ours: MLP, theirs: nn.Module) -> None:
    gate_up = torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight])
    copy_(ours.linear_fc1.weight, interleaved(gate_up))
    copy_(ours.linear_fc2.weight, theirs.down_proj.weight)


def copy_moe(ours: MoE, theirs: nn.Module) -> None:
    copy_(ours.router.weight, theirs.gate.weight)
    copy_(ours.experts.linear_fc1.weight, interleaved(theirs.experts.gate_up_proj))
    copy_(ours.experts.linear_fc2.weight, theirs.experts.down_proj)
    if ours.shared_experts is not None:
        copy_mlp(ours.shared_experts, getattr(theirs, "shared_experts", None) or theirs.shared_expert)
    if ours.shared_expert_gate is not None:
        copy_(ours.shared_expert_gate.weight, theirs.shared_expert_gate.weight)


def copy_attention(layer: nn.Module, theirs: nn.Module, config: ModelConfig) -> None:
    attention, projections = layer.self_attention, (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    groups, head_dim = config.query_groups, config.head_dim
    copy_(attention.linear_qkv.weight, grouped_qkv(*(p.weight for p in projections), groups, head_dim))
    if config.add_qkv_bias:
        copy_(attention.linear_qkv.bias, grouped_qkv(*(p.bias for p in projections), groups, head_dim))
    if config.qk_layernorm:
        copy_(attention.q_layernorm.weight, theirs.q_norm.weight)
        copy_(attention.k_layernorm.weight, theirs.k_norm.weight)
    copy_(attention.linear_proj.weight, theirs.o_proj.weight)


def from_mixtral(reference: nn.Module, model: Transformer) -> None:
    source, config = reference.model, model.config
    copy_(model.embedding.word_embeddings.weight, source.embed_tokens.weight)
    for layer, block in zip(model.layers.values(), source.layers):
        copy_attention(layer, block.self_attn, config)
        (copy_moe if layer.has_experts else copy_mlp)(layer.mlp, block.mlp)
        copy_(layer.input_layernorm.weight, block.input_layernorm.weight)
        copy_(layer.pre_mlp_layernorm.weight, block.post_attention_layernorm.weight)
    copy_(model.final_layernorm.weight, source.norm.weight)
    copy_(model.output_layer.weight, reference.lm_head.weight)


THEIRS = dict(LLAMA, rope_parameters=dict(rope_type="default", rope_theta=10000.0), tie_word_embeddings=False)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40)
OUR_EXPERTS = dict(OURS, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=40)

CASES: dict[str, tuple[Callable, Callable, dict]] = {
    "mixtral": (
        lambda: transformers.MixtralConfig(**THEIRS, num_local_experts=4, num_experts_per_tok=2,
                                           rms_norm_eps=1e-6, sliding_window=None),
        from_mixtral,
        dict(OURS, num_experts=4),
    ),
    "qwen3-moe, a dense layer": (
        lambda: transformers.Qwen3MoeConfig(**THEIRS, **EXPERTS, head_dim=32, norm_topk_prob=True,
                                            decoder_sparse_step=1, mlp_only_layers=[1]),
        from_mixtral,
        dict(OUR_EXPERTS, kv_channels=32, qk_layernorm=True, moe_layer_freq=[1, 0, 1]),
    ),
    "qwen2-moe, gated shared expert": (
        lambda: transformers.Qwen2MoeConfig(**THEIRS, **EXPERTS, norm_topk_prob=False,
                                            shared_expert_intermediate_size=48, decoder_sparse_step=1),
        from_mixtral,
        dict(OUR_EXPERTS, add_qkv_bias=True, moe_router_pre_softmax=True,
             moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True),
    ),
}  # fmt: skip


def reference_and_ours(name: str, std: float = 0.1) -> tuple[nn.Module, Transformer]:
    """The model of case `name` in transformers and here, with the same weights, in evaluation mode."""
    their_config, convert, our_config = CASES[name]
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(their_config(), attn_implementation="eager")
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=std)
    model = Transformer(ModelConfig(**our_config))
    convert(reference, model)
    return reference.eval(), model.eval()

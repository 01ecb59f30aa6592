"""Models of transformers with random weights, and the same weights in ours: every feature of each family."""

from collections.abc import Callable

import torch
import transformers
from torch import nn

from megalith.config import ModelConfig
from megalith.models.transformer import Transformer

VOCAB = 151


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


def from_gpt2(reference: nn.Module, model: Transformer) -> None:
    source, config = reference.transformer, model.config
    copy_(model.embedding.word_embeddings.weight, source.wte.weight)
    copy_(model.embedding.position_embeddings.weight, source.wpe.weight)
    for layer, block in zip(model.layers.values(), source.h):
        for kind in ("weight", "bias"):
            qkv = getattr(block.attn.c_attn, kind).T if kind == "weight" else block.attn.c_attn.bias
            fused = grouped_qkv(*qkv.chunk(3), config.query_groups, config.head_dim)
            copy_(getattr(layer.self_attention.linear_qkv, kind), fused)
            pairs = [
                (layer.input_layernorm, block.ln_1),
                (layer.pre_mlp_layernorm, block.ln_2),
                (layer.self_attention.linear_proj, block.attn.c_proj),
                (layer.mlp.linear_fc1, block.mlp.c_fc),
                (layer.mlp.linear_fc2, block.mlp.c_proj),
            ]
            for ours, theirs in pairs:
                value = getattr(theirs, kind)
                copy_(getattr(ours, kind), value.T if value.ndim == 2 else value)
    copy_(model.final_layernorm.weight, source.ln_f.weight)
    copy_(model.final_layernorm.bias, source.ln_f.bias)


def from_llama(reference: nn.Module, model: Transformer) -> None:
    source, config = reference.model, model.config
    copy_(model.embedding.word_embeddings.weight, source.embed_tokens.weight)
    for layer, block in zip(model.layers.values(), source.layers):
        attention, theirs = layer.self_attention, block.self_attn
        projections = (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        groups, head_dim = config.query_groups, config.head_dim
        copy_(attention.linear_qkv.weight, grouped_qkv(*(p.weight for p in projections), groups, head_dim))
        if config.add_qkv_bias:
            copy_(attention.linear_qkv.bias, grouped_qkv(*(p.bias for p in projections), groups, head_dim))
        if config.qk_layernorm:
            copy_(attention.q_layernorm.weight, theirs.q_norm.weight)
            copy_(attention.k_layernorm.weight, theirs.k_norm.weight)
        copy_(attention.linear_proj.weight, theirs.o_proj.weight)
        gate_up = torch.stack([block.mlp.gate_proj.weight, block.mlp.up_proj.weight], dim=1).flatten(0, 1)
        copy_(layer.mlp.linear_fc1.weight, gate_up)
        copy_(layer.mlp.linear_fc2.weight, block.mlp.down_proj.weight)
        copy_(layer.input_layernorm.weight, block.input_layernorm.weight)
        copy_(layer.pre_mlp_layernorm.weight, block.post_attention_layernorm.weight)
    copy_(model.final_layernorm.weight, source.norm.weight)
    if model.output_layer is not None:
        copy_(model.output_layer.weight, reference.lm_head.weight)


LLAMA = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, attention_dropout=0.0)  # fmt: skip
OURS = dict(vocab_size=VOCAB, hidden_size=64, ffn_hidden_size=112, num_layers=3, num_attention_heads=4,
            num_query_groups=2, max_position_embeddings=256, position_embedding_type="rope", swiglu=True,
            normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True,
            layernorm_epsilon=1e-6)  # fmt: skip
LLAMA3_ROPE = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32, rope_theta=500000.0)  # fmt: skip
YARN_ROPE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)
LINEAR_ROPE = dict(rope_type="linear", factor=2.0, rope_theta=10000.0)

CASES: dict[str, tuple[Callable, Callable, dict]] = {
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64),
        from_gpt2,
        dict(vocab_size=VOCAB, hidden_size=64, num_layers=3, num_attention_heads=4, max_position_embeddings=64),
    ),
    "llama": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        from_llama,
        OURS,
    ),
    "llama3 rope": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=LLAMA3_ROPE),
        from_llama,
        dict(OURS, rotary_base=500000.0,
             rope_scaling=dict(type="llama3", factor=4.0, original_max_position_embeddings=32)),
    ),
    "yarn rope": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=YARN_ROPE),
        from_llama,
        dict(OURS, rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64)),
    ),
    "linear rope": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=LINEAR_ROPE),
        from_llama,
        dict(OURS, rope_scaling=dict(type="linear", factor=2.0)),
    ),
    "qwen2, tied": (
        lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
        from_llama,
        dict(OURS, add_qkv_bias=True, untie_embeddings_and_output_weights=False),
    ),
    "qwen3": (
        lambda: transformers.Qwen3Config(**LLAMA, head_dim=32, tie_word_embeddings=False),
        from_llama,
        dict(OURS, kv_channels=32, qk_layernorm=True),
    ),
}  # fmt: skip


def reference_and_ours(name: str, std: float = 0.1) -> tuple[nn.Module, Transformer]:
    """The model of case `name` in transformers and here, with the same weights, in evaluation mode.

    Norms and biases are random too: their initial 1 and 0 would hide a mistake.
    """
    their_config, convert, our_config = CASES[name]
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(their_config(), attn_implementation="eager")
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=std)
    model = Transformer(ModelConfig(**our_config))
    convert(reference, model)
    return reference.eval(), model.eval()

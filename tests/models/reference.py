"""Models of transformers with random weights, and the same weights in ours: every feature of each family."""

from collections.abc import Callable

import torch
import transformers
from torch import nn

from megalith.bridge.families import FAMILIES
from megalith.bridge.transfer import to_ours
from megalith.config import ModelConfig
from megalith.models.transformer import Transformer

VOCAB = 151


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

CASES: dict[str, tuple[Callable, dict]] = {
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64),
        dict(vocab_size=VOCAB, hidden_size=64, num_layers=3, num_attention_heads=4, max_position_embeddings=64),
    ),
    "llama": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        OURS,
    ),
    "llama3 rope": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=LLAMA3_ROPE),
        dict(OURS, rotary_base=500000.0,
             rope_scaling=dict(type="llama3", factor=4.0, original_max_position_embeddings=32)),
    ),
    "yarn rope": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=YARN_ROPE),
        dict(OURS, rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64)),
    ),
    "linear rope": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=LINEAR_ROPE),
        dict(OURS, rope_scaling=dict(type="linear", factor=2.0)),
    ),
    "qwen2, tied": (
        lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
        dict(OURS, add_qkv_bias=True, untie_embeddings_and_output_weights=False),
    ),
    "mistral": (
        lambda: transformers.MistralConfig(**LLAMA, head_dim=32, sliding_window=None),
        dict(OURS, kv_channels=32),
    ),
    "llama, biases": (
        lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        dict(OURS, add_bias_linear=True, untie_embeddings_and_output_weights=False),
    ),
    "gpt2, untied": (
        lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, n_inner=96,
                                        activation_function="relu", tie_word_embeddings=False),
        dict(vocab_size=VOCAB, hidden_size=64, num_layers=2, num_attention_heads=4, max_position_embeddings=64,
             ffn_hidden_size=96, activation="relu", untie_embeddings_and_output_weights=True),
    ),
    "qwen3": (
        lambda: transformers.Qwen3Config(**LLAMA, head_dim=32, tie_word_embeddings=False),
        dict(OURS, kv_channels=32, qk_layernorm=True),
    ),
}  # fmt: skip


def random_reference(their_config: transformers.PreTrainedConfig, std: float = 0.1) -> nn.Module:
    """A model of transformers in evaluation mode. Its norms and biases are random too: their initial 1 and 0 would
    hide a mistake."""
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(their_config, attn_implementation="eager")
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=std)
    return reference.eval()


def reference_and_ours(name: str, std: float = 0.1) -> tuple[nn.Module, Transformer]:
    """The model of case `name` in transformers and here, with the same weights, in evaluation mode."""
    their_config, our_config = CASES[name]
    reference = random_reference(their_config(), std)
    model = Transformer(ModelConfig(**our_config))
    family = FAMILIES[type(reference).__name__]
    theirs, ours = reference.state_dict(), model.state_dict()
    for group in family.groups(model.config):
        value = to_ours(group, theirs.__getitem__)
        ours[group.name].zero_()[: len(value)] = value
    return reference, model.eval()

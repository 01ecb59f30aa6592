"""T5: the first, whose output matrix is its embedding, and 1.1 with Flan's, gated and with a matrix of its own.

Our layers are numbered through both stacks, the encoder's first; theirs begin again in the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.family import Family
from megalith.bridge.rows import Rule, gate_up, keys_values, qkv, same
from megalith.bridge.settings import Field, Ours, Theirs, Tree, Writes
from megalith.config import ModelConfig
from megalith.errors import ConfigError

# fmt: off
OUTSIDE = {
    "embedding.word_embeddings.weight":
        same("shared.weight"),
    "encoder.relative_attention_bias.weight":
        same("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    "encoder.final_layernorm.weight":
        same("encoder.final_layer_norm.weight"),
    "relative_attention_bias.weight":
        same("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    "final_layernorm.weight":
        same("decoder.final_layer_norm.weight"),
    "output_layer.weight":
        same("lm_head.weight"),
}
ENCODER = {
    "encoder.layers.{layer}.input_layernorm.weight":
        same("encoder.block.{layer}.layer.0.layer_norm.weight"),
    "encoder.layers.{layer}.self_attention.linear_qkv.weight":
        qkv("encoder.block.{layer}.layer.0.SelfAttention.q.weight",
            "encoder.block.{layer}.layer.0.SelfAttention.k.weight",
            "encoder.block.{layer}.layer.0.SelfAttention.v.weight"),
    "encoder.layers.{layer}.self_attention.linear_proj.weight":
        same("encoder.block.{layer}.layer.0.SelfAttention.o.weight"),
    "encoder.layers.{layer}.pre_mlp_layernorm.weight":
        same("encoder.block.{layer}.layer.1.layer_norm.weight"),
    "encoder.layers.{layer}.mlp.linear_fc1.weight":
        same("encoder.block.{layer}.layer.1.DenseReluDense.wi.weight"),
    "encoder.layers.{layer}.mlp.linear_fc2.weight":
        same("encoder.block.{layer}.layer.1.DenseReluDense.wo.weight"),
}
DECODER = {
    "layers.{layer}.input_layernorm.weight":
        same("decoder.block.{decoder}.layer.0.layer_norm.weight"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv("decoder.block.{decoder}.layer.0.SelfAttention.q.weight",
            "decoder.block.{decoder}.layer.0.SelfAttention.k.weight",
            "decoder.block.{decoder}.layer.0.SelfAttention.v.weight"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("decoder.block.{decoder}.layer.0.SelfAttention.o.weight"),
    "layers.{layer}.pre_cross_attn_layernorm.weight":
        same("decoder.block.{decoder}.layer.1.layer_norm.weight"),
    "layers.{layer}.cross_attention.linear_q.weight":
        same("decoder.block.{decoder}.layer.1.EncDecAttention.q.weight"),
    "layers.{layer}.cross_attention.linear_kv.weight":
        keys_values("decoder.block.{decoder}.layer.1.EncDecAttention.k.weight",
                    "decoder.block.{decoder}.layer.1.EncDecAttention.v.weight"),
    "layers.{layer}.cross_attention.linear_proj.weight":
        same("decoder.block.{decoder}.layer.1.EncDecAttention.o.weight"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("decoder.block.{decoder}.layer.2.layer_norm.weight"),
    "layers.{layer}.mlp.linear_fc1.weight":
        same("decoder.block.{decoder}.layer.2.DenseReluDense.wi.weight"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("decoder.block.{decoder}.layer.2.DenseReluDense.wo.weight"),
}
GATES = {
    "encoder.layers.{layer}.mlp.linear_fc1.weight":
        gate_up("encoder.block.{layer}.layer.1.DenseReluDense.wi_0.weight",
                "encoder.block.{layer}.layer.1.DenseReluDense.wi_1.weight"),
    "layers.{layer}.mlp.linear_fc1.weight":
        gate_up("decoder.block.{decoder}.layer.2.DenseReluDense.wi_0.weight",
                "decoder.block.{decoder}.layer.2.DenseReluDense.wi_1.weight"),
}
ACTIVATIONS = {
    "relu": ("relu", False), "gelu": ("gelu", False), "gelu_new": ("gelu_tanh", False), "silu": ("silu", False),
    "gated-gelu": ("gelu_tanh", True), "gated-gelu_new": ("gelu_tanh", True), "gated-silu": ("silu", True),
    "gated-relu": ("relu", True),
}
# fmt: on


class Stacks:
    """`num_layers` and `num_decoder_layers`: there each stack's, here both together and the encoder's."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        encoder = theirs.get("num_layers", 6)
        decoder = theirs.get("num_decoder_layers")
        return {
            "num_layers": encoder + (encoder if decoder is None else decoder),
            "encoder_num_layers": encoder,
        }

    def write(self, model: ModelConfig) -> Tree:
        return {
            "num_layers": model.encoder_layers,
            "num_decoder_layers": model.num_layers - model.encoder_layers,
        }


class FeedForward:
    """`feed_forward_proj`: the non-linearity, and whether it is of a gate. `gated-gelu` is the tanh approximation."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        name = theirs.get("feed_forward_proj", "relu")
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"config.json has feed_forward_proj {name!r}, which has no equal here; known: {', '.join(ACTIVATIONS)}"
            )
        activation, gated = ACTIVATIONS[name]
        return {"activation": activation, "gated_linear_unit": gated}

    def write(self, model: ModelConfig) -> Tree:
        wanted = model.mlp_activation, model.gated
        names = [name for name, meaning in ACTIVATIONS.items() if meaning == wanted]
        if not names:
            raise ConfigError(
                f"activation {wanted[0]}{' with a gate' if wanted[1] else ''} has no equal there"
            )
        return {"feed_forward_proj": names[0]}


class OutputMatrix:
    """`tie_word_embeddings` says in older files both whether the output matrix is the embedding's and whether what it
    is given is scaled, which `scale_decoder_outputs` says in newer ones."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        tied = theirs.get("tie_word_embeddings", True) is not False
        scaled = theirs.get("scale_decoder_outputs", tied)
        return {"untie_embeddings_and_output_weights": not tied, "scale_decoder_outputs": bool(scaled)}

    def write(self, model: ModelConfig) -> Tree:
        return {
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            "scale_decoder_outputs": model.scale_decoder_outputs,
        }


class T5Family(Family):
    """As Family, with two tables: of an MLP with a gate, and of one without."""

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        return self.tensors | GATES if model.gated else self.tensors


# fmt: off
T5_SETTINGS = (
    Stacks(),
    Field("hidden_size", "d_model", default=512),
    Field("kv_channels", "d_kv", default=64),
    Field("ffn_hidden_size", "d_ff", default=2048),
    Field("num_attention_heads", "num_heads", default=8),
    Field("vocab_size", "vocab_size", default=32128),
    Field("max_position_embeddings", "n_positions", default=512),
    Field("relative_attention_num_buckets", "relative_attention_num_buckets", default=32),
    Field("relative_attention_max_distance", "relative_attention_max_distance", default=128),
    Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-6),
    Field("hidden_dropout", "dropout_rate", default=0.1),
    Field("attention_dropout", "dropout_rate", default=0.1),
    FeedForward(),
    OutputMatrix(),
    Theirs(is_encoder_decoder=True),
    Ours(model_type="t5", position_embedding_type="relative", normalization="RMSNorm", add_bias_linear=False,
         query_pre_attn_scalar=1),
    Writes(pad_token_id=0, decoder_start_token_id=0),
)
# fmt: on
T5 = T5Family(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    tensors=OUTSIDE | ENCODER | DECODER,
    settings=T5_SETTINGS,
    tied="lm_head.weight",
    ignored=(
        r"^(en|de)coder\.embed_tokens\.weight$",  # copies of the shared embedding
        r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",  # never used
    ),
    prefix="",
)

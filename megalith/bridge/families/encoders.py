"""Models with an encoder: BERT (post-LN), MegatronBert (pre-LN) and T5.

In BERT the norm after a layer is the norm at the start of the next layer, `layers.{layer}.input_layernorm` in Megalith.
BERT and MegatronBert exist as pre-training models, with only the masked-LM head, and bare with the pooler.

Megalith numbers T5's layers consecutively, first the encoder's and then the decoder's; in Hugging Face the decoder
starts at 0. T5 1.0 ties the output matrix; T5 1.1 and Flan-T5 have a separate one and a gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rows import Rule, gate_up, keys_values, qkv, replace_prefix, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WrittenKeys
from megalith.config import ModelConfig
from megalith.errors import ConfigError

# fmt: off
SHARED_TENSORS = {
    "embedding.word_embeddings.weight":
        same("bert.embeddings.word_embeddings.weight"),
    "embedding.position_embeddings.weight":
        same("bert.embeddings.position_embeddings.weight"),
    "embedding.tokentype_embeddings.weight":
        same("bert.embeddings.token_type_embeddings.weight"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv("bert.encoder.layer.{layer}.attention.self.query.weight",
            "bert.encoder.layer.{layer}.attention.self.key.weight",
            "bert.encoder.layer.{layer}.attention.self.value.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        qkv("bert.encoder.layer.{layer}.attention.self.query.bias",
            "bert.encoder.layer.{layer}.attention.self.key.bias",
            "bert.encoder.layer.{layer}.attention.self.value.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("bert.encoder.layer.{layer}.attention.output.dense.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("bert.encoder.layer.{layer}.attention.output.dense.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        same("bert.encoder.layer.{layer}.intermediate.dense.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("bert.encoder.layer.{layer}.intermediate.dense.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("bert.encoder.layer.{layer}.output.dense.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("bert.encoder.layer.{layer}.output.dense.bias"),
    "lm_head.dense.weight":
        same("cls.predictions.transform.dense.weight"),
    "lm_head.dense.bias":
        same("cls.predictions.transform.dense.bias"),
    "lm_head.layernorm.weight":
        same("cls.predictions.transform.LayerNorm.weight"),
    "lm_head.layernorm.bias":
        same("cls.predictions.transform.LayerNorm.bias"),
    "lm_head.vocabulary.bias":
        same("cls.predictions.bias"),
    "output_layer.weight":
        same("cls.predictions.decoder.weight"),
    "pooler.weight":
        same("bert.pooler.dense.weight"),
    "pooler.bias":
        same("bert.pooler.dense.bias"),
    "binary_head.weight":
        same("cls.seq_relationship.weight"),
    "binary_head.bias":
        same("cls.seq_relationship.bias"),
}
POST_NORMS = {
    "layers.0.input_layernorm.weight":
        same("bert.embeddings.LayerNorm.weight"),
    "layers.0.input_layernorm.bias":
        same("bert.embeddings.LayerNorm.bias"),
    "layers.{layer}.input_layernorm.weight":
        same("bert.encoder.layer.{before}.output.LayerNorm.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("bert.encoder.layer.{before}.output.LayerNorm.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("bert.encoder.layer.{layer}.attention.output.LayerNorm.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("bert.encoder.layer.{layer}.attention.output.LayerNorm.bias"),
    "final_layernorm.weight":
        same("bert.encoder.layer.{last}.output.LayerNorm.weight"),
    "final_layernorm.bias":
        same("bert.encoder.layer.{last}.output.LayerNorm.bias"),
}
PRE_NORMS = {
    "layers.{layer}.input_layernorm.weight":
        same("bert.encoder.layer.{layer}.attention.ln.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("bert.encoder.layer.{layer}.attention.ln.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("bert.encoder.layer.{layer}.ln.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("bert.encoder.layer.{layer}.ln.bias"),
    "final_layernorm.weight":
        same("bert.encoder.ln.weight"),
    "final_layernorm.bias":
        same("bert.encoder.ln.bias"),
}
# fmt: on


class Tokentypes:
    """Maps `type_vocab_size`. Models without token types are rejected because transformers does not support them."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {"num_tokentypes": hf_config.get("type_vocab_size", 2)}

    def write(self, model: ModelConfig) -> Tree:
        if not model.tokentypes:
            raise ConfigError("it has no token types (num_tokentypes 0)")
        return {"type_vocab_size": model.tokentypes}


# fmt: off
SETTINGS = (
    Field("num_layers", "num_hidden_layers"),
    Field("hidden_size", "hidden_size"),
    Field("ffn_hidden_size", "intermediate_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings", default=512),
    Field("layernorm_epsilon", "layer_norm_eps", default=1e-12),
    activation("hidden_act", "gelu"),
    Field("hidden_dropout", "hidden_dropout_prob", default=0.1),
    Field("attention_dropout", "attention_probs_dropout_prob", default=0.1),
    Field("init_method_std", "initializer_range", default=0.02),
    TIED,
    Tokentypes(),
    RequiredKeys(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute"),
)
# fmt: on
POST_NORM = FixedSettings(model_type="bert", apply_residual_connection_post_layernorm=True)
PRE_NORM = FixedSettings(model_type="bert")
FOR_PRE_TRAINING = FixedSettings(add_lm_head=True, bert_binary_head=True, add_pooler=True)
MASKED_LM = FixedSettings(add_lm_head=True, bert_binary_head=False, add_pooler=False)
BARE = FixedSettings(add_lm_head=False, bert_binary_head=False, add_pooler=True)
HEADS = (r"^cls\.",)  # in files of the models with heads, ignored by the bare model
OTHER_HEADS = (
    r"^cls\.seq_relationship\.",
    r"^bert\.pooler\.",
)  # in files of the pre-training model, ignored by the masked-LM model
OLD_COPIES = (
    r"^(bert\.)?embeddings\.position_ids$",
    r"^cls\.predictions\.(decoder\.)?bias$",  # the one that the output matrix does not use
)


@dataclass(frozen=True)
class BertFamily(Family):
    """A family whose output matrix has a separate bias if it is not tied to the embedding.

    Files of a tied model may contain both biases. transformers adds the output matrix's own.
    """

    uses_bias_of_matrix: bool = False
    """True if a tied model's files contain the output matrix's own bias."""

    def stored_as(self, shapes: Mapping[str, tuple[int, ...]]) -> Family:
        return replace(self, uses_bias_of_matrix=self._bias_of_matrix in shapes)

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        if not (model.untie_embeddings_and_output_weights or self.uses_bias_of_matrix):
            return self.tensors
        name = "vocabulary.bias" if "vocabulary.bias" in self.tensors else "lm_head.vocabulary.bias"
        return {**self.tensors, name: same(self._bias_of_matrix)}

    @property
    def _bias_of_matrix(self) -> str:
        return self.tied.removesuffix("weight") + "bias"


BERT = BertFamily(
    architecture="BertForPreTraining",
    model_type="bert",
    tensors=SHARED_TENSORS | POST_NORMS,
    settings=(*SETTINGS, POST_NORM, FOR_PRE_TRAINING),
    tied="cls.predictions.decoder.weight",
    ignored=OLD_COPIES,
    prefix="bert.",
)
BERT_MASKED_LM = replace(
    BERT,
    architecture="BertForMaskedLM",
    settings=(*SETTINGS, POST_NORM, MASKED_LM),
    ignored=(*OLD_COPIES, *OTHER_HEADS),
)
BERT_MODEL = replace(
    BERT,
    architecture="BertModel",
    settings=(*SETTINGS, POST_NORM, BARE),
    tensors=replace_prefix(BERT.tensors, "bert."),
    ignored=(*OLD_COPIES, *HEADS),
    prefix="",
    prefix_with_head="bert.",
)
MEGATRON_BERT = replace(
    BERT,
    architecture="MegatronBertForPreTraining",
    model_type="megatron-bert",
    tensors=SHARED_TENSORS | PRE_NORMS,
    settings=(*SETTINGS, PRE_NORM, FOR_PRE_TRAINING),
)
MEGATRON_BERT_MASKED_LM = replace(
    MEGATRON_BERT,
    architecture="MegatronBertForMaskedLM",
    settings=(*SETTINGS, PRE_NORM, MASKED_LM),
    ignored=(*OLD_COPIES, *OTHER_HEADS),
)
MEGATRON_BERT_MODEL = replace(
    MEGATRON_BERT,
    architecture="MegatronBertModel",
    settings=(*SETTINGS, PRE_NORM, BARE),
    tensors=replace_prefix(MEGATRON_BERT.tensors, "bert."),
    ignored=(*OLD_COPIES, *HEADS),
    prefix="",
    prefix_with_head="bert.",
)


# fmt: off
T5_OUTSIDE = {
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
T5_ENCODER = {
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
T5_DECODER = {
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
T5_GATES = {
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
    """Maps `num_layers` and `num_decoder_layers` to the total number of layers and the number of encoder layers."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        encoder = hf_config.get("num_layers")
        encoder = 6 if encoder is None else encoder
        decoder = hf_config.get("num_decoder_layers")
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
    """Maps `feed_forward_proj` to the activation and the gate. `gated-gelu` is the tanh approximation.

    Files may repeat it in `dense_act_fn` and `is_gated_act`, which then have priority in transformers.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        name = hf_config.get("feed_forward_proj", "relu")
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"config.json has feed_forward_proj {name!r}, which is not supported; use {', '.join(ACTIVATIONS)}"
            )
        kind, gated = ACTIVATIONS[name]
        function = hf_config.get("dense_act_fn") or (
            "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
        )
        if ACTIVATIONS.get(function) != (kind, False) or hf_config.get("is_gated_act", gated) != gated:
            raise ConfigError(
                f"config.json has feed_forward_proj {name!r}, but dense_act_fn {hf_config.get('dense_act_fn')!r} and "
                f"is_gated_act {hf_config.get('is_gated_act')!r}, which contradict it; correct or remove them"
            )
        return {"activation": kind, "gated_linear_unit": gated}

    def write(self, model: ModelConfig) -> Tree:
        pair = model.mlp_activation, model.gated
        names = [name for name, value in ACTIVATIONS.items() if value == pair]
        if not names:
            raise ConfigError(
                f"activation {pair[0]}{' with a gate' if pair[1] else ''} has no equivalent in transformers"
            )
        return {"feed_forward_proj": names[0]}


class TieAndScale:
    """Maps `tie_word_embeddings` and `scale_decoder_outputs`.

    Older files have only the first key. It then also means that the output matrix's input is scaled.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        tied = hf_config.get("tie_word_embeddings", True) is not False
        scaled = hf_config.get("scale_decoder_outputs", tied)
        return {"untie_embeddings_and_output_weights": not tied, "scale_decoder_outputs": bool(scaled)}

    def write(self, model: ModelConfig) -> Tree:
        return {
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            "scale_decoder_outputs": model.scale_decoder_outputs,
        }


class T5Family(Family):
    """A family with different tables for MLPs with and without a gate."""

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        return self.tensors | T5_GATES if model.gated else self.tensors


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
    TieAndScale(),
    RequiredKeys(is_encoder_decoder=True),
    FixedSettings(model_type="t5", position_embedding_type="relative", normalization="RMSNorm", add_bias_linear=False,
         query_pre_attn_scalar=1),
    Field("decoder_start_token_id", "decoder_start_token_id", default=0),
    WrittenKeys(pad_token_id=0),
)
# fmt: on
T5 = T5Family(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    tensors=T5_OUTSIDE | T5_ENCODER | T5_DECODER,
    settings=T5_SETTINGS,
    tied="lm_head.weight",
    not_in_fp8=".wo.weight",  # transformers does not convert it to FP8
    trusts_stored_head=True,  # transformers 5 writes tie_word_embeddings for every T5
    embedding_copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ignored=(
        r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",  # never used
    ),
    prefix="",
)


# mT5: T5 1.1 that never scales the decoder's output. transformers 5 writes tie_word_embeddings for every model.
MT5 = replace(
    T5,
    architecture="MT5ForConditionalGeneration",
    model_type="mt5",
    defaults={
        "num_layers": 8,
        "d_ff": 1024,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
        "vocab_size": 250112,
    },
    settings=(
        *[row for row in T5_SETTINGS if not isinstance(row, TieAndScale)],
        TIED,
        FixedSettings(scale_decoder_outputs=False),
    ),
)


FAMILIES = (
    BERT,
    BERT_MASKED_LM,
    BERT_MODEL,
    MEGATRON_BERT,
    MEGATRON_BERT_MASKED_LM,
    MEGATRON_BERT_MODEL,
    T5,
    MT5,
)

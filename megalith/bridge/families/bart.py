"""Encoder-decoders with positions in the embedding: BART, mBART, PEGASUS, Blenderbot, Marian, M2M100 and their kin.

They differ in three places:

    BART, PLBart, MVP     post-LN, learned positions and a norm of the embedding, in each stack
    mBART                 as BART, pre-LN
    Blenderbot            pre-LN, learned positions
    BlenderbotSmall       as BART, but the decoder adds positions after the norm
    PEGASUS, M2M100       pre-LN, sinusoidal positions
    Marian                post-LN, sinusoidal positions

Megalith numbers the layers consecutively, as in T5. In post-LN models, the norm after a layer is stored as the norm at
the start of the next layer of its stack. `final_logits_bias` is a constant that files may lack.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.family import Family
from megalith.bridge.rows import first_last, keys_values, qkv, row_vector, same
from megalith.bridge.settings import ConfigRow, Field, FixedSettings, RequiredKeys, Tree, WrittenKeys
from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.sinusoids import Sinusoids

LOGITS_BIAS = "final_logits_bias"

# fmt: off
LAYERS = {
    "embedding.word_embeddings.weight":
        same("model.shared.weight"),
    "encoder.layers.{layer}.self_attention.linear_qkv.weight":
        qkv("model.encoder.layers.{layer}.self_attn.q_proj.weight",
            "model.encoder.layers.{layer}.self_attn.k_proj.weight",
            "model.encoder.layers.{layer}.self_attn.v_proj.weight"),
    "encoder.layers.{layer}.self_attention.linear_qkv.bias":
        qkv("model.encoder.layers.{layer}.self_attn.q_proj.bias",
            "model.encoder.layers.{layer}.self_attn.k_proj.bias",
            "model.encoder.layers.{layer}.self_attn.v_proj.bias"),
    "encoder.layers.{layer}.self_attention.linear_proj.weight":
        same("model.encoder.layers.{layer}.self_attn.out_proj.weight"),
    "encoder.layers.{layer}.self_attention.linear_proj.bias":
        same("model.encoder.layers.{layer}.self_attn.out_proj.bias"),
    "encoder.layers.{layer}.mlp.linear_fc1.weight":
        same("model.encoder.layers.{layer}.fc1.weight"),
    "encoder.layers.{layer}.mlp.linear_fc1.bias":
        same("model.encoder.layers.{layer}.fc1.bias"),
    "encoder.layers.{layer}.mlp.linear_fc2.weight":
        same("model.encoder.layers.{layer}.fc2.weight"),
    "encoder.layers.{layer}.mlp.linear_fc2.bias":
        same("model.encoder.layers.{layer}.fc2.bias"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv("model.decoder.layers.{decoder}.self_attn.q_proj.weight",
            "model.decoder.layers.{decoder}.self_attn.k_proj.weight",
            "model.decoder.layers.{decoder}.self_attn.v_proj.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        qkv("model.decoder.layers.{decoder}.self_attn.q_proj.bias",
            "model.decoder.layers.{decoder}.self_attn.k_proj.bias",
            "model.decoder.layers.{decoder}.self_attn.v_proj.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("model.decoder.layers.{decoder}.self_attn.out_proj.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("model.decoder.layers.{decoder}.self_attn.out_proj.bias"),
    "layers.{layer}.cross_attention.linear_q.weight":
        same("model.decoder.layers.{decoder}.encoder_attn.q_proj.weight"),
    "layers.{layer}.cross_attention.linear_q.bias":
        same("model.decoder.layers.{decoder}.encoder_attn.q_proj.bias"),
    "layers.{layer}.cross_attention.linear_kv.weight":
        keys_values("model.decoder.layers.{decoder}.encoder_attn.k_proj.weight",
                    "model.decoder.layers.{decoder}.encoder_attn.v_proj.weight"),
    "layers.{layer}.cross_attention.linear_kv.bias":
        keys_values("model.decoder.layers.{decoder}.encoder_attn.k_proj.bias",
                    "model.decoder.layers.{decoder}.encoder_attn.v_proj.bias"),
    "layers.{layer}.cross_attention.linear_proj.weight":
        same("model.decoder.layers.{decoder}.encoder_attn.out_proj.weight"),
    "layers.{layer}.cross_attention.linear_proj.bias":
        same("model.decoder.layers.{decoder}.encoder_attn.out_proj.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        same("model.decoder.layers.{decoder}.fc1.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("model.decoder.layers.{decoder}.fc1.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("model.decoder.layers.{decoder}.fc2.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("model.decoder.layers.{decoder}.fc2.bias"),
    "vocabulary.bias":
        row_vector(LOGITS_BIAS),
}
NORMS_AFTER = {  # Megalith's norm, without .weight or .bias → Hugging Face's
    "encoder.layers.{layer}.input_layernorm": "model.encoder.layers.{before}.final_layer_norm",
    "encoder.layers.{layer}.pre_mlp_layernorm": "model.encoder.layers.{layer}.self_attn_layer_norm",
    "encoder.final_layernorm": "model.encoder.layers.{last}.final_layer_norm",
    "layers.{layer}.input_layernorm": "model.decoder.layers.{before}.final_layer_norm",
    "layers.{layer}.pre_cross_attn_layernorm": "model.decoder.layers.{decoder}.self_attn_layer_norm",
    "layers.{layer}.pre_mlp_layernorm": "model.decoder.layers.{decoder}.encoder_attn_layer_norm",
    "final_layernorm": "model.decoder.layers.{last}.final_layer_norm",
}
NORMS_BEFORE = {
    "encoder.layers.{layer}.input_layernorm": "model.encoder.layers.{layer}.self_attn_layer_norm",
    "encoder.layers.{layer}.pre_mlp_layernorm": "model.encoder.layers.{layer}.final_layer_norm",
    "encoder.final_layernorm": "model.encoder.layer_norm",
    "layers.{layer}.input_layernorm": "model.decoder.layers.{decoder}.self_attn_layer_norm",
    "layers.{layer}.pre_cross_attn_layernorm": "model.decoder.layers.{decoder}.encoder_attn_layer_norm",
    "layers.{layer}.pre_mlp_layernorm": "model.decoder.layers.{decoder}.final_layer_norm",
    "final_layernorm": "model.decoder.layer_norm",
}
EMBEDDING_NORMS = {
    "encoder.embedding.layernorm": "model.encoder.layernorm_embedding",
    "embedding.layernorm": "model.decoder.layernorm_embedding",
}
POSITIONS = {  # Megalith's table of positions → Hugging Face's
    "encoder.embedding.position_embeddings.weight": "model.encoder.embed_positions.weight",
    "embedding.position_embeddings.weight": "model.decoder.embed_positions.weight",
}
OLD = (  # in files of fairseq's converters
    r"^model\.(en|de)coder\.version$",
    r"^model\.(en|de)coder\.embed_positions\.(_float_tensor|weights)$",
)
# fmt: on


def norms(names: Mapping[str, str]) -> dict[str, Any]:
    """Return the mapping rules of the weights and biases of norms."""
    return {
        f"{ours}.{kind}": same(f"{theirs}.{kind}")
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }


class StackDepths:
    """Maps `encoder_layers` and `decoder_layers` to the number of all layers and of the encoder's."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        encoder, decoder = (hf_config[f"{stack}_layers"] or 0 for stack in ("encoder", "decoder"))
        return {"num_layers": encoder + decoder, "encoder_num_layers": encoder}

    def write(self, model: ModelConfig) -> Tree:
        encoder = model.encoder_layers
        return {"encoder_layers": encoder, "decoder_layers": model.num_layers - encoder}


class FirstToken:
    """Maps `decoder_start_token_id`; if it is null, transformers starts with `bos_token_id`."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        tokens = (hf_config.get(key) for key in ("decoder_start_token_id", "bos_token_id"))
        return {"decoder_start_token_id": next((token for token in tokens if token is not None), 0)}

    def write(self, model: ModelConfig) -> Tree:
        return {"decoder_start_token_id": model.decoder_start_token_id}


class OmittedDropout:
    """Warns if a key enables a kind of dropout that Megalith does not support: dropout of activations or of whole
    layers.
    """

    KEYS = ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop")

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if used := [f"{key} {hf_config[key]!r}" for key in self.KEYS if hf_config.get(key)]:
            warnings.warn(
                f"config.json has {', '.join(used)}: transformers drops these out in training, Megalith does not",
                stacklevel=4,
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return dict.fromkeys(self.KEYS, 0.0)


class FirstPosition:
    """Maps `pad_token_id`, whose position precedes the first token's in M2M100."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        token = hf_config["pad_token_id"]
        if type(token) is not int or token < 0:
            raise ConfigError(
                f"config.json has pad_token_id {token!r}, but positions are counted from the padding token's id in "
                "models of this family; set it to a token"
            )
        return {"sinusoidal_first_position": token + 1}

    def write(self, model: ModelConfig) -> Tree:
        return {"pad_token_id": model.sinusoidal_first_position - 1}


# fmt: off
SETTINGS = (
    StackDepths(),
    Field("hidden_size", "d_model"),
    Field("ffn_hidden_size", "encoder_ffn_dim"),
    Field("ffn_hidden_size", "decoder_ffn_dim"),
    Field("num_attention_heads", "encoder_attention_heads"),
    Field("num_attention_heads", "decoder_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings"),
    activation("activation_function", "gelu"),
    Field("scale_embeddings", "scale_embedding"),
    Field("hidden_dropout", "dropout"),
    Field("attention_dropout", "attention_dropout"),
    Field("init_method_std", "init_std"),
    FirstToken(),
    OmittedDropout(),
    RequiredKeys(is_encoder_decoder=True, tie_word_embeddings=True),
)
# fmt: on
ENCODER_DECODER = dict(model_type="t5", add_output_bias=True, train_output_bias=False)
POST_LN = dict(apply_residual_connection_post_layernorm=True, add_first_input_layernorm=False)
OWN_NORMS = dict(separate_encoder_positions=True, embedding_layernorm=True)
SINUSOIDAL = dict(position_embedding_type="sinusoidal")
PAD = WrittenKeys(pad_token_id=1)


def defaults(
    layers: int, width: int, ffn: int, heads: int, vocabulary: int, start: int | None, **others: Any
) -> Tree:
    """Return the values of missing keys."""
    sizes = {"layers": layers, "ffn_dim": ffn, "attention_heads": heads, "layerdrop": 0.0}
    return {
        **{f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in sizes.items()},
        "d_model": width,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
        "scale_embedding": False,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "init_std": 0.02,
        "decoder_start_token_id": start,
        "bos_token_id": 0,
        **others,
    }


@dataclass(frozen=True)
class BartFamily(Family):
    """A family whose files may contain, or lack, the logits' constant bias and tables of sinusoids."""

    def stored_model(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        if LOGITS_BIAS in names or not model.add_output_bias:
            return model
        return model.model_copy(update={"add_output_bias": False, "train_output_bias": True})

    def described_model(self, model: ModelConfig) -> ModelConfig:
        if "vocabulary.bias" not in self.tensors or model.add_output_bias:
            return model
        return model.model_copy(update={"add_output_bias": True, "train_output_bias": False})

    def stored_tables(self, model: ModelConfig) -> dict[str, Tensor]:
        if model.position_embedding_type != "sinusoidal" or model.sinusoidal_spacing == "inclusive":
            return {}  # transformers never stores M2M100's
        table = Sinusoids.of_model(model)(torch.arange(model.max_position_embeddings))
        return dict.fromkeys(POSITIONS.values(), table)


def family(
    architecture: str,
    model_type: str,
    tables: Mapping[str, Any],
    keys: Tree,
    *rows: ConfigRow,
    **how: Any,
) -> BartFamily:
    """Return a family that has the shared tables, additional rows of tensors and settings, and defaults for missing
    keys.
    """
    return BartFamily(
        architecture=architecture,
        model_type=model_type,
        tensors=LAYERS | tables,
        settings=(*SETTINGS, *rows),
        tied="lm_head.weight",
        defaults=keys,
        aliases={
            "num_attention_heads": "encoder_attention_heads",
            "hidden_size": "d_model",
            "num_hidden_layers": "encoder_layers",
        },
        embedding_copies=("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
        ignored=OLD,
        **how,
    )


WITH_OFFSET = {ours: first_last(theirs, 2) for ours, theirs in POSITIONS.items()}
WITHOUT_OFFSET = {ours: same(theirs) for ours, theirs in POSITIONS.items()}
AFTER, BEFORE, OF_EMBEDDING = norms(NORMS_AFTER), norms(NORMS_BEFORE), norms(EMBEDDING_NORMS)
BART_SETTINGS = FixedSettings(**ENCODER_DECODER, **POST_LN, **OWN_NORMS, padding_positions=2)

BART = family(
    "BartForConditionalGeneration",
    "bart",
    AFTER | OF_EMBEDDING | WITH_OFFSET,
    defaults(12, 1024, 4096, 16, 50265, 2),
    BART_SETTINGS,
    PAD,
)
PLBART = family(
    "PLBartForConditionalGeneration",
    "plbart",
    AFTER | OF_EMBEDDING | WITH_OFFSET,
    defaults(6, 768, 3072, 12, 50005, None, scale_embedding=True, attention_dropout=0.1),
    BART_SETTINGS,
    PAD,
)
PLBART = replace(PLBART, aliases={**PLBART.aliases, "initializer_range": "init_std"})
MVP = family(
    "MvpForConditionalGeneration",
    "mvp",
    AFTER | OF_EMBEDDING | WITH_OFFSET,
    defaults(12, 1024, 4096, 16, 50267, 2),
    BART_SETTINGS,
    RequiredKeys(use_prompt=False),
    PAD,
)
MBART = family(
    "MBartForConditionalGeneration",
    "mbart",
    BEFORE | OF_EMBEDDING | WITH_OFFSET,
    defaults(12, 1024, 4096, 16, 50265, None),
    FixedSettings(**ENCODER_DECODER, **OWN_NORMS, padding_positions=2),
    PAD,
)
BLENDERBOT = family(
    "BlenderbotForConditionalGeneration",
    "blenderbot",
    BEFORE | WITHOUT_OFFSET,
    defaults(24, 2560, 10240, 32, 8008, 1, encoder_layers=2, max_position_embeddings=128),
    FixedSettings(**ENCODER_DECODER, separate_encoder_positions=True),
    WrittenKeys(pad_token_id=0),
)
BLENDERBOT_SMALL = family(
    "BlenderbotSmallForConditionalGeneration",
    "blenderbot-small",
    AFTER | OF_EMBEDDING | WITHOUT_OFFSET,
    defaults(8, 512, 2048, 16, 50265, 1, max_position_embeddings=512),
    FixedSettings(**ENCODER_DECODER, **POST_LN, **OWN_NORMS, decoder_positions_after_layernorm=True),
    WrittenKeys(pad_token_id=0),
)
PEGASUS = family(
    "PegasusForConditionalGeneration",
    "pegasus",
    BEFORE,
    defaults(12, 1024, 4096, 16, 50265, 0),
    FixedSettings(**ENCODER_DECODER, **SINUSOIDAL),
    WrittenKeys(pad_token_id=0),
    writes_tables=True,
)
MARIAN = family(
    "MarianMTModel",
    "marian",
    AFTER,
    defaults(12, 1024, 4096, 16, 58101, 58100),
    FixedSettings(**ENCODER_DECODER, **POST_LN, **SINUSOIDAL),
    Field("vocab_size", "decoder_vocab_size", default=None),
    RequiredKeys(share_encoder_decoder_embeddings=True),
    WrittenKeys(pad_token_id=0),
)
M2M100 = family(
    "M2M100ForConditionalGeneration",
    "m2m_100",
    BEFORE,
    defaults(12, 1024, 4096, 16, 128112, 2, activation_function="relu", scale_embedding=True, attention_dropout=0.1,
             encoder_layerdrop=0.05, decoder_layerdrop=0.05, pad_token_id=1),
    FixedSettings(model_type="t5", **SINUSOIDAL, sinusoidal_spacing="inclusive", positions_skip_padding=True),
    FirstPosition(),
)  # fmt: skip
M2M100 = replace(
    M2M100, tensors={name: rule for name, rule in M2M100.tensors.items() if name != "vocabulary.bias"}
)

FAMILIES = (BART, PLBART, MVP, MBART, BLENDERBOT, BLENDERBOT_SMALL, PEGASUS, MARIAN, M2M100)

"""Sizes and choices of a model that follow from its settings."""

from __future__ import annotations

from typing import Any

from megalith.config.dense import DenseSettings


class DenseModel(DenseSettings):
    """Settings shared by all models, and values derived from them. ModelConfig adds layers with experts."""

    @property
    def causal(self) -> bool:
        """True if tokens attend only to earlier tokens."""
        return self.model_type == "gpt"

    @property
    def encoder_layers(self) -> int:
        """Number of encoder layers, which come first, or 0 without an encoder-decoder."""
        if self.model_type != "t5":
            return 0
        return self.encoder_num_layers or self.num_layers // 2

    def depth(self, name: str) -> int:
        """Return the number of layers in the stack to which the parameter `name` belongs."""
        encoders = self.model_type == "t5" and name.startswith("encoder.")
        return self.encoder_layers if encoders else self.num_layers - self.encoder_layers

    def has_input_layernorm(self, number: int) -> bool:
        """Return True if layer `number` (from 0) has a norm before attention."""
        return self.add_first_input_layernorm or number not in (0, self.encoder_layers)

    @property
    def tokentypes(self) -> int:
        """Number of token types (segments)."""
        if self.num_tokentypes is not None:
            return self.num_tokentypes
        return 2 if self.model_type == "bert" and self.bert_binary_head else 0

    @property
    def pooler(self) -> bool:
        """True if the model has a pooler."""
        if self.add_pooler is not None:
            return self.add_pooler
        return self.model_type == "bert" and self.bert_binary_head

    @property
    def query_groups(self) -> int:
        """Number of key and value heads, with 0 resolved to the number of query heads."""
        if self.multi_latent_attention:
            return self.num_attention_heads
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of an attention head; with MLA, of its query and key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        if self.gated:
            return max(8 * self.hidden_size // (3 * 64), 1) * 64  # as Megatron-LM rounds
        return 4 * self.hidden_size

    @property
    def mtp_layers(self) -> list[int]:
        """Indices of the MTP layers, which follow the model's other layers."""
        return list(range(self.num_layers, self.num_layers + (self.mtp_num_layers or 0)))

    @property
    def embedding_at_head(self) -> bool:
        """True if the last pipeline stage needs the word embedding, for tied embeddings or MTP."""
        if self.score_head:
            return False
        return not self.untie_embeddings_and_output_weights or self.mtp_num_layers is not None

    @property
    def logits_size(self) -> int:
        """Number of outputs per token: vocabulary entries, or one score."""
        return 1 if self.score_head else self.vocab_size

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate."""
        return self.swiglu or self.gated_linear_unit

    @property
    def head_activation(self) -> str | None:
        """Activation of the layer before the output matrix; None for a decoder without this layer."""
        if self.model_type == "gpt" and not self.add_decoder_lm_head:
            return None
        return self.lm_head_activation or self.mlp_activation

    @property
    def mlp_activation(self) -> str:
        """Activation of the MLP, with or without a gate."""
        return "silu" if self.swiglu else self.activation

    @property
    def qkv_bias(self) -> bool:
        """True if the query, key and value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def proj_bias(self) -> bool:
        """True if attention's output projection has a bias."""
        return self.add_bias_linear or self.add_proj_bias

    def has_proj_bias(self, number: int) -> bool:
        """Return True if attention's output projection in layer `number` has a bias."""
        return self.proj_bias and (not self.proj_bias_in_last_layer_only or number == self.num_layers - 1)

    @property
    def mlp_bias(self) -> bool:
        """True if MLPs have biases."""
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def rotary_size(self) -> int:
        """Number of dimensions per head with RoPE."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def learns_positions(self) -> bool:
        """True if learned positions are added to the embedding."""
        return self.position_embedding_type == "learned_absolute" or self.add_position_embedding

    @property
    def adds_positions(self) -> bool:
        """True if positions, learned or sinusoidal, are added to the embedding."""
        return self.learns_positions or self.position_embedding_type == "sinusoidal"

    @property
    def shares_relative_positions(self) -> bool:
        """True if the layers of a stack share relative positions."""
        return self.position_embedding_type == "relative" and not self.relative_attention_per_layer

    @property
    def position_rows(self) -> int:
        """Number of rows of the learned position embedding."""
        return self.max_position_embeddings + self.padding_positions

    @property
    def attention_divisor(self) -> int:
        """Number whose square root divides the attention scores."""
        return self.query_pre_attn_scalar or self.head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores: `plain_attention_scale` times the squared magnitude of YaRN's mscale_all_dim."""
        scaling = self.rope_scaling
        stretched = scaling is not None and scaling.type == "yarn" and scaling.mscale_all_dim
        return self.plain_attention_scale * (scaling.magnitude(stretched) ** 2 if stretched else 1.0)

    @property
    def plain_attention_scale(self) -> float:
        """Factor on attention scores, not counting YaRN's factor."""
        return self.softmax_scale or self.attention_divisor**-0.5

    @property
    def layers_without_rope(self) -> list[int] | None:
        """List with a 1 for each layer without RoPE, or None if all layers have it."""
        frequency = self.no_rope_freq
        if frequency is None or isinstance(frequency, list):
            return frequency
        return [int((layer + 1) % frequency == 0) for layer in range(self.num_layers)]

    def uses_rope(self, layer: int) -> bool:
        """Return True if layer number `layer` (from 0) applies RoPE."""
        without = self.layers_without_rope
        return without is None or not without[min(layer, self.num_layers - 1)]

    def attention_chunk(self, layer: int) -> int | None:
        """Return attention_chunk_size if layer number `layer` (from 0) has it, else None."""
        return self.attention_chunk_size if self.uses_rope(layer) else None

    def reach(self, layer: int, seq_length: int) -> int:
        """Return the number of tokens in the window or the chunk of layer `layer`, at most `seq_length`."""
        if sides := self.two_sided_window(layer):
            return min(sum(sides) + 1, seq_length)
        return min(self.window(layer) or self.attention_chunk(layer) or seq_length, seq_length)

    def scales_queries(self, layer: int) -> bool:
        """Return True if layer number `layer` (from 0) multiplies queries by query_scaling_beta's factor."""
        if self.query_scaling_beta is None:
            return False
        return self.query_scaling_layers == "all" or not self.uses_rope(layer)

    @property
    def windows(self) -> list[Any]:
        """Window of every layer: see `window`, and in encoders `two_sided_window`."""
        return [self.window(layer) or self.two_sided_window(layer) for layer in range(self.num_layers)]

    def window(self, layer: int) -> int | None:
        """Return the number of keys per query, including its own, in layer `layer` (from 0). None means no limit."""
        causal = self.window_size is not None and not self.window_size[1]
        return self.window_size[0] + 1 if causal and self._has_window(layer) else None

    def two_sided_window(self, layer: int) -> tuple[int, int] | None:
        """Return the number of keys before and after a query in layer `layer` (from 0) of an encoder. None means no
        limit."""
        two_sided = self.window_size is not None and self.window_size[1]
        return (self.window_size[0], self.window_size[1]) if two_sided and self._has_window(layer) else None

    def _has_window(self, layer: int) -> bool:
        frequency, layer = self.window_attn_skip_freq, min(layer, self.num_layers - 1)
        if isinstance(frequency, list):
            return frequency[layer] == 1
        return frequency is None or (layer + 1) % frequency != 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of make_vocab_size_divisible_by."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

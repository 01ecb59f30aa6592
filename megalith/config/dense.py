"""A model's shape but for its experts: embedding, attention, MLP, norms and biases, and what follows from them.

How a model's rotary positions reach further than its first training did.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.config import small
from megalith.config.base import DEFAULT, KEPT, Decides, Needs, Resolved, Section, Shrinks


class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the length that the model was first trained on."""

    type: Literal["linear", "llama3", "yarn", "longrope"] = "llama3"
    """`linear` divides all frequencies by factor, `longrope` each by its own; `llama3` and `yarn` by its height."""

    factor: PositiveFloat = 8.0
    """How many times longer than the original the context becomes."""

    original_max_position_embeddings: Annotated[PositiveInt, Needs("type", "llama3", "yarn", "longrope")] = (
        8192
    )
    """The context length of the first training, in tokens."""

    low_freq_factor: Annotated[PositiveFloat, Needs("type", "llama3")] = 1.0
    """llama3: wavelengths longer than original / low_freq_factor are divided by factor."""

    high_freq_factor: Annotated[PositiveFloat, Needs("type", "llama3")] = 4.0
    """llama3: wavelengths shorter than original / high_freq_factor are kept."""

    beta_fast: Annotated[PositiveFloat, Needs("type", "yarn")] = 32.0
    """yarn: dimensions that turn more often than this over the original length are kept."""

    beta_slow: Annotated[PositiveFloat, Needs("type", "yarn")] = 1.0
    """yarn: dimensions that turn less often than this over the original length are divided by factor."""

    attention_factor: Annotated[PositiveFloat | None, Needs("type", "yarn", "longrope")] = None
    """Scale of the cosines and sines. Absent: yarn 0.1 · ln(factor) + 1, longrope √(1 + ln(factor) / ln(original))."""

    truncate: Annotated[bool, Needs("type", "yarn")] = True
    """yarn: the pairs between which frequencies are blended are whole numbers (gpt-oss: not)."""

    mscale: Annotated[PositiveFloat | None, Needs("type", "yarn")] = None
    """yarn: cosines and sines are scaled by (0.1 · mscale · ln(factor) + 1) / the same of mscale_all_dim (DeepSeek)."""

    mscale_all_dim: Annotated[PositiveFloat | None, Needs("type", "yarn")] = None
    """yarn: attention scores are multiplied by (0.1 · mscale_all_dim · ln(factor) + 1)²."""

    short_factor: Annotated[list[PositiveFloat] | None, Needs("type", "longrope")] = None
    """longrope: what each frequency is divided by, in sequences not longer than the original."""

    long_factor: Annotated[list[PositiveFloat] | None, Needs("type", "longrope")] = None
    """longrope: what each frequency is divided by, in longer sequences."""

    def magnitude(self, mscale: float = 1.0) -> float:
        """yarn: 0.1 · mscale · ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
ROTARY = Needs("position_embedding_type", "rope")
ROTARY_ONLY = Needs("position_embedding_type", "rope", strict=True)
WINDOWED = Needs("window_size", strict=True)
LATENT = Needs("multi_latent_attention", True)
BERT_ONLY = Needs("model_type", "bert", strict=True)
T5_ONLY = Needs("model_type", "t5", strict=True)
RELATIVE_ONLY = Needs("position_embedding_type", "relative", strict=True)


class DenseModel(Section):
    """The settings of `model` that every model has; ModelConfig adds those of layers with experts."""

    decides: ClassVar[Decides] = Decides.FUNCTION
    shrinks: ClassVar[Shrinks] = KEPT

    preset: Annotated[str | None, Decides.NOTHING, DEFAULT] = None
    """A published shape by name (`megalith config presets` lists them). Fields given beside it win over it."""

    init_from: Annotated[str | None, Decides.NOTHING, DEFAULT] = None
    """Weights and shape to begin from: Hugging Face's folder or hub name, Megatron-LM's folder (with checkpoint.trust),
    or a run folder. checkpoint.load wins."""

    model_type: Literal["gpt", "bert", "t5"] = "gpt"
    """`gpt`: a decoder, whose tokens see those before them. `bert`: an encoder, whose tokens see all of their sequence,
    trained by masked tokens. `t5`: both, the decoder attending to all that the encoder has made of another sequence."""

    num_layers: Annotated[Annotated[PositiveInt, Field(le=10_000)] | None, Shrinks(small.LAYERS)] = None
    """Transformer layers; of T5 the encoder's and the decoder's together."""

    encoder_num_layers: Annotated[
        PositiveInt | None,
        T5_ONLY,
        Resolved("encoder_layers"),
        Shrinks(lambda value, _: value and min(value, small.LAYERS - 1)),
    ] = None
    """Those of num_layers that are the encoder's, the first ones; the others are the decoder's. Absent: half."""

    hidden_size: Annotated[PositiveInt | None, Shrinks(small.hidden)] = None
    """Width of the residual stream."""

    ffn_hidden_size: Annotated[PositiveInt | None, Resolved("ffn_size"), Shrinks(small.ffn)] = None
    """Width of the MLP. Absent: 4 · hidden_size, of a gated MLP 8/3 · hidden_size rounded down to a multiple of 64."""

    num_attention_heads: Annotated[PositiveInt | None, Shrinks(small.heads)] = None
    """Query heads."""

    num_query_groups: Annotated[NonNegativeInt, Resolved("query_groups"), Shrinks(small.query_groups)] = 0
    """Key and value heads, each shared by a group of query heads. 0: as many as query heads (MHA)."""

    kv_channels: Annotated[
        PositiveInt | None, Resolved("head_dim"), Shrinks(lambda value, _: value and small.HEAD_DIM)
    ] = None
    """Size of one head. Absent: hidden_size / num_attention_heads."""

    vocab_size: Annotated[PositiveInt | None, Shrinks(small.VOCABULARY)] = None
    """Entries of the vocabulary, unpadded. Absent: the tokenizer's. With NullTokenizer the last is its end."""

    make_vocab_size_divisible_by: Annotated[
        PositiveInt, Decides.NOTHING, Shrinks(lambda value, _: min(value, small.PADDED_TO))
    ] = 128
    """The embedding's rows are padded to a multiple of this. Never depends on the layout."""

    max_position_embeddings: Annotated[PositiveInt | None, Shrinks(small.SEQUENCE)] = None
    """Longest sequence the model can take, in tokens. Absent: data.seq_length."""

    position_embedding_type: Literal["learned_absolute", "rope", "alibi", "relative"] = "learned_absolute"
    """Learned positions added to the embedding, rotary positions in attention, or its scores biased by distance: by
    fixed slopes, or `relative`, by a learned number for each range of distances (T5)."""

    relative_attention_num_buckets: Annotated[Annotated[int, Field(ge=4)], RELATIVE_ONLY] = 32
    """Ranges of distances, each with a bias for each head; an encoder's half of them are for keys behind the query."""

    relative_attention_max_distance: Annotated[PositiveInt, RELATIVE_ONLY] = 128
    """The distance in tokens from which on all are one range."""

    rotary_base: Annotated[float, Field(gt=1.0), Decides.REACH, ROTARY] = 10000.0
    """Base of the rotary frequencies (theta)."""

    rotary_base_local: Annotated[Annotated[float, Field(gt=1.0)] | None, ROTARY_ONLY, WINDOWED] = None
    """Base of the rotary frequencies in layers with a window, which are then never scaled (Gemma 3)."""

    rotary_percent: Annotated[float, Field(gt=0.0, le=1.0), ROTARY_ONLY] = 1.0
    """Share of a head's dimensions that turn with the position; the others stay as they are."""

    rotary_interleaved: Annotated[bool, ROTARY_ONLY] = False
    """Dimensions that turn together are neighbours, 0 and 1, 2 and 3, instead of half a head apart (GPT-J)."""

    no_rope_freq: Annotated[
        PositiveInt | list[Literal[0, 1]] | None,
        Resolved("layers_without_rope"),
        ROTARY_ONLY,
        Shrinks(small.window_skip),
    ] = None
    """Layers without rotary positions (SmolLM3): every N-th, or where a list with a number a layer has a 1."""

    rope_scaling: Annotated[RopeScaling | None, Decides.REACH, ROTARY_ONLY, Shrinks(small.scaling)] = None
    """Stretches the rotary frequencies to a longer context."""

    window_size: Annotated[
        Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)] | None,
        Resolved("windows"),
        Shrinks(lambda value, _: value and [min(value[0], small.WINDOW), 0]),
    ] = None
    """Sliding window: tokens before and after itself that a query sees, like [4095, 0]. Absent: all before it."""

    window_attn_skip_freq: Annotated[
        PositiveInt | list[Literal[0, 1]] | None, Resolved(None), WINDOWED, Shrinks(small.window_skip)
    ] = None
    """Layers without the window: every N-th, or where a list with a number a layer has a 0. Absent: none."""

    embedding_layernorm: bool = False
    """A norm between the embedding and the layers (BLOOM)."""

    scale_embeddings: bool = False
    """Multiplies the embedding's output by √hidden_size (Gemma)."""

    embedding_multiplier: PositiveFloat = 1.0
    """Multiplies the embedding's output (Granite)."""

    residual_multiplier: PositiveFloat = 1.0
    """Multiplies what attention and MLP add to the residual stream (Granite)."""

    logits_scaling: PositiveFloat = 1.0
    """The logits are divided by this (Granite; Cohere's logit_scale is one over it)."""

    num_tokentypes: Annotated[NonNegativeInt | None, BERT_ONLY, Resolved("tokentypes")] = None
    """Segments that a token may be of, each with an embedding of its own. Absent: 2 with bert_binary_head, else 0."""

    add_lm_head: Annotated[bool, BERT_ONLY] = True
    """A matrix, GELU and a norm before the output matrix, and a bias behind it (BERT). Needed to train."""

    lm_head_activation: Annotated[
        Literal["gelu", "gelu_tanh"] | None, BERT_ONLY, Resolved("head_activation")
    ] = None
    """The activation before the output matrix. Absent: the MLP's. Megatron's BERT has gelu, whatever that is."""

    bert_binary_head: Annotated[bool, BERT_ONLY] = True
    """A pooler and a head that tells whether a sample's two segments are in order, which is trained too."""

    add_pooler: Annotated[bool | None, BERT_ONLY, Resolved("pooler")] = None
    """A matrix and tanh of each sequence's first token. Absent: as bert_binary_head, which needs it."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """The norm before attention, before the MLP and at the end."""

    layernorm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in every norm."""

    layernorm_zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight, so that weights are small and begin at 0 (Gemma)."""

    add_norm_bias: Annotated[bool, Needs("normalization", "LayerNorm", strict=True)] = True
    """Biases in norms (Cohere: none)."""

    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """A norm before each attention and MLP, on what they add to the residual stream (OLMo 2), or both (Gemma 2)."""

    apply_residual_connection_post_layernorm: Annotated[
        bool, Needs("norm_placement", "pre", strict=True), Needs("parallel_attn_mlp", False, strict=True)
    ] = False
    """The residual stream goes on from each norm's result and not from its input: post-LN, as the first BERT has it."""

    parallel_attn_mlp: Annotated[bool, Needs("norm_placement", "pre", strict=True)] = False
    """Attention and MLP side by side: x + attention(norm(x)) + mlp(norm(x)) (GPT-NeoX, Falcon)."""

    shared_layernorm: Annotated[bool, Needs("parallel_attn_mlp", True, strict=True)] = False
    """parallel_attn_mlp: one norm for both, instead of one each (Falcon-7B)."""

    activation: Annotated[
        Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"], Resolved("mlp_activation")
    ] = "gelu_tanh"
    """The MLP's non-linearity without swiglu. `gelu_tanh` is GPT-2's approximation, `quick_gelu` x · σ(1.702 x)."""

    gated_linear_unit: Annotated[bool, Resolved("gated")] = False
    """Gated MLP: activation(gate) · up."""

    activation_func_clamp_value: PositiveFloat | None = None
    """Gated MLP: gates are at most this, ups between this and its negative (gpt-oss)."""

    glu_linear_offset: float = 0.0
    """Gated MLP: activation(gate) · (up + this) (gpt-oss: 1)."""

    swiglu: Annotated[bool, Resolved(None)] = False
    """Gated MLP with silu for its activation: silu(gate) · up."""

    add_bias_linear: Annotated[bool, Resolved(None)] = True
    """Biases in every linear layer."""

    add_qkv_bias: Annotated[bool, Resolved("qkv_bias")] = False
    """Biases in the query, key and value projection (Qwen2)."""

    add_proj_bias: Annotated[bool, Resolved("proj_bias")] = False
    """Biases in attention's output projection."""

    add_mlp_bias: Annotated[bool, Resolved("mlp_bias")] = False
    """Biases in the MLP, and in experts."""

    qk_layernorm: bool = False
    """Normalizes queries and keys per head before attention (Qwen3)."""

    qk_layernorm_full_width: Annotated[
        bool, Needs("qk_layernorm", True, strict=True), Needs("normalization", "RMSNorm", strict=True)
    ] = False
    """qk_layernorm goes over all heads together instead (OLMo 2)."""

    qk_layernorm_per_head: Annotated[
        bool, Needs("qk_layernorm", True, strict=True), Needs("qk_layernorm_full_width", False, strict=True)
    ] = False
    """qk_layernorm has weights of its own for each head instead of the same for all (Command-R+)."""

    qk_l2_norm: Annotated[bool, Needs("qk_layernorm", False, strict=True)] = False
    """Divides queries and keys by the root mean square of their head, without a weight (Llama 4)."""

    query_pre_attn_scalar: Annotated[PositiveInt | None, Resolved("attention_divisor")] = None
    """Attention scores are divided by its root. Absent: the size of a head."""

    softmax_scale: Annotated[PositiveFloat | None, Needs("query_pre_attn_scalar", None, strict=True)] = None
    """Attention scores are multiplied by this (Granite). Absent: by 1 / √query_pre_attn_scalar."""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention's softmax has a score of nothing beside the keys': 0, or `learnable`, one for each head (gpt-oss)."""

    attn_logit_softcapping: PositiveFloat | None = None
    """Bounds attention scores smoothly: c · tanh(score / c) (Gemma 2)."""

    final_logit_softcapping: PositiveFloat | None = None
    """Bounds the logits smoothly: c · tanh(logit / c) (Gemma 2)."""

    untie_embeddings_and_output_weights: bool = False
    """A matrix of its own for the output instead of the embedding's."""

    add_output_bias: Annotated[bool, Needs("model_type", "gpt", "t5", strict=True)] = False
    """A bias behind the output matrix (Phi-2, GPT-J, Megatron's T5)."""

    scale_decoder_outputs: Annotated[bool, T5_ONLY] = False
    """Multiplies what the output matrix is given by 1 / √hidden_size (T5 before 1.1)."""

    hidden_dropout: Annotated[Probability, Decides.UPDATES] = 0.1
    """Dropout of the embedding's output and of what each sub-layer adds to the residual stream."""

    attention_dropout: Annotated[Probability, Decides.UPDATES] = 0.1
    """Dropout of the attention probabilities."""

    init_method_std: Annotated[PositiveFloat, Decides.NOTHING] = 0.02
    """Standard deviation of initial weights; attention output and MLP down projections use std / √(2 · layers)."""

    multi_latent_attention: bool = False
    """Multi-head latent attention (MLA): keys and values of all heads from one low-rank latent (DeepSeek)."""

    q_lora_rank: Annotated[PositiveInt | None, LATENT, Shrinks(lambda value, _: value and 10)] = None
    """MLA: width of the latent that queries come from. Absent: queries come straight from the residual stream."""

    kv_lora_rank: Annotated[PositiveInt, LATENT, Shrinks(12)] = 512
    """MLA: width of the latent that keys and values come from."""

    qk_head_dim: Annotated[PositiveInt, LATENT, Shrinks(6)] = 128
    """MLA: dimensions of a head's query and key that have no position."""

    qk_pos_emb_head_dim: Annotated[PositiveInt, LATENT, Shrinks(4)] = 64
    """MLA: dimensions of a head's query and key that turn with the position; all heads share the key's."""

    v_head_dim: Annotated[PositiveInt, LATENT, Shrinks(small.HEAD_DIM)] = 128
    """MLA: dimensions of a head's value."""

    latent_layernorm: Annotated[bool, LATENT] = True
    """MLA: the latents have norms."""

    add_position_embedding: Annotated[bool, Needs("multi_latent_attention", True, strict=True)] = False
    """MLA: learned positions are added to the embedding, beside the rotary ones of the heads, as in Megatron-LM."""

    mtp_num_layers: Annotated[PositiveInt | None, ROTARY_ONLY] = None
    """Multi-token prediction (MTP): layers that in training each predict one token further (DeepSeek-V3)."""

    mtp_loss_scaling_factor: Annotated[PositiveFloat, Decides.UPDATES, Needs("mtp_num_layers")] = 0.1
    """Weight of the mean MTP loss."""

    num_experts: Annotated[
        PositiveInt | None, Shrinks(lambda value, _: value and min(value, small.EXPERTS))
    ] = None
    """Experts in each mixture-of-experts layer."""

    @property
    def causal(self) -> bool:
        """Whether a token sees those before it alone."""
        return self.model_type == "gpt"

    @property
    def encoder_layers(self) -> int:
        """The first so many of the layers are an encoder's beside the decoder."""
        if self.model_type != "t5":
            return 0
        return self.encoder_num_layers or self.num_layers // 2

    def depth(self, name: str) -> int:
        """Layers of the stack that the parameter of this name is in."""
        encoders = self.model_type == "t5" and name.startswith("encoder.")
        return self.encoder_layers if encoders else self.num_layers - self.encoder_layers

    @property
    def tokentypes(self) -> int:
        """Segments that a token may be of."""
        if self.num_tokentypes is not None:
            return self.num_tokentypes
        return 2 if self.model_type == "bert" and self.bert_binary_head else 0

    @property
    def pooler(self) -> bool:
        """Whether the model has a pooler."""
        if self.add_pooler is not None:
            return self.add_pooler
        return self.model_type == "bert" and self.bert_binary_head

    @property
    def query_groups(self) -> int:
        """Key and value heads, with 0 resolved to the number of query heads."""
        if self.multi_latent_attention:
            return self.num_attention_heads
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of one head; of its query and key with MLA."""
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
    def further_layers(self) -> list[int]:
        """The numbers of the layers of multi-token prediction. They are like the last of the model's own."""
        return list(range(self.num_layers, self.num_layers + (self.mtp_num_layers or 0)))

    @property
    def embedding_at_head(self) -> bool:
        """Whether a pipeline's last stage needs the word embedding: as the output matrix, or for further layers."""
        return not self.untie_embeddings_and_output_weights or self.mtp_num_layers is not None

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.swiglu or self.gated_linear_unit

    @property
    def head_activation(self) -> str:
        """That of the LM head."""
        return self.lm_head_activation or self.mlp_activation

    @property
    def mlp_activation(self) -> str:
        """The MLP's non-linearity, with or without a gate."""
        return "silu" if self.swiglu else self.activation

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def proj_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.add_bias_linear or self.add_proj_bias

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP's matrices have biases."""
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def norms_in_layer(self) -> int:
        """Tensors of the residual stream's width that the norms of a layer take."""
        return 4 if self.norm_placement == "sandwich" else 1 if self.parallel_attn_mlp else 2

    @property
    def rotary_size(self) -> int:
        """Dimensions of a head that turn with the position."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def learns_positions(self) -> bool:
        """Whether learned positions are added to the embedding, of which there are max_position_embeddings."""
        return self.position_embedding_type == "learned_absolute" or self.add_position_embedding

    @property
    def attention_divisor(self) -> int:
        """Attention scores are divided by its root."""
        return self.query_pre_attn_scalar or self.head_dim

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by: 1 / √divisor, with YaRN's mscale_all_dim also its square."""
        scaling = self.rope_scaling
        stretched = scaling is not None and scaling.type == "yarn" and scaling.mscale_all_dim
        plain = self.softmax_scale or self.attention_divisor**-0.5
        return plain * (scaling.magnitude(stretched) ** 2 if stretched else 1.0)

    @property
    def layers_without_rope(self) -> list[int] | None:
        """For each layer a 1 where rotary positions are left out; None: they never are."""
        every = self.no_rope_freq
        if every is None or isinstance(every, list):
            return every
        return [int((layer + 1) % every == 0) for layer in range(self.num_layers)]

    def turns(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) turns queries and keys, where positions are rotary."""
        without = self.layers_without_rope
        return without is None or not without[min(layer, self.num_layers - 1)]

    @property
    def windows(self) -> list[int | None]:
        """`window` of every layer."""
        return [self.window(layer) for layer in range(self.num_layers)]

    def window(self, layer: int) -> int | None:
        """Keys that a query of layer number `layer` (from 0) sees at most, its own included; None: no limit."""
        if self.window_size is None:
            return None
        every, layer = self.window_attn_skip_freq, min(layer, self.num_layers - 1)
        windowed = every[layer] == 1 if isinstance(every, list) else every is None or (layer + 1) % every != 0
        return self.window_size[0] + 1 if windowed else None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of make_vocab_size_divisible_by."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

"""Model shape without experts: embedding, attention, MLP, norms, biases and RoPE scaling."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.config.base import Decides, RequiresSetting, Resolved, Section
from megalith.config.rope_scaling import RopeScaling

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
ROTARY = RequiresSetting("position_embedding_type", "rope")
ROTARY_ONLY = RequiresSetting("position_embedding_type", "rope", strict=True)
WINDOWED = RequiresSetting("window_size", strict=True)
SCALED_QUERIES = RequiresSetting("query_scaling_beta", strict=True)
LATENT = RequiresSetting("multi_latent_attention", True)
BERT_ONLY = RequiresSetting("model_type", "bert", strict=True)
GPT_ONLY = RequiresSetting("model_type", "gpt", strict=True)
NOT_T5 = RequiresSetting("model_type", "bert", "gpt", strict=True)
T5_ONLY = RequiresSetting("model_type", "t5", strict=True)
RELATIVE_ONLY = RequiresSetting("position_embedding_type", "relative", strict=True)
SINUSOIDAL_ONLY = RequiresSetting("position_embedding_type", "sinusoidal", strict=True)


class DenseSettings(Section):
    """Settings shared by all models. DenseModel (dense_model.py) adds values derived from them."""

    decides: ClassVar[Decides] = Decides.FUNCTION

    preset: Annotated[str | None, Decides.NOTHING] = None
    """Name of a published model shape (`megalith config presets` lists them). Other fields override it."""

    init_from: Annotated[str | None, Decides.NOTHING] = None
    """Initial weights and shape: a Hugging Face folder or hub name, a Megatron-LM folder (with checkpoint.trust), or a
    run folder. checkpoint.load has priority."""

    model_type: Literal["gpt", "bert", "t5"] = "gpt"
    """Architecture: `gpt` is a decoder with causal attention. `bert` is an encoder with full attention, trained on
    masked tokens. `t5` is an encoder-decoder with cross-attention."""

    num_layers: Annotated[PositiveInt, Field(le=10_000)] | None = None
    """Number of transformer layers; for T5, of encoder and decoder together."""

    encoder_num_layers: Annotated[
        PositiveInt | None,
        T5_ONLY,
        Resolved("encoder_layers"),
    ] = None
    """Number of encoder layers (the first of num_layers); the rest are decoder layers. Default: half."""

    hidden_size: PositiveInt | None = None
    """Width of the residual stream."""

    ffn_hidden_size: Annotated[PositiveInt | None, Resolved("ffn_size")] = None
    """Width of the MLP. Default: 4 · hidden_size; for a gated MLP 8/3 · hidden_size, rounded down to a multiple of
    64."""

    num_attention_heads: PositiveInt | None = None
    """Number of query heads."""

    num_query_groups: Annotated[NonNegativeInt, Resolved("query_groups")] = 0
    """Number of key and value heads (GQA). 0: as many as query heads (MHA)."""

    kv_channels: Annotated[PositiveInt | None, Resolved("head_dim")] = None
    """Size of one head. Default: hidden_size / num_attention_heads."""

    vocab_size: PositiveInt | None = None
    """Unpadded vocabulary size. Default: the tokenizer's. With NullTokenizer the last entry is the end of document."""

    make_vocab_size_divisible_by: Annotated[PositiveInt, Decides.NOTHING] = 128
    """Multiple that the embedding's rows are padded to, in every layout."""

    max_position_embeddings: PositiveInt | None = None
    """Maximum sequence length in tokens. Default: data.seq_length."""

    padding_positions: Annotated[
        NonNegativeInt, RequiresSetting("position_embedding_type", "learned_absolute", strict=True)
    ] = 0
    """Rows of the learned positions' table after those of max_position_embeddings, for padding only (2 in RoBERTa and
    OPT)."""

    positions_skip_padding: bool = False
    """Number only real tokens (RoBERTa, OPT, M2M100). Padding has the last row of padding_positions."""

    position_embedding_type: Literal[
        "learned_absolute", "sinusoidal", "rope", "alibi", "relative", "none"
    ] = "learned_absolute"
    """Positions: added to the embedding, learned or `sinusoidal`; RoPE; or biases on attention scores: `alibi` with
    fixed slopes, `relative` with a learned value per bucket of distances (T5). `none`: no positions, for models whose
    recurrent mixers depend on the order of tokens (Nemotron-H)."""

    sinusoidal_first_position: Annotated[NonNegativeInt, SINUSOIDAL_ONLY] = 0
    """Number of the first position (M2M100: 2)."""

    sinusoidal_spacing: Annotated[Literal["exclusive", "inclusive"], SINUSOIDAL_ONLY] = "exclusive"
    """Frequencies of the n = hidden_size / 2 sines and cosines: 10000^(-i / n) with `exclusive` (Marian, Pegasus),
    10000^(-i / (n - 1)) with `inclusive`, so that the last one is 1 / 10000 (M2M100)."""

    separate_encoder_positions: Annotated[bool, T5_ONLY] = False
    """Give the encoder a table of learned positions and an embedding norm of its own (BART). The word embedding is
    shared."""

    decoder_positions_after_layernorm: Annotated[
        bool, T5_ONLY, RequiresSetting("separate_encoder_positions", True, strict=True)
    ] = False
    """Add the decoder's positions after the norm of embedding_layernorm (BlenderbotSmall)."""

    relative_attention_num_buckets: Annotated[Annotated[int, Field(ge=4)], RELATIVE_ONLY] = 32
    """Number of distance buckets, each with one bias per head. An encoder uses half of them for keys after the
    query."""

    relative_attention_max_distance: Annotated[PositiveInt, RELATIVE_ONLY] = 128
    """Distances of at least this many tokens share one bucket."""

    relative_attention_per_layer: Annotated[bool, RELATIVE_ONLY] = False
    """Give each layer relative positions of its own (UMT5). Otherwise the layers of a stack share them."""

    rotary_base: Annotated[float, Field(gt=1.0), Decides.REACH, ROTARY] = 10000.0
    """Base of the RoPE frequencies (theta)."""

    rotary_base_local: Annotated[Annotated[float, Field(gt=1.0)] | None, ROTARY_ONLY, WINDOWED] = None
    """Base of the RoPE frequencies in sliding-window layers. These frequencies are never scaled (Gemma 3)."""

    rotary_percent: Annotated[float, Field(gt=0.0, le=1.0), ROTARY_ONLY] = 1.0
    """Fraction of head_dim that RoPE is applied to."""

    rotary_interleaved: Annotated[bool, ROTARY_ONLY] = False
    """Pair adjacent dimensions for RoPE (0 and 1, 2 and 3) instead of dimensions half a head apart (GPT-J)."""

    no_rope_freq: Annotated[
        PositiveInt | list[Literal[0, 1]] | None,
        Resolved("layers_without_rope"),
        ROTARY_ONLY,
    ] = None
    """Layers without RoPE (SmolLM3): every N-th layer, or a list with one entry per layer, 1 = without RoPE."""

    rope_scaling: Annotated[RopeScaling | None, Decides.REACH, ROTARY_ONLY] = None
    """Scaling of the RoPE frequencies for a longer context."""

    window_size: Annotated[
        Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)] | None,
        Resolved("windows"),
    ] = None
    """Sliding window: how many tokens before and after itself a query attends to, such as [4095, 0], in encoders [64,
    64]. Default: all earlier tokens; in encoders, all tokens."""

    window_attn_skip_freq: Annotated[PositiveInt | list[Literal[0, 1]] | None, Resolved(None), WINDOWED] = (
        None
    )
    """Layers without the window: every N-th layer, or a list with one entry per layer, 1 with the window and 0
    without. Default: all layers have it."""

    attention_chunk_size: Annotated[
        PositiveInt | None,
        ROTARY_ONLY,
        RequiresSetting("window_size", None, strict=True),
        RequiresSetting("multi_latent_attention", False, strict=True),
    ] = None
    """Length of the chunks that a document is divided into. In layers with RoPE, a token attends only to tokens of its
    chunk (Llama 4). Default: no chunks."""

    embedding_layernorm: bool = False
    """Add a norm between the embedding and the layers (BLOOM)."""

    add_first_input_layernorm: bool = True
    """Add the norm before attention in the first layer of a stack too (off for ModernBERT, whose embedding has a norm,
    and GPT-1, whose norms all follow a branch)."""

    scale_embeddings: bool = False
    """Multiply the word embedding by √hidden_size (Gemma, BioGPT)."""

    embedding_multiplier: PositiveFloat = 1.0
    """Factor on the embedding's output (Granite)."""

    residual_multiplier: PositiveFloat = 1.0
    """Factor on the outputs of attention and MLP before they are added to the residual stream (Granite)."""

    logits_scaling: PositiveFloat = 1.0
    """Divisor of the logits (Granite; the inverse of Cohere's logit_scale)."""

    num_tokentypes: Annotated[NonNegativeInt | None, BERT_ONLY, Resolved("tokentypes")] = None
    """Number of segments, each with its own embedding. Default: 2 with bert_binary_head, otherwise 0."""

    add_lm_head: Annotated[bool, BERT_ONLY] = True
    """Add a dense layer, an activation and a norm before the output matrix, and an output bias (BERT). Required for
    training."""

    add_decoder_lm_head: Annotated[bool, GPT_ONLY, RequiresSetting("score_head", False, strict=True)] = False
    """Add a dense layer, an activation and a norm before a decoder's output matrix (ModernBERT's decoder)."""

    add_lm_head_dense_bias: Annotated[bool, NOT_T5] = True
    """Add a bias to the dense layer before the output matrix (off for ModernBERT)."""

    lm_head_activation: Annotated[
        Literal["gelu", "gelu_tanh"] | None, NOT_T5, Resolved("head_activation")
    ] = None
    """Activation before the output matrix. Default: the MLP's. Megatron-LM's BERT always uses gelu."""

    bert_binary_head: Annotated[bool, BERT_ONLY] = True
    """Add a pooler and a head that predicts whether a sample's two segments are in order, and train them."""

    add_pooler: Annotated[bool | None, BERT_ONLY, Resolved("pooler")] = None
    """Add a matrix and tanh on the first token of each sequence. Default: the value of bert_binary_head, which needs
    it."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm before attention, before the MLP and at the end."""

    layernorm_epsilon: PositiveFloat = 1e-5
    """Constant added to the variance in every norm."""

    layernorm_zero_centered_gamma: Annotated[bool, RequiresSetting("add_norm_weight", True, strict=True)] = (
        False
    )
    """Multiply by 1 + weight in norms, so that weights start at 0 (Gemma)."""

    add_norm_bias: Annotated[bool, RequiresSetting("normalization", "LayerNorm", strict=True)] = True
    """Add biases to norms (off for Cohere)."""

    add_norm_weight: Annotated[bool, RequiresSetting("qk_layernorm", False, strict=True)] = True
    """Multiply by a weight in norms (off for OLMo and nanochat). Norms of queries and keys without weights are
    qk_l2_norm."""

    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Position of norms: `pre` before attention and MLP, `post` on their outputs (OLMo 2), `sandwich` both (Gemma
    2)."""

    apply_residual_connection_post_layernorm: Annotated[
        bool,
        RequiresSetting("norm_placement", "pre", strict=True),
        RequiresSetting("parallel_attn_mlp", False, strict=True),
    ] = False
    """Continue the residual stream from the output of each norm instead of its input: post-LN, as in the original
    BERT and GPT-1."""

    parallel_attn_mlp: Annotated[bool, RequiresSetting("norm_placement", "pre", strict=True)] = False
    """Compute attention and MLP in parallel: x + attention(norm(x)) + mlp(norm(x)) (GPT-NeoX, Falcon)."""

    shared_layernorm: Annotated[bool, RequiresSetting("parallel_attn_mlp", True, strict=True)] = False
    """Use one norm for both attention and MLP with parallel_attn_mlp (Falcon-7B)."""

    activation: Annotated[
        Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu", "xielu"],
        Resolved("mlp_activation"),
    ] = "gelu_tanh"
    """Activation of the MLP unless swiglu is on. `gelu_tanh` is GPT-2's approximation, `quick_gelu` is x · σ(1.702
    x), `xielu` has two learned slopes per layer (Apertus)."""

    gated_linear_unit: Annotated[bool, Resolved("gated")] = False
    """Gated MLP: activation(gate) · up."""

    activation_func_clamp_value: PositiveFloat | None = None
    """Clamp in a gated MLP: gate is at most this value, up is between minus and plus this value (gpt-oss)."""

    glu_linear_offset: float = 0.0
    """Offset in a gated MLP: activation(gate) · (up + offset) (gpt-oss: 1)."""

    swiglu: Annotated[bool, Resolved(None)] = False
    """Gated MLP with SiLU: silu(gate) · up."""

    add_bias_linear: Annotated[bool, Resolved(None)] = True
    """Add biases to every linear layer."""

    add_qkv_bias: Annotated[bool, Resolved("qkv_bias")] = False
    """Add biases to the query, key and value projection (Qwen2)."""

    add_proj_bias: Annotated[bool, Resolved("proj_bias")] = False
    """Add a bias to attention's output projection."""

    proj_bias_in_last_layer_only: Annotated[bool, RequiresSetting("add_proj_bias", True, strict=True)] = False
    """Add the bias of add_proj_bias only in the last layer (GPT-NeoX-Japanese)."""

    add_mlp_bias: Annotated[bool, Resolved("mlp_bias")] = False
    """Add biases to MLPs and experts."""

    qk_layernorm: bool = False
    """Normalize queries and keys per head before attention (Qwen3)."""

    qk_layernorm_full_width: Annotated[
        bool,
        RequiresSetting("qk_layernorm", True, strict=True),
        RequiresSetting("normalization", "RMSNorm", strict=True),
    ] = False
    """Apply qk_layernorm over all heads together (OLMo 2)."""

    qk_layernorm_per_head: Annotated[
        bool,
        RequiresSetting("qk_layernorm", True, strict=True),
        RequiresSetting("qk_layernorm_full_width", False, strict=True),
    ] = False
    """Use separate qk_layernorm weights for each head (Command-R+)."""

    qk_layernorm_after_rope: Annotated[
        bool, RequiresSetting("qk_layernorm", True, strict=True), ROTARY_ONLY
    ] = False
    """Apply qk_layernorm after RoPE (Hunyuan)."""

    qk_l2_norm: Annotated[bool, RequiresSetting("qk_layernorm", False, strict=True)] = False
    """Divide queries and keys by the root mean square of their head, without a weight (Llama 4)."""

    qk_l2_norm_rope_only: Annotated[bool, RequiresSetting("qk_l2_norm", True, strict=True), ROTARY_ONLY] = (
        False
    )
    """Apply qk_l2_norm only in layers with RoPE (Llama 4)."""

    clip_qkv: Annotated[
        PositiveFloat | None,
        RequiresSetting("multi_latent_attention", False, strict=True),
        RequiresSetting("model_type", "gpt", "bert", strict=True),
    ] = None
    """Clamp queries, keys and values between minus and plus this value, before RoPE (OLMo, DBRX)."""

    query_scaling_beta: Annotated[
        PositiveFloat | None, RequiresSetting("multi_latent_attention", False, strict=True)
    ] = None
    """Multiply queries by 1 + beta · ln(1 + ⌊position / query_scaling_length⌋), so that attention to long sequences
    stays sharp (Ministral 3). Default: no factor."""

    query_scaling_length: Annotated[PositiveInt, SCALED_QUERIES] = 8192
    """Number of tokens up to which the factor of query_scaling_beta is 1."""

    query_scaling_layers: Annotated[Literal["all", "no_rope"], SCALED_QUERIES] = "all"
    """Layers with query_scaling_beta. `no_rope`: those without RoPE, where positions count from 1 (Llama 4)."""

    query_pre_attn_scalar: Annotated[PositiveInt | None, Resolved("attention_divisor")] = None
    """Attention scores are divided by the square root of this number. Default: the size of a head."""

    softmax_scale: Annotated[
        PositiveFloat | None, RequiresSetting("query_pre_attn_scalar", None, strict=True)
    ] = None
    """Factor on attention scores (Granite). Default: 1 / √query_pre_attn_scalar."""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sink: `off-by-one` adds a score of 0 to the softmax, `learnable` one learned score per head
    (gpt-oss)."""

    attn_logit_softcapping: PositiveFloat | None = None
    """Soft cap on attention scores: c · tanh(score / c) (Gemma 2)."""

    final_logit_softcapping: PositiveFloat | None = None
    """Soft cap on logits: c · tanh(logit / c) (Gemma 2)."""

    untie_embeddings_and_output_weights: bool = False
    """Use a separate output matrix instead of the embedding matrix."""

    add_output_bias: Annotated[bool, RequiresSetting("model_type", "gpt", "t5", strict=True)] = False
    """Add a bias to the output matrix (Phi-2, GPT-J, Megatron-LM's T5)."""

    train_output_bias: Annotated[
        bool, T5_ONLY, RequiresSetting("add_output_bias", True, strict=True), Decides.UPDATES
    ] = True
    """Train the bias of add_output_bias. It is a constant in BART."""

    score_head: Annotated[bool, RequiresSetting("model_type", "gpt", strict=True)] = False
    """Replace the output matrix by a score per token: a reward model. `megalith reward` sets it."""

    scale_decoder_outputs: Annotated[bool, T5_ONLY] = False
    """Multiply the input of the output matrix by 1 / √hidden_size (T5 before 1.1)."""

    decoder_start_token_id: Annotated[NonNegativeInt, T5_ONLY] = 0
    """First token of the decoder's input in generation."""

    hidden_dropout: Annotated[Probability, Decides.UPDATES] = 0.1
    """Dropout probability on the embedding's output and on each sub-layer's output."""

    attention_dropout: Annotated[Probability, Decides.UPDATES] = 0.1
    """Dropout probability on attention probabilities."""

    init_method_std: Annotated[PositiveFloat, Decides.NOTHING] = 0.02
    """Standard deviation of initial weights. Attention output and MLP down projections use std / √(2 · layers)."""

    multi_latent_attention: bool = False
    """Multi-head latent attention (MLA): project the keys and values of all heads from one low-rank latent
    (DeepSeek)."""

    q_lora_rank: Annotated[PositiveInt | None, LATENT] = None
    """MLA: width of the query latent. Default: queries are projected from the residual stream."""

    kv_lora_rank: Annotated[PositiveInt, LATENT] = 512
    """MLA: width of the latent for keys and values."""

    qk_head_dim: Annotated[PositiveInt, LATENT] = 128
    """MLA: dimensions of a query and key head without RoPE."""

    qk_pos_emb_head_dim: Annotated[PositiveInt, LATENT] = 64
    """MLA: dimensions of a query and key head with RoPE; all heads share these dimensions of the key."""

    v_head_dim: Annotated[PositiveInt, LATENT] = 128
    """MLA: dimensions of a value head."""

    latent_layernorm: Annotated[bool, LATENT] = True
    """MLA: add norms to the latents."""

    add_position_embedding: Annotated[bool, RequiresSetting("multi_latent_attention", True, strict=True)] = (
        False
    )
    """MLA: add learned position embeddings in addition to RoPE, as Megatron-LM does with --position-embedding-type
    learned_absolute."""

    mtp_num_layers: Annotated[
        PositiveInt | None, RequiresSetting("position_embedding_type", "rope", "none", strict=True)
    ] = None
    """Number of multi-token prediction (MTP) layers; each predicts one token further in training (DeepSeek-V3)."""

    mtp_loss_scaling_factor: Annotated[PositiveFloat, Decides.UPDATES, RequiresSetting("mtp_num_layers")] = (
        0.1
    )
    """Weight of the mean MTP loss."""

    output_z_loss_coeff: Annotated[NonNegativeFloat, Decides.UPDATES] = 0.0
    """Weight of the z-loss, log² Σ exp(logit) of each token, which keeps logits small (PaLM used 1e-4). It is in the
    gradient but not in the logged loss; metrics.jsonl records it as output_z_loss."""

    num_experts: PositiveInt | None = None
    """Number of experts in each mixture-of-experts layer."""

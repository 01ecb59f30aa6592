"""Models of transformers with random weights, and the same weights in ours: every feature of each family."""

import tempfile
from collections.abc import Callable

import torch
import transformers
from models.expert_cases import EXPERT_CASES
from models.hybrid_cases import HYBRID_CASES
from models.newer_cases import NEWER_CASES
from models.tiny import (
    DEEPSEEK,
    DEEPSEEK_ROPE,
    EXPERTS,
    FALCON,
    GEMMA,
    LINEAR_ROPE,
    LLAMA,
    LLAMA3_ROPE,
    LONG_FACTORS,
    LONG_ROPE,
    NEOX,
    OPT,
    OUR_DEEPSEEK,
    OUR_EXPERTS,
    OUR_FALCON,
    OUR_GEMMA,
    OUR_NEOX,
    OUR_OPT,
    OUR_PHI,
    OUR_STABLELM,
    OUR_STARCODER,
    OURS,
    PHI3,
    VOCAB,
    YARN_ROPE,
)
from torch import nn

from megalith.bridge.families import family_of
from megalith.bridge.folder import SourceFolder
from megalith.bridge.transfer import to_ours
from megalith.config import ModelConfig
from megalith.models.transformer import Transformer

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
        dict(OURS, rotary_base=5000.0,
             rope_scaling=dict(type="llama3", factor=4.0, original_max_position_embeddings=64)),
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
    "bloom": (  # of heads that are no power of two
        lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=6, seq_length=64),
        dict(vocab_size=VOCAB, hidden_size=48, num_layers=3, num_attention_heads=6, max_position_embeddings=64,
             position_embedding_type="alibi", embedding_layernorm=True, hidden_dropout=0.0, attention_dropout=0.0),
    ),
    "qwen3": (
        lambda: transformers.Qwen3Config(**LLAMA, head_dim=32, tie_word_embeddings=False),
        dict(OURS, kv_channels=32, qk_layernorm=True),
    ),
    "llama, biases in attention": (
        lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True),
        dict(OURS, add_qkv_bias=True, add_proj_bias=True),
    ),
    "seed-oss": (
        lambda: transformers.SeedOssConfig(**LLAMA, head_dim=24, attention_out_bias=True, mlp_bias=True,
                                           residual_dropout=0.2, pad_token_id=None),
        dict(OURS, kv_channels=24, add_qkv_bias=True, add_proj_bias=True, add_mlp_bias=True, hidden_dropout=0.2),
    ),
    "mistral, window": (
        lambda: transformers.MistralConfig(**LLAMA, sliding_window=11),
        dict(OURS, window_size=[10, 0]),
    ),
    "smollm3": (
        lambda: transformers.SmolLM3Config(**LLAMA, pad_token_id=None, no_rope_layers=[1, 0, 1],
                                           tie_word_embeddings=False),
        dict(OURS, no_rope_freq=[0, 1, 0], rotary_base=2e6),
    ),
    "gemma": (
        lambda: transformers.GemmaConfig(**LLAMA, head_dim=24, pad_token_id=0),
        dict(OURS, kv_channels=24, gated_linear_unit=True, swiglu=False, layernorm_zero_centered_gamma=True,
             scale_embeddings=True, untie_embeddings_and_output_weights=False),
    ),
    "gemma2": (
        lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
        dict(OUR_GEMMA, window_attn_skip_freq=2, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    ),
    "gemma3": (
        lambda: transformers.Gemma3TextConfig(
            **GEMMA,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=2e4),
            ),
        ),
        dict(OUR_GEMMA, window_attn_skip_freq=[1, 1, 0], rotary_base=1e6, rotary_base_local=2e4,
             rope_scaling=dict(type="linear", factor=8.0), qk_layernorm=True),
    ),
    "olmo2": (
        lambda: transformers.Olmo2Config(**LLAMA, pad_token_id=None, rms_norm_eps=1e-6),
        dict(OURS, norm_placement="post", qk_layernorm=True, qk_layernorm_full_width=True),
    ),
    "llama, longrope": (
        lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=32, factor=8.0,
            short_factor=[1.0] * 8, long_factor=[1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0])),
        dict(OURS, rope_scaling=dict(
            type="longrope", factor=8.0, original_max_position_embeddings=32,
            short_factor=[1.0] * 8, long_factor=[1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0])),
    ),
    "phi3, window": (
        lambda: transformers.Phi3Config(**PHI3, sliding_window=11),
        dict(OURS, window_size=[10, 0]),
    ),
    "phi3, short of longrope": (
        lambda: transformers.Phi3Config(**PHI3, original_max_position_embeddings=64, rope_parameters=LONG_ROPE),
        dict(OURS, rotary_percent=0.75, rope_scaling=dict(
            type="longrope", factor=4.0, original_max_position_embeddings=64, **LONG_FACTORS)),
    ),
    "phi3, long of longrope": (
        lambda: transformers.Phi3Config(**PHI3, original_max_position_embeddings=32, rope_parameters=LONG_ROPE),
        dict(OURS, rotary_percent=0.75, rope_scaling=dict(
            type="longrope", factor=8.0, original_max_position_embeddings=32, **LONG_FACTORS)),
    ),
    "starcoder2": (
        lambda: transformers.Starcoder2Config(**LLAMA),
        dict(OUR_STARCODER, num_query_groups=2, untie_embeddings_and_output_weights=False),
    ),
    "starcoder2, window, no biases": (
        lambda: transformers.Starcoder2Config(**LLAMA, use_bias=False, sliding_window=11, tie_word_embeddings=False),
        dict(OUR_STARCODER, num_query_groups=2, add_bias_linear=False, window_size=[10, 0]),
    ),
    "stablelm": (
        lambda: transformers.StableLmConfig(**LLAMA, use_qkv_bias=True, tie_word_embeddings=True),
        dict(OUR_STABLELM, add_qkv_bias=True, untie_embeddings_and_output_weights=False),
    ),
    "stablelm, side by side": (
        lambda: transformers.StableLmConfig(**LLAMA, use_parallel_residual=True, partial_rotary_factor=0.5),
        dict(OUR_STABLELM, parallel_attn_mlp=True, shared_layernorm=True, rotary_percent=0.5),
    ),
    "phi": (
        lambda: transformers.PhiConfig(**LLAMA),
        dict(OUR_PHI, num_query_groups=2, rotary_percent=0.5),
    ),
    "phi, tied": (
        lambda: transformers.PhiConfig(**NEOX, tie_word_embeddings=True, partial_rotary_factor=0.25),
        dict(OUR_PHI, rotary_percent=0.25, untie_embeddings_and_output_weights=False),
    ),
    "gpt-j": (
        lambda: transformers.GPTJConfig(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64,
                                        rotary_dim=12),
        dict(OUR_PHI, ffn_hidden_size=256, max_position_embeddings=64, rotary_percent=0.75, add_bias_linear=False,
             add_mlp_bias=True),
    ),
    "opt": (
        lambda: transformers.OPTConfig(**OPT),
        dict(OUR_OPT, activation="relu"),
    ),
    "opt, no biases, untied": (
        lambda: transformers.OPTConfig(**OPT, enable_bias=False, tie_word_embeddings=False, activation_function="gelu"),
        dict(OUR_OPT, activation="gelu", add_bias_linear=False, untie_embeddings_and_output_weights=True),
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(**LLAMA, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                           rms_norm_eps=1e-6,
                                           rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        dict(OURS, num_experts=4),
    ),
    "qwen3-moe, a dense layer": (
        lambda: transformers.Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=32, norm_topk_prob=True,
                                            moe_intermediate_size=40, decoder_sparse_step=1, mlp_only_layers=[1]),
        dict(OURS, **OUR_EXPERTS, kv_channels=32, qk_layernorm=True, moe_layer_freq=[1, 0, 1], moe_ffn_hidden_size=40),
    ),
    "qwen2-moe, a dense layer": (
        lambda: transformers.Qwen2MoeConfig(**LLAMA, **EXPERTS, moe_intermediate_size=40, mlp_only_layers=[1],
                                            shared_expert_intermediate_size=56),
        dict(OURS, **OUR_EXPERTS, add_qkv_bias=True, moe_layer_freq=[1, 0, 1], moe_ffn_hidden_size=40,
             moe_shared_expert_intermediate_size=56, moe_shared_expert_gate=True, moe_router_pre_softmax=True),
    ),
    "qwen2-moe, weights of a sum of 1": (
        lambda: transformers.Qwen2MoeConfig(**LLAMA, **EXPERTS, moe_intermediate_size=40, norm_topk_prob=True,
                                            shared_expert_intermediate_size=56, qkv_bias=False),
        dict(OURS, **OUR_EXPERTS, moe_ffn_hidden_size=40, moe_shared_expert_intermediate_size=56,
             moe_shared_expert_gate=True),
    ),
    "qwen3-next, two heads of values to one of keys": (
        lambda: transformers.Qwen3NextConfig(
            **LLAMA, **EXPERTS, head_dim=32, moe_intermediate_size=40, shared_expert_intermediate_size=56,
            norm_topk_prob=True, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=24, layer_types=["linear_attention", "full_attention", "linear_attention"]),
        dict(OURS, **OUR_EXPERTS, kv_channels=32, qk_layernorm=True, moe_ffn_hidden_size=40, rotary_percent=0.25,
             moe_shared_expert_intermediate_size=56, moe_shared_expert_gate=True, attention_output_gate=True,
             layernorm_zero_centered_gamma=True, experimental_attention_variant="gated_delta_net",
             linear_attention_freq=[1, 0, 1], linear_num_key_heads=2, linear_num_value_heads=4,
             linear_key_head_dim=16, linear_value_head_dim=24),
    ),
    "granite": (
        lambda: transformers.GraniteConfig(**LLAMA, embedding_multiplier=12.0, residual_multiplier=0.22,
                                           attention_multiplier=0.3, logits_scaling=8.0, tie_word_embeddings=True),
        dict(OURS, embedding_multiplier=12.0, residual_multiplier=0.22, softmax_scale=0.3, logits_scaling=8.0,
             untie_embeddings_and_output_weights=False),
    ),
    "granite-moe": (
        lambda: transformers.GraniteMoeConfig(**LLAMA, num_local_experts=6, num_experts_per_tok=2,
                                              embedding_multiplier=6.0, residual_multiplier=0.4,
                                              attention_multiplier=0.2, logits_scaling=4.0),
        dict(OURS, num_experts=6, moe_router_topk=2, embedding_multiplier=6.0, residual_multiplier=0.4,
             softmax_scale=0.2, logits_scaling=4.0),
    ),
    "cohere": (
        lambda: transformers.CohereConfig(**LLAMA, attention_bias=True, logit_scale=0.25, use_qk_norm=True),
        dict(OURS, normalization="LayerNorm", add_norm_bias=False, parallel_attn_mlp=True, shared_layernorm=True,
             rotary_interleaved=True, qk_layernorm=True, qk_layernorm_per_head=True,
             add_qkv_bias=True, add_proj_bias=True, logits_scaling=4.0, untie_embeddings_and_output_weights=False,
             rotary_base=500000.0, layernorm_epsilon=1e-5),
    ),
    "cohere2": (
        lambda: transformers.Cohere2Config(**LLAMA, sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        dict(OURS, normalization="LayerNorm", add_norm_bias=False, parallel_attn_mlp=True, shared_layernorm=True,
             rotary_interleaved=True,
             logits_scaling=16.0, untie_embeddings_and_output_weights=False, layernorm_epsilon=1e-5,
             window_size=[8, 0], window_attn_skip_freq=[1, 0, 1], no_rope_freq=[0, 1, 0]),
    ),
    "gpt-oss": (
        lambda: transformers.GptOssConfig(
            **LLAMA, head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=7, swiglu_limit=0.4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(YARN_ROPE, truncate=False, rope_theta=15000.0)),
        dict(OURS, kv_channels=16, num_experts=6, moe_router_topk=2, swiglu=False, gated_linear_unit=True,
             activation="quick_gelu", activation_func_clamp_value=0.4, glu_linear_offset=1.0, add_mlp_bias=True,
             add_qkv_bias=True, add_proj_bias=True, add_router_bias=True, softmax_type="learnable",
             window_size=[6, 0], window_attn_skip_freq=[1, 0, 1], layernorm_epsilon=1e-5, rotary_base=15000.0,
             rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)),
    ),
    "olmoe": (
        lambda: transformers.OlmoeConfig(**LLAMA, **EXPERTS, rms_norm_eps=1e-6),
        dict(OURS, **OUR_EXPERTS, qk_layernorm=True, qk_layernorm_full_width=True, moe_router_pre_softmax=True),
    ),
    "deepseek-v2, a latent for queries, groups": (
        lambda: transformers.DeepseekV2Config(**DEEPSEEK, q_lora_rank=36, n_group=4, topk_group=2,
                                              topk_method="group_limited_greedy", routed_scaling_factor=1.5,
                                              rope_parameters=DEEPSEEK_ROPE),
        dict(OUR_DEEPSEEK, q_lora_rank=36, moe_router_pre_softmax=True, moe_router_topk_scaling_factor=1.5,
             moe_router_num_groups=4, moe_router_group_topk=2,
             rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7,
                               mscale_all_dim=0.9)),
    ),
    "gpt-neox": (
        lambda: transformers.GPTNeoXConfig(**NEOX, hidden_act="gelu_fast"),
        dict(OUR_NEOX, activation="gelu_tanh", rotary_percent=0.25),
    ),
    "gpt-neox, one behind the other, other positions": (
        lambda: transformers.GPTNeoXConfig(**NEOX, use_parallel_residual=False, attention_bias=False,
            tie_word_embeddings=True, rope_parameters=dict(LINEAR_ROPE, partial_rotary_factor=0.5)),
        dict(OUR_NEOX, activation="gelu", rotary_percent=0.5, rope_scaling=dict(type="linear", factor=2.0),
             parallel_attn_mlp=False, add_bias_linear=False, add_mlp_bias=True,
             untie_embeddings_and_output_weights=False),
    ),
    "falcon, new decoder": (
        lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2,
                                          num_ln_in_parallel_attn=2),
        dict(OUR_FALCON, num_query_groups=2),
    ),
    "falcon, new decoder, one norm, biases": (
        lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True,
                                          num_ln_in_parallel_attn=1, tie_word_embeddings=False),
        dict(OUR_FALCON, num_query_groups=2, shared_layernorm=True, add_bias_linear=True,
             untie_embeddings_and_output_weights=True),
    ),
    "falcon, multi-query": (
        lambda: transformers.FalconConfig(**FALCON),
        dict(OUR_FALCON, num_query_groups=1, shared_layernorm=True),
    ),
    "deepseek-v2, as lite": (
        lambda: transformers.DeepseekV2Config(**DEEPSEEK, q_lora_rank=None),
        dict(OUR_DEEPSEEK, moe_router_pre_softmax=True),
    ),
    "deepseek-v3": (
        lambda: transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=36, n_group=4, topk_group=2, num_mtp_layers=0),
        dict(OUR_DEEPSEEK, q_lora_rank=36, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
             moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5),
    ),
    **NEWER_CASES,
    **EXPERT_CASES,
    **HYBRID_CASES,
}  # fmt: skip


def random_reference(their_config: transformers.PreTrainedConfig, std: float = 0.1) -> nn.Module:
    """A model of transformers for generation, as `random_parameters` gives it."""
    reference = transformers.AutoModelForCausalLM.from_config(their_config, attn_implementation="eager")
    return random_parameters(reference, std)


def random_parameters(reference: nn.Module, std: float = 0.1) -> nn.Module:
    """A model in evaluation mode. Its norms and biases are random too: their initial 1 and 0 would hide a mistake."""
    torch.manual_seed(0)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=std)
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=std)
    return reference.eval()


def saved_tensors(reference: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors as transformers writes them into files, which have one for each expert, under their current names."""
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        source = SourceFolder(folder)
        source.normalize_names(family_of(source.config, folder))
        return {name: stored.read().clone() for name, stored in source.tensors.items()}


# One case of each mechanism: positions, masks, norms, projections, experts, other mixers.
MECHANISMS = (
    "gpt2, untied", "llama3 rope", "yarn rope", "bloom", "mistral, window", "smollm3", "gemma3",
    "phi3, short of longrope", "stablelm, side by side", "gpt-j", "opt", "mixtral", "cohere2", "gpt-oss", "deepseek-v3",
    "qwen3-next, two heads of values to one of keys", "gpt-neox", "falcon, multi-query", "granite-moe-swa", "gpt-neo",
)  # fmt: skip


def first_of_each_kind() -> list[str]:
    """Return one case of each class of configurations."""
    kinds = {}
    for name, (their_config, _) in CASES.items():
        kinds.setdefault(type(their_config()), name)
    return list(kinds.values())


def reference_and_ours(name: str, std: float = 0.1) -> tuple[nn.Module, Transformer]:
    """The model of case `name` in transformers and here, with the same weights, in evaluation mode."""
    their_config, our_config = CASES[name]
    reference = random_reference(their_config(), std)
    model = Transformer(ModelConfig(**our_config))
    family, theirs = family_of(reference.config.to_dict(), name), saved_tensors(reference)
    family = family.stored_as({name: value.shape for name, value in theirs.items()})
    ours = model.state_dict()
    for group in family.groups(model.config):
        value = to_ours(group, theirs.__getitem__)
        ours[group.name].zero_()[: len(value)] = value
    return reference, model.eval()

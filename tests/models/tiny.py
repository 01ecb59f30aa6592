"""Sizes and options of tiny models: as transformers spells them, and as Megalith does (OUR...)."""

VOCAB = 151


LLAMA = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, attention_dropout=0.0)  # fmt: skip
OURS = dict(vocab_size=VOCAB, hidden_size=64, ffn_hidden_size=112, num_layers=3, num_attention_heads=4,
            num_query_groups=2, max_position_embeddings=256, position_embedding_type="rope", swiglu=True,
            normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True,
            layernorm_epsilon=1e-6)  # fmt: skip
LLAMA3_ROPE = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64, rope_theta=5000.0)  # fmt: skip
YARN_ROPE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)
LINEAR_ROPE = dict(rope_type="linear", factor=2.0, rope_theta=10000.0)
GEMMA = dict(LLAMA, head_dim=24, query_pre_attn_scalar=20, sliding_window=11, pad_token_id=0,
             tie_word_embeddings=True)  # fmt: skip
OUR_GEMMA = dict(OURS, kv_channels=24, query_pre_attn_scalar=20, window_size=[10, 0], gated_linear_unit=True,
                 swiglu=False, norm_placement="sandwich", layernorm_zero_centered_gamma=True, scale_embeddings=True,
                 untie_embeddings_and_output_weights=False)  # fmt: skip
PHI3 = dict(LLAMA, pad_token_id=None, rms_norm_eps=1e-6)
LONG_FACTORS = dict(short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.5], long_factor=[1.5, 2.0, 3.0, 5.0, 8.0, 9.0])
LONG_ROPE = dict(rope_type="longrope", partial_rotary_factor=0.75, rope_theta=10000.0, **LONG_FACTORS)

NEOX = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=256)  # fmt: skip
OUR_NEOX = dict(vocab_size=VOCAB, hidden_size=64, ffn_hidden_size=112, num_layers=3, num_attention_heads=4,
                max_position_embeddings=256, position_embedding_type="rope", parallel_attn_mlp=True,
                untie_embeddings_and_output_weights=True)  # fmt: skip
FALCON = dict(vocab_size=VOCAB, hidden_size=64, ffn_hidden_size=112, num_hidden_layers=3, num_attention_heads=4,
              max_position_embeddings=256)  # fmt: skip
OUR_FALCON = dict(
    OUR_NEOX, activation="gelu", add_bias_linear=False, untie_embeddings_and_output_weights=False
)

OUR_STARCODER = dict(OUR_NEOX, parallel_attn_mlp=False)
OUR_STABLELM = dict(
    OUR_STARCODER, num_query_groups=2, add_bias_linear=False, swiglu=True, rotary_percent=0.25
)
OUR_PHI = dict(OUR_NEOX, shared_layernorm=True, add_output_bias=True)
OPT = dict(vocab_size=VOCAB, hidden_size=64, ffn_dim=112, num_hidden_layers=3, num_attention_heads=4,
           max_position_embeddings=64)  # fmt: skip
OUR_OPT = dict(vocab_size=VOCAB, hidden_size=64, ffn_hidden_size=112, num_layers=3, num_attention_heads=4,
               max_position_embeddings=64, padding_positions=2, positions_skip_padding=True)  # fmt: skip

EXPERTS = dict(num_experts=8, num_experts_per_tok=3)
OUR_EXPERTS = dict(num_experts=8, moe_router_topk=3)
DEEPSEEK = dict({**LLAMA, "num_key_value_heads": 4}, n_routed_experts=8, num_experts_per_tok=4, n_shared_experts=2,
                moe_intermediate_size=24, first_k_dense_replace=1, kv_lora_rank=20, qk_nope_head_dim=16,
                qk_rope_head_dim=8, v_head_dim=12)  # fmt: skip
OUR_DEEPSEEK = dict({**OURS, "num_query_groups": 0}, num_experts=8, moe_router_topk=4,
                    moe_shared_expert_intermediate_size=48, moe_ffn_hidden_size=24, moe_layer_freq=[0, 1, 1],
                    multi_latent_attention=True, kv_lora_rank=20, qk_head_dim=16, qk_pos_emb_head_dim=8,
                    v_head_dim=12)  # fmt: skip
DEEPSEEK_ROPE = dict(YARN_ROPE, mscale=0.7, mscale_all_dim=0.9)

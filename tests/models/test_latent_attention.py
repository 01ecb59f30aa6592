"""Latent attention as Megatron-LM has it without --qk-layernorm, against its formula in plain PyTorch."""

import torch
from torch.nn.functional import embedding, gelu, layer_norm, linear

from megalith.config import ModelConfig
from megalith.models.init import initialize
from megalith.models.transformer import Transformer

HIDDEN, HEADS, LATENT, PLAIN, TURNING, VALUE, SEQ = 16, 2, 6, 5, 4, 3, 7
CONFIG = ModelConfig(num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=24, num_attention_heads=HEADS, vocab_size=30,
                     max_position_embeddings=SEQ, position_embedding_type="rope", multi_latent_attention=True,
                     q_lora_rank=LATENT, kv_lora_rank=LATENT, qk_head_dim=PLAIN, qk_pos_emb_head_dim=TURNING,
                     v_head_dim=VALUE, latent_layernorm=False, add_position_embedding=True, hidden_dropout=0.0,
                     attention_dropout=0.0, init_method_std=0.3)  # fmt: skip


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of [seq, ..., TURNING], by halves."""
    angles = torch.arange(SEQ)[:, None] * 10000.0 ** (-torch.arange(0, TURNING, 2) / TURNING)
    angles = angles.view(SEQ, *[1] * (x.dim() - 2), -1)
    first, second = x.chunk(2, -1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )


def by_formula(w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Logits [seq, vocab] of ids [seq]."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def of_layer(name: str) -> torch.Tensor:
        return w[f"layers.0.{name}"]

    x = embedding(ids, w["embedding.word_embeddings.weight"]) + w["embedding.position_embeddings.weight"]
    h = norm(x, "layers.0.input_layernorm")
    queries = linear(h, of_layer("self_attention.linear_q_down_proj.weight"))
    queries = linear(queries, of_layer("self_attention.linear_q_up_proj.weight")).view(SEQ, HEADS, -1)
    queries = torch.cat([queries[..., :PLAIN], turned(queries[..., PLAIN:])], -1)
    latent, shared = linear(h, of_layer("self_attention.linear_kv_down_proj.weight")).split(
        [LATENT, TURNING], -1
    )
    up = linear(latent, of_layer("self_attention.linear_kv_up_proj.weight")).view(SEQ, HEADS, PLAIN + VALUE)
    keys = torch.cat([up[..., :PLAIN], turned(shared)[:, None].expand(SEQ, HEADS, TURNING)], -1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / (PLAIN + TURNING) ** 0.5
    scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), up[..., PLAIN:]).flatten(1)
    x = x + linear(
        out, of_layer("self_attention.linear_proj.weight"), of_layer("self_attention.linear_proj.bias")
    )
    h = norm(x, "layers.0.pre_mlp_layernorm")
    h = gelu(
        linear(h, of_layer("mlp.linear_fc1.weight"), of_layer("mlp.linear_fc1.bias")), approximate="tanh"
    )
    x = x + linear(h, of_layer("mlp.linear_fc2.weight"), of_layer("mlp.linear_fc2.bias"))
    return linear(norm(x, "final_layernorm"), w["embedding.word_embeddings.weight"][:30])


def test_latents_without_norms_beside_learned_positions_and_biases_are_megatrons_formula():
    model = Transformer(CONFIG)
    initialize(model, CONFIG, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    ids = torch.randint(0, 30, (SEQ,), generator=torch.Generator().manual_seed(0))
    weights = dict(model.named_parameters())
    assert not any("down_layernorm" in name for name in weights)
    found = model(ids[None])[0]
    torch.testing.assert_close(found, by_formula(weights, ids), rtol=1e-5, atol=1e-5)

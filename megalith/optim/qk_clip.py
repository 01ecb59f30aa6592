"""qk-clip (Kimi K2, Moonshot AI 2025): rescale queries and keys of heads whose attention logits have grown too large.

With s the largest logit of a head over a step's tokens, and η = min(1, qk_clip_threshold / s), the rows of the head's
projections are multiplied after the step, in the weights and in their biases:

    grouped-query attention    queries η^alpha, key η^(1 - alpha), with the smallest η of the group that shares the key
    latent attention           query without positions η^alpha, its rotary part η, key without positions η^(1 - alpha)

The rotary part of latent attention's key is shared by all heads and is not rescaled. On the same tokens, the largest
logit of a clipped head is then at most the threshold, apart from the change by the step itself. The optimizer's state
is not changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import ModelConfig


def clip_factors(logits: Tensor, threshold: float) -> Tensor:
    """Return the rescaling factor η of each head, float32 like `logits`: 1 where the logit is at most the threshold, or
    not finite."""
    return torch.where((logits > threshold) & logits.isfinite(), threshold / logits, torch.ones_like(logits))


def row_factors(module: str, eta: Tensor, model: ModelConfig, alpha: float) -> Tensor | None:
    """Return the factor of each row of a projection's global weight, or None if the projection is not rescaled.

    Args:
        module: name of the linear in the attention module.
        eta: float32 [heads], from `clip_factors`.
        model: sizes of the heads.
        alpha: share of the factor that queries take.
    """
    if model.multi_latent_attention:
        nope, rope, value = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
        if module in ("linear_q_proj", "linear_q_up_proj"):
            return _rows([(eta**alpha, nope), (eta, rope)])
        if module == "linear_kv_up_proj":
            return _rows([(eta ** (1 - alpha), nope), (torch.ones_like(eta), value)])
        return None
    if module != "linear_qkv":
        return None
    eta = eta.unflatten(0, (model.query_groups, -1)).amin(1)
    width = model.num_attention_heads // model.query_groups * model.head_dim
    ones = torch.ones_like(eta)
    gates = [(ones, width)] * model.attention_output_gate
    return _rows([(eta**alpha, width), *gates, (eta ** (1 - alpha), model.head_dim), (ones, model.head_dim)])


def _rows(parts: list[tuple[Tensor, int]]) -> Tensor:
    """Return the factors of all rows. The rows of each head or group consist of the `parts`, in this order."""
    return torch.cat([factor[:, None].expand(-1, rows) for factor, rows in parts], dim=1).flatten()

"""Cost of a forward and backward pass under dynamic context parallelism, from FLOPs and the exchange of keys and
values.

    cost = overhead + Σ (per_token · n + per_pair · n² + per_exchanged_token · n if degree > 1) / degree

`per_token` and `per_pair` are the FLOPs that the planner counts, per token and per pair of tokens of a sequence. In a
sharded sequence, a token's queries, outputs, keys and values are exchanged in the forward and backward pass. Bytes are
converted into FLOPs at the rate of a GPU whose matmuls take 400 TFLOP/s and whose links take 200 GB/s, an H100 with
NVLink. A pass costs at least as much as `OVERHEAD_TOKENS` tokens, for launches and the parameters that it gathers.
"""

from __future__ import annotations

from megalith.config import RunConfig
from megalith.data.dynamic_context import PassCosts
from megalith.planner.flops import flops_per_token

FLOPS_PER_BYTE = 2000
OVERHEAD_TOKENS = 256
BYTES = 2
PASSES = 2
"""Number of passes in which keys and values are exchanged: forward and backward."""
SCALE = 16
"""Units per pair of tokens, so that rounding to integers matters little."""


def pass_costs(config: RunConfig) -> PassCosts:
    """Return the cost model of a run's forward and backward passes."""
    model, length = config.model, config.data.seq_length
    shortest, longest = (flops_per_token(model, n, config.lora).causal for n in (1, length))
    pair = (longest - shortest) / max(
        length - 1, 1
    )  # FLOPs per token are linear in the length of its sequence
    token = shortest - pair
    unit = pair / SCALE if pair > 0 else token / SCALE
    heads = 2 * (model.num_attention_heads + model.query_groups) * model.head_dim
    exchanged = PASSES * BYTES * heads * len(model.attention_layers) * FLOPS_PER_BYTE
    per_token = max(round(token / unit), 1)
    return PassCosts(
        per_token=per_token,
        per_pair=SCALE if pair > 0 else 0,
        per_exchanged_token=round(exchanged / unit),
        overhead=OVERHEAD_TOKENS * per_token,
    )

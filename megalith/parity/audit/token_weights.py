"""Loss weights of the tokens. Gradients are linear in them, so they can be solved for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megalith.parity.audit.evidence import StepEvidence
from megalith.parity.audit.findings import Finding, find

MOST_TOKENS = 1024
"""Maximum number of tokens in a step whose loss weights are solved for. Solving takes a backward pass per token."""


def name_token_weights(e: StepEvidence, token_gradients: Callable[[], Iterator[Tensor]]) -> list[Finding]:
    """Return a finding if loss weights of the tokens explain the gradients.

    Args:
        e: evidence of the step.
        token_gradients: function that yields each token's gradients, in the order of the micro-batches.
    """
    count = sum(batch.input_ids.numel() for of_rank in e.batches for batch in of_rank)
    first = e.first_copies()
    if count > MOST_TOKENS or count > e.observed[first].numel() // 2 or e.copies_differ():
        return []
    columns = torch.stack([g[e.key_index[first]].flatten() for g in token_gradients()], 1).double()
    scale = e.scale[first].repeat_interleave(e.observed.shape[1])
    # By singular values, because the gradients of some tokens can be zero or equal. The ordinary driver decides on the
    # rank while it factorizes, and then sometimes leaves out a column that counts.
    solved = torch.linalg.lstsq(
        columns / scale[:, None], (e.observed[first].flatten() / scale)[:, None].double(), driver="gelsd"
    )
    weights = solved.solution.flatten()
    fitted = (columns @ weights).view(len(first), -1)
    errors = (e.observed[first] - fitted).norm(dim=1) / e.scale[first]
    if not bool((errors <= 2 * e.bound[first]).all()):
        return []
    return [find(e, "token-weights", "; ".join(_describe_tokens(e, weights * e.tokens)))]


def _describe_tokens(e: StepEvidence, weights: Tensor) -> Iterator[str]:
    """Yield, per micro-batch, a description of the tokens with a wrong weight. A valid token has weight 1."""
    start = 0
    for d, of_rank in enumerate(e.batches):
        for m, batch in enumerate(of_rank):
            size = batch.input_ids.numel()
            solved, right = weights[start : start + size], batch.weights.flatten()
            start += size
            width = batch.input_ids.shape[1]
            for text, chosen in (
                ("not counted", (right > 0) & (solved.abs() < 0.1)),
                ("counted", (right == 0) & (solved.abs() > 0.1)),
                (
                    "with another weight",
                    (right > 0) & (solved.abs() >= 0.1) & ((solved - right).abs() > 0.1),
                ),
            ):
                if chosen.any():
                    at = [f"[{i // width}, {i % width}]" for i in chosen.nonzero().flatten().tolist()]
                    more = f" and {len(at) - 8} more" if len(at) > 8 else ""
                    yield f"dp rank {d}, micro-batch {m}, {text}: {', '.join(at[:8])}{more}"

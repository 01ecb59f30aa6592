"""Multi-token prediction (DeepSeek-AI 2024, V3): in training, further layers predict the tokens behind the next one.

The model's layers predict the token after each token. Further layer k (1, 2, …) predicts the one k places behind that,
from what the head has read so far and from the token that is k places ahead:

    h_k = norm(layer(linear_join([norm(embedding(t_{i+k})), norm(h_{k-1})])))        h_0: what the model's head reads

with the model's own embedding and output matrix. The loss of each is the mean over the tokens that it predicts, as in
Megatron-LM: the further it looks, the fewer. The mean of these losses, times mtp_loss_scaling_factor, adds to the
gradient, and nothing to the loss that is logged. Evaluation and generation leave these layers out. They are numbered on
from the model's own, and every axis of parallelism takes them as layers; a pipeline's last stage has them, and with
them a copy of the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.hardware import to_device
from megalith.models.linear import Linear
from megalith.models.norm import Norm
from megalith.models.pass_context import Context
from megalith.ops.documents import document_ids


@dataclass
class MTPTargets:
    """The tokens behind the next one, for each further layer: [layers, batch, seq]."""

    tokens: Tensor  # int64: the token k places ahead, which is layer k's input
    labels: Tensor  # int64: the one behind it
    loss_mask: Tensor  # float32: 0 where there is none, or where it belongs to another document
    weights: Tensor | float = (
        1.0  # float32 [layers], of each layer's sum of losses: main loss's tokens / its own
    )
    sums: Tensor | None = None  # float32 [layers]: each layer's sum of losses is added here, for the log

    def at(self, token_index: Tensor) -> MTPTargets:
        """These places of every sequence."""
        parts = (self.tokens, self.labels, self.loss_mask)
        return MTPTargets(*(part[..., token_index] for part in parts), self.weights, self.sums)

    def to(self, device: torch.device) -> MTPTargets:
        """On a device; weights and sums are made there."""
        parts = (self.tokens, self.labels, self.loss_mask)
        return MTPTargets(*(to_device(part, device) for part in parts), self.weights, self.sums)


def make_mtp_targets(
    labels: Tensor, loss_mask: Tensor, document_ends: Tensor | None, layers: int
) -> MTPTargets:
    """From what a batch of whole sequences has: each [batch, seq], the label being the next token, and the documents'
    ends [batch, documents]."""
    seq = labels.shape[1]
    numbers = None if document_ends is None else document_ids(document_ends, seq)
    counts = torch.zeros(layers, *labels.shape)
    for k in range(1, min(layers, seq - 1) + 1):
        counts[k - 1, :, : seq - k] = loss_mask[:, k:]
        if numbers is not None:
            counts[k - 1, :, : seq - k] *= numbers[:, k:] == numbers[:, : seq - k]
    return MTPTargets(
        tokens=torch.stack([labels.roll(-k, 1) for k in range(layers)]),
        labels=torch.stack([labels.roll(-k, 1) for k in range(1, layers + 1)]),
        loss_mask=counts,
    )


class MTPProjection(nn.Module):
    """What stands before a further layer: the norms of both inputs, and the matrix [hidden, 2 · hidden]."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.embedding_layernorm = Norm(config, config.hidden_size, device)
        self.hidden_layernorm = Norm(config, config.hidden_size, device)
        self.linear_join = Linear(2 * config.hidden_size, config.hidden_size, bias=False, device=device)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        both = [self.embedding_layernorm(context.mtp_embeddings), self.hidden_layernorm(x)]
        return self.linear_join(torch.cat(both, dim=-1), context)


def add_mtp_losses(loss: Tensor, further: Tensor) -> Tensor:
    """`loss` as it is, with the gradient of loss + further, which has its factor in it."""
    return _Further.apply(loss, further)


class _Further(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Tensor, further: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, grad

"""Multi-token prediction (DeepSeek-AI 2024, V3): in training, MTP layers predict tokens after the next one.

MTP layer k (1, 2, …) predicts token t_{i+k+1} from the head's previous input and from the embedding of t_{i+k}:

    h_k = norm(layer(linear_join([norm(embedding(t_{i+k})), norm(h_{k-1})])))        h_0: the input of the model's head

MTP layers share the model's embedding and output matrix. Each layer's loss is the mean over the tokens that it
predicts, as in Megatron-LM; a larger k has fewer such tokens. The mean of these losses, times mtp_loss_scaling_factor,
contributes to the gradient but not to the logged loss. Evaluation and generation skip the MTP layers. They are numbered
after the model's layers, and parallelism treats them as layers. The last pipeline stage has them, with a copy of the
embedding.
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
    """Inputs and labels of the MTP layers: [layers, batch, seq]."""

    tokens: Tensor  # int64: t_{i+k}, the input of layer k
    labels: Tensor  # int64: t_{i+k+1}
    loss_mask: Tensor  # float32: 0 if the label is beyond the sequence or in another document
    weights: Tensor | float = (
        1.0  # float32 [layers], of each layer's sum of losses: main loss's tokens / its own
    )
    sums: Tensor | None = None  # float32 [layers]: each layer's sum of losses is added to it, for the log

    def at(self, token_index: Tensor) -> MTPTargets:
        """Return the targets of the tokens with these indices, in every sequence."""
        parts = (self.tokens, self.labels, self.loss_mask)
        return MTPTargets(*(part[..., token_index] for part in parts), self.weights, self.sums)

    def to(self, device: torch.device) -> MTPTargets:
        """Return a copy on a device, on which `weights` and `sums` must already be."""
        parts = (self.tokens, self.labels, self.loss_mask)
        return MTPTargets(*(to_device(part, device) for part in parts), self.weights, self.sums)


def make_mtp_targets(
    labels: Tensor, loss_mask: Tensor, document_ends: Tensor | None, layers: int
) -> MTPTargets:
    """Return the targets of `layers` MTP layers.

    Args:
        labels: int64 [batch, seq], the next token, of full sequences.
        loss_mask: float32 [batch, seq].
        document_ends: int32 [batch, documents]; None means one document per sequence.
        layers: number of MTP layers.
    """
    seq = labels.shape[1]
    documents = None if document_ends is None else document_ids(document_ends, seq)
    counts = torch.zeros(layers, *labels.shape, device=loss_mask.device)
    for k in range(1, min(layers, seq - 1) + 1):
        counts[k - 1, :, : seq - k] = loss_mask[:, k:]
        if documents is not None:
            counts[k - 1, :, : seq - k] *= documents[:, k:] == documents[:, : seq - k]
    return MTPTargets(
        tokens=torch.stack([labels.roll(-k, 1) for k in range(layers)]),
        labels=torch.stack([labels.roll(-k, 1) for k in range(1, layers + 1)]),
        loss_mask=counts,
    )


class MTPProjection(nn.Module):
    """The input of an MTP layer: norms of the embedding and of the hidden state, and a matrix [hidden, 2 · hidden]."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.embedding_layernorm = Norm(config, config.hidden_size, device)
        self.hidden_layernorm = Norm(config, config.hidden_size, device)
        self.linear_join = Linear(2 * config.hidden_size, config.hidden_size, bias=False, device=device)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        both = [self.embedding_layernorm(context.mtp_embeddings), self.hidden_layernorm(x)]
        return self.linear_join(torch.cat(both, dim=-1), context)


def add_mtp_losses(loss: Tensor, mtp_loss: Tensor) -> Tensor:
    """Return `loss` with the gradient of loss + mtp_loss."""
    return _AddGradient.apply(loss, mtp_loss)


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Tensor, mtp_loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, grad

"""The layers between the last norm and the output matrix of BERT and of ModernBERT's decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.models.linear import Linear
from megalith.models.norm import Norm
from megalith.models.pass_context import Context
from megalith.models.vocabulary import VocabularyBias
from megalith.ops.activation import ACTIVATIONS


class LMHead(nn.Module):
    """norm(activation(dense(x))), and the bias of an encoder's logits."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.activation = ACTIVATIONS[config.head_activation]
        size, bias = config.hidden_size, config.add_lm_head_dense_bias
        self.dense = Linear(size, size, bias=bias, device=device)
        self.layernorm = Norm(config, config.hidden_size, device)
        self.vocabulary = None if config.causal else VocabularyBias(config, device)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:  # […, hidden]
        return self.layernorm(self.dense(x, context, then=self.activation))

"""Settings that depend on several of Megatron's flags: one function per subject.

Each function runs once per command line, even without its flags, so that Megatron's defaults apply. Its docstring names
the settings and is shown by `megalith megatron flags`.
"""

from megalith.dialects.megatron.derive.checkpoint_flags import loading, saving
from megalith.dialects.megatron.derive.data_flags import attention_mask, datasets, lengths, tokenizer
from megalith.dialects.megatron.derive.layout_flags import (
    context,
    recompute,
    sequence_parallel,
    sharding,
    stages,
)
from megalith.dialects.megatron.derive.model_flags import (
    activation,
    experts,
    heads,
    latent_attention,
    linear_attention,
    masked_words,
    mup,
    sink,
    vocabulary,
    window,
)
from megalith.dialects.megatron.derive.optimizer_flags import emerging_optimizer, moments, precision
from megalith.dialects.megatron.derive.position_flags import positions
from megalith.dialects.megatron.derive.run_flags import batch, evaluation, per_token_loss, trackers

__all__ = [
    "activation",
    "attention_mask",
    "batch",
    "context",
    "datasets",
    "emerging_optimizer",
    "evaluation",
    "experts",
    "heads",
    "latent_attention",
    "lengths",
    "linear_attention",
    "loading",
    "masked_words",
    "moments",
    "mup",
    "per_token_loss",
    "positions",
    "precision",
    "recompute",
    "saving",
    "sequence_parallel",
    "sharding",
    "sink",
    "stages",
    "tokenizer",
    "trackers",
    "vocabulary",
    "window",
]

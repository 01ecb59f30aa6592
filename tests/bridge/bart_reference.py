"""Tiny random models of BART's kind."""

from pathlib import Path

import torch
import transformers
from models.reference import random_parameters
from torch import nn

VOCAB = 151
# Stacks of two depths.
SIZES = dict(vocab_size=VOCAB, d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
             decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=64,
             pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)  # fmt: skip
CLASSES = {
    "Bart": transformers.BartForConditionalGeneration,
    "PLBart": transformers.PLBartForConditionalGeneration,
    "Mvp": transformers.MvpForConditionalGeneration,
    "MBart": transformers.MBartForConditionalGeneration,
    "Blenderbot": transformers.BlenderbotForConditionalGeneration,
    "BlenderbotSmall": transformers.BlenderbotSmallForConditionalGeneration,
    "Pegasus": transformers.PegasusForConditionalGeneration,
    "Marian": transformers.MarianMTModel,
    "M2M100": transformers.M2M100ForConditionalGeneration,
}
NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0)


def reference(kind: str, folder: Path | None = None, std: float = 0.1, **changed) -> nn.Module:
    """Return a random model in evaluation mode, and save it in `folder`. Tables of sinusoids keep their values."""
    model_class = CLASSES[kind]
    config = model_class.config_class(**SIZES | NO_DROPOUT | changed)
    model = model_class._from_config(config, attn_implementation="eager")
    tables = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    random_parameters(model, std).load_state_dict(tables, strict=False)
    assert bool(tables) == (kind in ("Pegasus", "Marian"))
    if kind != "M2M100":
        model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(8))
    if folder is not None:
        model.save_pretrained(folder)
    return model

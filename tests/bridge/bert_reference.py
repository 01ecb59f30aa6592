"""Encoders of transformers with random weights, and a batch for them."""

import re

import torch
import transformers
from models.reference import random_parameters

VOCAB, SEQ, LENGTHS = 151, 24, [24, 17, 9]
SIZES = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
             max_position_embeddings=32)  # fmt: skip
KINDS = ["BertForPreTraining", "BertForMaskedLM", "BertModel",
         "MegatronBertForPreTraining", "MegatronBertForMaskedLM", "MegatronBertModel",
         "ModernBertForMaskedLM",
         "RobertaForMaskedLM", "RobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaModel", "CamembertForMaskedLM",
         "CamembertModel", "Data2VecTextForMaskedLM", "Data2VecTextModel", "XLMRobertaXLForMaskedLM",
         "XLMRobertaXLModel", "RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormModel",
         "ModernBertModel", "ErnieForPreTraining", "ErnieForMaskedLM", "ErnieModel",
         "DistilBertForMaskedLM", "DistilBertModel", "BertGenerationEncoder"]  # fmt: skip
NO_TYPES = ("BertGenerationEncoder", "BertGenerationDecoder")
LOCAL = dict(
    local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
)


def reference(kind: str, **settings) -> torch.nn.Module:
    """A model of this class with random weights, biases and norms, in evaluation mode."""
    if kind.startswith("Modern"):
        of, settings = transformers.ModernBertConfig, LOCAL | settings
        settings["hidden_activation"] = settings.pop("hidden_act", "gelu")
    elif kind.startswith("DistilBert"):
        of = transformers.DistilBertConfig
        names = {"intermediate_size": "hidden_dim", "hidden_act": "activation"}
        settings = {names.get(name, name): value for name, value in (SIZES | settings).items()}
        model = getattr(transformers, kind)._from_config(of(**settings), attn_implementation="eager")
        return random_parameters(model)
    else:
        if kind not in NO_TYPES:
            settings = {"type_vocab_size": 2} | settings
        of = getattr(
            transformers, re.sub("(ForPreTraining|ForMaskedLM|Model|Encoder|Decoder)$", "Config", kind)
        )
    model = getattr(transformers, kind)._from_config(of(**SIZES | settings), attn_implementation="eager")
    return random_parameters(model)


def batch() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    # transformers leaves out the gradient of [PAD], which is 0, or 1 in RoBERTa.
    ids = torch.randint(2, VOCAB, (3, SEQ), generator=random)
    lengths = torch.tensor(LENGTHS)[:, None]
    return dict(
        input_ids=ids,
        tokentype_ids=(torch.arange(SEQ) > 6).long().expand(3, SEQ),
        padding_mask=torch.arange(SEQ) < lengths,
        document_ends=torch.cat([lengths, torch.full_like(lengths, SEQ)], 1).int(),
        labels=torch.randint(0, VOCAB, (3, SEQ), generator=random),
        loss_mask=((torch.rand(3, SEQ, generator=random) < 0.3) & (torch.arange(SEQ) < lengths)).float(),
        sentence_order=torch.tensor([1, 0, 1]),
    )


def theirs(model: torch.nn.Module, tokens: dict[str, torch.Tensor], **more):
    if "type_vocab_size" in model.config.to_dict():
        more["token_type_ids"] = tokens["tokentype_ids"]
    return model(tokens["input_ids"], attention_mask=tokens["padding_mask"].long(), **more)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()

"""Converts batches of transformers models to Megalith's: labels, loss masks, documents, padding, micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.data.batch import Batch, document_ends
from megalith.data.token_ids import TokenIds
from megalith.dialects.accelerate.replica_loader import IGNORED
from megalith.errors import ConfigError

LABELS = ("labels", "shift_labels")  # labels aligned with the tokens, and with the next tokens
SUPPORTED_INPUTS = ("input_ids", *LABELS, "attention_mask", "position_ids", "num_items_in_batch")
ENCODER_INPUTS = ("token_type_ids", "next_sentence_label", "decoder_input_ids")
TOKEN_TYPES_IGNORED = (
    "the batch has token_type_ids, all 0, which this model ignores; set model_input_names of the tokenizer to leave "
    "them out"
)
NO_EFFECT_INPUTS = ("use_cache", "return_dict")
WRONG_IDS = (
    "use the model's tokenizer, or add its new tokens to the model before prepare: "
    "model.resize_token_embeddings(len(tokenizer))"
)
EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def check_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `model(**batch)` that Megalith supports, with None for absent ones.

    Raises:
        ConfigError: for unsupported arguments.
    """
    accepted = (*SUPPORTED_INPUTS, *ENCODER_INPUTS, *NO_EFFECT_INPUTS, *EXTRA_OUTPUTS)
    unsupported = [name for name, value in batch.items() if name not in accepted and value is not None]
    reject_extra_outputs(batch)
    if unsupported:
        raise ConfigError(_unsupported_inputs(unsupported))
    if batch.get("input_ids") is None or batch["input_ids"].dim() != 2:
        raise ConfigError("the model needs input_ids [batch, seq]; pass the batch by keyword: model(**batch)")
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != batch["input_ids"].shape:
        raise ConfigError(
            f"attention_mask has shape {list(mask.shape)}, but input_ids has {list(batch['input_ids'].shape)}; use "
            "one mask value per token, or separate packed samples with position_ids"
        )
    encoder_inputs = {name: batch[name] for name in ENCODER_INPUTS if batch.get(name) is not None}
    return {name: batch.get(name) for name in SUPPORTED_INPUTS} | encoder_inputs


def check_ids(ids: TokenIds, batch: Mapping[str, Any], *, causal: bool) -> None:
    """Raise DataError for token ids and labels outside the vocabulary, as plain PyTorch does.

    With `causal` the first label of a sample, which no token predicts, is not checked.
    """
    for name in ("input_ids", "decoder_input_ids", *LABELS):
        tensor = batch.get(name)
        if tensor is None:
            continue
        counted = tensor != IGNORED if name in LABELS else None
        if name == "labels" and causal:
            counted[:, 0] = False
        ids.check(tensor, name, "the batch", mask=counted)


def _unsupported_inputs(names: Sequence[str]) -> str:
    return (
        f"the model was called with {', '.join(names)}, which decoder-only models do not support; leave "
        f"{', '.join(names)} out of the batch (supported: {', '.join(SUPPORTED_INPUTS)})"
    )


def reject_token_types(types: Tensor, module: nn.Module) -> None:
    """Raise ConfigError for token_type_ids that would change a decoder-only model's result.

    Args:
        types: token_type_ids on the host.
        module: the script's model.
    """
    name = type(module).__name__
    advice = 'set model_input_names=["input_ids", "attention_mask"] of the tokenizer, or leave them out of the batch'
    if "token_type_ids" in inspect.signature(type(module).forward).parameters:
        raise ConfigError(
            f"the model was called with token_type_ids, for which transformers' {name} adds embeddings that are not "
            f"supported; {advice}"
        )
    if bool(types.any()):
        raise ConfigError(
            f"the model was called with token_type_ids that are not all 0, but {name} has no segments; {advice}"
        )


def reject_extra_outputs(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if a call's arguments, or a model's config, request more outputs than loss and logits."""
    for name in EXTRA_OUTPUTS:
        if options.get(name):
            raise ConfigError(
                f"{name} is true, but a prepared model returns only loss and logits, because no rank has the full "
                f"intermediate results; leave {name} out, or call accelerator.unwrap_model(model), on every rank"
            )


def next_token_batch(batch: Mapping[str, Any], masked_rows: int, eod: int | None) -> Batch:
    """Convert a transformers batch to a Batch. Each token predicts the label of the next token.

    Labels of −100 and the last `masked_rows` samples do not count. Tokens do not attend to padding (attention_mask 0).
    Labels predicted at padding positions count, as in transformers. Without a mask, a document begins where
    position_ids restart.
    """
    if unsupported := [name for name in ENCODER_INPUTS if name in batch]:
        raise ConfigError(_unsupported_inputs(unsupported))
    tokens, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    labels = torch.full_like(tokens, IGNORED)
    if batch.get("shift_labels") is not None:
        labels.copy_(batch["shift_labels"])
    elif batch.get("labels") is not None:
        labels[:, :-1] = batch["labels"][:, 1:]
    documents = padding = None
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    else:
        positions = positions.expand_as(tokens)
        if mask is None and bool((positions.diff(dim=1) != 1).any()):
            begins = torch.zeros_like(tokens, dtype=torch.int32)
            begins[:, 1:] = positions.diff(dim=1) != 1
            documents = begins.cumsum(1, dtype=torch.int32)
    if masked_rows:
        labels[-masked_rows:] = IGNORED
    if eod is not None:
        labels = labels.masked_fill(torch.isin(tokens, torch.as_tensor(eod, device=tokens.device)), IGNORED)
    counts = labels != IGNORED
    if mask is not None and not bool(mask.all()):
        documents, padding = _split_padding(mask == 0, counts)
    return Batch(
        input_ids=tokens,
        labels=labels.masked_fill(~counts, 0),
        loss_mask=counts.float(),
        position_ids=positions.contiguous(),
        document_ends=None if documents is None else document_ends_of(documents),
        sample_numbers=torch.arange(len(tokens)),
        padding=padding,
        all_padding=None if mask is None else mask == 0,
    )


def _split_padding(padding: Tensor, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return document ids and padding for a Batch.

    Padding becomes a separate document if it is at the beginning, or at the end without counted labels. Otherwise the
    mask itself is needed.

    Args:
        padding: bool [batch, seq], tokens that attention ignores.
        counts: bool [batch, seq], tokens that predict a counted label.

    Returns:
        Document ids, int32 [batch, seq], or None; padding, bool [batch, seq], or None.
    """
    leading = padding.cumprod(1).bool()
    trailing = padding.flip(1).cumprod(1).flip(1).bool()
    inner = padding & ~leading & ~(trailing & ~counts)
    if bool(inner.any()):
        return None, padding
    return (~padding).to(torch.int32), padding if bool((counts & padding).any()) else None


def document_ends_of(documents: Tensor) -> Tensor | None:
    """Return a Batch's document ends, given document ids, int [batch, seq], that change where a document begins.

    None if each sequence is a single document.
    """
    return document_ends(nn.functional.pad(documents.diff(dim=1) != 0, (1, 0)).cpu().numpy())


def pad_sequences(batch: Batch, multiple: int) -> Batch:
    """Pad the sequences to a multiple of `multiple`. The padding has no loss and joins the last document."""
    seq = batch.input_ids.shape[1]
    extra = -seq % multiple
    if not extra:
        return batch
    ends = batch.document_ends
    padded = batch._each(
        lambda tensor: tensor if tensor.dim() == 1 else nn.functional.pad(tensor, (0, extra))
    )
    return replace(
        padded, document_ends=None if ends is None else torch.where(ends == seq, seq + extra, ends)
    )


def split_micro_batches(batch: Batch, count: int, multiple: int = 1) -> list[Batch]:
    """Split a batch into `count` micro-batches of equal size, a multiple of `multiple`.

    Copies of the first sample, without loss, fill the last one.
    """
    size = -(-len(batch.input_ids) // (count * multiple)) * multiple
    extra = size * count - len(batch.input_ids)
    if extra:
        batch = batch._each(lambda tensor: torch.cat([tensor, tensor[:1].expand(extra, *tensor.shape[1:])]))
        batch.loss_mask[-extra:] = 0
    return [batch._each(lambda tensor, n=n: tensor[n * size : (n + 1) * size]) for n in range(count)]


def is_right_padded(mask: Tensor | None) -> bool:
    """Return True if there is a mask and it has padding only at the ends of sequences."""
    return mask is not None and bool((mask.diff(dim=1) <= 0).all())

"""A batch as transformers' models take it, and as ours: what counts, what is kept apart, and its micro-batches."""

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

LABELS = ("labels", "shift_labels")  # those of the same tokens, and of the next ones
TAKEN = ("input_ids", *LABELS, "attention_mask", "position_ids", "num_items_in_batch")
OF_ENCODERS = ("token_type_ids", "next_sentence_label", "decoder_input_ids")
TYPES_IGNORED = (
    "the batch has token_type_ids, all 0, which this model does not have: they are ignored; model_input_names of the "
    "tokenizer leaves them out"
)
WITHOUT_EFFECT = ("use_cache", "return_dict")
WRONG_IDS = (
    "use the tokenizer of the model, or give the model its new tokens before prepare: "
    "model.resize_token_embeddings(len(tokenizer))"
)
MORE_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def checked_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What of a call's arguments is read; None where it was not given. Raises ConfigError for what is not had."""
    known = (*TAKEN, *OF_ENCODERS, *WITHOUT_EFFECT, *MORE_OUTPUTS)
    others = [name for name, value in batch.items() if name not in known and value is not None]
    require_loss_and_logits_alone(batch)
    if others:
        raise ConfigError(_not_taken(others))
    if batch.get("input_ids") is None or batch["input_ids"].dim() != 2:
        raise ConfigError(
            "the model is called with input_ids [batch, seq]; give the batch by name: model(**batch)"
        )
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != batch["input_ids"].shape:
        raise ConfigError(
            f"attention_mask has the shape {list(mask.shape)}, not that of input_ids {list(batch['input_ids'].shape)}; "
            "give one number a token, or tell packed samples apart by position_ids"
        )
    given = {name: batch[name] for name in OF_ENCODERS if batch.get(name) is not None}
    return {name: batch.get(name) for name in TAKEN} | given


def check_ids(ids: TokenIds, batch: Mapping[str, Any], *, causal: bool) -> None:
    """Raise DataError for token ids and labels outside the vocabulary, as plain PyTorch does.

    `causal`: the first label of a sample, which no token predicts, is not looked at.
    """
    for name in ("input_ids", "decoder_input_ids", *LABELS):
        tensor = batch.get(name)
        if tensor is None:
            continue
        counted = tensor != IGNORED if name in LABELS else None
        if name == "labels" and causal:
            counted[:, 0] = False
        ids.check(tensor, name, "the batch", counted=counted)


def _not_taken(names: Sequence[str]) -> str:
    return (
        f"the model was called with {', '.join(names)}, which decoder-only models here do not take; they take "
        f"{', '.join(TAKEN)}: leave it out of the batch"
    )


def require_no_token_types(types: Tensor, module: nn.Module) -> None:
    """Raise ConfigError for token_type_ids, on the host, that change what a decoder-only model computes in transformers
    or would if it had them."""
    name = type(module).__name__
    way = (
        'give the tokenizer model_input_names=["input_ids", "attention_mask"], or leave them out of the batch'
    )
    if "token_type_ids" in inspect.signature(type(module).forward).parameters:
        raise ConfigError(
            f"the model was called with token_type_ids, for which transformers' {name} adds embeddings; they are "
            f"not supported: {way}"
        )
    if bool(types.any()):
        raise ConfigError(
            f"the model was called with token_type_ids that are not all 0, but {name} has no segments; {way}"
        )


def require_loss_and_logits_alone(asked: Mapping[str, Any]) -> None:
    """Raises ConfigError where a call's arguments, or a model's config, ask for further outputs."""
    for name in MORE_OUTPUTS:
        if asked.get(name):
            raise ConfigError(
                f"{name} is true, but a prepared model gives loss and logits alone, for no rank has the whole of what "
                "stands between; leave it out, or ask accelerator.unwrap_model(model), on every rank"
            )


def next_tokens(batch: Mapping[str, Any], masked_rows: int, eod: int | None) -> Batch:
    """Return a batch of transformers as one of ours: each token predicts the next one's label.

    Labels of −100 and the last `masked_rows` samples do not count. No token sees padding (attention_mask 0); a label
    that padding predicts counts, as in transformers. Samples that position_ids tell apart where there is no mask are
    documents of their own.
    """
    if others := [name for name in OF_ENCODERS if name in batch]:
        raise ConfigError(_not_taken(others))
    tokens, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    labels = torch.full_like(tokens, IGNORED)
    if batch.get("shift_labels") is not None:
        labels.copy_(batch["shift_labels"])
    elif batch.get("labels") is not None:
        labels[:, :-1] = batch["labels"][:, 1:]
    documents = padding = None
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if positions is None:
        positions = places
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
        documents, padding = _hidden(mask == 0, counts)
    return Batch(
        input_ids=tokens,
        labels=labels.masked_fill(~counts, 0),
        loss_mask=counts.float(),
        position_ids=positions.contiguous(),
        document_ends=None if documents is None else ends_of(documents),
        sample_numbers=torch.arange(len(tokens)),
        padding=padding,
    )


def _hidden(padding: Tensor, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the documents, int [batch, seq], and the padding as a Batch has it, of bool [batch, seq]: where attention
    does not look, and which tokens predict a label that counts.

    Padding is a document of its own, unless tokens stand before it and it predicts or tokens stand behind it.
    """
    leading = padding.cumprod(1).bool()
    trailing = padding.flip(1).cumprod(1).flip(1).bool()
    inner = padding & ~leading & ~(trailing & ~counts)
    if bool(inner.any()):
        return None, padding
    return (~padding).to(torch.int32), padding if bool((counts & padding).any()) else None


def ends_of(documents: Tensor) -> Tensor | None:
    """The documents' ends, as a Batch has them, from int [batch, seq], another number where another begins."""
    return document_ends(nn.functional.pad(documents.diff(dim=1) != 0, (1, 0)).cpu().numpy())


def filled_up(batch: Batch, multiple: int) -> Batch:
    """With tokens at the end that do not count, so that the length is a multiple; they join the last document."""
    seq = batch.input_ids.shape[1]
    more = -seq % multiple
    if not more:
        return batch
    ends = batch.document_ends
    longer = batch._each(lambda tensor: tensor if tensor.dim() == 1 else nn.functional.pad(tensor, (0, more)))
    return replace(longer, document_ends=None if ends is None else torch.where(ends == seq, seq + more, ends))


def split_rows(batch: Batch, count: int, multiple: int = 1) -> list[Batch]:
    """So many batches of one size, a multiple, with samples at the end that do not count where they do not divide."""
    size = -(-len(batch.input_ids) // (count * multiple)) * multiple
    more = size * count - len(batch.input_ids)
    if more:
        batch = batch._each(lambda tensor: torch.cat([tensor, tensor[:1].expand(more, *tensor.shape[1:])]))
        batch.loss_mask[-more:] = 0
    return [batch._each(lambda tensor, n=n: tensor[n * size : (n + 1) * size]) for n in range(count)]


def is_right_padded(mask: Tensor | None) -> bool:
    """Whether there is a mask, of sequences that are filled up at their ends alone."""
    return mask is not None and bool((mask.diff(dim=1) <= 0).all())

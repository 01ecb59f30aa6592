"""Rejects chat records with columns that would change the training targets but that the record's format does not use.

All other columns, such as ids and scores, are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

MASKS = ("completion_mask", "assistant_masks", "loss_mask", "response_mask")
"""Keys of masks with one number per token; 0 marks tokens that are not in the loss."""
OTHER_MASKS = ("attention_mask", "special_tokens_mask")  # of tokenizers
SAMPLE_WEIGHTS = ("weight", "weights", "sample_weight", "loss_weight", "loss_weights")
MEDIA = ("image", "images", "pixel_values", "videos", "audios")
"""Columns of TRL's and LLaMA-Factory's multimodal data."""
SYSTEM_COLUMNS = ("system", "system_prompt")
QUESTION_COLUMNS = ("instruction", "question", "query", "messages", "conversations")
"""Columns of other systems' preferences that have the question to both answers."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def reject_media(record: Record) -> None:
    """Raise ValueError if a record has images, videos or audio."""
    for key in MEDIA:
        value = record.get(key)
        if value is not None and not (isinstance(value, Sequence) and not value):
            raise ValueError(
                f"it has {key}, but models train on text only; remove {key} if the text is complete without it"
            )


def reject_unread_columns(record: Record, keys: tuple[str, ...]) -> None:
    """Raise ValueError if a column that is not in `keys`, the keys of the record's format, would change the training
    targets.
    """
    for key in SAMPLE_WEIGHTS:
        if record.get(key) not in (None, 1):
            raise ValueError(
                f"its {key} is {record[key]!r:.60}, but each sample counts once; repeat the record, or remove it"
            )
    _reject_masks(record, MASKS if "input_ids" in keys else ())
    if keys[0].endswith("_ids"):
        return
    first = record[keys[0]]
    _reject_system(record, keys, first)
    if not record.get("tools"):
        _reject(record, "functions", "give functions as tools: [{type: function, function: …}]")
    if keys == ("instruction", "output") and not record.get("input"):
        _reject(record, "context", "rename it to input, or remove it")
    if keys == ("chosen", "rejected") and isinstance(first, str):
        for key in QUESTION_COLUMNS:
            _reject(record, key, "give the question to both answers as prompt")


def _reject_system(record: Record, keys: tuple[str, ...], first: Any) -> None:
    """Raise ValueError if a column contains a system message, unless `first`, the first message or text, is the same
    system message.
    """
    reads_system, is_text = keys[0] in ("conversations", "instruction"), isinstance(first, str)
    message = first[0] if isinstance(first, Sequence) and first else None
    if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
        return
    remedy = (
        "put it at the start of the prompt" if is_text else "make it the first message, with the role system"
    )
    for key in SYSTEM_COLUMNS[reads_system:]:
        _reject(record, key, f"{'rename it to system' if reads_system else remedy}, or remove it")


def _reject(record: Record, key: str, remedy: str) -> None:
    if record.get(key):
        raise ValueError(
            f"its {key} is {record[key]!r:.60}, which is not used with the record's other keys; {remedy}"
        )


def _reject_masks(record: Record, read: Sequence[str]) -> None:
    for key, value in record.items():
        is_mask = "mask" in key and isinstance(value, Sequence) and not isinstance(value, str)
        if key == "mask" and isinstance(value, str):
            is_mask = ROLES.get(value.lower()) != "user"  # NeMo: the role that is not in the loss
        if is_mask and key not in (*read, *OTHER_MASKS):
            raise ValueError(
                f"it has {key}, which is not used with the record's other keys; use input_ids with loss_mask (1: in "
                f"the loss), or remove {key}"
            )

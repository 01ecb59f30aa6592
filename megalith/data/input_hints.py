"""Hints for error messages: infers from the keys of a record which command can read its file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megalith.data.inputs.jsonl import read_objects
from megalith.errors import DataError

PREFERENCES = "preferences, which `megalith dpo` trains on"
CONVERSATIONS = "conversations or instructions, which `megalith sft` trains on"
TEXT = "text for pre-training, which `megalith train` and `megalith preprocess` read"
PROMPTS = "prompts, which `megalith grpo` takes as rl.prompts"
KEYS: tuple[tuple[set[str], str], ...] = (
    ({"chosen", "rejected"}, PREFERENCES),
    ({"chosen_ids", "rejected_ids"}, PREFERENCES),
    ({"messages"}, CONVERSATIONS),
    ({"conversations"}, CONVERSATIONS),
    ({"instruction", "output"}, CONVERSATIONS),
    ({"prompt", "completion"}, CONVERSATIONS),
    ({"prompt", "answer"}, PROMPTS),
    ({"question", "answer"}, PROMPTS),
    ({"text"}, TEXT),
    ({"prompt"}, PROMPTS),
)


def record_kind(keys: Iterable[object]) -> str:
    """Return the kind of records that have these keys, and the command that reads them; "" if unknown."""
    present = set(keys)
    return next((kind for names, kind in KEYS if names <= present), "")


def record_hint(keys: Iterable[object]) -> str:
    """Return a clause about the kind of records that have these keys, to be appended to a sentence; "" if unknown."""
    kind = record_kind(keys)
    return f"; such records are {kind}" if kind else ""


def dataset_hint(prefix: str) -> str:
    """Return a sentence if `prefix` names an indexed dataset or one of its files, otherwise ""."""
    path = Path(prefix.removesuffix(".idx").removesuffix(".bin"))
    if not path.with_name(f"{path.name}.idx").is_file():
        return ""
    return f"{path} is an indexed dataset, which `megalith train` reads; use files of records (docs/sft.md)"


def file_hint(path: Path) -> str:
    """Return a sentence on the records of a file that was passed as an indexed dataset, "" if they are unknown."""
    if not path.is_file():
        return ""
    try:
        kind = record_kind(next((record for _, record in read_objects(path)), {}))
    except DataError as error:
        return str(error)
    return f"{path} has {kind}" if kind else ""

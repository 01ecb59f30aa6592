"""Which command a file of data is for, from the keys of its records: what the sentence for the wrong one names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megalith.data.preprocessing.jsonl import read_objects
from megalith.errors import DataError

PREFERENCES = "preferences, which `megalith dpo` trains on"
CONVERSATIONS = "conversations or instructions, which `megalith sft` trains on"
TEXT = "text to pretrain on, which `megalith preprocess` makes a dataset of for `megalith train`"
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


def purpose(keys: Iterable[object]) -> str:
    """What records with these keys are, and the command for them; "" where no command takes them."""
    there = set(keys)
    return next((what for names, what in KEYS if names <= there), "")


def of_records(keys: Iterable[object]) -> str:
    """The same as the end of a sentence."""
    found = purpose(keys)
    return f"; such records are {found}" if found else ""


def of_dataset(prefix: str) -> str:
    """Where `prefix` is of an indexed dataset, or one of its two files: what it is for."""
    path = Path(prefix.removesuffix(".idx").removesuffix(".bin"))
    if not path.with_name(f"{path.name}.idx").is_file():
        return ""
    return f"{path} is an indexed dataset, which `megalith train` reads; name files of records (docs/sft.md)"


def of_file(path: Path) -> str:
    """What a file that was named as an indexed dataset is for; "" where it says nothing of it."""
    if not path.is_file():
        return ""
    try:
        found = purpose(next((record for _, record in read_objects(path)), {}))
    except DataError as error:
        return str(error)
    return f"{path} has {found}" if found else ""

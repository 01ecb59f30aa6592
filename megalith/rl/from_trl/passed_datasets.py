"""Converts the datasets that a script passes to a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.data.chat.record_columns import reject_media
from megalith.errors import ConfigError


def records_of(dataset: Any, argument: str) -> list[Mapping[str, Any]]:
    """Return the records of a dataset, such as a list of dicts or a Hugging Face Dataset.

    Args:
        dataset: value of the trainer's argument.
        argument: name of the argument, for messages.

    Raises:
        ConfigError: for a dict of datasets, a name or path, and records that are not dicts or have images.
    """
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, dataset))
        raise ConfigError(
            f"{argument} is a dict of datasets ({splits or 'empty'}), but one dataset is needed; pass one of them, or "
            "concatenate them"
        )
    if isinstance(dataset, str | bytes) or not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"{argument} is {dataset!r:.60}, not records; load it first, for example with datasets.load_dataset"
        )
    records = list(dataset)
    for number, record in enumerate(records, 1):
        if not isinstance(record, Mapping):
            raise ConfigError(
                f"record {number} of {argument} is a {type(record).__name__}, but records are dicts"
            )
        try:
            reject_media(record)
        except ValueError as error:
            raise ConfigError(f"record {number} of {argument} is unusable: {error}") from None
    return records

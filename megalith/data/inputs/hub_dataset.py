"""Parses names of Hugging Face datasets: `hf://OWNER/NAME?split=train&name=CONFIG&streaming=true`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from megalith.data.inputs.packages import import_package
from megalith.errors import ConfigError, DataError, did_you_mean
from megalith.remote import StorePath

SCHEME = "hf://"
ARGUMENTS = ("split", "name", "revision", "data_dir", "data_files", "streaming")
"""Arguments of `datasets.load_dataset` that an input can set."""


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset of the Hugging Face Hub. `url` is its name as an input."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Name on the hub, such as `openai/gsm8k`."""
        return self.url.removeprefix(SCHEME).partition("?")[0].removeprefix("datasets/").rstrip("/")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `load_dataset`. Raise ConfigError for unsupported ones."""
        query = self.url.partition("?")[2]
        arguments: dict[str, Any] = {"split": "train", **dict(parse_qsl(query, keep_blank_values=True))}
        if unknown := next((key for key in arguments if key not in ARGUMENTS), None):
            raise ConfigError(
                f"{self.url} sets {unknown!r}, which is not one of {', '.join(ARGUMENTS)}"
                + did_you_mean(unknown, ARGUMENTS)
            )
        streaming = arguments.get("streaming", "false").lower()
        if streaming not in ("true", "false"):
            raise ConfigError(f"{self.url} sets streaming to {streaming!r}; write true or false")
        return {**arguments, "streaming": streaming == "true"}

    def load(self) -> Any:
        """Return the Dataset or IterableDataset. A local copy in the cache is preferred to a download.

        Raises:
            DataError: there is no such dataset or split, or the hub cannot be reached.
        """
        datasets = import_package("datasets", str(self))
        arguments = self.arguments
        try:
            return datasets.load_dataset(self.name, **arguments)
        except Exception as error:  # the library has no error class of its own
            reason = str(error).strip().split("\n")[0]
            raise DataError(
                f"the dataset {self.name!r} with split {arguments['split']!r} is not in the local Hugging Face cache "
                f"and could not be downloaded ({reason}); download it on a machine with a network, check its name, or "
                "use JSON Lines"
            ) from error


Source = Path | StorePath | HubDataset
"""A file, a folder saved by `datasets`, or a dataset of the hub."""

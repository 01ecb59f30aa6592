"""Finds tokenizers by hub name, in the local Hugging Face cache or else by download."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megalith.errors import DataError

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILES = (".json", ".txt", ".model", ".tiktoken", ".safetensors", ".bin")


def is_hub_name(name: str) -> bool:
    """Return True if `name` could be a repository of the hub."""
    return bool(_HUB_NAME.fullmatch(name)) and not name.endswith(_FILES)


def local_folder(name: str, patterns: Sequence[str]) -> Path:
    """Return the local folder of hub repository `name` that contains the first of `patterns`.

    The cache is tried first, so that machines without a network do not wait. The hub library's HF_HUB_OFFLINE
    controls downloads. Raise DataError if neither has it, or if `name` is a path.
    """
    no_name = DataError(f"there is no file or folder {name!r}; check the path")
    if not is_hub_name(name):
        raise no_name
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise DataError(
            f"{name!r} is not a local file or folder, and huggingface_hub, which could look it up "
            "as a hub name, is not installed; pass a local path, or run: pip install "
            "huggingface_hub"
        ) from error
    try:
        folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        if (folder / patterns[0]).is_file():
            return folder
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        raise no_name from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"{name!r} is not a local file or folder, is not in the local Hugging Face cache, and "
            f"could not be downloaded ({reason}); download it on a machine with a network (hf "
            f"download {name}) and pass that folder, or check the spelling"
        ) from error

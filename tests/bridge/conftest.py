"""Folders as transformers writes them, of the families' smallest models."""

from collections.abc import Callable
from pathlib import Path

import pytest
from models.reference import CASES, random_reference


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """hf_folder(case): the folder that `save_pretrained` wrote of a case's model; made once."""
    root = tmp_path_factory.mktemp("hugging_face")
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = root / str(len(made))
            random_reference(CASES[name][0]()).save_pretrained(made[name])
        return made[name]

    return folder

"""Several teachers, each for samples from its own data source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath

import torch
from torch import Tensor

from megalith.comm.collectives import any_rank
from megalith.data.batch import Batch
from megalith.data.blended_dataset import BlendedDataset
from megalith.data.chat.chat_dataset import ChatDataset
from megalith.data.dataset import SampleDataset
from megalith.data.text_data import source_name
from megalith.errors import ConfigError
from megalith.rl.teachers.teacher import Prediction, Teacher
from megalith.training.run_state import Run


class SeveralTeachers:
    """Combines several teachers. Each predicts the rows of its own data, and skips steps that have none."""

    def __init__(self, run: Run, teachers: Sequence[Teacher]):
        self._run, self._teachers = run, teachers
        self._names = run.config.distill.teacher_data
        self.note = "; ".join(f"{name}: {one.note}" for name, one in zip(self._names, teachers))

    def predict(self, batches: Sequence[Batch]) -> list[Prediction]:
        run = self._run
        owners = [self._owners(batch) for batch in batches]  # int64 [batch] each
        merged = [Prediction()] * len(batches)
        for number, teacher in enumerate(self._teachers):
            rows = [(owner == number).to(run.device) for owner in owners]
            # A pipeline has a fixed number of micro-batches, and all data-parallel ranks run the same collectives.
            if not any_rank(any(bool(each.any()) for each in rows), run.mesh.world):
                continue
            masked = [
                replace(batch, loss_mask=batch.loss_mask * each[:, None])
                for batch, each in zip(batches, rows)
            ]
            predictions = teacher.predict(masked)
            merged = [
                _with_rows(old, new, each) for old, new, each in zip(merged, predictions, rows, strict=True)
            ]
        return merged

    def _owners(self, batch: Batch) -> Tensor:
        """Return the index of each row's teacher, int64 [batch]."""
        data = self._run.data
        sources = [
            data_source(data.train, data.order(position)) for position in batch.sample_numbers.tolist()
        ]
        return torch.tensor([owner_of(source, self._names) for source in sources])


def data_source(dataset: SampleDataset, index: int) -> str:
    """Return the file or prefix that a sample comes from."""
    if isinstance(dataset, ChatDataset):
        return dataset.describe(index).removeprefix("the row of ")
    if isinstance(dataset, BlendedDataset):
        return data_source(dataset.datasets[dataset.locate(index)[0]], 0)
    return source_name(next(iter(dataset.epochs()), ""))


def owner_of(source: str, names: Sequence[str]) -> int:
    """Return the index of the first of `names` that `source`, or the last component of its path, starts with.

    Raises:
        ConfigError: if there is none.
    """
    for number, name in enumerate(names):
        for whole in (source, PurePath(source).name):
            if whole == name or whole.startswith((f"{name} ", f"{name}/")):
                return number
    raise ConfigError(
        f"the sample of {source} has no teacher, because distill.teacher_data only has "
        f"{', '.join(names)}; add its file to distill.teacher_data, and its teacher to distill.teacher"
    )


def _with_rows(old: Prediction, new: Prediction, rows: Tensor) -> Prediction:
    """Return `old` with the rows of `new` where `rows`, bool [batch], is True."""
    if old.indices is None or new.indices is None:
        return new
    choose: Callable[[Tensor, Tensor], Tensor] = lambda mine, other: torch.where(  # noqa: E731
        rows.view(-1, 1, 1), mine, other
    )
    return Prediction(None, choose(new.indices, old.indices), choose(new.logprobs, old.logprobs))

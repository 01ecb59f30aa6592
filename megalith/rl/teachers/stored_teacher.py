"""A teacher with predictions that `megalith teacher-logits` has stored."""

from __future__ import annotations

from collections.abc import Sequence

from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.stored_logits import LogitsRecord, StoredLogits
from megalith.errors import ConfigError
from megalith.rl.teachers.teacher import Prediction
from megalith.training.run_state import Run


def logits_record(config: RunConfig) -> LogitsRecord:
    """Return the description of a run's folder of predictions."""
    distill = config.distill
    return LogitsRecord(
        teacher=distill.teachers[0],
        vocab_size=config.model.vocab_size,
        seq_length=config.data.seq_length,
        top_k=min(distill.logits_top_k, config.model.vocab_size),
        temperature=distill.temperature,
    )


class StoredTeacher:
    """Reads a teacher's stored predictions."""

    def __init__(self, run: Run):
        """Open the folder of predictions. Raise ConfigError if it was written with other settings."""
        config, self._stored = run.config, StoredLogits(run.config.distill.logits_dir)
        self._reads = run.mesh.pp.rank == run.mesh.pp.size - 1
        stored = self._stored.record
        for name, setting, ours in (
            ("vocab_size", "the model's vocabulary", config.model.vocab_size),
            ("seq_length", "data.seq_length", config.data.seq_length),
            ("temperature", "distill.temperature", config.distill.temperature),
        ):
            theirs = getattr(stored, name)
            if theirs != ours:
                raise ConfigError(
                    f"distill.logits_dir {config.distill.logits_dir} was written with {name} {theirs}, but {setting} "
                    f"is {ours}; set {setting} to {theirs}, or store the predictions again"
                )
        self.note = (
            f"predictions of {stored.teacher} for {self._stored.samples:,} samples: top {stored.top_k:,} entries per "
            "token, and the sum of the others"
        )

    def predict(self, batches: Sequence[Batch]) -> list[Prediction]:
        return [
            Prediction(None, *self._stored.read(batch)) if self._reads else Prediction() for batch in batches
        ]

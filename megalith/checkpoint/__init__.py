"""Checkpoints: what a run is (`state`), safe folders for it (`store`), and the way back (`open`)."""

from megalith.checkpoint.manifest import Manifest, RunRecord, TokenizerRecord
from megalith.checkpoint.open import Checkpoint, open_checkpoint
from megalith.checkpoint.state import load_model, load_optimizer, save_checkpoint
from megalith.checkpoint.steps import list_steps

__all__ = [
    "Checkpoint",
    "Manifest",
    "RunRecord",
    "TokenizerRecord",
    "list_steps",
    "load_model",
    "load_optimizer",
    "open_checkpoint",
    "save_checkpoint",
]

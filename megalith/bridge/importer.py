"""`megalith import-hf`: a Hugging Face folder as a checkpoint, a slice of a tensor of ours at a time.

The weights are stored in float32, as training keeps them, and `train.precision` of the checkpoint's configuration is
the type that they came in: what `megalith.load` computes in, and what an export writes again.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalith.bridge.families import family_of
from megalith.bridge.folder import SourceFolder, path_exists
from megalith.bridge.match import Match, match
from megalith.bridge.origin import check_vocabulary, save_origin, tokenizer_of
from megalith.bridge.settings import conversion_notes
from megalith.checkpoint import RunRecord, StepWriter, TokenizerRecord
from megalith.checkpoint.steps import CHECKPOINTS
from megalith.config import RunConfig, TrainConfig
from megalith.config.rules.model_rules import check_model
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.launch.lock import LOCK_NAME, OutputLock, lock_output
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import StorePath, open_location, remove_all

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHARDS = 64  # files that a checkpoint is cut into, as far as they are then of a good size, in bytes:
SMALLEST_SHARD, LARGEST_SHARD = 2**25, 2**28
Change = Callable[[str, LocalShard], Tensor]
SEED = 1234  # of the initial values of tensors that are missing and were allowed to be


def import_hf(
    source: str | Path,
    out: str | Path,
    *,
    allow: bool = False,
    show_progress: bool = True,
    change: Change = lambda name, shard: shard.values,
) -> Path:
    """Writes the model in the folder or of the hub name `source` as step 0 of a run at `out`; returns the step.

    Holds a few of the files being written in memory, of at most 256 MB, whatever the model's size. With `allow`,
    tensors that are missing begin with initial values, those that are not of the model are left out, and types need
    not be config.json's. `change` gives what is written of a slice of a tensor of ours, from its name and the slice.
    Raises ConfigError for a model that cannot be built here, CheckpointError for a damaged folder or when `out` is
    there already or cannot be written: nothing is left then.
    """
    check_absent(open_location(out))
    matched = open_hf_folder(source, allow)
    tokenizer = tokenizer_of(matched.source.path)
    check_vocabulary(matched.source, tokenizer, matched.groups[0].model.vocab_size)
    exceptions = {name: other for name, other in matched.dtypes.items() if other != common_dtype(matched)}
    keep = partial(save_origin, matched.source, tokenizer, exceptions)
    return write_run(matched, out, tokenizer, keep, change=change, show_progress=show_progress)


def write_run(
    matched: Match,
    out: str | Path | StorePath,
    tokenizer: Tokenizer | None,
    keep: Callable[[Path], None] | None = None,
    *,
    change: Change = lambda name, shard: shard.values,
    show_progress: bool = True,
) -> Path:
    """Writes matched tensors as step 0 of a run at `out`, with what `keep` puts beside its tokenizer.

    Raises as `new_run`.
    """
    model, dtype = matched.groups[0].model, common_dtype(matched)
    config = RunConfig(model=model, train=TrainConfig(precision=PRECISIONS[dtype]))
    record = RunRecord(
        step=0,
        consumed_samples=0,
        config=config.to_tree(),
        tokenizer=tokenizer
        and TokenizerRecord(fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size),
    )
    elements = sum(math.prod(group.shape) for group in matched.groups)
    shard_bytes = min(max(SMALLEST_SHARD, 4 * elements // SHARDS), LARGEST_SHARD)
    with (
        new_run(open_location(out)) as checkpoints,
        Progress("import", sum(map(matched.bytes, matched.groups)), show=show_progress) as progress,
        StepWriter(checkpoints, record, write_tokenizer=keep, shard_bytes=shard_bytes) as writer,
    ):
        for group in matched.groups:
            for offset, shape in row_slices(group.shape, shard_bytes // 8):
                shard = LocalShard(matched.ours(group, SEED, offset, shape), offset, group.shape, owned=True)
                writer.add("model", group.name, change(group.name, shard), offset, group.shape)
            progress.add(matched.bytes(group))
    return writer.folder


@contextmanager
def new_run(out: Path | StorePath) -> Iterator[Path | StorePath]:
    """The checkpoints folder of a run that is made at `out`, this process's alone; on an error nothing stays of it.

    Raises CheckpointError when something is at `out`, ConfigError while another process makes a run there.
    """
    check_absent(out)
    with lock_output(out):
        check_absent(out / CHECKPOINTS)
        try:
            yield out / CHECKPOINTS
        except BaseException:
            remove_all(out / CHECKPOINTS)  # the rest goes with the lock
            raise


def check_absent(out: Path | StorePath) -> None:
    """Raises CheckpointError when something is at `out`; ConfigError, naming it, when a process is at work there."""
    if isinstance(out, Path) and (out / LOCK_NAME).exists():
        OutputLock(out).release()
    if path_exists(out):
        raise CheckpointError(f"{out} already exists; remove it, or choose another path")


def row_slices(shape: tuple[int, ...], elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and shape of slices of whole rows that make up a tensor, of at most as many elements, or one row."""
    width = math.prod(shape[1:])
    rows = max(1, elements // max(width, 1))
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])


def open_hf_folder(source: str | Path, allow: bool = False) -> Match:
    """A Hugging Face folder, its family found and its tensors matched. Raises as `import_hf`."""
    folder = SourceFolder(source)
    family = family_of(folder.config, str(folder.path))
    try:
        model = family.read_config(folder.config)
        check_model(model)
    except ConfigError as error:
        raise error.within(folder.path) from None
    for note in (*folder.notes, *conversion_notes(model)):
        warnings.warn(f"{folder.path}: {note}", stacklevel=2)
    return match(folder, family, model, allow)


def common_dtype(matched: Match) -> torch.dtype:
    """What config.json says, else the type of most tensors."""
    return matched.source.dtype or Counter(matched.dtypes.values()).most_common(1)[0][0]

"""`megalith import-hf`: convert a Hugging Face folder to a checkpoint, one slice of a tensor at a time.

Weights are stored in float32, as training keeps them. `train.precision` in the checkpoint's configuration is their
original dtype, in which `megalith.load` computes and an export writes.
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
from megalith.bridge.model_differences import conversion_notes
from megalith.bridge.origin import check_vocabulary, save_origin, tokenizer_of
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
SHARDS = 64  # files per checkpoint, within these bounds on their size in bytes:
SMALLEST_SHARD, LARGEST_SHARD = 2**25, 2**28
Change = Callable[[str, LocalShard], Tensor]
SEED = 1234  # for initial values of missing tensors


def import_hf(
    source: str | Path,
    out: str | Path,
    *,
    allow: bool = False,
    show_progress: bool = True,
    change: Change = lambda name, shard: shard.values,
) -> Path:
    """Write a Hugging Face model as step 0 of a run. Memory use is a few files of at most 256 MB for any model size.

    Args:
        source: Hugging Face folder, URL or hub name.
        out: folder or URL of the run; must not exist.
        allow: initialize missing tensors, ignore extra ones and accept dtypes that differ from config.json's.
        show_progress: draw a progress bar.
        change: function of a tensor's name and slice that returns the values to write.

    Returns:
        The folder of the step.

    Raises:
        ConfigError: the model is not supported.
        CheckpointError: the folder is damaged, or `out` exists or cannot be written. Nothing is left at `out`.
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
    """Write matched tensors as step 0 of a run; `keep` adds files to its tokenizer folder. Raises the same errors as
    `new_run`.
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
                shard = LocalShard(matched.read(group, SEED, offset, shape), offset, group.shape, owned=True)
                writer.add("model", group.name, change(group.name, shard), offset, group.shape)
            progress.add(matched.bytes(group))
    return writer.folder


@contextmanager
def new_run(out: Path | StorePath) -> Iterator[Path | StorePath]:
    """Create a run, locked by this process, and return its checkpoints folder. On an error the run is removed.

    Raises:
        CheckpointError: `out` exists.
        ConfigError: another process is creating a run there.
    """
    check_absent(out)
    with lock_output(out):
        check_absent(out / CHECKPOINTS)
        try:
            yield out / CHECKPOINTS
        except BaseException:
            remove_all(out / CHECKPOINTS)  # releasing the lock removes the rest
            raise


def check_absent(out: Path | StorePath) -> None:
    """Raise CheckpointError if `out` exists, ConfigError if another process is working there."""
    if isinstance(out, Path) and (out / LOCK_NAME).exists():
        OutputLock(out).release()
    if path_exists(out):
        raise CheckpointError(f"{out} already exists; remove it, or choose another path")


def row_slices(shape: tuple[int, ...], elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and shape of slices of whole rows that cover a tensor.

    A slice has at most `elements` elements, or one row.
    """
    width = math.prod(shape[1:])
    rows = max(1, elements // max(width, 1))
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])


def open_hf_folder(source: str | Path, allow: bool = False) -> Match:
    """Open a Hugging Face folder and match its tensors with its family's. Raises the same errors as `import_hf`."""
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
    """Return the dtype in config.json or, if it has none, the most frequent dtype of the tensors."""
    return matched.source.dtype or Counter(matched.dtypes.values()).most_common(1)[0][0]

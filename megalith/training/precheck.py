"""What a job would be refused for, found by the launcher before it starts a process.

The ranks refuse the same by the same rules, each when it has come so far: after seconds of imports, and after all of
them have met. Here one process asks what takes no device and little time. On several machines the output folder and
its checkpoints are left to rank 0: a launcher that joins a running job finds there what that job has written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from megalith.checkpoint import open_checkpoint
from megalith.checkpoint.state import check_model_fits
from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_base
from megalith.data.blend import dataset_prefixes
from megalith.data.chat.conversations import chat_files
from megalith.data.idx_format import require_files
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.hardware import pick_device
from megalith.launch.lock import OutputLock, check_output_dir
from megalith.remote import size_of
from megalith.training.build import PreparedRun, build_meta_model, open_datasets, prepare, vocabulary_rows
from megalith.training.resume import fitting

MOST_INDEX_BYTES = (
    2**27
)  # of .idx files that are read whole here: six million documents, a fraction of a second


def check_job(
    config: RunConfig,
    world_sizes: Sequence[int],
    nproc: int,
    one_machine: bool,
    check_data: Callable[[RunConfig, Tokenizer | None], object] | None = None,
) -> None:
    """Raises the MegalithError with which every rank would refuse `config`.

    `world_sizes` are those that the job may have: one of them has to be possible. `nproc` processes are on this
    machine. `check_data` is of data that is not pre-training's.
    """
    check_base(config)
    prepared, tokenizer, _ = _prepare_any(config, world_sizes)
    pick_device(config.runtime.device, nproc - 1)
    (check_data or _check_data)(prepared, tokenizer)
    if config.train.skip_train:  # it writes nothing
        _check_checkpoint(prepared, tokenizer)
    elif one_machine:
        with OutputLock(config.train.output_dir):
            check_output_dir(config.train.output_dir, config.checkpoint.load, config.checkpoint.save)
        _check_checkpoint(prepared, tokenizer)


def opened(config: RunConfig, world_size: int) -> tuple[RunConfig, list[str]]:
    """The prepared configuration of a run on `world_size` processes, and its notes, once data and checkpoint are open:
    what a dry run asks. Raises the MegalithError with which every rank would refuse it."""
    check_base(config)
    prepared, tokenizer, notes = prepare(config, world_size)
    _check_data(prepared, tokenizer)
    _check_checkpoint(prepared, tokenizer)
    return prepared, notes


def _prepare_any(config: RunConfig, world_sizes: Sequence[int]) -> PreparedRun:
    for world_size in reversed(world_sizes):
        try:
            return prepare(config, world_size)
        except ConfigError:
            if world_size == world_sizes[0]:
                raise
    raise AssertionError("a job has at least one size")


def _check_data(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Its files are there, and small ones whole and enough for the splits."""
    if config.chat is not None:  # tokenized by the ranks, unless its length was needed already
        data = config.data
        for path in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
            if path is not None:
                chat_files(path)
        return
    index_bytes = [size_of(require_files(prefix)[1]) for prefix in dataset_prefixes(config.data)]
    if sum(index_bytes) <= MOST_INDEX_BYTES:
        evaluated = min(config.train.eval_iters, 1)
        open_datasets(config, (1, evaluated, evaluated), tokenizer)


def _check_checkpoint(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """The one to load is there and, by its manifest, of this model."""
    if config.checkpoint.load is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks warn of steps that are damaged
        found = open_checkpoint(config.checkpoint.load, ())
    checkpoint = fitting(found, config, tokenizer)
    if checkpoint is not None:
        check_model_fits(checkpoint, build_meta_model(config), vocabulary_rows(config))

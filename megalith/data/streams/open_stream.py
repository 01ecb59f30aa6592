"""Opens the streams among the entries of data paths."""

from __future__ import annotations

from collections.abc import Callable

from megalith.config.data import DataConfig
from megalith.data.streams.lane import StreamSettings
from megalith.data.streams.stream_shards import list_shards
from megalith.data.streams.text_stream import TextStream, default_lanes
from megalith.data.text_data import is_streamed
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError


def stream_opener(
    data: DataConfig,
    tokenizer: Tokenizer | None,
    seed: int,
    global_batch_size: int,
    notes: list[str] | None = None,
) -> Callable[[str, bool], TextStream | None]:
    """Return a function (entry of a data path, True for training data) → stream.

    It returns None for entries that are not streams.

    Args:
        data: the run's data settings.
        tokenizer: the run's tokenizer.
        seed: train.seed.
        global_batch_size: samples per step at the end of the run, for the number of lanes.
        notes: receives a sentence about the files of each folder that are not read.
    """

    def open_stream(entry: str, is_training: bool) -> TextStream | None:
        if not is_streamed(data, entry, is_training):
            return None
        if data.append_eod and tokenizer.eod is None:
            raise ConfigError(
                f"data.append_eod is on, but this {tokenizer.tokenizer_type} has no end-of-document token; name an "
                "eos_token in its tokenizer_config.json, or set data.append_eod to false"
            )
        shards = list_shards(entry, notes)
        lanes = data.stream_lanes or default_lanes(global_batch_size, len(shards))
        if lanes > len(shards):
            raise ConfigError(
                f"data.stream_lanes is {lanes}, but {entry} has {len(shards)} shards, and each lane reads its own "
                "shards; lower data.stream_lanes, or divide the data into more files"
            )
        settings = StreamSettings(
            entry=entry,
            shards=shards,
            lanes=lanes,
            seq_length=data.seq_length,
            seed=seed,
            tokenizer=tokenizer,
            repeat=data.dataloader_type == "cyclic" or not is_training,
            shuffle_buffer=data.shuffle_buffer,
            text_key=data.text_key,
            text_documents=data.text_documents,
            append_eod=data.append_eod,
            skip_bad_documents=data.skip_bad_documents,
        )
        return TextStream(settings, data.num_workers if is_training else 0)

    return open_stream

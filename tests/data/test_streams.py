"""Text that is tokenized while training: the order of its samples, its position in checkpoints, and its faults."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from layout_job import build
from trained_runs import comparable, configuration, losses, stored

import megalith
from megalith.data.streams.lane import Lane, LanePosition, StreamSettings
from megalith.data.streams.lane_worker import LaneWorker
from megalith.data.streams.stream_shards import RETRIES, Shard, ShardReader, list_shards
from megalith.data.streams.text_stream import TextStream, default_lanes
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import ConfigError, DataError
from megalith.training.build import open_datasets, prepare
from megalith.training.run_data import RunData
from megalith.training.trainer import Trainer

EOD = 256


def documents_of(shard: int) -> list[str]:
    return [f"shard {shard} document {n}" + " word" * (n * shard % 7) for n in range(30 + shard)]


def documents_in(shard: Shard) -> list[str]:
    return documents_of(int(shard.source.stem))


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Write five shards to texts/, and work next to them."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for shard in range(5):
        lines = [json.dumps({"text": text}) for text in documents_of(shard)]
        Path(f"texts/{shard}.jsonl").write_text("\n".join(lines) + "\n\n")
    yield tmp_path
    torch.use_deterministic_algorithms(False)


def settings(lanes=2, **changes) -> StreamSettings:
    entry = changes.pop("entry", "texts/*.jsonl")
    fixed = dict(seq_length=32, seed=7, tokenizer=build_tokenizer("ByteTokenizer"), repeat=True)
    return StreamSettings(
        entry,
        list_shards(entry),
        lanes,
        **(fixed | dict(shuffle_buffer=16, skip_bad_documents=False) | changes),
    )


def texts_of(samples: list[np.ndarray]) -> list[str]:
    """Return the documents in samples, of which each begins with the last token of the one before."""
    tokens = np.concatenate([samples[0][:1], *(sample[1:] for sample in samples)])
    ends = np.flatnonzero(tokens == EOD)
    return [bytes(part[part != EOD].astype(np.uint8)).decode() for part in np.split(tokens, ends + 1)[:-1]]


def test_without_shuffling_a_stream_reads_the_files_in_order(texts):
    stream = TextStream(settings(lanes=1, shuffle_buffer=1), 0)
    whole = [text for shard in range(5) for text in documents_of(shard)]
    expected = np.array([token for text in 2 * whole for token in [*text.encode(), EOD]])
    for i in range(len(expected) // 32 - 1):
        assert np.array_equal(stream[i], expected[32 * i : 32 * i + 33])


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_each_pass_reads_every_document_once(texts, lanes):
    parts = [Lane(settings(lanes), number) for number in range(lanes)]
    read, orders = Counter(), []
    for part in parts:
        samples = []
        while part.position.pass_number < 2:
            samples.append(part.next_sample())
        names = texts_of(samples)
        assert part.position.documents - len(names) in (-1, 0, 1)
        orders.append(names)
        per_pass = [
            [
                text
                for shard in part._settings.shards_of(part._number, k)
                for text in documents_of(int(shard.source.stem))
            ]
            for k in range(2)
        ]
        assert (
            Counter(names[: len(per_pass[0])]) == Counter(per_pass[0])
            and names[: len(per_pass[0])] != per_pass[0]
        )
        read += Counter(per_pass[0])
    assert read == Counter(text for shard in range(5) for text in documents_of(shard))


def ranks_state(position: int, ranks: int, micro_batch: int, begin: dict | None, start: int) -> dict:
    """Read a stream up to a position as data-parallel ranks do, some samples ahead; return the merged state."""
    states, block = [], ranks * micro_batch
    for rank in range(ranks):
        stream = TextStream(settings(), 0)
        stream.load_state(begin)
        stream.restart(start, block, 8)
        for first in range(start + rank * micro_batch, position + 2 * block, block):
            for i in range(first, first + micro_batch):
                stream[i]
        states.append(json.loads(json.dumps(stream.state_at(position))))
    return stream.merged_state(position, states)


def test_a_position_does_not_depend_on_the_ranks_that_reach_it(texts):
    whole = TextStream(settings(), 0)
    expected = [whole[i] for i in range(160)]
    state, start = None, 0
    for position, ranks, micro_batch in ((8, 1, 4), (24, 4, 2), (56, 2, 1), (64, 8, 1), (96, 1, 2)):
        state = ranks_state(position, ranks, micro_batch, state, start)
        assert state == ranks_state(position, 1, 1, None, 0)
        resumed = TextStream(settings(), 0)
        resumed.load_state(state)
        resumed.restart(position)
        assert all(np.array_equal(resumed[i], expected[i]) for i in range(position, 160))
        start = position


def test_worker_processes_make_the_same_samples(texts):
    alone, workers = TextStream(settings(lanes=5), 0), TextStream(settings(lanes=5), 2)
    assert all(np.array_equal(alone[i], workers[i]) for i in range(60))
    Path("texts/0.jsonl").write_bytes(b'{"text": "fine"}\nbad\n')
    failing = TextStream(settings(entry="texts/0.jsonl", lanes=1), 1)
    with pytest.raises(DataError, match=r"texts/0.jsonl line 2 \(byte 17\) is unusable"):
        failing[0]
    for stream in (workers, failing):
        [process] = [worker._process for worker in stream._workers[:1]]
        stream.close()
        assert process.poll() is not None


def test_default_lanes_divide_the_batch_and_have_a_shard_each():
    assert [default_lanes(*each) for each in ((8, 5), (8, 1), (512, 1000), (480, 100), (3, 2))] == [
        4,
        1,
        64,
        60,
        1,
    ]


def run(folder, iterations=8, data=None, **sections):
    data = dict(data_path=["texts/*.jsonl"], streaming=True, split="1", shuffle_buffer=16) | (data or {})
    train = dict(train_iters=iterations, deterministic=True, micro_batch_size=2) | sections.pop("train", {})
    return configuration("", folder, data=data, train=train, **sections)


def test_a_run_on_a_stream_resumes_bitwise(texts):
    straight = megalith.train(run("straight"))
    for name, stop in (("first", dict(exit_interval=3)), ("moved", {})):
        resumed = megalith.train(
            run(name, data=dict(num_workers=1), checkpoint=dict(load="first"), train=stop)
        )
    assert stored(Path(resumed.checkpoint)) == stored(Path(straight.checkpoint))
    assert comparable(Path("moved")) == comparable(Path("straight"))[3:]
    shown = RunData(run("first"), from_checkpoint=True)
    assert shown.step == 3
    again = RunData(run("straight"))
    again.advance_to(3)
    samples = shown.samples_of_next_step()
    assert samples == again.samples_of_next_step() == again.samples_at(range(24, 32))


def train_in(folder, sections):
    return str(Trainer(build(run(folder, **sections))).train().checkpoint)


def test_a_run_on_a_stream_resumes_at_another_data_parallel_size(pool, texts):
    here = dict(data_path=[str(texts / "texts/*.jsonl")])
    layout = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    (texts / "first").mkdir()
    sections = dict(data=here, parallel=layout, train=dict(exit_interval=3))
    first = pool.run(train_in, texts / "first", sections)[0]
    state = json.loads((Path(first) / "task" / "data_stream.json").read_text())
    assert [samples for samples, *_ in state["lanes"]] == [6] * 4  # 24 samples over the lanes of both ranks
    megalith.train(run("moved", data=here, checkpoint=dict(load=str(texts / "first"))))
    torch.use_deterministic_algorithms(False)
    megalith.train(run("straight", data=here))
    assert np.allclose(losses(texts / "first"), losses(Path("straight"))[:3], rtol=1e-5)
    assert np.allclose(losses(Path("moved")), losses(Path("straight"))[3:], rtol=1e-5)


def test_a_blend_with_a_stream_reads_both_and_resumes(texts, corpus):
    path = [0.75, "texts/*.jsonl", 0.25, corpus]
    config = prepare(run("blend", data=dict(data_path=path)), 1).config
    whole = open_datasets(config, (60, 0, 0), build_tokenizer("ByteTokenizer"))[0]
    samples = [whole[i] for i in range(80)]
    assert whole.sample_counts() == [45, 15]
    resumed = open_datasets(config, (60, 0, 0), build_tokenizer("ByteTokenizer"))[0]
    whole.restart(0, 8, 12)
    for i in range(50):
        whole[i]
    resumed.load_state(whole.merged_state(48, [json.loads(json.dumps(whole.state_at(48)))]))
    resumed.restart(48)
    assert all(np.array_equal(resumed[i], samples[i]) for i in range(48, 80))


def test_a_dataset_of_the_hub_is_streamed_by_its_shards(texts):
    files = "data_files=texts/*.jsonl"
    stream = TextStream(settings(entry=f"hf://json?streaming=true&{files}", lanes=5), 0)
    assert len(stream.settings.shards) == 5 and "shard 4 of 5" in str(stream.settings.shards[4])
    text = "".join(texts_of([stream[5 * i] for i in range(8)]))
    assert sum(f"shard {n} " in text for n in range(5)) == 1  # a lane reads one shard


def test_faults_of_a_shard_are_named(texts):
    stream = TextStream(settings(lanes=5, shuffle_buffer=1), 0)
    stream[0]
    os.utime("texts/0.jsonl", ns=(1, 1))
    with pytest.raises(
        DataError, match=r"texts/0.jsonl changed while the run read it: [\d,]+ bytes \(version \d+"
    ):
        for i in range(5, 200, 5):
            stream[i]
    stream = TextStream(settings(), 0)
    state = stream.state_at(0)
    Path("texts/3.jsonl").write_text('{"text": "other"}\n')
    for message in (
        r"texts/3.jsonl \(\d[\d,]* bytes\) is texts/3.jsonl \(18 bytes\)",
        "has 6 shards, and 5 at",
    ):
        resumed = TextStream(settings(), 0)
        resumed.load_state(state)
        with pytest.raises(DataError, match=message):
            resumed.restart()
        Path("texts/3.jsonl").write_bytes(b"x" * state["shards"][3][1])
        Path("texts/9.jsonl").write_text("")
    other = TextStream(settings(lanes=1), 0)
    other.load_state(state)
    with pytest.raises(
        DataError, match=r"with 2 lanes, but the run reads .* with 1; set data.stream_lanes to 2"
    ):
        other.restart()
    cut = gzip.compress(Path("texts/1.jsonl").read_bytes())[:-20]
    Path("texts/cut.jsonl.gz").write_bytes(cut)
    with pytest.raises(DataError, match=r"texts/cut.jsonl.gz is not a complete .gz file"):
        list(map(TextStream(settings(entry="texts/cut.jsonl.gz", lanes=1), 0).__getitem__, range(200)))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_is_raised_again_by_every_later_read(texts, workers):
    """A thread of the loader reads on after another one has met the error; it must not wait for the worker."""
    Path("texts/bad.jsonl").write_text('{"text": "good"}\nno json\n')
    stream = TextStream(settings(entry="texts/bad.jsonl", lanes=1), workers)
    for position in range(3):
        with pytest.raises(DataError, match=r"texts/bad.jsonl line 2 \(byte 17\) is unusable: not JSON"):
            stream[position]
    Path("texts/bad.jsonl").write_text('{"text": "good"}\n' * 20)
    stream = TextStream(settings(entry="texts/bad.jsonl", lanes=1), workers)
    stream[0]
    stream.close()


def test_a_worker_goes_on_with_other_lanes_after_the_error_of_one(texts):
    Path("texts/a.jsonl").write_text(json.dumps({"text": "long " * 2000}) + "\n")
    Path("texts/b.jsonl").write_text(json.dumps({"text": "x" * 50}) + "\nno json\n")
    worker = LaneWorker(settings(entry="texts/[ab].jsonl", shuffle_buffer=1, append_eod=False), 2)
    for lane in (0, 1):
        worker.open(lane, LanePosition())
    with pytest.raises(DataError, match=r"texts/b.jsonl line 2 .* is unusable: not JSON"):
        worker.next(1)
    worker._send((1, None))  # as for a sample that was made before the error and is read after it
    for _ in range(100):
        assert worker.next(0).tokens.shape == (33,)
    worker.close()


def test_a_stream_that_ends_is_an_error_with_its_numbers(texts):
    stream = TextStream(settings(lanes=5, repeat=False), 0)
    message = r"ended: lane 1 of 5 has read its 1 shard \(the last one is texts/\d.jsonl\), 3\d documents"
    with pytest.raises(DataError, match=message):
        for i in range(0, 500, 5):
            stream[i]
    Path("texts/empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="has no tokens in the 1 shard of lane 1 of 1"):
        TextStream(settings(entry="texts/empty.jsonl", lanes=1), 0)[0]


def test_documents_that_are_left_out_are_counted_once_also_after_a_resume(texts):
    lines = [
        '{"text": ""}',
        "bad",
        *(json.dumps({"text": f"text {n}"}) for n in range(400)),
        '{"text": 1}',
        "",
    ]
    Path("texts/0.jsonl").write_text("\n".join(lines))
    chosen = settings(entry="texts/0.jsonl", lanes=1, repeat=False, skip_bad_documents=True)
    whole = Lane(chosen, 0)
    positions = [whole.position]
    with pytest.raises(DataError, match=r"401 documents \(1 empty\)"):
        while True:
            whole.next_sample()
            positions.append(whole.position)
    for position in positions[::9]:
        lane = Lane(chosen, 0, position)
        with pytest.raises(DataError, match=r"401 documents \(1 empty\)"):
            while True:
                lane.next_sample()
        assert lane.skipped == 2
    stream = TextStream(settings(entry="texts/0.jsonl", lanes=1, skip_bad_documents=True), 0)
    for i in range(100):
        stream[i]
    [note] = stream.notes(stream.state_at(100))
    assert (
        "1 of them without tokens" in note
        and "2 unusable ones skipped" in note
        and "line 2 (byte 13)" in note
    )


def test_the_network_is_retried_from_the_block_that_failed(texts):
    pauses, opened = [], []

    class Flaky(ShardReader):
        def _open(self, shard):
            opened.append(shard)
            yield from range(len(opened) - 1)
            raise DataError("no route") from OSError("no route to host")

    class Remote(Shard):
        is_remote = True

    reader = Flaky("text", "file", pauses.append)
    blocks = reader.blocks(Remote(Path("texts/0.jsonl")), 0)
    assert [next(blocks)[0] for _ in range(9)] == list(range(9))  # each attempt reads one block further
    assert set(pauses) == {1.0}

    class Dead(Flaky):
        def _open(self, shard):
            raise DataError("no route") from OSError("no route to host")

    pauses.clear()
    with pytest.raises(
        DataError, match=rf"no route \({RETRIES} retries failed, in block 2 of texts/0.jsonl\)"
    ):
        list(Dead("text", "file", pauses.append).blocks(Remote(Path("texts/0.jsonl")), 2))
    assert pauses == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (dict(packing="best_fit"), ConfigError, "data.packing best_fit does not apply to streams"),
        (dict(stream_lanes=6), ConfigError, "data.stream_lanes is 6, but .* has 5 shards"),
        (
            dict(max_epochs_per_source=2),
            ConfigError,
            "whose length is unknown, but data.blend_temperature or a max",
        ),
        (dict(data_path=["texts", "texts/0.jsonl"]), ConfigError, "2 sources without weights"),
        (dict(tokenizer_type=None), ConfigError, "data.tokenizer_type is not set"),
    ],
)
def test_settings_that_do_not_apply_to_streams_are_refused(texts, data, error, message):
    config = run("refused", data=data, model=dict(vocab_size=257))
    tokenizer = None if "tokenizer_type" in data else build_tokenizer("ByteTokenizer")
    with pytest.raises(error, match=message):
        open_datasets(config, (10, 0, 0), tokenizer)

"""The indexed dataset: its bytes are Megatron's, and no damaged file yields a token."""

import os
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest

from megalith.data.indexed import IndexedDataset, IndexedWriter, _packed_offsets, best_dtype, merge
from megalith.errors import DataError

# Three sequences [5, 6, 7], [], [65499] in two documents, written out by hand.
GOLDEN_BIN = bytes.fromhex("0500 0600 0700 dbff")
GOLDEN_IDX = bytes.fromhex(
    "4d4d4944494458 0000"  # MMIDIDX, two zeros
    "0100000000000000"  # version 1
    "08"  # uint16
    "0300000000000000"  # three sequences
    "0300000000000000"  # three document entries
    "03000000 00000000 01000000"  # lengths
    "0000000000000000 0600000000000000 0600000000000000"  # byte offsets
    "0000000000000000 0200000000000000 0300000000000000"  # document indices
)


def write_golden(folder, name="golden"):
    (folder / f"{name}.bin").write_bytes(GOLDEN_BIN)
    (folder / f"{name}.idx").write_bytes(GOLDEN_IDX)
    return folder / name


def sequences(dataset):
    return [dataset.get(i).tolist() for i in range(len(dataset))]


def test_writer_gives_the_bytes_written_out_by_hand(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([5, 6, 7], [3, 0])
        writer.add_document(np.array([65499], dtype=np.int64))
    assert (tmp_path / "a.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "a.idx").read_bytes() == GOLDEN_IDX
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_reader_reads_the_bytes_written_out_by_hand(tmp_path):
    dataset = IndexedDataset(write_golden(tmp_path))
    assert len(dataset) == 3 and dataset.num_documents == 2 and dataset.num_tokens == 4
    assert dataset.dtype == np.uint16 and dataset.sequence_lengths.dtype == np.int32
    assert sequences(dataset) == [[5, 6, 7], [], [65499]]
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert dataset.get(0, 1).tolist() == [6, 7] and dataset.get(0, 1, 1).tolist() == [6]
    assert not dataset.get(0).flags.owndata and not dataset.get(0).flags.writeable


def test_modes_after_the_document_indices_are_accepted(tmp_path):
    prefix = write_golden(tmp_path)
    (tmp_path / "golden.idx").write_bytes(GOLDEN_IDX + b"\0\1\0")
    assert sequences(IndexedDataset(prefix)) == [[5, 6, 7], [], [65499]]
    with pytest.raises(DataError, match="has modes"):
        merge([prefix], tmp_path / "merged")


@pytest.mark.parametrize("code, dtype", [(1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (8, "u2")])
def test_every_integer_dtype_round_trips_with_its_code(tmp_path, code, dtype):
    limits = np.iinfo(dtype)
    with IndexedWriter(tmp_path / "a", dtype) as writer:
        writer.add_document(np.array([limits.min, 0, limits.max], dtype))
    dataset = IndexedDataset(tmp_path / "a")
    assert (tmp_path / "a.idx").read_bytes()[17] == code
    assert dataset.dtype == np.dtype(dtype) and sequences(dataset) == [[limits.min, 0, limits.max]]


def test_best_dtype_keeps_megatrons_margin():
    assert best_dtype(65_499) == np.uint16 and best_dtype(65_500) == np.int32


def test_batch_path_equals_one_document_at_a_time(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 200)
    tokens = rng.integers(0, 60_000, lengths.sum())
    with IndexedWriter(tmp_path / "a", np.int32) as writer:
        writer.add_documents(tokens[: lengths[:50].sum()], lengths[:50])
        writer.add_documents(tokens[lengths[:50].sum() :], lengths[50:])
    with IndexedWriter(tmp_path / "b", np.int32) as writer:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document(document)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_offsets_of_sequences_beyond_2_gib():
    """numpy 1 multiplies int32 lengths by a numpy scalar in int32."""
    lengths = np.array([2**30 + 5, 3], np.int32)
    offsets, end = _packed_offsets(lengths, np.dtype("<i4"), 8)
    assert (offsets.tolist(), end) == ([8, 2**32 + 28], 2**32 + 40)


def test_merge_equals_writing_everything_at_once(tmp_path):
    documents = [[1, 2, 3], [], [4], [5, 6], [7]]
    for name, part in (("all", documents), ("a", documents[:2]), ("b", []), ("c", documents[2:])):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for document in part:
                writer.add_document(np.array(document, np.uint16))
    merge([tmp_path / "a", tmp_path / "b", tmp_path / "c"], tmp_path / "merged")
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"merged{ending}").read_bytes() == (tmp_path / f"all{ending}").read_bytes()


def test_merge_of_sequences_that_lie_out_of_order_keeps_their_order(tmp_path):
    (tmp_path / "a.bin").write_bytes(GOLDEN_BIN)
    idx = bytearray(GOLDEN_IDX)
    idx[46:54] = (2).to_bytes(8, "little")  # sequence 0 begins at the second token
    (tmp_path / "a.idx").write_bytes(idx)
    merge([tmp_path / "a"], tmp_path / "merged")
    assert sequences(IndexedDataset(tmp_path / "merged")) == [[6, 7, 65499], [], [65499]]


def test_merge_of_two_dtypes_is_refused_and_leaves_nothing(tmp_path):
    for name, dtype in (("a", np.uint16), ("b", np.int32)):
        with IndexedWriter(tmp_path / name, dtype) as writer:
            writer.add_document([1])
    with pytest.raises(DataError, match="int32 tokens"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


def test_an_exception_leaves_no_file(tmp_path):
    with pytest.raises(KeyError), IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([1, 2])
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_kill_leaves_nothing_that_opens(tmp_path):
    program = (
        "import os, sys; from megalith.data.indexed import IndexedWriter\n"
        "with IndexedWriter(sys.argv[1], 'u2') as writer:\n"
        "    writer.add_document([1, 2]); writer._file.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")], check=False)
    assert done.returncode == -9
    assert not (tmp_path / "a.bin").exists() and not (tmp_path / "a.idx").exists()


def test_existing_files_are_kept_unless_overwriting(tmp_path):
    prefix = write_golden(tmp_path)
    with pytest.raises(DataError, match="exists"):
        IndexedWriter(prefix, np.uint16)
    assert (tmp_path / "golden.idx").read_bytes() == GOLDEN_IDX
    with IndexedWriter(prefix, np.uint16, overwrite=True) as writer:
        writer.add_document([1])
    assert sequences(IndexedDataset(prefix)) == [[1]]


@pytest.mark.parametrize("tokens", [[65_536], [-1], [0.5], [[1, 2]]])
def test_tokens_that_do_not_fit_are_refused(tmp_path, tokens):
    with pytest.raises(DataError, match="token"), IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.array(tokens))


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    with pytest.raises(DataError, match="add up"), IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([1, 2, 3], [1, 1])
    with pytest.raises(DataError, match="-1"), IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_documents(np.array([1]), np.array([2, -1]))


@pytest.mark.fault(20)
def test_a_file_cut_short_while_it_is_open_is_an_error_and_not_a_crash(tmp_path):
    dataset = IndexedDataset(write_golden(tmp_path))
    with open(tmp_path / "golden.bin", "r+b") as file:
        file.truncate(5)
    with pytest.raises(
        DataError, match=r"golden\.bin ends before byte 6, but had 8 bytes .* truncated since"
    ):
        dataset.get(0)


def test_reading_past_a_sequence_is_an_index_error(tmp_path):
    dataset = IndexedDataset(write_golden(tmp_path))
    for arguments in ((0, 2, 2), (0, -1, 1), (1, 0, 1), (0, 4), (3,)):
        with pytest.raises(IndexError):
            dataset.get(*arguments)


def test_an_unpickled_dataset_maps_the_files_again(tmp_path):
    with IndexedWriter(tmp_path / "big", np.uint16) as writer:
        writer.add_document(np.zeros(100_000, np.uint16))
    pickled = pickle.dumps(IndexedDataset(tmp_path / "big"))
    assert len(pickled) < 1000 and pickle.loads(pickled).num_tokens == 100_000


def test_a_misspelt_prefix_is_told_with_the_nearest_one(tmp_path):
    for name in ("web_text_document", "zebra"):
        write_golden(tmp_path, name)
    with pytest.raises(DataError, match=r"; did you mean \S+/web_text_document\?$"):
        IndexedDataset(tmp_path / "web_text_documnet")
    with pytest.raises(DataError, match="check the path, or make the dataset"):
        IndexedDataset(tmp_path / "quux")


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    write_golden(tmp_path, "corpus_text_document")
    with pytest.raises(DataError, match=r"corpus\.idx and .*corpus\.bin not found.*corpus_text_document"):
        IndexedDataset(tmp_path / "corpus")
    with pytest.raises(DataError, match=r"without|no ending"):
        IndexedDataset(tmp_path / "corpus_text_document.bin")
    (tmp_path / "corpus_text_document.bin").unlink()
    with pytest.raises(DataError, match=r"corpus_text_document\.bin not found"):
        IndexedDataset(tmp_path / "corpus_text_document")


@pytest.mark.fault(20)
def test_every_truncation_of_either_file_is_refused(tmp_path):
    prefix = write_golden(tmp_path)
    for path, whole in ((tmp_path / "golden.idx", GOLDEN_IDX), (tmp_path / "golden.bin", GOLDEN_BIN)):
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(DataError, match=f"{path.name}.* {length} bytes"):
                IndexedDataset(prefix)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "at, value, message",
    [
        (0, b"PK", "begins with"),
        (9, b"\2", "version 2 at byte 9"),
        (17, b"\6", "dtype code 6 at byte 17"),
        (17, b"\0", "dtype code 0"),
        (18, b"\xff" * 8, "18446744073709551615 sequences"),
        (34, b"\xff" * 4, "sequence 0 at byte 0 with -1 tokens"),
        (42, b"\2", "sequence 2 at byte 6 with 2 tokens"),
        (46, b"\xfe" + b"\xff" * 7, "sequence 0 at byte -2"),
        (62, b"\xff" * 7 + b"\x7f", "sequence 2 at byte 9223372036854775807"),
        (70, b"\1", "begin at 0"),
        (78, b"\4", "index 4 followed by 3 at entry 2"),
        (86, b"\4", "end within its 3 sequences"),
    ],
)
@pytest.mark.fault(20)
def test_damage_is_named_with_its_place_and_value(tmp_path, at, value, message):
    prefix = write_golden(tmp_path)
    (tmp_path / "golden.idx").write_bytes(GOLDEN_IDX[:at] + value + GOLDEN_IDX[at + len(value) :])
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.fault(20)
def test_random_damage_is_refused_or_stays_inside_the_file(tmp_path):
    prefix, rng = write_golden(tmp_path), random.Random(0)
    for _ in range(500):
        idx = bytearray(GOLDEN_IDX)
        for _ in range(rng.randint(1, 4)):
            idx[rng.randrange(len(idx))] = rng.randrange(256)
        (tmp_path / "golden.idx").write_bytes(idx)
        try:
            dataset = IndexedDataset(prefix)
        except DataError:
            continue
        for i in range(len(dataset)):
            assert dataset.get(i).tobytes() in GOLDEN_BIN


def test_two_writers_of_one_prefix_are_refused_and_a_lock_that_was_left_holds_nobody(tmp_path):
    (tmp_path / "a.lock").touch()  # of a writer that was killed
    with IndexedWriter(tmp_path / "a", np.uint16) as first:
        with pytest.raises(DataError, match=r"another process is writing .*/a; wait for it to end"):
            IndexedWriter(tmp_path / "a", np.uint16, overwrite=True)
        with IndexedWriter(tmp_path / "b", np.uint16) as other:
            other.add_document(np.arange(2))
        first.add_document(np.arange(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]
    with IndexedWriter(tmp_path / "a", np.uint16, overwrite=True) as again:
        again.add_document(np.arange(4))
    assert IndexedDataset(tmp_path / "a").num_tokens == 4


def test_both_files_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(
            "sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split(".partial")[0]
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: done.append(f"name {b.name}") or replace(a, b))
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.arange(3))
    assert done == ["sync a.bin", "sync a.idx", "name a.bin", "name a.idx", f"sync {tmp_path.name}"]

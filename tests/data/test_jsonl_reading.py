"""Reading JSON Lines: whole lines whatever the block size, compression, and every bad line by its place."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from megalith.data.inputs.jsonl import LineBlock, read_blocks, read_objects
from megalith.data.inputs.sources import expand_inputs, read_texts
from megalith.errors import DataError

LINES = [
    b'{"text": "one"}',
    b"",
    b'{"text": "two", "n": 2}',
    b"   \r",
    '{"text": "dr\u00e9i"}'.encode(),
    b'{"text": ""}',
]


def write(path, content):
    opened = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(opened.get(path.suffix, bytes)(content))
    return path


@pytest.mark.parametrize("block_bytes", [1, 7, 16, 40, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
def test_lines_and_their_places_do_not_depend_on_blocks_or_compression(tmp_path, block_bytes, suffix, end):
    content = b"\n".join(LINES) + end
    path = write(tmp_path / f"a.jsonl{suffix}", content)
    records = []
    for block in read_blocks(path, block_bytes=block_bytes):
        found, bad = block.parse(["text"])
        assert not bad
        records += found
    assert [record.texts for record in records] == [["one"], ["two"], ["dréi"], [""]]
    assert [record.line for record in records] == [1, 3, 5, 6]
    assert [content[record.offset :].split(b"\n")[0] for record in records] == [
        LINES[i] for i in (0, 2, 4, 5)
    ]


def test_positions_count_the_bytes_of_the_compressed_file(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", b'{"text": "some words"}\n' * 50_000)
    positions = [block.position for block in read_blocks(path)]
    assert positions == sorted(positions)
    assert positions[-1] == path.stat().st_size


def test_files_of_several_gzip_members_or_zstd_frames_are_read_to_their_end(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b'{"text": "a"}\n') + gzip.compress(b'{"text": "b"}\n'))
    frame = zstandard.ZstdCompressor().compress
    (tmp_path / "a.zst").write_bytes(frame(b'{"text": "a"}\n') + frame(b"") + frame(b'{"text": "b"}\n'))
    for name in ("a.gz", "a.zst"):
        assert list(read_texts(tmp_path / name, ["text"])) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"text": "a"} {"text": "b"}', "not JSON"),
        (b"[1, 2]", "an array, not a JSON object"),
        (b'"text"', "a string, not a JSON object"),
        (b'{"body": "a", "id": 1}', "no key 'text' (its keys: 'body', 'id')"),
        (b'{"text": null}', "its 'text' is null, not a string"),
        (b'{"text": ["a"]}', "its 'text' is an array, not a string"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at 10 of the line"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
        (rb'{"text": "\ud800"}', "has an unpaired surrogate"),
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"text": ' + b"1" * 10_000 + b"}", "Exceeds the limit"),
        (b'{"text": "a\x00b"}', "not JSON"),
    ],
)
@pytest.mark.fault(20)
def test_a_bad_line_is_named_by_file_line_byte_and_reason(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "also fine"}\n')
    (block,) = read_blocks(path)
    records, (bad,) = block.parse(["text"])
    assert [record.texts for record in records] == [["fine"], ["also fine"]]
    assert (bad.path, bad.line, bad.offset) == (path, 3, 18)
    assert reason in bad.reason
    assert str(bad).startswith(f"{path} line 3 (byte 18) is unusable: ")
    with pytest.raises(DataError, match=r"a\.jsonl line 3 \(byte 18\)"):
        list(read_texts(path, ["text"]))


def test_escaped_surrogate_pairs_are_characters(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "🦊"}).encode())
    assert list(read_texts(path, ["text"])) == ["🦊"]


def test_a_byte_order_mark_before_the_first_line_is_accepted(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')
    assert list(read_texts(path, ["text"])) == ["a", "b"]


@pytest.mark.parametrize("limit", [20, 100, 5000])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.fault(20)
def test_a_line_over_the_limit_is_refused_without_being_held_and_the_next_is_read(tmp_path, limit, suffix):
    long = b'{"text": "' + b"x" * 100_000 + b'"}'
    path = write(tmp_path / f"a.jsonl{suffix}", b'{"text": "a"}\n' + long + b'\n{"text": "b"}\n' + long)
    blocks = list(read_blocks(path, max_line_bytes=limit, block_bytes=64))
    assert max(len(block.data) for block in blocks) <= limit + 64
    parsed = [block.parse(["text"], limit) for block in blocks]
    assert [(r.line, r.offset, r.texts) for records, _ in parsed for r in records] == [
        (1, 0, ["a"]),
        (3, 15 + len(long), ["b"]),
    ]
    bad = [b for _, lines in parsed for b in lines]
    assert [(b.line, b.offset) for b in bad] == [(2, 14), (4, 15 + len(long) + 14)]
    assert f"longer than the limit of {limit} bytes" in bad[0].reason


def test_a_line_just_at_the_limit_is_accepted():
    line = b'{"text": "0123456789"}'
    assert not LineBlock(Path("f"), 1, 0, line, 0).parse(["text"], len(line))[1]
    assert LineBlock(Path("f"), 1, 0, line, 0).parse(["text"], len(line) - 1)[1]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_or_truncated_compressed_file_is_refused(tmp_path, suffix):
    text = "".join(json.dumps({"text": f"{i} {i * i}"}) + "\n" for i in range(20_000)).encode()
    path = write(tmp_path / f"a.jsonl{suffix}", text)
    whole = path.read_bytes()
    assert len(list(read_texts(path, ["text"]))) == 20_000
    for broken in (whole[: len(whole) // 2], whole[:-1], whole[:3], b"not compressed\n"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=rf"is not a complete {suffix} file"):
            list(read_texts(path, ["text"]))
    path.write_bytes(whole[:5000] + b"\0" * 99 + whole[5099:])  # may show as a bad line first
    with pytest.raises(DataError):
        list(read_texts(path, ["text"]))


def test_inputs_keep_their_order_and_globs_are_sorted(tmp_path):
    for name in ("b1.jsonl", "b0.jsonl", "a.jsonl", "odd[1].jsonl"):
        (tmp_path / name).touch()
    names = [tmp_path / "b*.jsonl", tmp_path / "a.jsonl", tmp_path / "odd[1].jsonl"]
    assert [path.name for path in expand_inputs(names)] == ["b0.jsonl", "b1.jsonl", "a.jsonl", "odd[1].jsonl"]


def test_inputs_that_are_missing_repeated_or_folders_are_refused(tmp_path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file matches"):
        expand_inputs([tmp_path / "b*.jsonl"])
    with pytest.raises(DataError, match="listed twice"):
        expand_inputs([tmp_path / "*.jsonl", tmp_path / "a.jsonl"])
    with pytest.raises(DataError, match="has no file that ends in"):
        expand_inputs([tmp_path / "empty"])
    with pytest.raises(DataError, match="no input"):
        expand_inputs([])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("a.csv", "write JSON Lines"),
        ("a.csv.gz", "write JSON Lines"),
        ("a.PDF", "write JSON Lines"),
        ("a.docx", "write JSON Lines"),
        ("a.zip", "extract the files"),
        ("a.tar.gz", "extract the files"),
        ("a.jsonl.bz2", "extract the files"),
    ],
)
def test_other_formats_are_named(tmp_path, name, advice):
    path = write(tmp_path / name, b"PK\x03\x04\x80\n")
    ending = ".tar" if ".tar" in name else f".{name.removesuffix('.gz').rpartition('.')[2].lower()}"
    with pytest.raises(DataError, match=rf"line 1 .*\({ending} files are not supported: {advice}"):
        list(read_objects(path))

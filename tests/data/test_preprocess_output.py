"""What preprocess writes: the bytes of a naive writer, whatever the workers, compression and inputs."""

import gzip
import json
import struct

import numpy as np
import pytest
import zstandard

from megalith.data.indexed import IndexedDataset
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.preprocessing.sentences import split_sentences
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer

WORDS = ["alpha", "βeta", "gamma 3.14", "delta. Next", "\n\n", "naïve", "🦊", "the", "the", "of"]


def make_texts(count, seed=0):
    rng = np.random.RandomState(seed)
    return [" ".join(rng.choice(WORDS, size=rng.randint(1, 60))) for _ in range(count)]


def write_jsonl(path, texts, **more):
    lines = [json.dumps({"text": text, **{k: v[i] for k, v in more.items()}}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def naive_files(documents, code, fmt):
    """(.bin, .idx) of documents, each a list of sequences, each a list of ids, straight from the format."""
    sequences = [sequence for document in documents for sequence in document]
    ends = np.cumsum([0] + [len(document) for document in documents])
    size = struct.calcsize(fmt)
    offsets = np.cumsum([0] + [len(sequence) * size for sequence in sequences])[:-1]
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    idx += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    idx += struct.pack(f"<{len(sequences)}q", *offsets) + struct.pack(f"<{len(ends)}q", *ends)
    flat = [i for sequence in sequences for i in sequence]
    return struct.pack(f"<{len(flat)}{fmt}", *flat), idx


def read_files(prefix):
    return tuple((prefix.parent / f"{prefix.name}{suffix}").read_bytes() for suffix in (".bin", ".idx"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    write_jsonl(folder / "text.jsonl", make_texts(50))
    train_tokenizer([folder / "text.jsonl"], 300, folder)
    return build_tokenizer("HuggingFaceTokenizer", folder)


@pytest.fixture
def run(tmp_path):
    def run(inputs, tokenizer, name="out", **options):
        options = {"workers": 0, "show_progress": False, **options}
        return preprocess(inputs, tmp_path / name, tokenizer, **options)

    return run


@pytest.mark.parametrize("append_eod", [False, True])
def test_files_are_those_of_a_naive_writer(bpe, run, tmp_path, append_eod):
    texts = make_texts(200)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    summary = run([source], bpe, append_eod=append_eod)
    end = [bpe.eod] if append_eod else []
    documents = [[bpe.encode(text) + end] for text in texts]
    assert read_files(tmp_path / "out_text_document") == naive_files(documents, 8, "H")
    assert summary.prefixes == [f"{tmp_path}/out_text_document"]
    assert (summary.documents, summary.sequences) == ([200], 200)
    assert summary.tokens == sum(len(document[0]) for document in documents)
    assert summary.bytes == source.stat().st_size
    assert (summary.empty, summary.skipped) == (0, 0)


def test_a_vocabulary_of_65500_and_more_is_written_as_int32(run, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["1 2 70000", "65535"])
    for size, code, fmt in ((65_498, 8, "H"), (65_499, 4, "i"), (100_000, 4, "i")):
        if size < 70_000:
            source = write_jsonl(tmp_path / "a.jsonl", ["1 2 65000"])
            documents = [[[1, 2, 65000]]]
        else:
            source = write_jsonl(tmp_path / "a.jsonl", ["1 2 70000", "65535"])
            documents = [[[1, 2, 70000]], [[65535]]]
        run([source], build_tokenizer("NullTokenizer", vocab_size=size), overwrite=True)
        assert read_files(tmp_path / "out_text_document") == naive_files(documents, code, fmt)


def test_workers_and_compression_do_not_change_a_byte(bpe, run, tmp_path, monkeypatch):
    plain = write_jsonl(tmp_path / "a.jsonl", make_texts(2_600))  # several blocks
    content = plain.read_bytes()
    assert len(content) > 2 << 18
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    run([plain], bpe, "reference")
    reference = read_files(tmp_path / "reference_text_document")
    for name, threads, options in (
        ("a.jsonl", 16, {"workers": 2}),
        ("a.jsonl.gz", 16, {}),
        ("a.jsonl.zst", 0, {"workers": 1}),  # a process
    ):
        monkeypatch.setattr("megalith.data.preprocessing.preprocess.MAX_THREADS", threads)
        summary = run([tmp_path / name], bpe, "other", overwrite=True, **options)
        assert read_files(tmp_path / "other_text_document") == reference
        assert summary.bytes == len(content)


def test_several_inputs_follow_one_another(bpe, run, tmp_path):
    texts = make_texts(30)
    for i in range(3):
        write_jsonl(tmp_path / f"part{i}.jsonl", texts[i * 10 : i * 10 + 10])
    write_jsonl(tmp_path / "whole.jsonl", texts[20:] + texts[:20])
    run([tmp_path / "part2.jsonl", tmp_path / "part[01].jsonl"], bpe, "parts")
    run([tmp_path / "whole.jsonl"], bpe, "whole")
    assert read_files(tmp_path / "parts_text_document") == read_files(tmp_path / "whole_text_document")


def test_each_json_key_is_a_dataset_of_its_own(bpe, run, tmp_path):
    texts, titles = make_texts(20), make_texts(20, seed=1)
    source = write_jsonl(tmp_path / "a.jsonl", texts, title=titles)
    summary = run([source], bpe, json_keys=["title", "text"])
    assert summary.documents == [20, 20]
    for key, column in (("title", titles), ("text", texts)):
        expected = naive_files([[bpe.encode(text)] for text in column], 8, "H")
        assert read_files(tmp_path / f"out_{key}_document") == expected


@pytest.mark.parametrize("append_eod", [False, True])
def test_split_sentences_makes_each_sentence_a_sequence(bpe, run, tmp_path, append_eod):
    texts = ["One. Two! Three?", "Only one", "", "Four.\n\nFive", " \n"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    summary = run([source], bpe, split_sentences=True, append_eod=append_eod)
    documents = [[bpe.encode(s) for s in split_sentences(text)] for text in texts]
    documents = [document for document in documents if document]
    if append_eod:
        for document in documents:
            document[-1].append(bpe.eod)
    assert [len(document) for document in documents] == [3, 1, 2]
    assert read_files(tmp_path / "out_text_sentence") == naive_files(documents, 8, "H")
    assert (summary.documents, summary.sequences, summary.empty) == ([3], 6, 2)
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    assert dataset.document_indices.tolist() == [0, 3, 4, 6]


def test_empty_documents_are_left_out_and_counted(bpe, run, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["", "one", "", "two", ""])
    summary = run([source], bpe, append_eod=True)
    expected = naive_files([[[*bpe.encode(text), bpe.eod]] for text in ("one", "two")], 8, "H")
    assert read_files(tmp_path / "out_text_document") == expected
    assert (summary.documents, summary.empty) == ([2], 3)

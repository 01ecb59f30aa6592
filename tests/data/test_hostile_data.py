"""Every number of an .idx, and every value of a tokenizer's files, replaced: a sentence, soon and cheaply."""

import base64
import json
import struct
import tomllib
from pathlib import Path

import numpy as np
import pytest
from default_cases import by_default
from hostile import VALUES, problems, spoiled
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from megalith.data.dataset import GPTDataset
from megalith.data.idx_format import HEADER
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.tokenizers.open_tokenizer import build_tokenizer, load_tokenizer
from megalith.data.tokenizers.tiktoken import TikTokenizer
from megalith.errors import DataError


def test_every_number_of_an_index(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for length in (5, 7, 4):
            writer.add_document(np.arange(length))
    file = tmp_path / "a.idx"
    content = file.read_bytes()
    sizes = [("<Q", 9), ("<B", 17), ("<Q", 18), ("<Q", 26)]
    sizes += [("<i", HEADER.size + 4 * i) for i in range(3)]
    sizes += [("<q", HEADER.size + 12 + 8 * i) for i in range(3 + 4)]
    numbers = (0, 1, 2, 3, 5, 8, 255, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -1, -(2**31), -(2**63))

    def cases():
        for form, at in sizes:
            for number in numbers:
                try:
                    packed = struct.pack(form, number)
                except struct.error:
                    continue
                yield f"byte {at} = {number}", content[:at] + packed + content[at + len(packed) :]
        yield from ((f"cut at {at}", content[:at]) for at in range(len(content)))

    def read(changed: bytes) -> None:
        file.write_bytes(changed)
        dataset = IndexedDataset(tmp_path / "a")
        for i in range(len(dataset)):
            dataset.get(i)
        samples = GPTDataset(dataset, 0, len(dataset), 4, 3, seed=1)
        [samples[i] for i in range(len(samples))]

    count, refused, found = problems(cases(), read)
    assert not found, "\n".join(found[:20])
    assert count > 200 and refused > count * 0.7


@pytest.mark.parametrize("stride", by_default([4, 1], 4))
def test_every_value_of_the_files_beside_a_tokenizer(tmp_path, stride):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("a b\n")
    tokenizer = build_tokenizer("GPT2BPETokenizer", tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer._tokenizer.to_str())
    side = {
        "tokenizer_config.json": {"eos_token": {"content": "<|endoftext|>"}},
        "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
        "generation_config.json": {"eos_token_id": [3]},
        "config.json": {"eos_token_id": 3},
        "vocab.json": {"a": 0, "b": 1, "ab": 2},
        "tokenizer.json": json.loads((tmp_path / "tokenizer.json").read_text()),
    }
    for name, content in side.items():
        kind = "GPT2BPETokenizer" if name == "vocab.json" else "HuggingFaceTokenizer"
        before = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b"{}"

        def read(changed: object, name: str = name, kind: str = kind) -> None:
            (tmp_path / name).write_text(json.dumps(changed))
            build_tokenizer(kind, tmp_path).encode("ab")

        _, _, found = problems(iter([*spoiled(content, (), stride), *((repr(v), v) for v in VALUES)]), read)
        assert not found, f"{name}: " + "\n".join(found[:20])
        (tmp_path / name).write_bytes(before)


@pytest.mark.parametrize("stride", by_default([4, 1], 4))
def test_every_value_of_a_saved_tokenizer_and_of_a_list_of_ranks(tmp_path, stride):
    for tokenizer in (build_tokenizer("ByteTokenizer"), build_tokenizer("NullTokenizer", vocab_size=9)):
        tokenizer.save(tmp_path)
        spec = json.loads((tmp_path / "megalith_tokenizer.json").read_text())

        def read(changed: object) -> None:
            (tmp_path / "megalith_tokenizer.json").write_text(json.dumps(changed))
            load_tokenizer(tmp_path)

        spoiled_specs = [*spoiled(spec, (), stride), *((repr(v), v) for v in VALUES)]
        _, refused, found = problems(iter(spoiled_specs), read)
        assert not found and refused > 100 / stride, "\n".join(found[:20])
    ranks = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": ""} for i in range(256)
    ]

    def tiktoken(changed: object) -> None:
        TikTokenizer({"ranks.tiktoken": json.dumps(changed).encode()})

    _, refused, found = problems(spoiled(ranks, (), stride), tiktoken)
    assert not found and refused > 100 / stride, "\n".join(found[:20])


def test_a_regular_expression_that_panics_is_a_sentence(tmp_path):
    tokenizer = Tokenizer(models.BPE({"x": 0, "y": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    built, text = build_tokenizer("HuggingFaceTokenizer", tmp_path), "x" * 5000
    for encode in (
        built.encode,
        lambda text: built.encode_batch([text]),
        lambda text: built.encode_marked([text], [[]]),
    ):
        with pytest.raises(DataError, match="the tokenizers library failed on a text"):
            encode(text)


def test_the_declared_jinja2_has_no_way_out_of_its_sandbox():
    """3.1.5 let a chat template read the environment: CVE-2025-27516."""
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    (floor,) = (name.removeprefix("jinja2>=") for name in declared if name.startswith("jinja2"))
    assert tuple(map(int, floor.split("."))) >= (3, 1, 6)

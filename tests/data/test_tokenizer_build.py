"""Building, saving and comparing tokenizers, and every way in which their files can be wrong."""

import json
import pickle
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from megalith.config import RunConfig
from megalith.data.tokenizers.open_tokenizer import TOKENIZER_TYPES, build_tokenizer, load_tokenizer
from megalith.errors import ConfigError, DataError
from megalith.training.build import build_run_tokenizer


def write_tokenizer_json(path, words=("a", "b", "<eos>", "</s>")):
    library = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    path.parent.mkdir(parents=True, exist_ok=True)
    library.save(str(path))
    return path


def write_gpt2(folder):
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (folder / "merges.txt").write_text("a b\n")


@pytest.mark.parametrize(
    ("file", "content", "eod"),
    [
        ("tokenizer_config.json", {"eos_token": "<eos>"}, 2),
        ("tokenizer_config.json", {"eos_token": {"content": "<eos>", "lstrip": False}}, 2),
        ("tokenizer_config.json", {"eos_token": None}, 3),
        ("tokenizer_config.json", {"eos_token": "not in the vocabulary"}, 3),
        ("special_tokens_map.json", {"eos_token": "<eos>"}, 2),
        ("generation_config.json", {"eos_token_id": [1, 2]}, 1),
        ("config.json", {"eos_token_id": 0}, 0),
        ("config.json", {"eos_token_id": 999}, 3),
        ("unrelated.json", {}, 3),
    ],
)
def test_end_of_document_is_what_the_files_beside_the_tokenizer_name(tmp_path, file, content, eod):
    write_tokenizer_json(tmp_path / "tokenizer.json")
    (tmp_path / file).write_text(json.dumps(content))
    assert build_tokenizer("HuggingFaceTokenizer", tmp_path).eod == eod
    assert build_tokenizer("HuggingFaceTokenizer", tmp_path / "tokenizer.json").eod == eod


def test_a_vocabulary_without_an_end_of_document_has_none(tmp_path):
    path = write_tokenizer_json(tmp_path / "small.json", words=("a", "b"))
    assert build_tokenizer("HuggingFaceTokenizer", path).eod is None


def test_vocab_size_counts_added_tokens_and_holes(tmp_path):
    path = write_tokenizer_json(tmp_path / "tokenizer.json")
    library = Tokenizer.from_file(str(path))
    library.add_tokens([AddedToken("new")])
    library.save(str(path))
    content = json.loads(path.read_text())
    assert build_tokenizer("HuggingFaceTokenizer", path).vocab_size == 5
    content["model"]["vocab"]["far"] = 99
    path.write_text(json.dumps(content))
    assert build_tokenizer("HuggingFaceTokenizer", path).vocab_size == 100


@pytest.mark.parametrize(
    "kind", ["HuggingFaceTokenizer", "GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer"]
)
def test_a_saved_or_pickled_tokenizer_is_the_same_tokenizer(tmp_path, kind):
    source = tmp_path / "source"
    write_tokenizer_json(source / "tokenizer.json")
    write_gpt2(source)
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    tokenizer = build_tokenizer(kind, source, vocab_size=50)
    tokenizer.save(tmp_path / "saved")
    for copy in (load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))):
        assert type(copy) is type(tokenizer)
        assert (copy.vocab_size, copy.eod) == (tokenizer.vocab_size, tokenizer.eod)
        assert copy.fingerprint == tokenizer.fingerprint
    assert not [path for path in (tmp_path / "saved").iterdir() if "partial" in path.name]


def test_fingerprint_depends_on_the_vocabulary_and_not_on_the_layout_of_its_file(tmp_path):
    path = write_tokenizer_json(tmp_path / "tokenizer.json")
    first = build_tokenizer("HuggingFaceTokenizer", path).fingerprint
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7, sort_keys=True))
    assert build_tokenizer("HuggingFaceTokenizer", path).fingerprint == first
    write_tokenizer_json(path, words=("a", "c", "<eos>", "</s>"))
    assert build_tokenizer("HuggingFaceTokenizer", path).fingerprint != first
    assert len(first) == 64


def test_a_tokenizer_changed_after_saving_is_refused(tmp_path):
    write_tokenizer_json(tmp_path / "a" / "tokenizer.json")
    build_tokenizer("HuggingFaceTokenizer", tmp_path / "a").save(tmp_path / "b")
    write_tokenizer_json(tmp_path / "b" / "tokenizer.json", words=("a", "z"))
    with pytest.raises(DataError, match="changed or damaged"):
        load_tokenizer(tmp_path / "b")


def test_a_damaged_spec_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read the tokenizer spec"):
        load_tokenizer(tmp_path)
    spec = tmp_path / "megalith_tokenizer.json"
    for content in ("not json", "[]", "{}", '{"tokenizer_type": "Other"}'):
        spec.write_text(content)
        with pytest.raises(DataError, match="spec"):
            load_tokenizer(tmp_path)


def test_a_saved_tokenizer_that_lost_its_file_is_refused(tmp_path):
    write_tokenizer_json(tmp_path / "a" / "tokenizer.json")
    build_tokenizer("HuggingFaceTokenizer", tmp_path / "a").save(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json.*No such file"):
        load_tokenizer(tmp_path / "b")


def test_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="did you mean 'HuggingFaceTokenizer'") as error:
        build_tokenizer("HuggingfaceTokenizer")
    assert all(kind in str(error.value) for kind in TOKENIZER_TYPES)


@pytest.mark.parametrize(
    ("kind", "needs"),
    [
        ("HuggingFaceTokenizer", "tokenizer_model"),
        ("SentencePieceTokenizer", "tokenizer_model"),
        ("TikTokenizer", "tokenizer_model"),
        ("GPT2BPETokenizer", "vocab_file"),
        ("NullTokenizer", "vocab_size"),
    ],
)
def test_a_missing_argument_is_named(kind, needs):
    with pytest.raises(ConfigError, match=needs):
        build_tokenizer(kind)


@pytest.mark.parametrize(
    "kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer", "GPT2BPETokenizer"]
)
def test_a_missing_file_is_named(kind, tmp_path):
    with pytest.raises(DataError, match=r"no/such/place|no file or folder"):
        build_tokenizer(kind, tmp_path / "no/such/place")


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00garbage", b'{"version": "1.0"}', b"[[[", b"[1, 2]", b'[{"rank": 0}]']
)
def test_a_damaged_file_is_refused(kind, content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError):
        build_tokenizer(kind, path)


@pytest.mark.parametrize(
    ("vocab", "merges", "reason"),
    [
        ('{"a": 0}', "a b\n", "does not fit"),
        ("[]", "", "not a JSON object"),
        ('{"a": "x"}', "", "not a JSON object"),
        ("{", "", "not JSON"),
        ('{"a": 0, "b": 1}', "#version: 0.2\na b\na b c\n", "line 3 has 3 words"),
    ],
)
def test_damaged_gpt2_files_are_refused(vocab, merges, reason, tmp_path):
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(DataError, match=reason):
        build_tokenizer("GPT2BPETokenizer", tmp_path)


def test_a_folder_without_tokenizer_json_names_the_kind_that_fits(tmp_path):
    write_gpt2(tmp_path)
    with pytest.raises(DataError, match="set tokenizer_type to GPT2BPETokenizer"):
        build_tokenizer("HuggingFaceTokenizer", tmp_path)


@pytest.mark.parametrize(
    ("package", "kind"), [("sentencepiece", "SentencePieceTokenizer"), ("tiktoken", "TikTokenizer")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "file"
    path.write_text(
        "".join(f"{__import__('base64').b64encode(bytes([b])).decode()} {b}\n" for b in range(256))
    )
    with pytest.raises(ConfigError, match=r"pip install .*\[tokenizers\]"):
        build_tokenizer(kind, path)


def test_a_truncated_tiktoken_file_is_refused(tmp_path):
    path = tmp_path / "small.tiktoken"
    path.write_text("YQ== 0\nYg== 1\n")
    with pytest.raises(DataError, match="254 of 256 bytes missing"):
        build_tokenizer("TikTokenizer", path)
    path.write_text("YQ== 0\nYg==\n")
    with pytest.raises(DataError, match="line 2"):
        build_tokenizer("TikTokenizer", path)


def test_null_tokenizer_refuses_words_and_ids_outside_its_vocabulary():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=10)
    with pytest.raises(DataError, match="whole numbers"):
        tokenizer.encode("1 two 3")
    with pytest.raises(DataError, match=r"token id 11 is not in \[0, 11\)"):
        tokenizer.encode("1 11")


def test_a_hub_name_is_found_in_the_local_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    revision = "0" * 40
    repository = tmp_path / "models--some-org--some-model"
    write_tokenizer_json(repository / "snapshots" / revision / "tokenizer.json")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert build_tokenizer("HuggingFaceTokenizer", "some-org/some-model").vocab_size == 4


def test_gpt2s_two_files_are_found_by_a_hub_name(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    revision = "0" * 40
    snapshot = tmp_path / "models--gpt2" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (snapshot / "merges.txt").write_text("a b\n")
    (tmp_path / "models--gpt2" / "refs").mkdir()
    (tmp_path / "models--gpt2" / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    tokenizer = build_tokenizer("GPT2BPETokenizer", "gpt2")
    assert (tokenizer.encode("ab"), tokenizer.eod) == ([2], 3)
    with pytest.raises(DataError, match="hf download gpt2-xl"):
        build_tokenizer("GPT2BPETokenizer", "gpt2-xl")


def test_a_hub_name_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="hf download some-org/other-model"):
        build_tokenizer("HuggingFaceTokenizer", "some-org/other-model")
    with pytest.raises(DataError, match="there is no file or folder 'no--name'; check the path"):
        build_tokenizer("HuggingFaceTokenizer", "no--name")


def test_the_name_of_a_file_is_never_looked_for_on_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"there is no file or folder 'data/tokenizer.json'; check the path"):
        build_tokenizer("HuggingFaceTokenizer", "data/tokenizer.json")
    with pytest.raises(DataError, match=r"there is no file or folder '\./tokenizer'; check"):
        build_tokenizer("HuggingFaceTokenizer", "./tokenizer")


def test_the_setting_of_a_missing_tokenizer_is_named(tmp_path):
    tree = dict(data=dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="data/tokenizer.json"))
    with pytest.raises(
        DataError, match=r"^data\.tokenizer_model: there is no file or folder 'data/tokenizer.json'; "
    ):
        build_run_tokenizer(RunConfig.from_tree(tree))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"^merge_file: cannot read .*merges.txt"):
        build_tokenizer(
            "GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt"
        )


def test_a_hub_name_without_the_hub_library_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="pip install huggingface_hub"):
        build_tokenizer("HuggingFaceTokenizer", "some-org/some-model")

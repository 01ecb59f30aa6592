"""A dataset made with one tokenizer is refused by a run with another, even if the two have the same size."""

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer

from megalith.cli.main import main
from megalith.data.dataset_tokenizer import describe_tokenizer, read_record
from megalith.data.indexed import IndexedDataset, IndexedWriter, merge
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import ConfigError, DataError

TEXTS = {
    "animals": ["the cat sat on the mat and saw the dog", "a dog and a cat sat"],
    "numbers": ["one two three four five six", "seven eight nine ten eleven"],
}
NUMBERS = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "numbers"]


@pytest.fixture(autouse=True)
def tokenizers(tmp_path):
    """Train two tokenizers of the same size, `animals` and `numbers`, each on a file of that name."""
    for name, texts in TEXTS.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 20))
        assert train_tokenizer([f"{name}.jsonl"], 270, name).vocab_size == 270


def make(prefix="data", tokenizer="animals", **options):
    """Preprocess animals.jsonl. Return the prefix of the dataset."""
    kind = "HuggingFaceTokenizer"
    options = {"append_eod": True, "workers": 0, "show_progress": False} | options
    return preprocess(["animals.jsonl"], prefix, build_tokenizer(kind, tokenizer), **options).prefixes[0]


def run_file(prefix, tokenizer="numbers", kind="HuggingFaceTokenizer", **data):
    named = {"tokenizer_type": kind} | ({"tokenizer_model": tokenizer} if tokenizer else {})
    tree = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 512},
        "data": {"data_path": prefix, "split": "100,0,0", "seq_length": 16, "num_workers": 0} | named | data,
        "optim": {"lr": 1e-3},
        "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 1, "output_dir": "run"},
        "runtime": {"device": "cpu"},
    }
    Path("run.yaml").write_text(json.dumps(tree))
    return "run.yaml"


def refusal(capsys, *words):
    capsys.readouterr()
    assert main([str(word) for word in words]) == ConfigError.exit_code
    return " ".join(capsys.readouterr().err.split())


def test_a_run_with_another_tokenizer_of_the_same_size_is_refused_with_both_names(capsys):
    prefix = make()
    assert main(["data", "stats", "--config", run_file(prefix, "animals")]) == 0
    for words in (
        ["train", run_file(prefix)],
        ["data", "stats", "--config", run_file([0.5, prefix, 0.5, make("more")])],
        ["data", "show", prefix, "--seq-length", 8, "--num-samples", 1, *NUMBERS],
    ):
        message = refusal(capsys, *words)
        assert f"{prefix} was made with HuggingFaceTokenizer animals (270 entries, fingerprint" in message
        assert "but the tokenizer is HuggingFaceTokenizer numbers (270 entries, fingerprint" in message
        assert (
            "data.tokenizer_model to the tokenizer that made it" in message
            and "preprocess the text again" in message
        )


def test_a_dataset_without_a_record_or_with_that_of_other_files_is_not_compared():
    prefix = make()
    record = Path(f"{prefix}.tokenizer.json").read_bytes()
    with IndexedWriter(prefix, np.uint16, overwrite=True) as writer:  # as Megatron would write it
        writer.add_document(np.arange(200))
    assert not Path(f"{prefix}.tokenizer.json").exists()
    assert main(["data", "stats", "--config", run_file(prefix)]) == 0
    Path(f"{prefix}.tokenizer.json").write_bytes(record)
    assert read_record(prefix) is None
    assert main(["data", "stats", "--config", run_file(prefix)]) == 0


def test_tokenizers_that_differ_only_in_special_tokens_or_kind_of_file_are_accepted(capsys):
    prefix = make()
    other = Tokenizer.from_file("animals/tokenizer.json")
    other.add_special_tokens(["<|user|>", "<|assistant|>"])
    Path("chat").mkdir()
    other.save("chat/tokenizer.json")
    model = json.loads(Path("animals/tokenizer.json").read_text())["model"]
    Path("gpt2").mkdir()
    Path("gpt2/vocab.json").write_text(json.dumps(model["vocab"]))
    Path("gpt2/merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    fingerprints = {read_record(prefix).fingerprint}
    for name, kind in (("chat", "HuggingFaceTokenizer"), ("gpt2", "GPT2BPETokenizer")):
        fingerprints.add(build_tokenizer(kind, name).fingerprint)
        assert main(["data", "stats", "--config", run_file(prefix, name, kind)]) == 0
    assert len(fingerprints) == 3
    assert main(["data", "stats", "--config", run_file(prefix, None, "NullTokenizer")]) == 0
    assert "was made with" in refusal(capsys, "train", run_file(prefix, None, "ByteTokenizer"))


def test_words_that_the_sample_lacks_are_compared_by_the_vocabulary():
    """Every word of the sample is unknown to these two."""
    for name, words in (("a", ["alpha", "beta"]), ("b", ["gamma", "delta"])):
        vocab = {word: i for i, word in enumerate(["[UNK]", "<|endoftext|>", *words])}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
        fields = ("truncation", "padding", "normalizer", "post_processor", "decoder")
        tree = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": {"type": "Whitespace"}}
        Path(name).mkdir()
        Path(f"{name}/tokenizer.json").write_text(json.dumps(tree | dict.fromkeys(fields)))
    first, second = (describe_tokenizer(build_tokenizer("HuggingFaceTokenizer", name)) for name in "ab")
    assert first.sample_sha256 == second.sample_sha256 and not first.gives_same_ids(second)


def test_the_token_before_a_text_makes_no_difference():
    Path("text.txt").write_text("\n".join(text for texts in TEXTS.values() for text in texts))
    options = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input="text.txt", model_prefix="small", **options)
    plain, with_begin = (
        build_tokenizer(kind, "small.model") for kind in ("SentencePieceTokenizer", "Llama2Tokenizer")
    )
    assert plain.encode("cat") == with_begin.encode("cat")[1:]
    assert describe_tokenizer(plain).sample_sha256 == describe_tokenizer(with_begin).sample_sha256


@pytest.mark.parametrize("setting", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_another_end_of_document_is_refused_where_a_setting_looks_for_it(capsys, setting):
    prefix = make()
    eod = read_record(prefix).end_of_document
    Path("instruct").mkdir()
    tokenizer = Tokenizer.from_file("animals/tokenizer.json")
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save("instruct/tokenizer.json")
    Path("instruct/tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    assert main(["data", "stats", "--config", run_file(prefix, "instruct")]) == 0
    message = refusal(capsys, "train", run_file(prefix, "instruct", **{setting: True}))
    assert f"end with the token {eod}, but" in message
    assert f"is {tokenizer.token_to_id('<|end|>')}, which data.{setting} looks for" in message


def test_a_damaged_record_is_named(capsys):
    prefix = make()
    for content in ("{", "[]", "{}", json.dumps({"tokenizer_type": 3})):
        Path(f"{prefix}.tokenizer.json").write_text(content)
        with pytest.raises(
            DataError, match=r"data_text_document\.tokenizer\.json, .* is damaged .* remove it"
        ):
            read_record(prefix)


def test_a_merge_keeps_the_record_and_refuses_two_tokenizers():
    first, second = make("first"), make("second")
    merge([first, second], "merged")
    assert read_record("merged").fingerprint == read_record(first).fingerprint
    assert IndexedDataset("merged").num_documents == 80
    with pytest.raises(DataError, match=r"first_text_document was made with .*animals.* and .*numbers"):
        merge([first, make("third", "numbers")], "mixed")
    Path(f"{second}.tokenizer.json").unlink()
    merge([first, second], "merged", overwrite=True)
    assert read_record("merged") is None

"""Each kind of tokenizer against an independent implementation built from the same files."""

import base64
import io
import json

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
import transformers

from megalith.data.tokenizers import tiktoken as ours_tiktoken
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import ConfigError, DataError

TEXTS = [
    "The quick brown fox jumps over the lazy dog; it doesn't look back.",
    "def encode(self, text):\n    return [1, 2, 3]  # numbers: 12345 and 67.89\n\n\n\tif x:\r\n        pass   ",
    "Größe, naïve café, Ελληνικά, 日本語のテキスト。한국어 🦊🏔️ e\u0301",
    " leading and trailing  ",
    "a",
    "",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A folder with tokenizer.json, its tokenizer_config.json, vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("bpe")
    with open(folder / "text.jsonl", "w") as file:
        for text in TEXTS * 3:
            file.write(json.dumps({"text": text}) + "\n")
    train_tokenizer([folder / "text.jsonl"], 400, folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    return folder


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "small.model"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:4] * 4),
        model_writer=model,
        vocab_size=350,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def ranks(bpe):
    """Byte-level ranks of a small vocabulary: the 256 bytes, then pairs that are often found."""
    pairs = [b"th", b"he", b" t", b"  ", b"er", b"in", b"the", b" the", b"\n\n", b"ing"]
    return {token: i for i, token in enumerate([bytes([b]) for b in range(256)] + pairs)}


def assert_matches(tokenizer, reference, texts=TEXTS):
    expected = [list(reference(text)) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == expected
    assert [list(ids) for ids in tokenizer.encode_batch(texts)] == expected
    assert all(0 <= i < tokenizer.vocab_size for ids in expected for i in ids)


def assert_round_trips(tokenizer):
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS


def test_huggingface_tokenizer_matches_transformers(bpe):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", bpe / "tokenizer.json")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"))
    assert_matches(tokenizer, lambda text: reference.encode(text, add_special_tokens=False))
    assert_round_trips(tokenizer)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_huggingface_tokenizer_adds_no_special_tokens_that_its_file_would_add(bpe, tmp_path):
    from tokenizers import Tokenizer, processors

    library = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    plain = library.encode("hello there").ids
    library.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    library.enable_truncation(2)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path)
    assert tokenizer.encode("hello there") == plain
    assert [list(ids) for ids in tokenizer.encode_batch(["hello there"])] == [plain]


def test_gpt2_tokenizer_matches_transformers(bpe):
    tokenizer = build_tokenizer(
        "GPT2BPETokenizer", vocab_file=bpe / "vocab.json", merge_file=bpe / "merges.txt"
    )
    reference = transformers.GPT2TokenizerFast(
        vocab=str(bpe / "vocab.json"), merges=str(bpe / "merges.txt"), clean_up_tokenization_spaces=False
    )
    texts = [*TEXTS, "one<|endoftext|>two"]
    assert_matches(tokenizer, lambda text: reference.encode(text, add_special_tokens=False), texts)
    assert_round_trips(tokenizer)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eod == reference.eos_token_id


@pytest.mark.parametrize("template", ["$A", "<|b|> $A", "$A <|endoftext|>", "<|b|> <|b|> $A <|endoftext|>"])
def test_a_prompt_has_the_special_tokens_that_transformers_gives_it(bpe, tmp_path, template):
    file = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    file.add_special_tokens(["<|b|>"])
    named = [(name, file.token_to_id(name)) for name in ("<|b|>", "<|endoftext|>")]
    file.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=named)
    file.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in filter(None, TEXTS):
        assert tokenizer.encode_prompt(text) == reference(text).input_ids
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False).input_ids
    written = template.replace(" ", "").replace("$A", "one")
    assert tokenizer.encode_prompt(written) == reference("one").input_ids  # none is repeated
    assert tokenizer.encode_prompt("") == []


def test_gpt2_tokenizer_takes_the_folder_of_both_files(bpe):
    by_folder = build_tokenizer("GPT2BPETokenizer", bpe)
    by_file = build_tokenizer(
        "GPT2BPETokenizer", vocab_file=bpe / "vocab.json", merge_file=bpe / "merges.txt"
    )
    assert by_folder.fingerprint == by_file.fingerprint


def test_llama_2s_tokenizer_begins_each_text_and_reads_what_was_trained_with_the_plain_one(
    sentencepiece_model,
):
    tokenizer = build_tokenizer("Llama2Tokenizer", sentencepiece_model)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model), add_bos=True)
    assert_matches(tokenizer, reference.encode)
    assert tokenizer.fingerprint == build_tokenizer("SentencePieceTokenizer", sentencepiece_model).fingerprint
    assert tokenizer.encode_prompt("a dog") == tokenizer.encode("a dog")
    marked = tokenizer.encode_marked(["a dog"], [[(0, 5)]])[0]  # a chat template writes its own <s>
    assert marked == (reference.encode("a dog")[1:], [True] * len(marked[0]))


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_word_pieces_match_transformers(tmp_path, kind):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "quick", "The", "brown", "##s", "fox", "##es", "a", "##b", ",",
             ".", "'", "nai", "##ve", "naïve", "(", ")", "1", "##2", "##3"]  # fmt: skip
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = build_tokenizer(kind, vocab_file=tmp_path / "vocab.txt")
    reference = transformers.BertTokenizer(
        {word: i for i, word in enumerate(words)}, do_lower_case=kind == "BertWordPieceLowerCase"
    )
    texts = [*TEXTS, "The quick foxes, naïve (browns) 123 ab."]
    assert_matches(tokenizer, lambda text: reference.encode(text, add_special_tokens=False), texts)
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(words), None)
    assert tokenizer.encode("foxes") == [words.index("fox"), words.index("##es")]
    with pytest.raises(ConfigError, match="needs vocab_file"):
        build_tokenizer(kind)
    (tmp_path / "vocab.txt").write_text("no\npieces\n")
    with pytest.raises(DataError, match=r"has no \[UNK\]"):
        build_tokenizer(kind, vocab_file=tmp_path / "vocab.txt")


def test_sentencepiece_tokenizer_matches_the_library(sentencepiece_model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", sentencepiece_model)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert_matches(tokenizer, reference.encode_as_ids)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert (tokenizer.vocab_size, tokenizer.eod) == (reference.vocab_size(), reference.eos_id())


def test_tiktoken_rank_file_matches_the_library(ranks, tmp_path):
    path = tmp_path / "small.tiktoken"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for t, i in ranks.items()))
    tokenizer = build_tokenizer("TikTokenizer", path)
    reference = tiktoken.Encoding(
        "reference",
        pat_str=ours_tiktoken.CL100K_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )
    assert_matches(tokenizer, reference.encode_ordinary)
    assert_round_trips(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(ranks) + 1, len(ranks))
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"
    assert tokenizer.eod not in tokenizer.encode("a special token's name in text is text: <|endoftext|>")


def test_llama_3s_tokenizer_begins_each_text_and_reads_what_was_cut_by_tiktoken(ranks, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for t, i in ranks.items()))
    tokenizer, count = build_tokenizer("Llama3Tokenizer", path), len(ranks)
    reference = tiktoken.Encoding(
        "reference", pat_str=ours_tiktoken.LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    assert_matches(tokenizer, lambda text: [count, *reference.encode_ordinary(text)])
    assert (tokenizer.vocab_size, tokenizer.eod) == (count + 256, count + 1)
    monkeypatch.setitem(ours_tiktoken.KNOWN_VOCABULARIES, count, ours_tiktoken.llama3_vocabulary(count))
    assert tokenizer.fingerprint == build_tokenizer("TikTokenizer", path).fingerprint


def write_megatron_list(path, ranks):
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode("utf-8", "replace")}
        for t, i in ranks.items()
    ]
    path.write_text(json.dumps(entries))


def test_megatron_tiktoken_list_puts_1000_special_tokens_first(ranks, tmp_path):
    path = tmp_path / "vocab.json"
    write_megatron_list(path, ranks)
    tokenizer = build_tokenizer("TikTokenizer", path)
    reference = tiktoken.Encoding(
        "reference", pat_str=ours_tiktoken.MEGATRON_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    assert_matches(tokenizer, lambda text: [i + 1000 for i in reference.encode_ordinary(text)])
    assert_round_trips(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000 + len(ranks), 2)
    assert tokenizer.decode([2, 999]) == "</s><SPECIAL_999>"


def test_megatron_tiktoken_list_keeps_the_best_ranks_that_vocab_size_allows(ranks, tmp_path):
    path = tmp_path / "vocab.json"
    write_megatron_list(path, ranks)
    tokenizer = build_tokenizer("TikTokenizer", path, vocab_size=1000 + 257)
    assert tokenizer.vocab_size == 1257
    assert tokenizer.encode("the") == [1256, 1000 + ord("e")]  # "th" is rank 256; "the" was cut off
    with pytest.raises(ConfigError, match=f"choose from 1256 to {1000 + len(ranks)}"):
        build_tokenizer("TikTokenizer", path, vocab_size=5000)


@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_known_tiktoken_vocabularies_are_the_library_s(name, monkeypatch):
    from tiktoken_ext import openai_public

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **kwargs: {})
    theirs = getattr(openai_public, name)()
    count = {"r50k_base": 50256, "p50k_base": 50280, "cl100k_base": 100256, "o200k_base": 199998}[name]
    ours = ours_tiktoken.KNOWN_VOCABULARIES[count]
    assert ours.pattern == theirs["pat_str"]
    assert ours.special_tokens == theirs["special_tokens"]
    assert ours.vocab_size == theirs.get("explicit_n_vocab", max(theirs["special_tokens"].values()) + 1)


def test_byte_tokenizer_is_utf8():
    tokenizer = build_tokenizer("ByteTokenizer")
    assert_matches(tokenizer, lambda text: text.encode("utf-8"))
    assert_round_trips(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([104, 105, 256, 0xFF]) == "hi\ufffd"


def test_null_tokenizer_reads_ids():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.encode(" 1 2\n99 100 ") == [1, 2, 99, 100]
    assert tokenizer.decode(np.array([1, 2, 99])) == "1 2 99"
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)


def write_side_files(folder, **tables):
    for name, table in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(table))


@pytest.mark.parametrize("lists_added_tokens", [False, True])
def test_the_end_of_two_files_is_that_of_transformers(bpe, tmp_path, lists_added_tokens):
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    first, second = "a", "b"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": first}
    if lists_added_tokens:
        config["added_tokens_decoder"] = {}
    write_side_files(tmp_path, tokenizer_config=config, special_tokens_map={"eos_token": second})
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert build_tokenizer("HuggingFaceTokenizer", tmp_path).eod == expected


EXTRA = {"content": "<extra>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    "tables",
    [
        {"tokenizer_config": {"added_tokens_decoder": {"900": EXTRA}}},
        {"tokenizer_config": {"additional_special_tokens": ["<extra>"]}},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<extra>"}}},
        {"tokenizer_config": {}, "added_tokens": {"<extra>": 900}},
        {"tokenizer_config": {"split_special_tokens": True}},
    ],
)
def test_tokens_that_transformers_adds_or_splits_are_refused(bpe, tmp_path, tables):
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    build_tokenizer("HuggingFaceTokenizer", tmp_path)
    tables["tokenizer_config"]["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_side_files(tmp_path, **tables)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    splits = "split_special_tokens" in tables["tokenizer_config"]
    assert splits or len(theirs.encode("<extra>", add_special_tokens=False)) == 1
    with pytest.raises(
        DataError, match="has split_special_tokens" if splits else "tokenizer.json lacks: <extra>"
    ):
        build_tokenizer("HuggingFaceTokenizer", tmp_path)
    if not splits:
        theirs.save_pretrained(tmp_path)
        assert build_tokenizer("HuggingFaceTokenizer", tmp_path).encode("<extra>") == theirs.encode("<extra>")

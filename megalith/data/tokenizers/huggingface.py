"""Tokenizers of the `tokenizers` library: tokenizer.json, GPT-2's vocab.json and merges.txt, BERT's vocab.txt."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import tokenizers

from megalith.data.tokenizers.hub import local_folder
from megalith.data.tokenizers.tokenizer import Tokenizer, TokenizerPaths, read_file, read_json, side_table
from megalith.errors import ConfigError, DataError, shorten

MODEL = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
GENERATION = "generation_config.json"
MODEL_CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
SIDE_FILES = (CONFIG, SPECIAL_TOKENS, GENERATION, MODEL_CONFIG, CHAT_TEMPLATE, TOOL_TEMPLATE)

EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>")
"""End-of-text tokens to try, in order, if no file next to the tokenizer names its end of sequence."""

VOCAB, MERGES = "vocab.json", "merges.txt"
PIECES, UNKNOWN = "vocab.txt", "[UNK]"


@contextmanager
def _no_panic() -> Iterator[None]:
    """Convert a panic of the tokenizers library into a DataError. A panic is not an Exception.

    A panic happens, for example, if the regular expression in a tokenizer.json reaches its limits on a text.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as panic:
        raise DataError(
            f"the tokenizers library failed on a text ({panic}); use another tokenizer, or remove the text"
        ) from None


class RustTokenizer(Tokenizer):
    """Base of the tokenizers of the library. `_tokenizer` is a tokenizers.Tokenizer."""

    encodes_without_lock = True
    _tokenizer: tokenizers.Tokenizer

    def _set_vocab_size(self) -> None:
        """Set the vocabulary size to the highest id plus one.

        A count could be too low because added tokens may leave gaps.
        """
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def to_json(self) -> str:
        """Return the text of a tokenizer.json."""
        return self._tokenizer.to_str()

    def pieces(self) -> list[str]:
        return [self._tokenizer.id_to_token(i) or "" for i in range(self.vocab_size)]

    @property
    def special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return super().special_ids | {i for i, token in added.items() if not token.content.isspace()}

    def encode(self, text: str) -> list[int]:
        with _no_panic():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def prefix(self) -> list[int]:
        return self._around[0]

    @property
    def suffix(self) -> list[int]:
        return self._around[1]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Ids of the special tokens that the post-processor adds before a text, and of those that it adds after."""
        pieces = chain("a", self._tokenizer.get_vocab(with_added_tokens=False))
        texts = (self._tokenizer.encode(piece, add_special_tokens=False) for piece in pieces)
        with _no_panic():
            text = next((encoding for encoding in texts if encoding.ids), None)
        if text is None:
            return [], []
        processed = self._tokenizer.post_process(text)
        start = processed.special_tokens_mask.index(0)
        return processed.ids[:start], processed.ids[start + len(text.ids) :]

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        with _no_panic():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]  # arrays take less memory than lists

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], list[bool]] | str]:
        """Encode texts; a token is marked if its characters overlap a span, as in transformers."""
        result = []
        with _no_panic():
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for encoding, text, text_spans in zip(encodings, texts, spans):
            inside = np.zeros(len(text) + 1, dtype=np.int64)  # characters of spans before each
            for start, end in text_spans:
                inside[start + 1 : end + 1] = 1
            inside = np.cumsum(inside)
            first, last = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            result.append((encoding.ids, (inside[last] > inside[first]).tolist()))
        return result

    def decode_without_special(self, ids: Iterable[int]) -> str:
        with _no_panic():
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: Iterable[int]) -> str:
        try:  # without _no_panic, which takes longer than a short text
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)
        except BaseException as error:
            with _no_panic():
                raise error


class HuggingFaceTokenizer(RustTokenizer):
    """A `tokenizer.json`, loaded with the tokenizers library.

    It loads neither transformers nor the tokenizer's own code.

    `eod` is the end of sequence named by the files next to it, else the first known end-of-text token.
    """

    required_files = (MODEL,)
    optional_files = SIDE_FILES

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None = None) -> None:
        super().__init__(files, vocab_size)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self.files[MODEL])
        except BaseException as error:  # the library raises bare Exception, and its panics are not even that
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(
                f"{MODEL} ({len(self.files[MODEL])} bytes) is not a tokenizer of the tokenizers library ({error}); "
                "the file is damaged, or a newer version wrote it: pip install -U tokenizers"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._set_vocab_size()
        self.eod = self._find_eod()

    @classmethod
    def from_paths(cls, paths: TokenizerPaths) -> Self:
        if paths.tokenizer_model is None:
            raise ConfigError(
                f"HuggingFaceTokenizer needs tokenizer_model: a {MODEL}, a folder with one, or a hub name"
            )
        path = Path(paths.tokenizer_model)
        if path.exists() and not path.is_dir():
            files = {MODEL: read_file(path, "tokenizer")}
            folder = path.parent if path.name == MODEL else None
        else:
            folder = path if path.is_dir() else local_folder(paths.tokenizer_model, (MODEL, *SIDE_FILES))
            if not (folder / MODEL).exists():
                raise DataError(_without_tokenizer_json(folder))
            files = {MODEL: read_file(folder / MODEL, "tokenizer", folder)}
        for name in SIDE_FILES if folder else ():
            if (folder / name).exists():
                files[name] = read_file(folder / name, "tokenizer's side file", folder)
        tokenizer = cls(files)
        if folder is not None:
            tokenizer._check_added_tokens(folder)
        return tokenizer

    def _check_added_tokens(self, folder: Path) -> None:
        """Raise DataError if transformers would add tokens that tokenizer.json lacks, or would split special tokens."""
        config = side_table(self.files, CONFIG)
        named = [*_texts(config.get("added_tokens_decoder")), *_texts(config.get("extra_special_tokens"))]
        named += _texts(config.get("additional_special_tokens"))
        if "added_tokens_decoder" not in config and (folder / ADDED_TOKENS).exists():
            named += read_json(
                read_file(folder / ADDED_TOKENS, "tokenizer's side file", folder), ADDED_TOKENS
            )
        if missing := [token for token in named if self._tokenizer.token_to_id(token) is None]:
            raise DataError(
                f"{folder} has tokens in {CONFIG} or {ADDED_TOKENS} that {MODEL} lacks: {shorten(missing)}; "
                "transformers adds them, so open the folder with its AutoTokenizer, and save it with save_pretrained"
            )
        if config.get("split_special_tokens"):
            raise DataError(
                f"{folder / CONFIG} has split_special_tokens, but special tokens in a text are always "
                "recognized; set split_special_tokens to false"
            )

    def content(self) -> bytes:
        """Return only the normalized tokenizer.json: side files do not change ids."""
        return json.dumps(read_json(self.files[MODEL], MODEL), sort_keys=True).encode()

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """`eod`, then the other values of eos_token_id in generation_config.json or, without that file, in config.json,
        as in vLLM.

        gpt-oss ends with <|return|>, <|endoftext|> or <|call|>, for example, and Llama 3.1 with <|eot_id|>, <|eom_id|>
        or <|end_of_text|>.
        """
        ids = self._generation_settings.get("eos_token_id")
        named = ids if isinstance(ids, list) else [ids]
        valid = [i for i in named if type(i) is int and 0 <= i < self.vocab_size]
        return tuple(dict.fromkeys([*super().stop_ids, *valid]))

    @property
    def forced_bos_token_id(self) -> int | None:
        """`forced_bos_token_id` of generation_config.json or, without that file, of config.json."""
        token = self._generation_settings.get("forced_bos_token_id")
        return token if type(token) is int and 0 <= token < self.vocab_size else None

    @property
    def _generation_settings(self) -> Mapping[str, Any]:
        return side_table(self.files, GENERATION if GENERATION in self.files else MODEL_CONFIG)

    def _find_eod(self) -> int | None:
        tables = {name: side_table(self.files, name) for name in SIDE_FILES if name.endswith(".json")}
        named_last = (
            "added_tokens_decoder" not in tables[CONFIG]
        )  # then the other file decides in transformers
        for name in (SPECIAL_TOKENS, CONFIG) if named_last else (CONFIG, SPECIAL_TOKENS):
            token = tables[name].get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if (
                isinstance(token, str)
                and _is_unicode(token)
                and (token_id := self._tokenizer.token_to_id(token)) is not None
            ):
                return token_id
        for name in (GENERATION, MODEL_CONFIG):
            ids = tables[name].get("eos_token_id")
            first = ids[0] if isinstance(ids, list) and ids else ids
            if isinstance(first, int) and 0 <= first < self.vocab_size:
                return first
        ids = (self._tokenizer.token_to_id(token) for token in EOD_TOKENS)
        return next((i for i in ids if i is not None), None)


def _texts(tokens: Any) -> list[str]:
    """Return the texts of a list or table of tokens, each a text or an AddedToken's table."""
    values = tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else ()
    texts = [value.get("content") if isinstance(value, dict) else value for value in values]
    return [text for text in texts if isinstance(text, str) and _is_unicode(text)]


class GPT2BPETokenizer(RustTokenizer):
    """GPT-2's byte-level byte-pair encoding from `vocab.json` and `merges.txt`. `eod` is `<|endoftext|>`."""

    required_files = (VOCAB, MERGES)

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None = None) -> None:
        super().__init__(files, vocab_size)
        vocab = read_json(self.files[VOCAB], "vocabulary file")
        if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
            raise DataError(
                "the vocabulary file is not a JSON object of token → id; pass GPT-2's vocab.json as vocab_file"
            )
        merges = _merges(self.files[MERGES])
        if unknown := next((pair for pair in merges if not {*pair, "".join(pair)} <= vocab.keys()), None):
            raise DataError(
                f"the merges file does not fit the vocabulary of {len(vocab)} tokens (it joins {unknown[0]!r} and "
                f"{unknown[1]!r}, but one of the three is not in it); use the merges.txt that came with this vocab.json"
            )
        try:
            model = tokenizers.models.BPE(vocab, merges)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"the merges file does not fit the vocabulary of {len(vocab)} tokens ({error}); "
                "use the merges.txt that came with this vocab.json"
            ) from error
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.eod = vocab.get("<|endoftext|>")
        if self.eod is not None:
            self._tokenizer.add_special_tokens(["<|endoftext|>"])
        self._set_vocab_size()

    @classmethod
    def from_paths(cls, paths: TokenizerPaths) -> Self:
        vocab_file, merge_file, folder = paths.vocab_file, paths.merge_file, None
        if paths.tokenizer_model is not None and None in (vocab_file, merge_file):
            folder = Path(paths.tokenizer_model)
            if not folder.is_dir():
                folder = local_folder(paths.tokenizer_model, (VOCAB, MERGES))
        if folder is None and None in (vocab_file, merge_file):
            raise ConfigError(
                f"GPT2BPETokenizer needs vocab_file ({VOCAB}) and merge_file ({MERGES}), "
                "or tokenizer_model: the folder that holds both, or a hub name such as gpt2"
            )
        files = {}
        for name, path, what in ((VOCAB, vocab_file, "vocabulary"), (MERGES, merge_file, "merges file")):
            files[name] = read_file(path, what) if path else read_file(folder / name, what, folder)
        return cls(files)


class BertWordPieceLowerCase(RustTokenizer):
    """BERT's lower-cased word pieces without accents, from its vocab.txt. It has no end-of-document token."""

    required_files = (PIECES,)
    lower_case: ClassVar[bool] = True

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None = None) -> None:
        super().__init__(files, vocab_size)
        try:
            pieces = self.files[PIECES].decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"the vocabulary of word pieces is not UTF-8 ({error}); use BERT's {PIECES}"
            ) from error
        vocab = {piece.rstrip("\r"): number for number, piece in enumerate(pieces) if piece.strip()}
        if UNKNOWN not in vocab:
            raise DataError(
                f"the vocabulary of {len(vocab)} word pieces has no {UNKNOWN}; use BERT's {PIECES}, one piece per line"
            )
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token=UNKNOWN))
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=self.lower_case)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._tokenizer.decoder = tokenizers.decoders.WordPiece()
        self._set_vocab_size()
        self.eod = None

    @property
    def model_vocab_size(self) -> int:
        """The vocabulary size plus Megatron's [BOS] and [EOS], which occur in no text but can replace masked words."""
        return self.vocab_size + 2

    @classmethod
    def from_paths(cls, paths: TokenizerPaths) -> Self:
        path = paths.vocab_file or paths.tokenizer_model
        if path is None:
            raise ConfigError(f"{cls.__name__} needs vocab_file: BERT's {PIECES}")
        return cls({PIECES: read_file(path, "vocabulary of word pieces")})


class BertWordPieceCase(BertWordPieceLowerCase):
    """Like BertWordPieceLowerCase, but case-sensitive."""

    lower_case = False


def _is_unicode(text: str) -> bool:
    """Return True if the tokenizers library accepts the text. JSON may contain an unpaired surrogate."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


def _merges(content: bytes) -> list[tuple[str, str]]:
    """Return the pairs of a merges.txt, best first: one `a b` per line, after an optional `#version` line."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the merges file is not UTF-8 ({error}), so it is damaged; fetch it again"
        ) from error
    first = 1 if lines[0].startswith("#version") else 0
    pairs = []
    for number, line in enumerate(lines[first:], first + 1):
        words = line.rstrip("\r").split(" ")
        if words == [""]:
            continue
        if len(words) != 2:
            raise DataError(
                f"merges file line {number} has {len(words)} words, not the two parts of a merge, so the file "
                "is damaged or of another kind; fetch it again, or pass another file"
            )
        pairs.append((words[0], words[1]))
    return pairs


def _without_tokenizer_json(folder: Path) -> str:
    remedies = {
        VOCAB: f"it has {VOCAB}: set tokenizer_type to GPT2BPETokenizer",
        "tokenizer.model": "it has tokenizer.model: set tokenizer_type to SentencePieceTokenizer with that file",
    }
    remedy = next((text for name, text in remedies.items() if (folder / name).is_file()), "check the path")
    return f"{str(folder)!r} has no {MODEL}; {remedy}"

"""SentencePiece models (`.model` files)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from megalith.data.tokenizers.tokenizer import Tokenizer, TokenizerPaths, read_file
from megalith.errors import ConfigError, DataError, install_line

MODEL = "tokenizer.model"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. `eod` is its `</s>`, as in Megatron."""

    required_files = (MODEL,)

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None = None) -> None:
        super().__init__(files, vocab_size)
        try:
            import sentencepiece
        except ImportError as error:
            raise ConfigError(
                "SentencePieceTokenizer needs the sentencepiece package, which is not installed; "
                f"run: {install_line('tokenizers')}"
            ) from error
        model = self.files[MODEL]
        try:
            if not model:
                raise RuntimeError("it is empty")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(
                f"the tokenizer model of {len(model)} bytes is not a SentencePiece model ({error}), so the file is "
                "damaged or of another kind; fetch it again, or pass another file"
            ) from error
        self.vocab_size = self._model.get_piece_size()
        eos = self._model.eos_id()
        self.eod = eos if eos >= 0 else None

    @classmethod
    def from_paths(cls, paths: TokenizerPaths) -> Self:
        if paths.tokenizer_model is None:
            raise ConfigError(f"{cls.__name__} needs tokenizer_model: the path of a .model file")
        return cls({MODEL: read_file(paths.tokenizer_model, "SentencePiece model")})

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, out_type=int)

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return self._model.encode(list(texts), out_type=int, num_threads=1)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode(list(ids))


class Llama2Tokenizer(SentencePieceTokenizer):
    """Like SentencePieceTokenizer, with the model's `<s>` before every text, as in Megatron."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the SentencePieceTokenizer with the same model, because an id means the same text
        in both.
        """
        return SentencePieceTokenizer(self.files).fingerprint

    def encode(self, text: str) -> list[int]:
        return [*self.prefix, *super().encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [[*self.prefix, *ids] for ids in super().encode_batch(texts)]

    def _without_prefix(self, text: str) -> list[int]:
        return super().encode(text)

    @property
    def prefix(self) -> list[int]:
        begin = self._model.bos_id()
        return [begin] if begin >= 0 else []

"""Fill-in-the-middle samples (Bavarian et al. 2022, arXiv:2207.14255), as Megatron's GPTFIMDataset makes them.

Each document of a sample is, with probability `rate`, decoded, cut at two random characters into prefix, middle and
suffix, and encoded again as `<prefix> P <suffix> S <middle> M` (PSM) or `<prefix> <suffix> S <middle> P M` (SPM). The
sample keeps its length: it is cut or padded at the end.

Megatron draws from one generator in the order of reads, so its samples depend on the number of ranks and on resumes.
Here sample i draws from a generator seeded by seed + i. Within a sample the draws are the same as Megatron's, so a
given state of the generator gives the same sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalith.config.data import DataConfig
from megalith.data.dataset import GPTDataset
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError

TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


class FimTokens(NamedTuple):
    """Ids of the tokens of fill-in-the-middle."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None
    """Token between the fragments of a document, for example between the files of a repository."""


class FillInMiddle:
    """Rearranges samples. Call it with a sample, int64 [n], and a generator. It returns a sample of the same length.

    Raises:
        ConfigError: there is no tokenizer, or it lacks one of the tokens.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise ConfigError(
                "data.fim_data decodes and encodes samples, but data.tokenizer_type is not set; set it to the "
                "tokenizer that the data was preprocessed with"
            )
        self._data, self._tokenizer = data, tokenizer
        ids = {name: _token_id(tokenizer, data, f"fim_{name}_token") for name in TOKENS}
        split = None if not data.fim_split_sample else _token_id(tokenizer, data, "fim_split_sample")
        self.tokens = FimTokens(**ids, split=split)

    def __call__(self, sample: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        eod, parts, start = self.tokens.eod, [], 0
        for end in np.flatnonzero(sample == eod).tolist():
            if end > start:  # an empty document leaves no end-of-document token either
                parts += [self._document(sample[start:end], rng), [eod]]
            start = end + 1
        parts.append(self._document(sample[start:], rng))
        rearranged = np.concatenate(parts)[: len(sample)]
        padded = np.full(len(sample), self.tokens.pad, dtype=np.int64)
        padded[: len(rearranged)] = rearranged
        return padded

    def _document(self, document: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        split, data, parts, start = self.tokens.split, self._data, [], 0
        ends = [] if split is None else np.flatnonzero(document == split).tolist()
        if not ends:
            return self._fragment(document, data.fim_rate, rng)
        if not rng.binomial(1, data.fim_rate):
            return document
        for end in ends:
            if end > start:
                parts += [self._fragment(document[start:end], data.fim_fragment_rate, rng), [split]]
            start = end + 1
        parts.append(self._fragment(document[start:], data.fim_fragment_rate, rng))
        return np.concatenate(parts)

    def _fragment(self, fragment: np.ndarray, rate: float, rng: np.random.RandomState) -> np.ndarray:
        if not rng.binomial(1, rate):
            return fragment
        text = self._tokenizer.decode_without_special(fragment.tolist())
        if self._data.fim_no_prefix is not None and text.startswith(self._data.fim_no_prefix):
            return fragment
        first, second = sorted(rng.randint(low=0, high=len(text) + 1, size=2).tolist())
        pieces = (text[:first], text[first:second], text[second:])
        prefix, middle, suffix = ([*self._tokenizer.encode(piece)] for piece in pieces)
        tokens = self.tokens
        if rng.binomial(1, self._data.fim_spm_rate):
            ids = [tokens.prefix, tokens.suffix, *suffix, tokens.middle, *prefix, *middle]
        else:
            ids = [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle, *middle]
        return np.array(ids, dtype=np.int64)


class FimDataset(GPTDataset):
    """GPTDataset's samples, rearranged. The first argument is a FillInMiddle, followed by GPTDataset's arguments."""

    def __init__(self, fill_in_middle: FillInMiddle, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self._fill_in_middle = fill_in_middle

    def __getitem__(self, i: int) -> np.ndarray:
        return self._fill_in_middle(super().__getitem__(i), np.random.RandomState((self.seed + i) % 2**32))


def _token_id(tokenizer: Tokenizer, data: DataConfig, setting: str) -> int:
    token = getattr(data, setting)
    token_id = tokenizer.token_id(token)
    if token_id is None:
        raise ConfigError(
            f"data.{setting} is {token!r}, which is not a token of {tokenizer.tokenizer_type}; set data.{setting} to "
            "a token of the vocabulary, or add the token to the tokenizer"
        )
    return token_id

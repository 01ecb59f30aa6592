"""A small dataset of documents that are split into sentences, and what masked samples of it are made with."""

from pathlib import Path

import numpy as np

from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.masked_lm import MaskedLMDataset, Masking, WordPieces
from megalith.data.pairs import SpanDataset, SpanTokens

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = SPECIAL + [f"w{i}" for i in range(50)] + [f"##p{i}" for i in range(40)]
SEQ, SEED = 64, 1234
DECODER, SENTINELS = 40, 30
# name: (samples, masking)
CASES = {
    "order": (150, Masking()),
    "one segment": (90, Masking(classification_head=False)),
    "pieces, often short": (60, Masking(masking_do_full_word=False, short_seq_prob=0.5)),
    "single words, many": (60, Masking(mask_prob=0.4, masking_max_ngram=1, short_seq_prob=0.0)),
}
SPANS = {
    "spans": (120, Masking(masking_max_ngram=10, masking_use_geometric_distribution=True)),
    "spans of pieces, often short": (60, Masking(masking_do_full_word=False, short_seq_prob=0.5)),
    "spans, many": (60, Masking(mask_prob=0.3, masking_max_ngram=5, short_seq_prob=0.0)),
}


def write_sentences(prefix: Path) -> IndexedDataset:
    """40 documents of up to 12 sentences, some of one or none, one sentence too long."""
    rng = np.random.RandomState(7)
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in range(40):
            lengths = rng.randint(1, 40, rng.randint(1, 13)).tolist()
            if document == 5:
                lengths[0] = 600
            tokens = rng.randint(len(SPECIAL), len(PIECES), sum(lengths)).astype(np.uint16)
            writer.add_document(tokens, lengths)
    return IndexedDataset(prefix)


def words(extra: int = 0) -> WordPieces:
    begins = np.array([not piece.startswith("##") for piece in PIECES] + [True] * extra)
    ids = [PIECES.index(token) for token in ("[CLS]", "[SEP]", "[MASK]", "[PAD]")]
    return WordPieces(*ids, len(begins), begins)


def spans(indexed: IndexedDataset, case: str, first: int = 0, last: int | None = None) -> SpanDataset:
    """Behind the word pieces stand [BOS], [EOS] and the sentinels."""
    samples, masking = SPANS[case]
    last, count = indexed.num_documents if last is None else last, len(PIECES)
    tokens = SpanTokens(words(2 + SENTINELS), count, count + 1, range(count + 2, count + 2 + SENTINELS))
    return SpanDataset(indexed, first, last, (SEQ, DECODER), samples, SEED, tokens, masking)


def ours(indexed: IndexedDataset, case: str, first: int = 0, last: int | None = None) -> MaskedLMDataset:
    samples, masking = CASES[case]
    last = indexed.num_documents if last is None else last
    return MaskedLMDataset(indexed, first, last, SEQ, samples, SEED, words(), masking)

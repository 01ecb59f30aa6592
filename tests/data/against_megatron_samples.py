"""Masked samples against Megatron core's, one by one: `make megatron-core` installs it and runs this.

With a path for its argument it writes there what test_masked_lm.py compares with: some of Megatron's samples.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset as CoreIndexedDataset
from megatron.core.datasets.utils import Split
from sentences import CASES, PIECES, SEED, SEQ, ours, words, write_sentences
from torch import distributed

GOLDEN = {"order": [0, 3, 77], "one segment": [1], "pieces, often short": [2], "single words, many": [4]}


def megatrons(prefix: str, case: str, first: int, last: int, cache: str) -> BERTMaskedWordPieceDataset:
    samples, masking = CASES[case]
    ids = words()
    tokenizer = SimpleNamespace(
        cls=ids.cls,
        sep=ids.sep,
        mask=ids.mask,
        pad=ids.pad,
        inv_vocab=dict(enumerate(PIECES)),
        unique_identifiers={},
    )
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ,
        blend=([prefix], None),
        split="1",
        path_to_cache=cache,
        tokenizer=tokenizer,
        masking_probability=masking.mask_prob,
        short_sequence_probability=masking.short_seq_prob,
        masking_max_ngram=masking.masking_max_ngram,
        masking_do_full_word=masking.masking_do_full_word,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=masking.classification_head,
    )
    documents = np.arange(first, last, dtype=np.int32)
    return BERTMaskedWordPieceDataset(
        CoreIndexedDataset(prefix), prefix, documents, samples, Split.train, config
    )


def main() -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        prefix = f"{folder}/sentences"
        indexed = write_sentences(Path(prefix))
        for case in CASES:
            for first, last in ((0, indexed.num_documents), (3, 17)):
                expected, found = (
                    megatrons(prefix, case, first, last, f"{folder}/{first}"),
                    ours(indexed, case, first, last),
                )
                assert len(expected) == len(found), (len(expected), len(found))
                for i in range(len(expected)):
                    sample = expected[i]
                    assert set(sample) == set(found[i].dtype.names)
                    for name, value in sample.items():
                        assert np.array_equal(found[i][name], value), (case, i, name)
                print(f"{case}, documents [{first}, {last}): {len(expected)} samples are Megatron's")
                if first == 0:
                    golden[case] = {
                        str(i): {name: np.asarray(value).tolist() for name, value in expected[i].items()}
                        for i in GOLDEN[case]
                    }
    if sys.argv[1:]:
        text = json.dumps(golden).replace("}}, ", "}},\n").replace('}, "', '},\n"')
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

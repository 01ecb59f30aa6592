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
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.datasets.utils import Split
from sentences import CASES, DECODER, PIECES, SEED, SENTINELS, SEQ, SPANS, ours, spans, words, write_sentences
from torch import distributed

GOLDEN = {
    "order": [0, 3, 77], "one segment": [1], "pieces, often short": [2], "single words, many": [4],
    "spans": [0, 90], "spans of pieces, often short": [2], "spans, many": [3],
}  # fmt: skip


def megatrons(
    prefix: str, case: str, first: int, last: int, cache: str
) -> BERTMaskedWordPieceDataset | T5MaskedWordPieceDataset:
    samples, masking = (CASES | SPANS)[case]
    ids, count = words(), len(PIECES)
    tokenizer = SimpleNamespace(
        cls=ids.cls,
        sep=ids.sep,
        mask=ids.mask,
        pad=ids.pad,
        bos=count,
        eos=count + 1,
        additional_special_tokens_ids=[*range(count + 2, count + 2 + SENTINELS)],
        inv_vocab=dict(enumerate(PIECES)),
        unique_identifiers={},
    )
    settings = dict(
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
        masking_use_geometric_distribution=masking.masking_use_geometric_distribution,
    )
    if case in SPANS:
        kind, config = (
            T5MaskedWordPieceDataset,
            T5MaskedWordPieceDatasetConfig(**settings, sequence_length_decoder=DECODER),
        )
    else:
        kind = BERTMaskedWordPieceDataset
        config = BERTMaskedWordPieceDatasetConfig(**settings, classification_head=masking.classification_head)
    documents = np.arange(first, last, dtype=np.int32)
    return kind(CoreIndexedDataset(prefix), prefix, documents, samples, Split.train, config)


def comparable(sample: dict) -> dict:
    """What a record of ours has of a sample of pairs: labels, -1 where nothing is learnt, are 0 there."""
    if "text_enc" not in sample:
        return sample
    kept = {name: sample[name] for name in ("text_enc", "enc_mask", "text_dec", "loss_mask")}
    return kept | {"labels": np.where(sample["loss_mask"], sample["labels"], 0)}


def main() -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        prefix = f"{folder}/sentences"
        indexed = write_sentences(Path(prefix))
        for case in (*CASES, *SPANS):
            for first, last in ((0, indexed.num_documents), (3, 17)):
                expected, found = (
                    megatrons(prefix, case, first, last, f"{folder}/{first}"),
                    (spans if case in SPANS else ours)(indexed, case, first, last),
                )
                assert len(expected) == len(found), (len(expected), len(found))
                for i in range(len(expected)):
                    sample = comparable(expected[i])
                    assert set(sample) == set(found[i].dtype.names)
                    for name, value in sample.items():
                        assert np.array_equal(found[i][name], value), (case, i, name)
                print(f"{case}, documents [{first}, {last}): {len(expected)} samples are Megatron's")
                if first == 0:
                    golden[case] = {
                        str(i): {
                            name: np.asarray(value).tolist()
                            for name, value in comparable(expected[i]).items()
                        }
                        for i in GOLDEN[case]
                    }
    if sys.argv[1:]:
        text = json.dumps(golden).replace("}}, ", "}},\n").replace('}, "', '},\n"')
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

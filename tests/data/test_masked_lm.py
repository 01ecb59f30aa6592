"""Masked samples are Megatron core's (a file of them; all by `make megatron-core`), and what a batch makes of them."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentences import CASES, PIECES, SEED, SEQ, SPANS, ours, spans, words, write_sentences

from megalith.config import RunConfig
from megalith.data.indexed import IndexedDataset
from megalith.data.kinds.bert_kind import masking_settings
from megalith.data.masked_lm import Masking, WordPieces, make_bert_batch
from megalith.data.mock_datasets import MockMaskedDataset
from megalith.data.sentence_index import mersenne_twister_64
from megalith.data.tokenizers.huggingface import BertWordPieceLowerCase
from megalith.data.tokenizers.plain import ByteTokenizer
from megalith.errors import ConfigError, DataError

GOLDEN = json.loads((Path(__file__).parent / "masked_lm_golden.json").read_text())


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_sentences(tmp_path_factory.mktemp("sentences") / "data")


@pytest.mark.parametrize("case", (*CASES, *SPANS))
def test_samples_are_those_that_megatron_core_gave(indexed: IndexedDataset, case: str) -> None:
    dataset = (spans if case in SPANS else ours)(indexed, case)
    for i, expected in GOLDEN[case].items():
        assert {name: dataset[int(i)][name].tolist() for name in expected} == expected


def test_the_shuffles_numbers_are_those_of_the_standard() -> None:
    assert int(mersenne_twister_64(5489, 10_000)[-1]) == 9981545732273789042  # ISO C++, [rand.predef]


def test_a_batch_has_real_tokens_in_one_document_and_what_fills_up_in_another(
    indexed: IndexedDataset,
) -> None:
    dataset = ours(indexed, "order")
    samples = np.stack([dataset[i] for i in range(4)])
    batch = make_bert_batch(samples, np.arange(4))
    assert batch.document_ends.tolist() == [[int(mask.sum()), SEQ] for mask in samples["padding_mask"]]
    assert batch.labels.min() == 0 and batch.loss_mask.dtype == torch.float32
    learnt = batch.loss_mask > 0
    assert torch.equal(batch.labels[learnt], torch.from_numpy(samples["labels"][samples["loss_mask"] == 1]))
    assert batch.sentence_order.tolist() == samples["is_random"].tolist()


def test_documents_that_give_no_sample_are_refused(indexed: IndexedDataset) -> None:
    short = [d for d in range(40) if np.diff(indexed.document_indices)[d] == 1]
    with pytest.raises(DataError, match="no document with the 2 sentences of up to 512 tokens"):
        ours(indexed, "order", short[0], short[0] + 1)


def test_two_segments_need_two_types_of_tokens_or_none() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": SEQ}
    for types, order, fits in ((1, True, False), (1, False, True), (0, True, True), (3, True, True)):
        model = {"model_type": "bert", "num_tokentypes": types, "bert_binary_head": order} | sizes
        how = (
            contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="num_tokentypes is 1, but")
        )
        with how:
            config = RunConfig.from_tree({"model": model})
            assert masking_settings(config.data, config.model).classification_head == order


def test_another_number_of_samples_is_in_the_same_order_within_the_same_epochs(
    indexed: IndexedDataset,
) -> None:
    once, twice = ours(indexed, "pieces, often short"), ours(indexed, "order")
    assert [dataset.epochs()[indexed.prefix] for dataset in (once, twice)] == [1, 2]
    assert (
        once.preserves_order(1)
        and once.preserves_order(len(once))
        and not once.preserves_order(len(once) + 1)
    )
    assert twice.preserves_order(len(twice)) and not twice.preserves_order(len(twice) // 3)


def test_what_begins_a_word_is_the_tokenizers_word() -> None:
    tokenizer = BertWordPieceLowerCase({"vocab.txt": "\n".join(PIECES).encode()})
    found, expected = WordPieces.from_tokenizer(tokenizer, len(PIECES) + 2), words(2)
    assert np.array_equal(found.begins_word, expected.begins_word)
    assert (found.cls, found.sep, found.mask, found.pad) == (
        expected.cls,
        expected.sep,
        expected.mask,
        expected.pad,
    )
    with pytest.raises(ConfigError, match="ByteTokenizer does not provide its entries as text"):
        WordPieces.from_tokenizer(ByteTokenizer({}, None), 300)
    without = BertWordPieceLowerCase({"vocab.txt": b"[UNK]\n[CLS]\n[SEP]\n"})
    with pytest.raises(ConfigError, match=r"has no \[MASK\], \[PAD\], which masked-word samples need"):
        WordPieces.from_tokenizer(without, 3)


def test_made_up_samples_depend_on_seed_and_number_alone() -> None:
    one, other = (MockMaskedDataset(90, 32, count, SEED, Masking()) for count in (5, 9))
    assert all(np.array_equal(one[i], other[i]) for i in range(5))
    samples = np.stack([other[i] for i in range(9)])
    assert len({sample.tobytes() for sample in samples}) == 9
    assert samples["padding_mask"].sum(1).min() >= 16 and (samples["loss_mask"].sum(1) > 0).all()
    assert {0, 1} == set(samples["is_random"].tolist())


def test_made_up_samples_are_as_short_as_a_masked_token_allows() -> None:
    for length in (5, 6, 7):
        samples = MockMaskedDataset(5, length, 20, SEED, Masking(mask_prob=0.9))
        assert all(samples[i]["loss_mask"].sum() for i in range(20))
    with pytest.raises(ConfigError, match="vocab_size 4 has no entries besides"):
        MockMaskedDataset(4, 32, 1, SEED, Masking())

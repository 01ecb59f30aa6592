"""The data: which tokens, in which order, cut into which sequences."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megalith.config import small
from megalith.config.base import KEPT, Decides, Needs, Resolved, Section, Shrinks

DataPath = str | list[Any]
MASKED = Needs("model.model_type", "bert", "t5")
SPECIAL_COUNT = 3  # special tokens in a sample of two segments: [CLS], and [SEP] behind each


class DataConfig(Section):
    """Indexed datasets (`.bin` and `.idx`), their blend and split, and how documents are told apart."""

    decides: ClassVar[Decides] = Decides.SAMPLES

    data_path: DataPath | None = None
    """Dataset prefix (the path or URL without .bin), or a blend: `"0.7 a 0.3 b"`, or a YAML list of the same."""

    train_data_path: DataPath | None = None
    """Datasets for training alone; with valid_data_path and test_data_path in place of data_path and split."""

    valid_data_path: Annotated[DataPath | None, Decides.NOTHING] = None
    """Datasets for validation alone."""

    test_data_path: Annotated[DataPath | None, Decides.NOTHING] = None
    """Datasets for the test after training alone."""

    mock: Annotated[bool, Shrinks(True)] = False
    """Synthetic tokens in place of a dataset, for speed measurements and tests."""

    split: str = "99,1,0"
    """Shares of the documents for training, validation and test."""

    seq_length: Annotated[PositiveInt, Shrinks(small.SEQUENCE)] = 1024
    """Tokens in a training sequence."""

    decoder_seq_length: Annotated[
        PositiveInt | None,
        Needs("model.model_type", "t5"),
        Resolved("decoder_length"),
        Shrinks(lambda value, _: value and small.SEQUENCE // 2),
    ] = None
    """Tokens in a sample's sequence for the decoder, where seq_length is the encoder's. Absent: as many."""

    tokenizer_type: Annotated[
        (
            Literal[
                "HuggingFaceTokenizer",
                "SentencePieceTokenizer",
                "Llama2Tokenizer",
                "Llama3Tokenizer",
                "GPT2BPETokenizer",
                "BertWordPieceLowerCase",
                "BertWordPieceCase",
                "TikTokenizer",
                "ByteTokenizer",
                "NullTokenizer",
            ]
            | None
        ),
        Decides.NOTHING,
        Shrinks(small.tokenizer),
    ] = None
    """Kind of tokenizer. Absent: none; model.vocab_size is then needed."""

    tokenizer_model: Annotated[str | None, Decides.NOTHING, Needs("tokenizer_type", strict=True)] = None
    """The tokenizer's file or folder (tokenizer.json, .model, .tiktoken), or a name in the local hub cache."""

    vocab_file: Annotated[str | None, Decides.NOTHING] = None
    """GPT2BPETokenizer: vocab.json; BertWordPieceLowerCase and BertWordPieceCase: vocab.txt."""

    merge_file: Annotated[str | None, Decides.NOTHING] = None
    """GPT2BPETokenizer: merges.txt."""

    dataloader_type: Annotated[Literal["cyclic", "single"], KEPT] = "cyclic"
    """`single`: the dataset's order, once. `cyclic`: a new permutation each epoch, for ever."""

    reset_position_ids: Annotated[bool, Decides.UPDATES, KEPT] = False
    """Positions start again at 0 after each end of document."""

    reset_attention_mask: Annotated[bool, Decides.UPDATES, KEPT] = False
    """Attention stops at document ends."""

    eod_mask_loss: Annotated[bool, Decides.UPDATES, KEPT] = False
    """No loss on what follows an end-of-document token."""

    mask_prob: Annotated[Annotated[float, Field(gt=0.0, lt=1.0)], MASKED] = 0.15
    """Share of the tokens that are masked, and learnt."""

    short_seq_prob: Annotated[Annotated[float, Field(ge=0.0, le=1.0)], MASKED] = 0.1
    """How often a sample is shorter than seq_length, by a random length."""

    masking_do_full_word: Annotated[bool, MASKED] = True
    """Masks whole words; otherwise pieces of words."""

    masking_max_ngram: Annotated[PositiveInt | None, MASKED] = None
    """Words in a row that are masked together at most, longer runs less often. Absent: 3, of T5 10."""

    masking_use_geometric_distribution: Annotated[bool | None, MASKED] = None
    """Whether a run ends behind each word with probability 0.2, or n words are 1 / n as often. Absent: of T5 alone."""

    vocab_extra_ids: Annotated[NonNegativeInt, Needs("model.model_type", "t5")] = 100
    """Sentinels behind a vocabulary of word pieces, one for each run of masked words; T5's own has its own."""

    num_workers: Annotated[NonNegativeInt, Decides.NOTHING, Shrinks(0)] = 2
    """Threads that prepare batches ahead of training; 0: the training thread does it between steps."""

    @property
    def decoder_length(self) -> int:
        """Tokens of a sample that a decoder behind an encoder reads."""
        return self.decoder_seq_length or self.seq_length

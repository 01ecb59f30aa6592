"""Data settings: datasets, sample order and sequences."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.config.base import Decides, RequiresSetting, Resolved, Section

DataPath = str | list[Any]
TextDocuments = Literal["file", "block"]
FIM = RequiresSetting("fim_data", True)
MASKED = RequiresSetting("model.model_type", "bert", "t5")
SPECIAL_COUNT = 3  # special tokens in a sample of two segments: [CLS], and [SEP] behind each


class DataConfig(Section):
    """Indexed datasets (`.bin` and `.idx`), blends and splits, tokenizer, and document boundaries."""

    decides: ClassVar[Decides] = Decides.SAMPLES

    data_path: DataPath | None = None
    """Dataset prefix (path or URL without .bin), or a blend: `"0.7 a 0.3 b"` or the same as a YAML list. Text (files,
    folders, globs, hf://NAME) is tokenized before the first step, or while training (data.streaming)."""

    train_data_path: DataPath | None = None
    """Training datasets. Use with valid_data_path and test_data_path instead of data_path and split."""

    valid_data_path: Annotated[DataPath | None, Decides.NOTHING] = None
    """Validation datasets."""

    test_data_path: Annotated[DataPath | None, Decides.NOTHING] = None
    """Datasets for the test after training."""

    blend_schedule: Annotated[list[Any] | None, RequiresSetting("dataloader_type", "single", strict=True)] = (
        None
    )
    """Schedule of the training sources' weights: points `{samples: N, weights: [...]}` or `{tokens: N, weights:
    [...]}`, each with the weights that apply from there on. With `interpolation: linear`, weights change linearly from
    the previous point to this one."""

    blend_temperature: PositiveFloat | None = None
    """Weight sources that have no weight by `tokens ** (1 / blend_temperature)`. 1: proportional to their tokens;
    higher values make the weights more equal."""

    max_epochs_per_source: Annotated[
        PositiveFloat | None, RequiresSetting("model.model_type", "gpt", strict=True)
    ] = None
    """Maximum number of epochs over each training source. The weight of a source that would exceed it is lowered, and
    the others take over. `max_epochs` of an entry of data_path takes precedence."""

    packing: Annotated[
        Literal["concat", "best_fit"], RequiresSetting("model.model_type", "gpt", strict=True)
    ] = "concat"
    """Method of filling samples: `concat` cuts them from concatenated documents; `best_fit` packs documents into
    samples, cuts only documents that are longer than a sample, and pads samples that are not full."""

    fim_data: Annotated[bool, RequiresSetting("model.model_type", "gpt", strict=True)] = False
    """Rearrange documents for fill-in-the-middle training: prefix, suffix, middle (PSM) or suffix, prefix, middle
    (SPM)."""

    fim_rate: Annotated[float, Field(gt=0.0, le=1.0), FIM] = 0.5
    """Probability that a document of a sample is rearranged."""

    fim_spm_rate: Annotated[float, Field(ge=0.0, le=1.0), FIM] = 0.5
    """Probability that a rearranged document is SPM instead of PSM."""

    fim_split_sample: Annotated[str | None, FIM] = None
    """Token that separates fragments of a document, such as the files of a repository. Each fragment is rearranged
    separately."""

    fim_fragment_rate: Annotated[
        Annotated[float, Field(ge=0.0, le=1.0)] | None, FIM, RequiresSetting("fim_split_sample")
    ] = None
    """Probability that a fragment is rearranged, in a document with fragments that was itself chosen with probability
    fim_rate."""

    fim_no_prefix: Annotated[str | None, FIM] = None
    """Do not rearrange documents and fragments that begin with this text."""

    fim_prefix_token: Annotated[str, FIM] = "<fim_prefix>"
    """Token before the prefix."""

    fim_middle_token: Annotated[str, FIM] = "<fim_middle>"
    """Token before the middle."""

    fim_suffix_token: Annotated[str, FIM] = "<fim_suffix>"
    """Token before the suffix."""

    fim_pad_token: Annotated[str, FIM] = "<fim_pad>"
    """Token that pads samples that rearranging makes shorter."""

    fim_eod_token: Annotated[str, FIM] = "<|endoftext|>"
    """Token between the documents of a sample."""

    dataset: str | None = None
    """Your own dataset: a name passed to `register_dataset`, or `path.py:function`. The function takes a
    DatasetRequest (with the data paths) and returns a torch Dataset or IterableDataset."""

    text_key: str = "text"
    """Key or column of the text, if data_path names text."""

    text_documents: TextDocuments = "file"
    """Document unit in a .txt file: the whole file, or each block of lines between blank lines."""

    append_eod: bool = True
    """End each document of text with the end-of-document token. No effect for BERT, T5 and indexed datasets."""

    skip_bad_documents: bool = False
    """Skip and count unusable lines and documents of text instead of stopping with an error."""

    streaming: Annotated[bool, RequiresSetting("model.model_type", "gpt", strict=True)] = False
    """Tokenize the text of data_path or train_data_path while training, shard by shard (file by file). Always on for
    hf://NAME?streaming=true."""

    shuffle_buffer: PositiveInt = 1000
    """Documents per lane that are read and shuffled together, if text is streamed. 1: keep the files' order."""

    stream_lanes: PositiveInt | None = None
    """Parts of a stream that are read in parallel, each with its own shards. The order of samples depends on this
    number. Default: the largest divisor of train.global_batch_size that is at most the number of shards and 64."""

    mock: bool = False
    """Use synthetic tokens instead of a dataset, for speed measurements and tests."""

    split: str = "99,1,0"
    """Fractions of the documents for training, validation and test."""

    seq_length: PositiveInt = 1024
    """Tokens per training sequence."""

    decoder_seq_length: Annotated[
        PositiveInt | None,
        RequiresSetting("model.model_type", "t5"),
        Resolved("decoder_length"),
    ] = None
    """Tokens per decoder sequence; seq_length is the encoder's. Default: seq_length."""

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
    ] = None
    """Kind of tokenizer. Default: none, which requires model.vocab_size."""

    tokenizer_model: Annotated[
        str | None, Decides.NOTHING, RequiresSetting("tokenizer_type", strict=True)
    ] = None
    """Tokenizer file or folder (tokenizer.json, .model, .tiktoken), or a name in the local Hugging Face cache."""

    vocab_file: Annotated[str | None, Decides.NOTHING] = None
    """Vocabulary file: vocab.json for GPT2BPETokenizer; vocab.txt for BertWordPieceLowerCase and BertWordPieceCase."""

    merge_file: Annotated[str | None, Decides.NOTHING] = None
    """Merges file (merges.txt) of GPT2BPETokenizer."""

    dataloader_type: Literal["cyclic", "single"] = "cyclic"
    """Sample order: `single` reads the dataset once in order; `cyclic` repeats it with a new permutation per epoch."""

    reset_position_ids: Annotated[bool, Decides.UPDATES] = False
    """Restart position ids at 0 after each end of document."""

    reset_attention_mask: Annotated[bool, Decides.UPDATES] = False
    """Restrict attention to the token's own document."""

    seq_length_schedule: Annotated[
        list[Any] | None, Decides.UPDATES, RequiresSetting("model.model_type", "gpt", strict=True)
    ] = None
    """Sequence length schedule: points `{samples: N, seq_length: L}` or `{tokens: N, seq_length: L}`, the first at 0.
    Samples keep data.seq_length tokens, and attention stays within sequences of L tokens."""

    balance_batches: Annotated[bool, Decides.NOTHING] = False
    """Assign the packed samples of each step to data-parallel ranks by the cost of their attention, so that the
    slowest rank has as little work as possible. The samples of a step stay the same."""

    eod_mask_loss: Annotated[bool, Decides.UPDATES] = False
    """Exclude the token that follows an end-of-document token from the loss."""

    mask_prob: Annotated[Annotated[float, Field(gt=0.0, lt=1.0)], MASKED] = 0.15
    """Fraction of tokens that are masked and predicted."""

    short_seq_prob: Annotated[Annotated[float, Field(ge=0.0, le=1.0)], MASKED] = 0.1
    """Probability that a sample is shorter than seq_length, with a random length."""

    masking_do_full_word: Annotated[bool, MASKED] = True
    """Mask complete words instead of single word pieces."""

    masking_max_ngram: Annotated[PositiveInt | None, MASKED] = None
    """Maximum number of consecutive words masked together; longer spans are less frequent. Default: 3, for T5 10."""

    masking_use_geometric_distribution: Annotated[bool | None, MASKED] = None
    """Draw span lengths from a geometric distribution with p = 0.2 instead of weights 1 / n. Default: on for T5
    only."""

    vocab_extra_ids: Annotated[NonNegativeInt, RequiresSetting("model.model_type", "t5")] = 100
    """Sentinel tokens appended to a WordPiece vocabulary, one per masked span. T5's own tokenizer includes them."""

    num_workers: Annotated[NonNegativeInt, Decides.NOTHING] = 2
    """Threads that prepare batches ahead of training; for streamed text, also the processes that tokenize. 0: the
    training thread prepares batches between steps."""

    @property
    def decoder_length(self) -> int:
        """Tokens per decoder sequence."""
        return self.decoder_seq_length or self.seq_length

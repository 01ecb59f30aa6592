"""Samples of an encoder-decoder: a sequence that the encoder reads, and one that the decoder learns to write.

A sample is a record of `pair_dtype`, filled up to the lengths of the run: a dataset makes records, and `make_t5_batch`
tensors of them. The decoder reads its labels one place later, behind a token that begins them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megalith.data.batch import Batch

BEGIN = 0  # what the mock decoder's sequences begin with, and what fills up


@dataclass
class T5Batch(Batch):
    """One micro-batch of an encoder-decoder: `input_ids`, `labels` and `loss_mask` are the decoder's, [batch, seq]."""

    encoder_input_ids: Tensor  # int64 [batch, encoder seq]
    encoder_padding_mask: (
        Tensor | None
    )  # bool [batch, encoder seq], False for what fills up; None: nothing does


def pair_dtype(encoder_length: int, length: int) -> np.dtype:
    """A record with both sequences and what of them is real; names are Megatron-LM's."""
    return np.dtype(
        [
            ("text_enc", np.int64, (encoder_length,)),
            ("enc_mask", bool, (encoder_length,)),  # False for what fills up
            ("text_dec", np.int64, (length,)),
            ("labels", np.int64, (length,)),
            ("loss_mask", np.float32, (length,)),  # 0 for what fills up
        ]
    )


def make_t5_batch(samples: np.ndarray, numbers: np.ndarray) -> T5Batch:
    """A batch of samples [batch] of a `pair_dtype`, and their places in the stream, int64 [batch]."""
    text = {name: torch.from_numpy(np.ascontiguousarray(samples[name])) for name in samples.dtype.names}
    batch, seq = text["text_dec"].shape
    return T5Batch(
        input_ids=text["text_dec"],
        labels=text["labels"],
        loss_mask=text["loss_mask"],
        position_ids=torch.arange(seq).expand(batch, seq).contiguous(),
        document_ends=None,
        sample_numbers=torch.from_numpy(numbers),
        encoder_input_ids=text["text_enc"],
        encoder_padding_mask=text["enc_mask"],
    )


class MockPairs:
    """Samples that depend on (seed, i) and on the sizes alone: the encoder reads tokens that count upwards from a
    random one, in steps of 1, 2 or 3, and the decoder goes on counting. Each fills half of its length to all of it."""

    def __init__(
        self, vocab_size: int, encoder_length: int, length: int, num_samples: int, seed: int
    ) -> None:
        self.vocab_size, self.num_samples, self.seed = vocab_size, num_samples, seed
        self.lengths, self._dtype = (encoder_length, length), pair_dtype(encoder_length, length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a mock dataset that has {len(self)}")
        rng = np.random.default_rng([self.seed, i])
        read, written = (int(rng.integers((size + 1) // 2, size + 1)) for size in self.lengths)
        words = self.vocab_size - 1  # all but what begins
        count = (rng.integers(words) + rng.integers(1, 4) * np.arange(read + written)) % words + 1
        sample = np.zeros((), self._dtype)
        sample["text_enc"][:read], sample["enc_mask"][:read] = count[:read], True
        sample["labels"][:written], sample["loss_mask"][:written] = count[read:], 1.0
        sample["text_dec"][0], sample["text_dec"][1:written] = BEGIN, count[read:-1]
        return sample

    def epochs(self) -> dict[str, int]:
        return {}

    def describe(self, i: int) -> str:
        return f"sample {i} of the mock dataset"

    def in_order_of(self, num_samples: int, permuted: bool = False) -> bool:
        return not permuted or num_samples == len(self)

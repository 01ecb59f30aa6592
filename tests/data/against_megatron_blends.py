"""Blends against Megatron core's, sample by sample: `make megatron-core` installs it and runs this.

Megatron core's builder makes the datasets of data paths with and without weights, for one and several epochs, and of
each split. Each sample has to have the tokens that it has here.
"""

import logging
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from torch import distributed

from megalith.data.blend import build_datasets
from megalith.data.indexed import IndexedWriter

SEQ, SEED = 16, 1234
DOCUMENTS = {"a": 150, "b": 120, "c": 300}
BLENDS = ["a", "0.7 a 0.3 b", "3 a 1 b 5 c", "1.0 a", "1e-4 a 1 c", "0.5 a 0.5 a", "a b c"]
PER_SPLIT = [("0.7 a 0.3 b", "c", "b c"), ("a", "c", "0.2 c 0.8 b"), ("b c", "c", None)]
SIZES = [(20, 8, 4), (160, 24, 8), (400, 40, 40)]


def write(folder: Path) -> None:
    """Write a dataset of short random documents for each of DOCUMENTS."""
    for number, (name, documents) in enumerate(DOCUMENTS.items()):
        rng = np.random.RandomState(number)
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(documents):
                writer.add_document(rng.randint(1, 900, rng.randint(3, 40)).astype(np.uint16))


def words(text: str | None, folder: Path) -> list[str] | None:
    """Return the words of a data path with the names of DOCUMENTS as paths."""
    return None if text is None else [str(folder / w) if w in DOCUMENTS else w for w in text.split()]


def megatrons(paths: list[list[str] | None], split: str, sizes: tuple[int, ...], cache: str) -> list:
    """Return Megatron core's datasets of one path, divided by `split`, or of a path per split."""
    blends = [None if path is None else get_blend_from_list(path) for path in paths]
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ,
        blend=blends[0] if len(blends) == 1 else None,
        blend_per_split=blends if len(blends) > 1 else None,
        split=split if len(blends) == 1 else None,
        path_to_cache=cache,
        tokenizer=SimpleNamespace(eod=0, pad=None, vocab_size=1000, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()


def main() -> None:
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        distributed.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        write(folder)
        for texts in (*[(blend,) for blend in BLENDS], *PER_SPLIT):
            paths, split, compared = [words(text, folder) for text in texts], "80,15,5", 0
            names = ("train_data_path", "valid_data_path", "test_data_path")
            for number, sizes in enumerate(SIZES):
                theirs = megatrons(paths, split, sizes, f"{name}/{'_'.join(map(str, texts))}{number}")
                if len(paths) == 1:
                    ours = build_datasets(paths[0], split, SEQ, sizes, SEED)
                else:
                    wanted = tuple(size if path else 0 for size, path in zip(sizes, paths))
                    ours = build_datasets(None, split, SEQ, wanted, SEED, **dict(zip(names, paths)))
                for expected, found, size in zip(theirs, ours, sizes):
                    assert (expected is None) == (found is None)
                    for i in range(size if expected is not None else 0):
                        tokens = torch.cat([expected[i]["tokens"], expected[i]["labels"][-1:]])
                        assert np.array_equal(tokens.numpy(), found[i]), (texts, sizes, i)
                    compared += size if expected is not None else 0
            print(f"{' | '.join(map(str, texts))}: {compared} samples are Megatron's", flush=True)


if __name__ == "__main__":
    main()

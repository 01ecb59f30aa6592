"""How long a very large dataset takes to open, shuffles included, and what memory it holds.

    python benchmarks/data_open.py --documents 100000000 --folder /tmp

writes an `.idx` of that many documents of about 1,000 tokens (20 bytes each, so 2 GB for 100 million) and a sparse
`.bin` that takes no room on the disk, opens them for one epoch of samples, and removes them. The tokens are all
zero: this measures opening and finding samples, not the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from megalith.data.dataset import GPTDataset
from megalith.data.greedy import greedy_order
from megalith.data.idx_format import CODES, HEADER, MAGIC, VERSION, chunks, file_pair
from megalith.data.indexed import IndexedDataset
from megalith.data.mixture import normalize

MEAN_LENGTH = 1000  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument(
        "--folder", default=None, help="where the files are made (default: the temporary folder)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        prefix = Path(folder) / "sparse"
        tokens = write_sparse(prefix, arguments.documents)
        num_samples = int((arguments.epochs * tokens - 1) // arguments.seq_length)
        print(f"{arguments.documents:,} documents, {tokens:,} tokens, {num_samples:,} samples asked for")
        measure_dataset(prefix, arguments.seq_length, num_samples)
    for count in (2, 10, 100):
        measure_blend(count, min(num_samples, 10_000_000))


def write_sparse(prefix: Path, documents: int) -> int:
    """Write the pair of files. Return the number of tokens."""
    bin_path, idx_path = file_pair(prefix)
    dtype = np.dtype("<u2")
    lengths = np.random.default_rng(0).integers(1, 2 * MEAN_LENGTH, documents, dtype=np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    with open(idx_path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], documents, documents + 1))
        file.write(lengths.data)
        end = 0
        for rows in chunks(documents):
            ends = end + np.cumsum(lengths[rows], dtype=np.int64) * dtype.itemsize
            file.write((ends - lengths[rows] * np.int64(dtype.itemsize)).data)
            end = int(ends[-1])
        for rows in chunks(documents + 1):
            file.write(np.arange(rows.start, rows.stop, dtype=np.int64).data)
    with open(bin_path, "wb") as file:
        file.truncate(tokens * dtype.itemsize)
    return tokens


def measure_dataset(prefix: Path, seq_length: int, num_samples: int) -> None:
    before = memory_mb()
    start = time.perf_counter()
    indexed = IndexedDataset(prefix)
    opened = time.perf_counter()
    dataset = GPTDataset(indexed, 0, len(indexed), seq_length, num_samples, seed=1234)
    built = time.perf_counter()
    picks = np.random.default_rng(1).integers(0, len(dataset), 2000)
    for i in picks:
        dataset[int(i)]
    read = time.perf_counter()
    held = memory_mb() - before
    print(f"  map and check the files   {opened - start:8.2f} s")
    print(f"  shuffles and sums         {built - opened:8.2f} s")
    print(f"  to the first sample       {built - start:8.2f} s")
    print(f"  a random sample           {(read - built) / len(picks) * 1e6:8.1f} µs")
    print(
        f"  memory held               {held:8.0f} MB, of which the two shuffles {shuffles_mb(dataset):.0f} MB"
    )


def measure_blend(datasets: int, num_samples: int) -> None:
    weights = normalize(np.random.default_rng(0).random(datasets))
    start = time.perf_counter()
    greedy_order(weights, num_samples)
    seconds = time.perf_counter() - start
    print(
        f"  blend of {datasets:3d} datasets     {seconds / num_samples * 1e9:8.0f} ns a sample ({num_samples:,})"
    )


def shuffles_mb(dataset: GPTDataset) -> float:
    return (dataset._documents.nbytes + dataset._order.nbytes) / 1e6


def memory_mb() -> float:
    """Return the memory of this process without mapped files (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    return float("nan")


if __name__ == "__main__":
    main()

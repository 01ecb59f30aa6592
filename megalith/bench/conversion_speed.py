"""Speed and memory of import-hf and export-hf, compared with a plain copy of the same files.

    megalith bench convert --gb 2 --dtype bfloat16 --folder /tmp/convert
    megalith bench convert --gb 0.01 --folder /tmp/convert --set model.hidden_size=64 model.vocab_size=256

Writes a Llama-like folder of the given size, in shards of 500 MB; `--set` changes the shape of its layers. Then copies,
imports and exports it, each in a process of its own, and prints the speed in GB/s (10⁹ bytes) and the peak memory. The
copy is synced to disk as well. `--turns` is the number of times that all three are measured.

Each measurement starts after a pause: a virtual machine returns freed memory to its host, and the first use of a
returned page takes five times as long as the copy into it. After the pause, memory is equally cold for copy, import and
export.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.errors import ConfigError

if TYPE_CHECKING:
    from megalith.config import ModelConfig

SHAPE = (
    "model.hidden_size=2048", "model.ffn_hidden_size=5632", "model.num_attention_heads=16", "model.num_query_groups=4",
    "model.vocab_size=32000", "model.max_position_embeddings=4096", "model.position_embedding_type=rope",
    "model.normalization=RMSNorm", "model.swiglu=true", "model.add_bias_linear=false",
    "model.untie_embeddings_and_output_weights=true",
)  # fmt: skip
SHARD_BYTES = 500_000_000
WAIT = 6  # seconds

# Code of each process: imports, then the part that is timed.
START = ("import megalith.bridge.importer, megalith.bridge.exporter", "")
COPY = (
    "import os, shutil, sys; from pathlib import Path",
    "shutil.copytree(sys.argv[1], sys.argv[2])\n"
    "for file in Path(sys.argv[2]).iterdir(): os.fsync(os.open(file, os.O_RDONLY))",
)
IMPORT = (
    "import sys; from megalith.bridge.importer import import_hf",
    "import_hf(sys.argv[1], sys.argv[2], show_progress=False)",
)
EXPORT = (
    "import sys; from megalith.bridge.exporter import export_hf",
    "export_hf(sys.argv[1], sys.argv[2], show_progress=False)",
)
MAKE = (
    "import sys; from pathlib import Path; from megalith.bench.conversion_speed import make_source",
    "make_source(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--folder", type=Path, required=True, help="working folder; must not exist, and is deleted at the end"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="section.key=value", help="settings of section model"
    )
    args = parser.parse_args()
    model_of(args.gb * 1e9, args.dtype, args.set)
    if args.folder.exists():
        raise ConfigError(
            f"--folder {args.folder} exists, but the benchmark deletes its folder at the end; choose a new folder"
        )
    args.folder.mkdir(parents=True)
    try:
        source = args.folder / "source"
        measure(MAKE, source, args.gb * 1e9, args.dtype, *args.set)
        size = sum(file.stat().st_size for file in source.iterdir()) / 1e9
        print(f"Python with torch and the converter alone: {measure(START)[1] / 1e6:.0f} MB")
        for turn in range(1, args.turns + 1):
            for name in ("copy", "run", "out"):
                shutil.rmtree(args.folder / name, ignore_errors=True)
            os.sync()
            copy_rate = None
            for name, code, *folders in (
                ("copy", COPY, source, args.folder / "copy"),
                ("import", IMPORT, source, args.folder / "run"),
                ("export", EXPORT, args.folder / "run", args.folder / "out"),
            ):
                rate = report(turn, name, size, *measure(code, *folders), copy_rate)
                copy_rate = copy_rate or rate
    finally:
        shutil.rmtree(args.folder)


def model_of(size: float, dtype: str, settings: Sequence[str]) -> ModelConfig:
    """Return a model with layers of SHAPE and `settings`, and as many layers as fill `size` bytes.

    Raises:
        ConfigError: embeddings and one layer take more than `size` bytes.
    """
    import torch

    from megalith.config import RunConfig
    from megalith.planner.counts import count_parameters

    itemsize = getattr(torch, dtype).itemsize
    model = RunConfig.load(None, ["model.num_layers=1", *SHAPE, *settings]).model
    counts = count_parameters(model, padded_vocab=False)
    layer, other = counts.attention + counts.mlp, counts.embedding + counts.head
    layers = round((size / itemsize - other) / layer)
    if layers < 1:
        raise ConfigError(
            f"--gb {size / 1000000000.0:g} is less than the {itemsize * (layer + other) / 1000000000.0:.2g} GB of "
            f"embeddings and one layer in {dtype}; raise --gb, or make the layers smaller: --set "
            "model.hidden_size=256"
        )
    return model.model_copy(update={"num_layers": layers})


def make_source(folder: Path, size: float, dtype: str, settings: Sequence[str]) -> None:
    """Write a Llama-like Hugging Face folder, one tensor at a time."""
    import torch

    from megalith.bridge.families.llama import LLAMA
    from megalith.bridge.folder_writer import FolderWriter

    kind, model = getattr(torch, dtype), model_of(size, dtype, settings)
    groups = LLAMA.groups(model)
    tensors = {name: (kind, shape) for group in groups for name, shape in group.sources.items()}
    with FolderWriter(folder, tensors, SHARD_BYTES) as writer:
        for name, (_, shape) in tensors.items():
            writer.write(name, torch.randn(shape).to(kind))
        writer.write_json("config.json", {**LLAMA.write_config(model), "torch_dtype": dtype})


def measure(code: tuple[str, str], *arguments: object) -> tuple[float, int]:
    """Run `code`, a pair (preparation, work), in a new Python process. Returns seconds and peak bytes.

    The process pauses before the work.
    """
    prepare, work = code
    text = f"""
import resource, time
{prepare}
time.sleep({WAIT})
begin = time.monotonic()
{work}
print(time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    printed = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    seconds, kilobytes = printed.split()
    return float(seconds), int(kilobytes) * 1024


def report(turn: int, name: str, size: float, seconds: float, memory: int, copy_rate: float | None) -> float:
    """Print the line of a measurement, and return its speed in GB/s."""
    rate = size / seconds
    share = f", {rate / copy_rate:.2f} of the copy" if copy_rate else ""
    print(f"{turn} {name:6} {seconds:6.1f} s {rate:6.2f} GB/s, {memory / 1e6:5.0f} MB{share}", flush=True)
    return rate


if __name__ == "__main__":
    main()

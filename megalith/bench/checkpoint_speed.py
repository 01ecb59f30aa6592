"""Saving and loading checkpoints, compared with torch.distributed.checkpoint.

    megalith bench checkpoint                        1 GB on one process: six layers of GPT-2 with Adam
    megalith bench checkpoint --nproc 8 --folder /fast/disk model.preset=llama3-8b \\
        parallel.data_parallel_sharding_strategy=optim_grads_params

The state is fp32 weights and Adam's two moments, in the layout of the settings. Figures are medians of `--repeats`
saves; the first save, which allocates memory, is shown separately. The stall is the time that training would wait on
the slowest rank. The bandwidth is the state's size divided by the time until all of it is on disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.bench.timing import synchronize
from megalith.checkpoint import RunRecord, Saver, load_model, load_optimizer, open_checkpoint, state_shards
from megalith.comm.collectives import gather_json
from megalith.config import RunConfig
from megalith.hardware import pick_device
from megalith.launch.launcher import end_distributed, init_distributed, launch, this_process
from megalith.optim import build_optimizer
from megalith.parallel.mesh import build_mesh
from megalith.parallel.shards import LocalShard
from megalith.training.build import build_model, resolve_config, vocabulary_rows

DEFAULTS = ["model.preset=gpt2", "model.num_layers=6"]
WORKER = "--worker"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--folder", default="runs/benchmark", help="where to save; it is emptied")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(WORKER, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    if args.nproc > 1 and not args.worker:
        return launch(args.nproc, ["-m", "megalith.bench.checkpoint_speed", WORKER, *arguments])
    Bench(RunConfig.load(None, args.settings or DEFAULTS), Path(args.folder), args.repeats).run()
    return 0


class Bench:
    """Saves and loads of a run's state, on each rank."""

    def __init__(self, config: RunConfig, folder: Path, repeats: int):
        process = this_process()
        self.device = pick_device(config.runtime.device, process.local_rank)
        init_distributed(self.device)
        mesh = build_mesh(config.parallel, process.world_size, self.device.type)
        self.world = mesh.world
        config = resolve_config(config.with_settings({"optim.lr": 1e-4}), None)
        self.config, self.folder, self.repeats = config, folder, repeats
        self.rows = vocabulary_rows(config)
        self.model = build_model(config, mesh, self.device)
        self.optimizer = build_optimizer(self.model.parameters.named, config.optim)
        generator = torch.Generator(self.device).manual_seed(process.rank)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.uniform_(generator=generator)

    def run(self) -> None:
        """Measure and print. At most one copy of the state is on disk at a time."""
        synchronous = self._saves(background=False)
        checkpoint = open_checkpoint(self.folder, world=self.world, shards=self._shards())
        size = sum(record.bytes for record in checkpoint.manifest.files.values())
        load = self._load()
        self._print(
            f"{size / 1e9:.2f} GB on {self.world.size} × {self.device.type}, median of {self.repeats}"
        )
        self._print(f"{'':34}{'stall s':>9}{'first':>8}{'whole s':>9}{'GB/s':>7}")
        self._line("Megalith, at once", synchronous, size)
        self._line("Megalith, in the background", self._saves(background=True), size)
        self._line("torch.distributed.checkpoint.save", self._dcp_saves(), size)
        self._print(f"{'load, checksums included':34}{'':17}{load:9.2f}{size / 1e9 / load:7.2f}")
        self._empty()
        end_distributed()

    def _saves(self, background: bool) -> list[tuple[float, float]]:
        """Return the stall and the total time of each save in seconds, on the slowest rank."""
        saver = Saver(self.folder / "checkpoints", self.world, unpadded_rows=self.rows, background=background)
        figures = []
        for step in range(self.repeats + 1):
            record = RunRecord(step=step, consumed_samples=0, config=self.config.to_tree())
            self._empty()
            self._settle()
            begin = time.monotonic()
            saver.save(record, self.model.chunks, self.optimizer)
            stall = time.monotonic() - begin
            (saved,) = saver.completed_saves(wait=True)
            if saved.error is not None:
                raise saved.error
            figures.append(self._slowest(stall, time.monotonic() - begin))
        return figures

    def _dcp_saves(self) -> list[tuple[float, float]]:
        state = self._dtensors()
        figures = []
        for _ in range(self.repeats + 1):
            self._empty()
            self._settle()
            begin = time.monotonic()
            dcp.save(state, checkpoint_id=self.folder / "dcp", no_dist=self.world.size == 1)
            seconds = time.monotonic() - begin
            figures.append(self._slowest(seconds, seconds))
        return figures

    def _dtensors(self) -> dict[str, Tensor]:
        """Return the state that Megalith saves, as DTensors, for torch.distributed.checkpoint."""
        state: dict[str, Tensor] = {}
        parameters = {
            name: parameter for chunk in self.model.chunks for name, parameter in chunk.named_parameters()
        }
        for part, shards in state_shards(self.model.chunks, self.optimizer).items():
            for name, shard in shards.items():
                parameter = parameters.get(
                    name.removeprefix("optim.").rpartition(".")[0], parameters.get(name)
                )
                if part == "model":
                    state[name] = parameter.detach()
                elif isinstance(parameter, DTensor) and shard.shape:
                    state[name] = DTensor.from_local(
                        shard.values, parameter.device_mesh, parameter.placements, run_check=False,
                        shape=parameter.shape, stride=parameter.stride(),
                    )  # fmt: skip
                else:
                    state[name] = shard.values
        return state

    def _load(self) -> float:
        """Return the seconds to verify the newest step's files and load weights and moments from them."""
        self._settle()
        begin = time.monotonic()
        checkpoint = open_checkpoint(self.folder, world=self.world, shards=self._shards())
        load_model(checkpoint, self.model.chunks, self.rows, self.world)
        load_optimizer(checkpoint, self.optimizer, self.rows, self.model.chunks, self.world)
        self._settle()
        return self._slowest(time.monotonic() - begin, 0.0)[0]

    def _settle(self) -> None:
        synchronize(self.device)
        gather_json(None, self.world)

    def _slowest(self, *seconds: float) -> tuple[float, ...]:
        return tuple(max(values) for values in zip(*gather_json(list(seconds), self.world)))

    def _empty(self) -> None:
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        gather_json(None, self.world)

    def _shards(self) -> dict[str, dict[str, LocalShard]]:
        return state_shards(self.model.chunks, self.optimizer, self.rows)

    def _line(self, name: str, figures: list[tuple[float, float]], size: int) -> None:
        first, *rest = figures
        stall, total = (statistics.median(column) for column in zip(*rest))
        self._print(f"{name:34}{stall:9.2f}{first[0]:8.2f}{total:9.2f}{size / 1e9 / total:7.2f}")

    def _print(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

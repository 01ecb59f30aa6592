"""A run in progress, as one rank has it: what it is made of, and where in the run it stands."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint import DataRecord, Saver
from megalith.config import RunConfig
from megalith.config.batch_size import BatchSizeSchedule
from megalith.data.batch import Batch
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.optim.loss_scale import build_loss_scale
from megalith.optim.optimizer import build_optimizer
from megalith.optim.step import sum_of_squares
from megalith.parallel.data.gradient_norm import GradientSquares
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.stages import copies, on_two_stages
from megalith.parallel.shards import Box
from megalith.report.report import Report
from megalith.training.build import Data, build_model, vocabulary_rows

FP8 = "fp8"  # the part of a checkpoint


class Run:
    """The pieces and the position of a run. The loop that moves it is the trainer's (trainer.py)."""

    report: Report
    """From when the loop begins."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None, mesh: Mesh, device: torch.device):
        self.config, self.tokenizer, self.mesh, self.device = config, tokenizer, mesh, device
        self.output = Path(config.train.output_dir)
        self.batch_sizes = BatchSizeSchedule.from_config(config.train, mesh.dp.size)
        self.total_steps = self.batch_sizes.iterations(config.train)
        self.data = Data(config, self.batch_sizes, self.total_steps, tokenizer, mesh.dp)
        self.model = build_model(config, mesh, device)
        self.optimizer = build_optimizer(
            self.model.parameters.named, config.optim, on_two_stages(self.model.chunks, mesh.tied)
        )
        self.loss_scale = build_loss_scale(config.train.precision, config.optim, device)
        self.gradient_squares = GradientSquares(
            self.model.parameters, mesh.world, sum_of_squares, copies(self.model.chunks, mesh.pp), device
        )
        self.saver = Saver(
            self.output / "checkpoints",
            mesh.world,
            unpadded_rows=vocabulary_rows(config),
            write_tokenizer=tokenizer.save if tokenizer else None,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            background=config.checkpoint.async_save,
        )
        self.step = 0  # updates made, skipped ones included
        self.consumed_samples = 0
        self.left_out: list[list[int]] = []  # ranges of the data's stream, after loss spikes
        self.base: str | None = (
            None  # with adapters: the fingerprint of the weights from init_from; on rank 0
        )
        self.data_files: dict[str, DataRecord] = {}  # of the training data, by prefix
        self.abandoned: list[
            list[int]
        ] = []  # ranges of save numbers in the output folder, of steps gone back from

    def gradients(self, micro_batches: list[Batch]) -> Tensor:
        """Leaves the step's gradients, times the loss scale, in `.grad`; returns its loss."""
        self._seed_fused_dropout()
        return self.model.backward(micro_batches, self.loss_scale.scale)

    def fp8_boxes(self) -> dict[str, dict[str, Box]]:
        """FP8's delayed scales as a part of a checkpoint: every rank has them all."""
        table = self.model.amaxes
        if table is None:
            return {}
        first = self.mesh.world.rank == 0
        state = {name: x.contiguous() for name, x in table.state().items()}
        return {FP8: {name: Box(x, (0,) * x.ndim, tuple(x.shape), owned=first) for name, x in state.items()}}

    def tell_of_saves(self, wait: bool = False) -> None:
        """Notes how the saves went that have ended; with `wait`, also the one in flight."""
        for saved in self.saver.finished(wait):
            self.report.note(str(saved))

    def _seed_fused_dropout(self) -> None:
        """A GPU kernel's attention dropout is the one user of a random state: it starts anew from each step."""
        if self.device.type == "cuda" and self.config.model.attention_dropout:
            key = f"{self.config.train.seed}/attention dropout/{self.step}/{self.mesh.world.rank}".encode()
            torch.cuda.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))

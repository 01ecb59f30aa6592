"""`megalith distill`: a run that learns from a larger model's predictions, by the trainer's own loop.

The teacher is a second model in the run's layout, frozen and in the run's precision. A step's micro-batches go through
it first, without its output matrix; the student's pass then makes both models' logits chunk by chunk
(ops/distillation_loss.py), so that neither's exist whole. Data are those of `megalith train`, or of `megalith sft`.

Or its predictions were stored (data/stored_logits.py): `megalith teacher-logits` asks it about every sample of the run,
and the student reads them, in whatever layout, without a second model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.load import load_initial_weights, with_init_from
from megalith.comm.collectives import all_gather_replicated, gather_json
from megalith.config import RunConfig, require_run_config
from megalith.config.rl import DistillConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.data.loader import Loader
from megalith.data.stored_logits import LogitsRecord, StoredLogits, digests_of
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.launch.launcher import end_distributed, init_distributed, this_process
from megalith.models.loss import FusedHeadLoss, Loss
from megalith.ops.distillation_loss import (
    TeacherOutput,
    TeacherTargets,
    TopLogProbs,
    linear_distillation,
    linear_top_logprobs,
)
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.model_spec import LOSSES
from megalith.parallel.parallel_model import ParallelModel
from megalith.planner.counts import count_parameters
from megalith.planner.layout import with_auto
from megalith.rl.reference import StepData
from megalith.rl.summed_loss import SummedLoss
from megalith.training.build import Data, build_model, prepare, resolve_config, vocabulary_rows
from megalith.training.process import detect_machine, prepare_process
from megalith.training.run_state import Run, Task
from megalith.training.trainer import TrainingResult, train

STUDENTS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
            "recompute_saves_attention", "distribute_saved_activations", "cpu_offloading_num_layers",
            "tp_comm_overlap", "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split", "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers")  # fmt: skip
"""Settings of section parallel that are about a backward pass, or the student's own layers."""


def require_teacher(config: RunConfig) -> None:
    """Raises ConfigError for a run that has nobody to learn from."""
    if config.distill.teacher_or_logits is None:
        raise ConfigError(
            "distill.teacher is not set, so there is nobody to learn from; name a model's folder, or one of its "
            "predictions by distill.logits_dir"
        )


def train_distilled(config: RunConfig) -> TrainingResult:
    """Trains on a teacher's predictions, as `megalith.train` does on a dataset's tokens; raises as it does."""
    require_run_config(config, "train_distilled")
    require_teacher(config)
    return train(config, DistillationTask())


def store_logits(config: RunConfig) -> None:
    """Writes what the teacher predicts for the samples of the run into `distill.logits_dir`; goes on with what is
    there. Every process of the run calls it, in any layout. Raises ConfigError and DataError as `train` does."""
    distill = config.distill
    if distill.teacher is None or distill.logits_dir is None:
        raise ConfigError(
            f"distill.teacher is {distill.teacher} and distill.logits_dir {distill.logits_dir}, but a teacher's "
            "predictions come from the one and go into the other; set both"
        )
    process = this_process()
    config, tokenizer, _ = prepare(config, process.world_size)
    device = prepare_process(config, process.local_rank)
    init_distributed(device)
    try:
        config, _ = with_auto(config, process.world_size, detect_machine(config, device))
        experts = config.model.num_experts is not None
        mesh = build_mesh(config.parallel, process.world_size, device.type, has_experts=experts)
        write_logits(config, tokenizer, mesh, device)
    finally:
        end_distributed()


def write_logits(config: RunConfig, tokenizer: Tokenizer | None, mesh: Mesh, device: torch.device) -> None:
    """As `store_logits`, where the processes have found each other."""
    sizes = BatchSizeSchedule.from_config(config.train, mesh.dp.size)
    steps = sizes.iterations(config.train)
    data, teacher = Data(config, sizes, steps, tokenizer, mesh.dp), Teacher(config, mesh, device)
    is_first = mesh.tp.rank == mesh.cp.rank == mesh.dp.rank == 0
    writes = is_first and mesh.pp.rank == mesh.pp.size - 1
    own = (
        StoredLogits.create(config.distill.logits_dir, _record(config)).samples if mesh.world.rank == 0 else 0
    )
    there, total = gather_json(own, mesh.world)[0], sizes.samples_for_iterations(steps)
    step = next((step for step in range(steps + 1) if sizes.samples_for_iterations(step) >= there), steps)
    consumed = sizes.samples_for_iterations(step)
    if there < total and consumed != there:
        raise ConfigError(
            f"distill.logits_dir {config.distill.logits_dir} has predictions of {there:,} samples, which is inside of "
            f"a step of this run (to {consumed:,}); go on with the train.global_batch_size that it was begun with"
        )
    folder = StoredLogits(config.distill.logits_dir) if writes else None
    if writes and there:
        print(f"predictions of {there:,} of {total:,} samples are in {folder.folder}", flush=True)
    with data.train_loader(step, consumed, device) as batches:
        for number in range(step, steps):
            micro_batches = [next(batches) for _ in range(data.micro_batches(consumed))]
            consumed = sizes.samples_for_iterations(number + 1)
            found = teacher.predictions(micro_batches)
            whole = [torch.cat([all_gather_replicated(x, mesh.dp) for x in each]) for each in zip(*found)]
            if folder is not None:
                folder.append(*whole)
                if (number + 1) % config.log.log_interval == 0 or number + 1 == steps:
                    print(f"predictions of {consumed:,} of {total:,} samples in {folder.folder}", flush=True)


def _record(config: RunConfig) -> LogitsRecord:
    """What a folder of predictions for this run says of itself."""
    distill = config.distill
    return LogitsRecord(
        teacher=distill.teacher,
        vocab_size=config.model.vocab_size,
        seq_length=config.data.seq_length,
        top_k=min(distill.logits_top_k, config.model.vocab_size),
        temperature=distill.temperature,
    )


@dataclass
class TaughtBatch(Batch):
    """A micro-batch with the end of the teacher's pass over this rank's tokens, as its output matrix reads it, or with
    what was stored of its predictions; None where that is another pipeline stage."""

    told: Tensor | None = None
    indices: Tensor | None = None  # int32 [batch, seq, k]
    logprobs: Tensor | None = None  # float32 [batch, seq, k + 1]


class DistillationTask(Task):
    """What the trainer's loop needs to know of distillation."""

    console_metrics = ("divergence",)

    def build_data(self, run: Run) -> TaughtData:
        stored = run.config.distill.logits_dir is not None
        teacher = StoredTeacher(run) if stored else Teacher(run.config, run.mesh, run.device)
        self.loss = DistillationLoss(run.config, teacher)
        return TaughtData(run, teacher)

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]]:
        sums = self.loss.take_all_sums(run.mesh, run.device)
        return lambda: self.loss.means(sums)


class Teacher:
    """The model that is learned from."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device):
        self.run, self._distill = teacher_config(config), config.distill
        self._mesh, self._device = mesh, device
        self._model: ParallelModel | None = None  # until it is first asked
        self.asked = _Ends()

    @property
    def note(self) -> str:
        count = count_parameters(self.run.model).total
        return (
            f"the teacher's {count:,} parameters, in fp32, are on the devices too, not in the memory expected"
        )

    def told(self, batches: Sequence[Batch]) -> list[tuple]:
        """Of each micro-batch what the output matrix reads; None off the last pipeline stage."""
        self._model = self._model or self._load()
        self._model.evaluate(batches, self.asked)
        return [(end,) for end in self.asked.take() or [None] * len(batches)]

    def predictions(self, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each micro-batch the likeliest entries, their log-probabilities, and digests of the samples, as they are
        stored; none off the last pipeline stage."""
        self._model, asked = self._model or self._load(), _Likeliest(self._distill)
        self._model.evaluate(batches, asked)
        return [(*each, digests_of(batch).to(self._device)) for each, batch in zip(asked.found, batches)]

    @property
    def output(self) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of its output matrix and of the bias behind it, once it was asked; the last stage's."""
        return self.asked.output

    @property
    def softcap(self) -> float | None:
        return self.run.model.final_logit_softcapping

    def _load(self) -> ParallelModel:
        run, model = self.run, build_model(self.run, self._mesh, self._device)
        rows = vocabulary_rows(run)
        load_initial_weights(
            run.model.init_from, model.chunks, rows, run.train.seed, self._mesh.world, run.checkpoint.trust
        )
        return model


class StoredTeacher:
    """The predictions that a teacher has left."""

    def __init__(self, run: Run):
        config, self._stored = run.config, StoredLogits(run.config.distill.logits_dir)
        self._reads = run.mesh.pp.rank == run.mesh.pp.size - 1
        found, record = self._stored.record, _record(config)
        for name, setting in (
            ("vocab_size", "the model's vocabulary"),
            ("seq_length", "data.seq_length"),
            ("temperature", "distill.temperature"),
        ):
            theirs, ours = getattr(found, name), getattr(record, name)
            if theirs != ours:
                raise ConfigError(
                    f"distill.logits_dir {config.distill.logits_dir} was written with {name} {theirs}, and {setting} "
                    f"is {ours}; take that of the predictions, or write others"
                )
        self.note = (
            f"the predictions of {found.teacher} are read: of each token the {found.top_k:,} likeliest and the others "
            f"together, of {self._stored.samples:,} samples"
        )

    def told(self, batches: Sequence[Batch]) -> list[tuple]:
        """Of each micro-batch nothing, the likeliest entries and their log-probabilities; () off the last stage."""
        return [(None, *self._stored.read(batch)) if self._reads else () for batch in batches]


def teacher_config(config: RunConfig) -> RunConfig:
    """The run of the teacher: its weights in the layout of the student. Raises ConfigError where they cannot be."""
    path, given = config.distill.teacher, config.parallel
    parallel = {name: getattr(given, name) for name in given.model_fields_set - set(STUDENTS)}
    tree = {
        "model": {
            "init_from": path,
            "make_vocab_size_divisible_by": config.model.make_vocab_size_divisible_by,
        },
        "parallel": parallel,
        "data": {"seq_length": config.data.seq_length},
        "train": {
            name: getattr(config.train, name)
            for name in ("micro_batch_size", "global_batch_size", "precision", "seed")
        },
        "checkpoint": {"trust": config.checkpoint.trust},
        "runtime": {"compile": config.runtime.compile, "device": config.runtime.device},
    }
    try:
        found = resolve_config(with_init_from(RunConfig.from_tree(tree)), None)
    except (ConfigError, DataError) as error:
        raise ConfigError(f"distill.teacher {path}: {error}") from error
    model, student = found.model, config.model
    if model.model_type != "gpt":
        raise ConfigError(
            f"distill.teacher {path} has model_type {model.model_type}, which does not predict the next token from "
            "those before it, as the student does; take a teacher that continues a text"
        )
    if (model.vocab_size, model.padded_vocab_size) != (student.vocab_size, student.padded_vocab_size):
        raise ConfigError(
            f"distill.teacher {path} has a vocabulary of {model.vocab_size} and the student one of "
            f"{student.vocab_size}, but their predictions are compared entry by entry; take a teacher of the same "
            "tokenizer"
        )
    longest = model.max_position_embeddings
    if model.learns_positions and longest < config.data.seq_length:
        raise ConfigError(
            f"distill.teacher {path} has {longest} learned positions, but data.seq_length is "
            f"{config.data.seq_length}; shorten the sequences to the teacher's"
        )
    return found


class _Ends(Loss):
    """Keeps what the output matrix reads in each pass, in order, and that matrix with its bias."""

    def __init__(self) -> None:
        self.output: tuple[Tensor, Tensor | None] | None = None
        self._ends: list[Tensor] = []

    def take(self) -> list[Tensor]:
        ends, self._ends = self._ends, []
        return ends

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def fused_head_loss(self, batch: Batch) -> FusedHeadLoss:
        return self._keep

    def _keep(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *_args, bias: Tensor | None = None, **_shard
    ) -> tuple[Tensor, None, Tensor]:
        self._ends.append(hidden)
        if self.output is None:  # a sharded one is gone after the pass
            self.output = tuple(
                x if x is None else x.detach().to(hidden.dtype, copy=True) for x in (weight, bias)
            )
        nothing = torch.zeros(labels.shape, device=labels.device)
        return nothing, None, nothing.sum()


class _Likeliest(Loss):
    """Keeps the likeliest entries after each token of whole micro-batches, and their log-probabilities, in order."""

    def __init__(self, distill: DistillConfig) -> None:
        self._distill, self.found = distill, []

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def fused_head_loss(self, batch: Batch) -> FusedHeadLoss:
        return self._find

    def observe(self, logprobs: Tensor, indices: Tensor, batch: Batch) -> None:
        self.found.append((indices, logprobs))

    def _find(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens: Mapping[str, Tensor],
        vocab_size: int,
        softcap: float | None,
        scale: Tensor | None,
        **shard,
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, temperature = min(self._distill.logits_top_k, vocab_size), self._distill.temperature
        found = linear_top_logprobs(hidden, weight, k, vocab_size, softcap, temperature, **shard)
        return *found, torch.zeros((), device=hidden.device)


class DistillationLoss(SummedLoss):
    """(1 − α) · cross-entropy + α · T² · divergence of each token, with the weights of pre-training's loss."""

    FIGURES = ("tokens", "lm_loss", "divergence")

    def __init__(self, config: RunConfig, teacher: Teacher | StoredTeacher):
        self.distill, self._teacher = config.distill, teacher
        self._plain = LOSSES["gpt", config.train.calculate_per_token_loss]()

    def denominator(self, batch: Batch) -> Tensor | float:
        return self._plain.denominator(batch)

    def weights(self, batch: Batch) -> Tensor:
        return self._plain.weights(batch)

    def tokens(self, batch: TaughtBatch) -> dict[str, Tensor]:
        found = {"weights": self.weights(batch), "indices": batch.indices, "logprobs": batch.logprobs}
        return {name: each for name, each in found.items() if each is not None}

    def fused_head_loss(self, batch: TaughtBatch) -> FusedHeadLoss:
        def loss(
            hidden: Tensor,
            weight: Tensor,
            labels: Tensor,
            tokens: Mapping[str, Tensor],
            vocab_size: int,
            softcap: float | None,
            scale: Tensor | None,
            **shard,
        ) -> tuple[Tensor, Tensor, Tensor]:
            how = self.distill
            if batch.indices is not None:
                indices = tokens["indices"].long() - shard.get("first", 0)
                by = TopLogProbs(indices, tokens["logprobs"])
            else:
                by = TeacherOutput(batch.told, *self._teacher.output, self._teacher.softcap)
            taught = TeacherTargets(by, how.kd_ratio, how.temperature, how.divergence)
            given = (tokens["weights"], taught, vocab_size, softcap, scale)
            total, logprobs, divergences = linear_distillation(hidden, weight, labels, *given, **shard)
            return logprobs, divergences, total

        return loss

    def observe(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> None:
        mask = batch.loss_mask
        self.add_figures([mask, -logprobs * mask, entropy * mask])


class TaughtData(StepData):
    """A run's data, in micro-batches with the end of the teacher's pass."""

    def __init__(self, run: Run, teacher: Teacher | StoredTeacher):
        super().__init__(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp)
        self._teacher = teacher
        self.notes.append(teacher.note)

    def evaluation_loader(self, dataset: SampleDataset, device: torch.device) -> Loader:
        """Without the teacher: what is evaluated is the cross-entropy."""
        return Data.evaluation_loader(self, dataset, device)

    def completed(self, batches: Sequence[Batch]) -> list[TaughtBatch]:
        told = self._teacher.told(batches)
        own = [item.name for item in fields(TaughtBatch) if item.name not in Batch.__dataclass_fields__]
        return [
            TaughtBatch(
                **{item.name: batch[item.name] for item in fields(Batch)}, **dict(zip(own, predictions))
            )
            for batch, predictions in zip(batches, told, strict=True)
        ]

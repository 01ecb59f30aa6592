"""Assignment of layers to pipeline stages, and the model chunk of a stage.

Stages are in the model's order: first chunk 0 of every rank, then chunk 1 of every rank, and so on. By default all
stages hold the same number of layers. Settings can give the first and last rank other numbers, count embedding and head
as a layer each, or list the layers of every stage (stage_layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config import ModelConfig, ParallelConfig
from megalith.errors import ConfigError
from megalith.models.transformer import Transformer
from megalith.parallel.pipeline.schedules import Schedule, build_schedule, fitting_micro_batches
from megalith.parallel.pipeline.stage_layout import expand_layout, suggested_layout
from megalith.tables import counted

LONGEST_SIMULATED = 3  # micro-batches per stage; each further one takes as long as the slowest stage


@dataclass(frozen=True)
class Stage:
    """The layers of one chunk of one pipeline rank."""

    rank: int
    chunk: int
    layers: tuple[int, ...]
    """Layer numbers, from 0."""
    embedding: bool
    head: bool
    """True if the stage has the final norm, and the output matrix with the loss."""


def assign_layers(model: ModelConfig, parallel: ParallelConfig) -> list[list[Stage]]:
    """Return the stages by pipeline rank and chunk.

    Raises:
        ConfigError: the layers cannot be split this way. The message suggests a split.
    """
    ranks, virtual = parallel.pipeline_model_parallel_size, virtual_size(parallel)
    if model.shares_relative_positions and virtual > 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size {virtual} would give each rank {virtual} copies of the relative "
            "positions, whose gradients are summed only over ranks; leave virtual_pipeline_model_parallel_size out, "
            "or choose learned positions"
        )
    if parallel.pipeline_model_parallel_layout is not None:
        sizes = _by_layout(model, parallel)
    elif parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers:
        sizes = _by_first_and_last(model, parallel, virtual)
    else:
        sizes = _evenly(model, parallel, virtual)
    first, assigned = 0, [[] for _ in range(ranks)]
    for index, size in enumerate(sizes):
        layers = tuple(range(first, first := first + size))
        stage = Stage(
            index % ranks, index // ranks, layers, embedding=index == 0, head=index == len(sizes) - 1
        )
        assigned[stage.rank].append(stage)
    return assigned


def virtual_size(parallel: ParallelConfig) -> int:
    """Return the number of chunks of layers per pipeline rank.

    Raises:
        ConfigError: pipeline_model_parallel_layout and the sizes contradict each other.
    """
    virtual = parallel.virtual_pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is None:
        return virtual or 1
    layout, ranks = parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
    stages = len(expand_layout(layout).split("|"))
    if stages % ranks or (virtual and stages != virtual * ranks):
        raise ConfigError(
            f"pipeline_model_parallel_layout {layout!r} has {stages} stages, but pipeline_model_parallel_size is "
            f"{ranks}{f' with {virtual} chunks per rank' if virtual else ''}; write {ranks * (virtual or 1)} "
            f"stages{'' if virtual else ', or a multiple'}, or change the sizes"
        )
    return stages // ranks


def schedule_kind(parallel: ParallelConfig) -> str:
    """Return the configured schedule. 1F1B with several chunks per rank becomes `interleaved`."""
    if parallel.pipeline_schedule == "1f1b" and virtual_size(parallel) > 1:
        return "interleaved"
    return parallel.pipeline_schedule


def run_schedule(parallel: ParallelConfig, micro_batches: int) -> Schedule:
    """Return the schedule of a step with this number of micro-batches.

    Raises:
        ConfigError: the schedule does not support this number.
    """
    return build_schedule(
        schedule_kind(parallel),
        parallel.pipeline_model_parallel_size,
        micro_batches,
        virtual_size(parallel),
        parallel.microbatch_group_size_per_virtual_pipeline_stage,
    )


def padded_micro_batches(parallel: ParallelConfig, micro_batches: int) -> int:
    """Return the number of micro-batches after padding with empty ones, for steps whose data decides the number."""
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    stages = parallel.pipeline_model_parallel_size
    return fitting_micro_batches(schedule_kind(parallel), stages, micro_batches, group)


def shortened_schedule(parallel: ParallelConfig, micro_batches: int) -> tuple[Schedule, int]:
    """Return the schedule for at most LONGEST_SIMULATED micro-batches per stage, and the number of micro-batches that
    it leaves out.
    """
    longest = LONGEST_SIMULATED * (parallel.microbatch_group_size_per_virtual_pipeline_stage or 0)
    longest = max(longest, LONGEST_SIMULATED * parallel.pipeline_model_parallel_size)
    omitted = max(micro_batches - longest, 0)
    unit = parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pipeline_model_parallel_size
    omitted = omitted // unit * unit
    return run_schedule(parallel, micro_batches - omitted), omitted


def split_stages(model: Transformer, assignment: list[list[Stage]], rank: int) -> list[Transformer]:
    """Return the chunks of pipeline rank `rank`, from the full model on the meta device.

    Each chunk is a Transformer without the modules of other stages. Parameters keep their names. If a tied embedding
    and the head are on different stages, the head's stage keeps a copy of the word embedding under the same name
    (`reduce_shared_gradients` keeps the two equal). Every stage keeps a copy of relative position embeddings.
    """
    if len(assignment) == 1:
        return [model]
    return [
        model.stage(stage.layers, is_first=stage.embedding, is_last=stage.head) for stage in assignment[rank]
    ]


def _evenly(model: ModelConfig, parallel: ParallelConfig, virtual: int) -> list[int]:
    ranks, layers = parallel.pipeline_model_parallel_size, model.num_layers
    embedding = parallel.account_for_embedding_in_pipeline_split
    head = parallel.account_for_loss_in_pipeline_split
    units, stages = layers + embedding + head, ranks * virtual
    if units % stages or (embedding and head and stages == 1):
        counted = " + ".join([f"model.num_layers {layers}"] + ["embedding"] * embedding + ["loss"] * head)
        sizes = [str(size) for size in range(1, units + 1) if units % (size * virtual) == 0]
        other_size = f"pipeline_model_parallel_size to one of {', '.join(sizes)}, or " if sizes else ""
        raise ConfigError(
            f"{counted}{'' if units == layers else f' = {units}'} is not divisible by pipeline ({ranks}) × "
            f"virtual ({virtual}) = {stages} stages; set {other_size}pipeline_model_parallel_layout to "
            f"'{suggested_layout(layers, stages)}'"
        )
    sizes = [units // stages] * stages
    sizes[0] -= embedding
    sizes[-1] -= head
    return sizes


def _by_first_and_last(model: ModelConfig, parallel: ParallelConfig, virtual: int) -> list[int]:
    ranks, layers = parallel.pipeline_model_parallel_size, model.num_layers
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if (
        parallel.account_for_embedding_in_pipeline_split
        or parallel.account_for_loss_in_pipeline_split
        or ranks == 1
    ):
        raise ConfigError(
            f"decoder_first_pipeline_num_layers ({first}) and decoder_last_pipeline_num_layers ({last}) need "
            f"pipeline_model_parallel_size of at least 2 (it is {ranks}), and exclude account_for_embedding_… and "
            "account_for_loss_in_pipeline_split; leave out the settings of one kind"
        )
    middle = ranks - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    uneven = rest < 0 or (rest if middle == 0 else rest % middle)
    if uneven:
        raise ConfigError(
            f"model.num_layers {layers} − first ({first or 0}) − last ({last or 0}) = {rest} layers are not divisible "
            f"by the other {middle} pipeline ranks; change decoder_first_pipeline_num_layers or "
            f"decoder_last_pipeline_num_layers, or set pipeline_model_parallel_layout to "
            f"'{suggested_layout(layers, ranks * virtual)}' in their place"
        )
    each = rest // middle if middle else 0
    by_rank = [first or each] + [each] * (ranks - 2) + [last or each]
    for rank, size in enumerate(by_rank):
        if size % virtual:
            raise ConfigError(
                f"pipeline rank {rank} has {counted(size, 'layer')}, which virtual_pipeline_model_parallel_size "
                f"{virtual} does not divide; change one of the two, or write the stages out in "
                "pipeline_model_parallel_layout"
            )
    return [size // virtual for _ in range(virtual) for size in by_rank]


def _by_layout(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    layout = parallel.pipeline_model_parallel_layout
    others = (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    )
    if conflicting := [name for name in others if getattr(parallel, name)]:
        raise ConfigError(
            f"pipeline_model_parallel_layout {layout!r} assigns every layer, and so does {', '.join(conflicting)}; "
            "leave one of the two out"
        )
    letters = expand_layout(layout)
    plain = letters.replace("|", "")
    if plain.count("E") != 1 or plain.count("L") != 1 or letters[0] != "E" or letters[-1] != "L":
        raise ConfigError(
            f"pipeline_model_parallel_layout {layout!r} must begin with its only E (embedding) "
            f"and end with its only L (head and loss), but it expands to {letters[:80]}"
        )
    if plain.count("t") != model.num_layers:
        stages = letters.count("|") + 1
        raise ConfigError(
            f"pipeline_model_parallel_layout {layout!r} has {plain.count('t')} layers (t), but model.num_layers is "
            f"{model.num_layers}; change one of the two, for example the layout to "
            f"'{suggested_layout(model.num_layers, stages)}'"
        )
    return [stage.count("t") for stage in letters.split("|")]

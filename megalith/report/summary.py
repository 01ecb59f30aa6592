"""What a run is about to do, on one screen: the model, its cost, the batch, the memory and the device.

In a file or a pipe Megatron-LM's parameter lines follow, for the scripts that look for them.
"""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megalith.config import RunConfig
from megalith.config.batch_size import BatchSizeSchedule
from megalith.hardware import DeviceInfo
from megalith.planner.counts import count_parameters, flops_per_token
from megalith.planner.layout import build_layout
from megalith.report.console import si

PLAIN_WIDTH = 100


def print_summary(
    config: RunConfig, device: DeviceInfo, data_parallel_size: int = 1, stream: TextIO | None = None
) -> None:
    """Prints the summary of a resolved `config` (its vocabulary known) to `stream`, or to standard output."""
    stream = stream or sys.stdout
    table = summary_table(summary_rows(config, device, data_parallel_size))
    if stream.isatty():
        Console(file=stream, force_terminal=True).print(table)
    else:
        console = Console(file=stream, force_terminal=False, width=PLAIN_WIDTH)
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        lines += megatron_parameter_lines(config, data_parallel_size)
        stream.write("\n".join(lines) + "\n")
    stream.flush()


def summary_table(rows: list[tuple[str, str]]) -> Table:
    """The rows as a borderless table that wraps within the console's width."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def summary_rows(config: RunConfig, device: DeviceInfo, data_parallel_size: int) -> list[tuple[str, str]]:
    """(heading, text) in the order shown."""
    return [
        ("model", _model(config)),
        ("parameters", _parameters(config)),
        ("FLOPs a token", _flops(config)),
        ("batch", _batch(config, data_parallel_size)),
        ("length", _length(config, data_parallel_size)),
        ("memory", _memory(config, device, data_parallel_size)),
        ("device", _device(config, device, data_parallel_size)),
        ("output", config.train.output_dir),
    ]


def megatron_parameter_lines(config: RunConfig, data_parallel_size: int) -> list[str]:
    """Megatron-LM's counts in billions. Its embedding layers are the vocabulary's, without positions.

    A shard is a tensor-parallel rank's part of a pipeline stage; experts count whole in it.
    """
    model, parallel = config.model, config.parallel
    block = count_parameters(model).non_embedding
    matrices = 2 if model.untie_embeddings_and_output_weights else 1
    embedding = matrices * model.padded_vocab_size * model.hidden_size
    positions = count_parameters(model).embedding - model.padded_vocab_size * model.hidden_size
    stages = build_layout(config, _world_size(config, data_parallel_size)).stages
    fullest = max(stage.parameters - positions * stage.embedding for stage in stages)
    shard = fullest / parallel.tensor_model_parallel_size
    return [
        f" Number of parameters in transformer block in billions: {block / 1e9: .2f}",
        f" Number of parameters in embedding layers in billions: {embedding / 1e9:.2f}",
        f" Total number of parameters in billions: {(block + embedding) / 1e9:.2f}",
        f" Number of parameters in most loaded shard in billions: {shard / 1e9:.4f}",
    ]


def _model(config: RunConfig) -> str:
    model = config.model
    heads = f"{model.num_attention_heads} heads of {model.head_dim}"
    if model.query_groups != model.num_attention_heads:
        heads += f" in {model.query_groups} KV groups"
    mlp = "SwiGLU" if model.swiglu else f"{'gated ' * model.gated}{model.activation}"
    positions = "RoPE" if model.position_embedding_type == "rope" else "learned positions"
    vocabulary = f"vocabulary {model.vocab_size:,}"
    if model.padded_vocab_size != model.vocab_size:
        vocabulary += f" padded to {model.padded_vocab_size:,}"
    name = f"{model.preset}: " if model.preset else ""
    widths = f"MLP {model.ffn_size} {mlp}"
    if model.num_experts:
        widths = f"{model.num_experts} experts of {model.expert_size} {mlp}, {model.moe_router_topk} a token"
        if dense := model.num_layers - len(model.expert_layers):
            widths += f", {dense} layers with an MLP of {model.ffn_size}"
    return (
        f"{name}{model.num_layers} layers × {model.hidden_size}, {heads}, {widths}\n"
        f"{model.normalization}, {positions}, {vocabulary}"
    )


def _parameters(config: RunConfig) -> str:
    counts = count_parameters(config.model)
    parts = {
        "embedding": counts.embedding,
        "attention": counts.attention,
        "MLP": counts.mlp,
        "norms": counts.norms,
        "head": counts.head,
    }
    shown = " + ".join(f"{name} {si(count)}" for name, count in parts.items() if count)
    tied = "" if counts.head else "; the head is the embedding"
    active = f", of which a token meets {counts.active:,}" if counts.idle else ""
    text = f"{counts.total:,}{active}, without embedding and head {counts.non_embedding:,}\n= {shown}{tied}"
    if config.lora.rank is None:
        return text
    trained = config.model.num_layers * config.lora.parameters(config.model)
    return f"{text}\nfrozen; trained are adapters of rank {config.lora.rank}: {trained:,}"


def _flops(config: RunConfig) -> str:
    cost = flops_per_token(config.model, config.data.seq_length, config.lora)
    return f"{_flop(cost.causal)} causal (as in the log), {_flop(cost.full)} full (attention matrix whole)"


def _batch(config: RunConfig, data_parallel_size: int) -> str:
    train, seq_length = config.train, config.data.seq_length
    schedule = BatchSizeSchedule.from_config(train, data_parallel_size)
    size = schedule.global_batch_size
    accumulation = size // (train.micro_batch_size * data_parallel_size)
    text = (
        f"{size} = micro {train.micro_batch_size} × data parallel {data_parallel_size} × accumulation {accumulation}"
        f"; × {seq_length:,} = {size * seq_length:,} tokens a step"
    )
    if schedule.rampup_batch_size is not None:
        start, increment, samples = schedule.rampup_batch_size
        text += f"\nramped up from {start} by {increment} over {samples:,} sequences"
    return text


def _length(config: RunConfig, data_parallel_size: int) -> str:
    train = config.train
    schedule = BatchSizeSchedule.from_config(train, data_parallel_size)
    steps = schedule.iterations(train)
    samples = schedule.samples_for_iterations(steps)
    tokens = samples * config.data.seq_length
    per_parameter = tokens / count_parameters(config.model).total
    return f"{steps:,} steps, {samples:,} sequences, {si(tokens)} tokens ({si(per_parameter)} a parameter)"


def _memory(config: RunConfig, device: DeviceInfo, data_parallel_size: int) -> str:
    layout = build_layout(config, _world_size(config, data_parallel_size))
    stage = max(layout.stages, key=lambda stage: stage.memory.total)
    memory = stage.memory
    copy = "gathered copy" if layout.gathers else f"{config.train.precision} copy"
    parts = {
        "weights": memory.weights,
        copy: memory.compute_copy,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "loss": memory.loss,
    }
    shown = " + ".join(f"{name} {_bytes(size)}" for name, size in parts.items() if size)
    where = "each device" if len(layout.stages) == 1 else f"a device of stage {stage.number}, the fullest"
    text = f"about {_bytes(memory.total)} on {where}\n= {shown}"
    if device.memory_bytes is not None and memory.total > device.memory_bytes:
        text += f"\nmore than the device's {_bytes(device.memory_bytes)}: lower train.micro_batch_size"
    return text


def _device(config: RunConfig, device: DeviceInfo, data_parallel_size: int) -> str:
    precision = config.train.precision
    text = f"{_world_size(config, data_parallel_size)} × {device.name}"
    if device.memory_bytes is not None:
        text += f", {_bytes(device.memory_bytes)}"
    peak = device.peak(precision)
    if peak is None:
        return f"{text}, {precision}; its peak is not known, so no MFU"
    return f"{text}, {precision} peak {peak / 1e12:,.0f} TFLOP/s"


def _world_size(config: RunConfig, data_parallel_size: int) -> int:
    parallel = config.parallel
    return (
        data_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.tensor_model_parallel_size
    )


def _flop(flops: int) -> str:
    return f"{flops / 1e9:.2f} GFLOP" if flops >= 1e9 else f"{flops / 1e6:.2f} MFLOP"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

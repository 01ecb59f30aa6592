"""The summary printed at the start of a run: model, parameters, FLOPs, batch, length, memory and device.

With `log.console lines`, Megatron-LM's lines about parameters follow, for scripts that parse them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from platform import python_version
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

import megalith
from megalith.config import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.hardware import DeviceInfo
from megalith.planner.counts import MetaModel, ParameterCounts, count_parameters
from megalith.planner.flops import flops_per_token
from megalith.planner.layout import Layout
from megalith.tables import counted, format_bytes, format_si, render

POSITIONS = {
    "learned_absolute": "learned positions",
    "sinusoidal": "sinusoidal positions",
    "rope": "RoPE",
    "alibi": "ALiBi",
    "relative": "relative positions",
    "none": "no positions",
}


def print_summary(layout: Layout, device: DeviceInfo, stream: TextIO | None = None) -> list[tuple[str, str]]:
    """Print the summary to `stream` or standard output, and return its rows. The vocabulary size must be resolved."""
    stream = stream or sys.stdout
    counts = count_parameters(layout.config.model, lora=layout.config.lora)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    rows = summary_rows(layout, counts, device)
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    if stream.isatty():
        Console(file=stream, force_terminal=True).print(table)
    else:
        stream.write(render(table) + "\n")
    if layout.config.log.console == "lines":
        stream.writelines(f"{line}\n" for line in megatron_parameter_lines(layout))
    stream.flush()
    return rows


def start_record(
    layout: Layout, hosts: Sequence[str], step: int, rows: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return the record for starts.jsonl: versions, machines, layout, summary and expected memory per stage.

    Args:
        hosts: the machine of each rank.
        step: the last completed step.
        rows: the rows of the summary.
    """
    size = layout.size
    return {
        "step": step,
        "versions": {"megalith": megalith.__version__, "torch": version("torch"), "python": python_version()},
        "hosts": sorted(set(hosts)),
        "ranks": layout.world_size,
        "layout": {"pp": size.pp, "dp": size.dp, "cp": size.cp, "tp": size.tp},
        "summary": dict(rows),
        "stages": [{"stage": stage.number, "bytes": asdict(stage.memory)} for stage in layout.stages],
    }


def summary_rows(layout: Layout, counts: ParameterCounts, device: DeviceInfo) -> list[tuple[str, str]]:
    """Return (heading, text) pairs in display order."""
    config = layout.config
    schedule = BatchSizeSchedule.from_config(config.train, layout.size.dp)
    return [
        ("model", _model(config)),
        ("parameters", _parameters(config, counts)),
        ("FLOPs a token", _flops(config)),
        ("batch", _batch(layout, schedule)),
        ("length", _length(config, schedule, counts)),
        ("memory", _memory(layout, device)),
        ("device", _device(layout, device)),
        ("output", config.train.output_dir),
    ]


def megatron_parameter_lines(layout: Layout) -> list[str]:
    """Return Megatron-LM's parameter counts in billions, by its formula.

    The formula counts matrices, two vectors for each of the layers' norms and the final norm (whatever norms and biases
    the model has), and for the embedding the vocabulary only. The most loaded shard is a tensor-parallel rank's share
    of an equal pipeline stage and of the embedding, and with one stage also of the output matrix.
    """
    model, size = layout.config.model, layout.size
    matrices = MetaModel(model).in_layers(range(model.num_layers), matrices=True).total()
    block = matrices + (4 * model.num_layers + 2) * model.hidden_size
    table = model.padded_vocab_size * model.hidden_size
    untied = table if model.untie_embeddings_and_output_weights else 0
    fullest = (block / size.pp + table + (untied if size.pp == 1 else 0)) / size.tp
    embedding = table + untied
    return [
        f" Number of parameters in transformer block in billions: {block / 1e9: .2f}",
        f" Number of parameters in embedding layers in billions: {embedding / 1e9:.2f}",
        f" Total number of parameters in billions: {(block + embedding) / 1e9:.2f}",
        f" Number of parameters in most loaded shard in billions: {fullest / 1e9:.4f}",
    ]


def _model(config: RunConfig) -> str:
    model = config.model
    heads = f"{model.num_attention_heads} heads of {model.head_dim}"
    if model.query_groups != model.num_attention_heads:
        heads += f" in {model.query_groups} KV groups"
    mlp = "SwiGLU" if model.swiglu else f"{'gated ' * model.gated}{model.activation}"
    positions = POSITIONS[model.position_embedding_type]
    vocabulary = f"vocabulary {model.vocab_size:,}"
    if model.padded_vocab_size != model.vocab_size:
        vocabulary += f" padded to {model.padded_vocab_size:,}"
    name = f"{model.preset}: " if model.preset else ""
    widths = f"MLP {model.ffn_size} {mlp}"
    if model.num_experts:
        widths = f"{model.num_experts} experts of {model.expert_size} {mlp}, {model.moe_router_topk} a token"
        if dense := model.num_layers - len(model.routed_layers):
            widths += f", {counted(dense, 'layer')} with an MLP of {model.ffn_size}"
    return (
        f"{name}{counted(model.num_layers, 'layer')} × {model.hidden_size}, {heads}, {widths}\n"
        f"{model.normalization}, {positions}, {vocabulary}"
    )


def _parameters(config: RunConfig, counts: ParameterCounts) -> str:
    parts = {
        "embedding": counts.embedding,
        "attention": counts.attention,
        "MLP": counts.mlp,
        "norms": counts.norms,
        "head": counts.head,
    }
    shown = " + ".join(f"{name} {format_si(count)}" for name, count in parts.items() if count)
    tied = "" if counts.head else "; head tied to embedding"
    active = f", of which a token uses {counts.active:,}" if counts.idle else ""
    text = f"{counts.total:,}{active}, without embedding and head {counts.non_embedding:,}\n= {shown}{tied}"
    if config.lora.rank is None:
        return text
    saved = f", and other weights: {counts.saved:,}" if counts.saved else ""
    return f"{text}\nfrozen; trained are adapters of rank {config.lora.rank}: {counts.adapters:,}{saved}"


def _flops(config: RunConfig) -> str:
    data = config.data
    cost = flops_per_token(config.model, data.seq_length, config.lora, data.decoder_length)
    return f"{_flop(cost.causal)} causal (as in the log), {_flop(cost.full)} full (full attention matrix)"


def _batch(layout: Layout, schedule: BatchSizeSchedule) -> str:
    train, seq_length = layout.config.train, layout.config.data.seq_length
    size = schedule.global_batch_size
    text = (
        f"{size} = micro {train.micro_batch_size} × data parallel {layout.size.dp} × accumulation "
        f"{layout.micro_batches}; × {seq_length:,} = {size * seq_length:,} tokens per step"
    )
    if schedule.steps is not None:
        text += f"\nfrom {', '.join(f'{size} at {start:,}' for start, size in schedule.steps)} sequences on"
    if schedule.rampup_batch_size is not None:
        start, increment, samples = schedule.rampup_batch_size
        text += f"\nramped up from {start} by {increment} over {samples:,} sequences"
    return text


def _length(config: RunConfig, schedule: BatchSizeSchedule, counts: ParameterCounts) -> str:
    steps = schedule.iterations(config.train)
    samples = schedule.samples_for_iterations(steps)
    tokens = samples * config.data.seq_length
    each = format_si(tokens / counts.total)
    length = f"{counted(steps, 'step')}, {counted(samples, 'sequence')}"
    return f"{length}, {format_si(tokens)} tokens ({each} per parameter)"


def _memory(layout: Layout, device: DeviceInfo) -> str:
    stage = max(layout.stages, key=lambda stage: stage.memory.total)
    memory = stage.memory
    words = {"compute_copy": "gathered copy" if layout.gathers else f"{layout.config.train.precision} copy"}
    parts = {words.get(part.name, part.name): getattr(memory, part.name) for part in fields(memory)}
    shown = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    where = "each device" if len(layout.stages) == 1 else f"a device of stage {stage.number}, the fullest"
    text = f"about {format_bytes(memory.total)} on {where}\n= {shown}"
    if device.memory_bytes is not None and memory.total > device.memory_bytes:
        text += f"\nmore than the device's {format_bytes(device.memory_bytes)}: lower train.micro_batch_size"
    if interval := layout.config.checkpoint.memory_interval:
        most = max(stage.memory.snapshots for stage in layout.stages)
        text += (
            f"\n+ at most {format_bytes(most)} of host memory per rank for a snapshot every {interval} steps"
        )
    return text


def _device(layout: Layout, device: DeviceInfo) -> str:
    precision = layout.config.train.peak_dtype
    text = f"{layout.world_size} × {device.name}"
    if device.memory_bytes is not None:
        text += f", {format_bytes(device.memory_bytes)}"
    peak = device.peak(precision)
    if peak is None:
        return f"{text}, {precision}; its peak is not known, so no MFU"
    return f"{text}, {precision} peak {peak / 1e12:,.0f} TFLOP/s"


def _flop(flops: int) -> str:
    return f"{flops / 1e9:.2f} GFLOP" if flops >= 1e9 else f"{flops / 1e6:.2f} MFLOP"

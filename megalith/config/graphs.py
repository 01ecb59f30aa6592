"""The rules of layers_per_graph, which makes one graph of several layers."""

from __future__ import annotations

from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_graphs(config: RunConfig) -> None:
    """Raises ConfigError unless nothing has to happen between the layers of a graph."""
    size, parallel = config.runtime.layers_per_graph, config.parallel
    if size == 1:
        return
    if config.model.num_experts is not None:
        raise ConfigError(
            f"runtime.layers_per_graph {size} needs layers that are one graph, but the exchange of tokens of "
            f"model.num_experts {config.model.num_experts} experts stands between two; leave it at 1"
        )
    if parallel.pipeline_schedule == "zero_bubble":
        raise ConfigError(
            f"runtime.layers_per_graph is {size}, but pipeline_schedule zero_bubble takes backward passes apart and "
            "compiles no layers; choose another schedule, or leave layers_per_graph at 1"
        )
    if parallel.recompute_granularity != "full":
        return
    if parallel.recompute_method == "block":
        raise ConfigError(
            f"runtime.layers_per_graph {size} makes one graph of several layers, but recompute_method block "
            "recomputes the first recompute_num_layers layers each by itself; choose uniform, or leave "
            "layers_per_graph at 1"
        )
    if parallel.recompute_num_layers % size:
        raise ConfigError(
            f"parallel.recompute_num_layers {parallel.recompute_num_layers} is not a multiple of "
            f"runtime.layers_per_graph {size}, but layers that are one graph are recomputed together; "
            f"set recompute_num_layers to {-(-parallel.recompute_num_layers // size) * size}, or leave "
            "layers_per_graph at 1"
        )


def graph_notes(config: RunConfig, compiled: bool) -> list[str]:
    """What to tell of layers_per_graph where layers are not compiled."""
    size = config.runtime.layers_per_graph
    if compiled or size == 1:
        return []
    return [
        f"runtime.layers_per_graph {size} makes no graphs without runtime.compile: FSDP gathers {size} layers at a "
        "time, and nothing else changes"
    ]

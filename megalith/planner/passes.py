"""Forward and backward time of a rank for one micro-batch, in seconds per operation.

The times of a stage's layers (layer_times.py) are added to the times of embedding and output layer. If the host
launches kernels more slowly than the GPU runs them, the host sets the pace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megalith.config import RunConfig
from megalith.config.rules.expert_rules import is_static
from megalith.parallel.memory.recompute import skips_last_layer
from megalith.parallel.pipeline.stages import Stage
from megalith.planner.counts import MetaModel, layers_of
from megalith.planner.flops import token_fraction
from megalith.planner.layer_times import OTHER_RATES, LayerTimes
from megalith.planner.rates import Rates

# Fitted to the same rows as the constants of layer_times.py.
OPERATORS = {"layer": 180, "half": 390, "experts": 440, "eager": 450}  # launched per layer in both passes
ACTION = 6e-4  # seconds between two passes of a pipeline rank, to start transfers and wait for them


class Passes(LayerTimes):
    """Estimates a rank's forward and backward time for one micro-batch."""

    def __init__(
        self,
        config: RunConfig,
        meta: MetaModel,
        world_size: int,
        rates: Rates,
        gpus_per_node: int,
        micro_batches: int,
    ):
        """Prepare the estimate of a step with `micro_batches` micro-batches."""
        super().__init__(config, meta, world_size, rates, gpus_per_node, micro_batches)
        self._chunks: dict[tuple, tuple[Counter[str], Counter[str]]] = {}

    def chunk(self, chunk: Stage) -> tuple[Counter[str], Counter[str]]:
        """Return the seconds of the forward and the backward pass of a chunk, per operation."""
        layer_numbers = layers_of(self.model, [chunk])
        kinds = self.meta.kinds(layer_numbers)
        key = (*kinds.items(), chunk.embedding, chunk.head)
        if key not in self._chunks:
            self._chunks[key] = self._chunk(chunk, layer_numbers, kinds)
        return self._chunks[key]

    def _chunk(
        self, chunk: Stage, layer_numbers: Sequence[int], kinds: Counter[int]
    ) -> tuple[Counter[str], Counter[str]]:
        forward, backward = Counter(), Counter()
        recomputed = self._recomputed(len(layer_numbers), chunk.head)
        for number, times in kinds.items():
            layer_forward, layer_backward, layer_recomputed = self._layer(number)
            times = times * token_fraction(self.config, number)
            for name in layer_forward | layer_backward:
                forward[name] += times * layer_forward[name]
                backward[name] += times * (layer_backward[name] + recomputed * layer_recomputed[name])
        forward, backward = (
            self._host(forward, layer_numbers, 0.45),
            self._host(backward, layer_numbers, 0.55 + 0.45 * recomputed),
        )
        if chunk.embedding:
            rows = self.tokens * self.model.hidden_size * self.width / self.streams
            forward["elementwise"] += 2 * rows
            backward["elementwise"] += 4 * rows
        if chunk.head:
            layer_forward = self._head()
            for name, seconds in layer_forward.items():
                forward[name] += seconds
        if (chunk.embedding or chunk.head) and self.tensor > 1:
            hidden = self.tokens * self.model.hidden_size * self.width * (self.tensor - 1) / self.tensor
            forward["tensor"] += self.collective_time("all_gather", self.tensor, 1, hidden)
            backward["tensor"] += self.collective_time("reduce_scatter", self.tensor, 1, hidden)
        return forward, backward

    def _recomputed(self, layers: int, head: bool) -> float:
        """Return the fraction of the layers that recompute their forward pass."""
        parallel = self.parallel
        if parallel.recompute_granularity != "full" or not layers:
            return 0.0
        if parallel.recompute_method == "block":
            return min(parallel.recompute_num_layers, layers) / layers
        return 1.0 - (head and skips_last_layer(parallel)) / layers

    def _host(self, work: Counter[str], layer_numbers: Sequence[int], share: float) -> Counter[str]:
        """Return the seconds per operation, with an additional entry `host`: the time that the device waits for the
        host.
        """
        launch = self.rates.launch * 1e-6
        experts = len(self.expert_layers.intersection(layer_numbers))
        kind = "half" if self.parallel.overlaps else "eager" if self.eager else "layer"
        host = share * launch * OPERATORS[kind] * (len(layer_numbers) - experts)
        waits = experts and not is_static(self.model, self.parallel)
        if not waits:
            host += share * launch * OPERATORS["experts"] * experts
        late = Counter(work)
        late["host"] = max(host - work.total(), 0.0)
        if self.parallel.pipeline_model_parallel_size > 1:
            late["host"] += ACTION
        # The host waits in each MoE layer for the number of rows per expert.
        if waits:
            late["host"] += 2 * share * 0.5 * launch * OPERATORS["experts"] * experts
        return late

    def _head(self) -> Counter[str]:
        """Return the time of final norm, output matrix and loss.

        The forward pass of the loss also computes its gradients.
        """
        model, rows = self.model, -(-self.model.padded_vocab_size // self.tensor)
        dtype, rate = ("bf16", OTHER_RATES.get(self.config.train.precision, 1.0))
        if self.config.train.precision == "fp32":
            rate = self._dtype(0)[1]
        hidden, work = model.hidden_size, Counter()
        work["GEMMs"] = self.rates.matmul(self.tokens, hidden, rows, dtype, rate)
        work["GEMMs"] += self.rates.matmul(self.tokens, rows, hidden, dtype, rate)
        if not self.frozen:
            work["GEMMs"] += self.rates.matmul(rows, self.tokens, hidden, dtype, rate)
        sizes = 2.5 * self.tokens * rows * self.width + 8 * self.tokens * hidden * self.width / self.sequence
        work["elementwise"] = (sizes + 8 * rows * hidden) / self.streams
        heads = 1 + len(model.mtp_layers)
        return Counter({name: heads * seconds for name, seconds in work.items()})

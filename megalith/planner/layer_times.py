"""Forward and backward time of a layer for one micro-batch, in seconds per operation.

A layer takes the time of its GEMMs at their shapes, its attention, and the bytes that all other operators read and
write; the sizes come from the model on the meta device. The time of exposed collectives is added; for tensor and
context parallelism it follows from the bytes in traffic.py. Collectives that overlap GEMMs add the time by which they
slow the GEMMs (GEMM_SLOWDOWN). Recomputation repeats the forward pass except the gathering of weights and saved
attention. In a layer compiled together with its recomputation, it also omits the last matmul, whose result no gradient
needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from megalith.config import RunConfig
from megalith.config.rules.expert_rules import expert_data_parallel_size, is_static, ranks_of_a_token
from megalith.config.rules.parallel_rules import data_parallel_size, shard_size
from megalith.hardware import GIGA
from megalith.ops.chunks import CHUNK
from megalith.ops.delta_rule import BLOCK
from megalith.parallel.fp8_linears import casts_weights_once, saves_weight_codes, uses_fp8
from megalith.parallel.memory.recompute import can_recompute_in_graph
from megalith.parallel.pipeline.stages import virtual_size
from megalith.planner.adapter_traffic import adapter_elements, decoded_bytes
from megalith.planner.counts import MetaModel
from megalith.planner.flops import token_fraction
from megalith.planner.memory import COMPUTE_BYTES, GRADIENT_BYTES
from megalith.planner.rates import NETWORK, Rates, bytes_per_second, peak_flops
from megalith.planner.saved_activations import budget_savings, makes_mask, saved_activations
from megalith.planner.traffic import context_bytes, expert_bytes

# Fitted to the rows of benchmarks/RESULTS.md that benchmarks/measured_rows.py marks for it.
OTHER_RATES = {"fp16": 0.94, "blockwise": 0.8}  # relative to bf16 GEMMs; to tensorwise FP8
STREAMS = 0.87  # bandwidth of elementwise kernels relative to a copy
# added to GEMMs, relative to the overlapped collective's time
GEMM_SLOWDOWN = {"NCCL": 0.6, "copy engine": 0.1}
PING_PONG = 0.8  # exposed fraction of collectives with ping-pong micro-batches
MASKED = 8.6  # time of attention with a mask tensor, relative to causal attention
# Time of the sliding-window kernel relative to causal attention: constant, and times the fraction of visible pairs.
WINDOW = (0.3, 1.7)
FLASH_DIMS = (64, 128)  # head dims for which flash attention with documents and windows was measured
DROPPED = 1.5  # time with attention dropout, relative to causal attention
BIASED = 4  # time with relative position biases, relative to causal attention (docs/performance.md)
# Per query element and ring step, to merge partial results in fp32. Fitted to a run of `cp2-ring` that took 470.6 ms
# and is not in RESULTS.md.
RING_BYTES = 95
GATHERED = 5  # time of attention with cp_comm_type all_gather, relative to causal attention
EXPERTS = 0.62  # rate of a grouped GEMM relative to a dense one
EVEN = 0.85  # the same for experts of equal size, a batched matmul
# bytes per parameter that FSDP2 casts and copies in an all-gather and a reduction
GATHERING, REDUCING = (12, 13)
SUMMING = 10  # bytes per parameter to accumulate a micro-batch's gradients


class LayerTimes:
    """Estimates a layer's forward and backward time for one micro-batch on a rank."""

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
        self.config, self.meta, self.rates, self.world = config, meta, rates, world_size
        self.micro_batches = micro_batches
        self.model, self.parallel, train = config.model, config.parallel, config.train
        parallel = config.parallel
        self.node = min(gpus_per_node, world_size)
        self.tensor, self.context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.sequence = self.tensor if parallel.sequence_parallel else 1
        self.dp = data_parallel_size(parallel, world_size)
        self.tokens = config.tokens_per_pass
        self.width = COMPUTE_BYTES[train.precision]
        self.streams = rates.memory * GIGA * STREAMS
        self.fsdp = parallel.data_parallel_sharding_strategy != "no_shard" and self.dp * self.context > 1
        self.frozen = config.lora.rank is not None
        chunk = self.model.num_layers / parallel.pipeline_model_parallel_size / virtual_size(parallel)
        frees = parallel.data_parallel_sharding_strategy == "optim_grads_params"
        self.freed = max(1 - parallel.unsharded_layers / chunk, 0.0) if frees else 0.0
        """Fraction of the layers that FSDP2 gathers in each pass."""
        self.eager = config.runtime.compile is False or parallel.pipeline_schedule == "zero_bubble"
        self.fp8 = train.fp8_format is not None and "fp8" in rates.matmuls
        self.masked = makes_mask(config)
        self.expert_layers = set(self.model.expert_layers)
        self._layers: dict[int, tuple[Counter[str], Counter[str], Counter[str]]] = {}

    def link(self, size: int, stride: int) -> tuple[str, float]:
        """Return the slowest link in a ring of `size` ranks that are `stride` apart, and its bytes/s per rank."""
        inside = bytes_per_second(self.rates, self.rates.wiring.link)
        if size * stride <= self.node or size == 1:
            return self.rates.wiring.link, inside
        near = max(self.node // stride, 1)  # ranks of the group per node, each with a network card
        return NETWORK, min(near * bytes_per_second(self.rates, NETWORK), inside)

    def collective_time(self, kind: str, size: int, stride: int, sent: float) -> float:
        link, bandwidth = self.link(size, stride)
        if kind == "copy" and link == NETWORK:
            kind = "all_gather"
        return self.rates.collective_time(kind, link, size, sent, bandwidth)

    def _layer(self, number: int) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Return the seconds of a layer's forward pass, backward pass and recomputation."""
        if number not in self._layers:
            forward, backward = Counter(), Counter()
            self._matmuls(number, forward, backward)
            self._adapters(number, forward, backward)
            self._attention(number, forward, backward)
            self._elementwise(number, forward, backward)
            self._communication(number, forward, backward)
            recomputed = self._recomputed_work(number, forward)
            self._weights(number, forward, backward, recomputed)
            self._layers[number] = forward, backward, recomputed
        return self._layers[number]

    def _recomputed_work(self, number: int, forward: Counter[str]) -> Counter[str]:
        """Return the operations of a layer's forward pass that recomputation repeats."""
        recomputed, model = Counter(forward), self.model
        if self.parallel.saves_attention:
            recomputed["attention"] = 0.0
        in_graph = can_recompute_in_graph(model, self.parallel, number in self.expert_layers)
        if in_graph and not self.eager and self.config.train.fp8_format is None:
            rows = [each for each in self.meta.matmuls(number) if each.style == "row"]
            for last in rows if model.parallel_attn_mlp else rows[-1:]:
                dtype, factor = self._dtype(number)
                recomputed["GEMMs"] -= self.rates.matmul(self.tokens, last.columns, last.rows, dtype, factor)
            # The residual addition is not repeated either: the first norm reads the saved input.
            recomputed["elementwise"] -= 2 * model.hidden_size * self.width * self.tokens / self.streams
        return recomputed

    def _dtype(self, number: int) -> tuple[str, float]:
        """Return the dtype by which the table of rates lists a layer's matmuls, and the ratio of their rate to the
        listed one.
        """
        train = self.config.train
        if self.fp8 and uses_fp8(number, self.config):
            return "fp8", OTHER_RATES.get(train.fp8_recipe, 1.0)
        if train.precision == "fp32":
            peaks = [peak_flops(self.rates, name) for name in ("fp32", "bf16")]
            return "bf16", peaks[0] / peaks[1] if all(peaks) else 0.07
        return "bf16", OTHER_RATES.get(train.precision, 1.0)

    def _matmuls(self, number: int, forward: Counter[str], backward: Counter[str]) -> None:
        dtype, factor = self._dtype(number)
        selective = self.parallel.recompute_granularity == "selective"
        recomputed = selective and "mlp" in self.parallel.recompute_modules
        for rows, columns, experts, style, reads_encoder in self.meta.matmuls(number):
            tokens, rate = self.tokens if style else self.tokens // self.sequence, factor
            if reads_encoder:
                tokens = int(tokens / token_fraction(self.config, number))
            if experts:
                etp = self.parallel.expert_tensor_parallel_size
                tokens = self.tokens * self.model.moe_router_topk * etp // self.tensor
                rate = factor * self._rate_of_experts()
            one = self.rates.matmul(tokens, columns, rows, dtype, rate)
            forward["GEMMs"] += one
            backward["GEMMs"] += self.rates.matmul(tokens, rows, columns, dtype, rate)
            if not self.frozen:
                kind, rate = self._wgrad_dtype(dtype, rate, experts)
                backward["GEMMs"] += self.rates.matmul(rows, tokens, columns, kind, rate)
            if recomputed and (experts or style == "column") and columns == self.model.hidden_size:
                is_mlp = rows * self.tensor >= self.model.ffn_size or experts
                backward["GEMMs"] += one if is_mlp else 0.0
            if dtype == "fp8":
                self._casts(tokens, rows, columns, experts, style, forward, backward)

    def _adapters(self, number: int, forward: Counter[str], backward: Counter[str]) -> None:
        both = adapter_elements(self.meta, number, self.model.moe_router_topk)
        for work, elements in zip((forward, backward), both):
            work["elementwise"] += self.width * self.tokens * elements / self.streams

    def _wgrad_dtype(self, dtype: str, rate: float, experts: int) -> tuple[str, float]:
        if dtype == "fp8" and (experts or not self.config.train.fp8_wgrad):
            return "bf16", self._rate_of_experts() if experts else 1.0
        return dtype, rate

    def _rate_of_experts(self) -> float:
        model = self.model
        even = model.moe_router_force_load_balancing or model.moe_pad_expert_input_to_capacity
        return EVEN if even and not is_static(model, self.parallel) else EXPERTS

    def _casts(
        self,
        tokens: int,
        rows: int,
        columns: int,
        experts: int,
        style: str | None,
        forward: Counter[str],
        backward: Counter[str],
    ) -> None:
        """Add the casts of a matmul to FP8.

        A cast reads bf16 (twice with current scaling, for the maximum) and writes FP8 data and its transpose for the
        backward pass. With sequence parallelism a rank casts its shard before gathering and transposes it later. If the
        FP8 data of a weight is not saved, the weight is cast again. Experts have a scale per row and no transpose.
        Weights that are cast once per step are counted in `_weights`.
        """
        both, one = (5, 5) if experts else self._cast_bytes()
        gathered, taken = self.sequence > 1 and style == "column", tokens * columns
        weight = self._weight_casts(rows * columns * (experts or 1), both, one, bool(experts))
        here = taken * one / self.sequence if gathered else taken * both
        forward["elementwise"] += (here + weight[0]) / self.streams
        backward["elementwise"] += (
            tokens * rows * both + (2 * taken if gathered else 0) + weight[1]
        ) / self.streams

    def _weight_casts(self, weight: int, both: int, one: int, experts: bool) -> tuple[float, float]:
        """Return the bytes that casting a weight of `weight` elements moves per micro-batch, forward and backward."""
        if experts:
            return weight * one, weight * one
        weight *= 1 - self._cast_once()
        return (weight * both, 0) if saves_weight_codes(self.config) else (weight * one, weight * one)

    def _cast_bytes(self) -> tuple[int, int]:
        """Return the bytes per element that a cast to FP8 moves, with and without the transpose."""
        scan = 2 if self.config.train.fp8_recipe == "tensorwise" else 0
        return 4 + scan, 3 + scan

    def _cast_once(self) -> float:
        """Return the fraction of the dense FP8 weights that are cast only once per step."""
        return 1 - self.freed if casts_weights_once(self.config) else 0.0

    def _attention(self, number: int, forward: Counter[str], backward: Counter[str]) -> None:
        model, parallel = self.model, self.parallel
        seq = self.config.data.seq_length
        self._recurrence(number, forward, backward)
        if not model.has_attention(number):
            return
        window = model.reach(number, seq)
        heads = model.num_attention_heads / self.tensor
        values = model.v_head_dim if model.multi_latent_attention else model.head_dim
        keys = (2 * window - window**2 / seq) / 2 if model.causal else seq  # per query
        if model.attention_chunk(number) is not None:
            keys = window / 2
        biased = BIASED if model.position_embedding_type == "relative" else 1
        if 0 < model.encoder_layers <= number:  # the preceding decoder tokens and all encoder tokens
            keys = biased * self.config.data.decoder_length / 2 + seq
        else:
            keys *= biased
        flops = 2 * self.tokens * keys * heads * (model.head_dim + values)
        rates = self.rates.attention_flops(seq, model.head_dim)
        slower = DROPPED if model.attention_dropout else 1.0
        if self.masked and (window < seq or self.config.separates_documents):
            slower *= MASKED
        elif window < seq:  # documents alone cost nothing: fewer pairs in a slower kernel
            share = 2 * window / seq - (window / seq) ** 2
            slower *= WINDOW[0] / share + WINDOW[1]
        exchange = parallel.resolved_cp_comm_type if self.context > 1 else ""
        if exchange == "all_gather":
            slower *= GATHERED
        if self.config.train.precision == "fp32":
            slower *= 8
        forward["attention"] += slower * flops / rates[0]
        backward["attention"] += slower * 2.5 * flops / rates[1]
        if parallel.recompute_granularity == "selective" and "core_attn" in parallel.recompute_modules:
            backward["attention"] += slower * flops / rates[0]
        if "p2p" in exchange:
            steps = self.context if exchange == "p2p" else parallel.hierarchical_context_parallel_sizes[1]
            merged = RING_BYTES * steps / 3 * self.tokens * heads * values / self.streams
            forward["attention"] += merged
            backward["attention"] += 2 * merged

    def _recurrence(self, number: int, forward: Counter[str], backward: Counter[str]) -> None:
        """Add the time of a recurrence as bytes read and written: fp32 matrices per chunk, recomputed in the backward
        pass.
        """
        model, mixer = self.model, self.model.recurrent_mixer(number)
        if mixer == "gated_delta_net":
            of_head = 4 * CHUNK + 6 * model.linear_key_head_dim + 6 * model.linear_value_head_dim
            heads = model.linear_num_value_heads
        elif mixer == "kimi_delta_attention":  # and the decays of all channels, between the pairs of a block
            of_head = (
                4 * CHUNK + (10 + 4 * BLOCK) * model.linear_key_head_dim + 6 * model.linear_value_head_dim
            )
            heads = model.linear_num_value_heads
        elif mixer == "mamba2":  # a chunk's state is state_dim · head_dim, for CHUNK tokens
            states = 3 * model.mamba_state_dim * model.mamba_head_dim / CHUNK
            of_head = 3 * CHUNK + 6 * model.mamba_head_dim + states
            heads = model.mamba_heads
        else:
            return
        moved = 4 * of_head * heads / self.tensor * self.tokens / self.streams
        forward["attention"] += moved
        backward["attention"] += 3 * moved

    def _elementwise(self, number: int, forward: Counter[str], backward: Counter[str]) -> None:
        """Add the time of the operators between matmuls as bytes: norms, residuals, activations, heads, RoPE, casts."""
        model, width, parallel = self.model, self.width, self.parallel
        modules = parallel.recompute_modules if parallel.recompute_granularity == "selective" else []
        norms = model.norms_in_layer(number) * 4 * model.hidden_size / self.sequence
        heads = model.num_attention_heads / self.tensor * model.head_dim
        groups = 2 * max(model.query_groups / self.tensor, 1) * model.head_dim
        qkv = heads + groups
        rotated = 2 * (heads + groups / 2) if model.position_embedding_type == "rope" else 0
        forward_elements, backward_elements = norms + rotated, norms + rotated + 2 * qkv + 6 * heads
        for out, taken, experts, style, _ in self.meta.matmuls(number):
            fc1 = style == "column" and out * self.tensor in (model.ffn_size, 2 * model.ffn_size)
            if fc1 or (experts and taken == model.hidden_size):  # expert matrices have no style
                times = model.moe_router_topk / self.tensor if experts else 1.0
                into = out / 2 if model.gated else out
                recomputed = into if "mlp_act" in modules and not experts else 0.0
                forward_elements += times * (out + into)
                backward_elements += times * (2 * out + into) + recomputed
        if number in self.expert_layers:
            moved = self._rows_moved() * model.hidden_size / self.tensor
            forward_elements, backward_elements = forward_elements + moved, backward_elements + moved
        backward_elements += norms if "layernorm" in modules else self._within_budget(number)
        forward["elementwise"] += width * self.tokens * forward_elements / self.streams
        backward["elementwise"] += width * self.tokens * backward_elements / self.streams

    def _rows_moved(self) -> float:
        """Return how often dispatch and combine read or write a token's hidden state per forward or backward pass."""
        model, size = self.model, self.parallel.expert_model_parallel_size
        moved = 3 * model.moe_router_topk + 1  # rows gathered, and read to sum them
        if size > 1 and self.parallel.moe_token_dispatcher_type == "alltoall":
            # The same for the rows that each rank receives.
            moved += 3 * (size if is_static(model, self.parallel) else ranks_of_a_token(model, size)) + 1
        return moved

    def _within_budget(self, number: int) -> float:
        """Return the elements per token that recomputation reads and writes under an activation memory budget."""
        budget = self.config.runtime.activation_share
        if (
            budget == 1
            or self.eager
            or self.model.num_experts
            or self.parallel.recompute_granularity is not None
        ):
            return 0.0
        saved = [saved_activations(self.meta, number, recomputed=modules) for modules in ((), ("mlp_act",))]
        return 2 * budget_savings(
            budget, saved[0], saved[0] - saved[1], self.model.hidden_size // self.sequence
        )

    def _weights(
        self, number: int, forward: Counter[str], backward: Counter[str], recomputed: Counter[str]
    ) -> None:
        """Add the casts of a layer's weights or FSDP2's copies of them, and gradient accumulation.

        FP8 casts that happen once per step are divided over its micro-batches; recomputation does not repeat them.
        """
        here = Counter(self.meta.in_layers([number]))
        if self.config.lora.has_quantized_base:
            self._decode(number, here, (forward, backward, recomputed))
        if self._dtype(number)[0] == "fp8" and (share := self._cast_once()):
            matrices = sum(
                rows * columns for rows, columns, experts, *_ in self.meta.matmuls(number) if not experts
            )
            moved = share * self._cast_bytes()[0] * matrices
            forward["elementwise"] += moved / self.micro_batches / self.streams
        local_weights = here.total() - (
            here["experts"] if self.fsdp and not self._has_unsharded_experts() else 0
        )
        cast = (4 + self.width) * (self.width != 4) / self.streams
        if not self.fsdp or self._has_unsharded_experts():
            once = self.config.train.moe_cache_weights is True
            forward["elementwise"] += cast * here["experts"] / (self.micro_batches if once else 1)
            if not once:
                for work in (backward, recomputed):
                    work["elementwise"] += cast * here["experts"]
        if not self.fsdp:
            dense = cast * (here["adapters"] if self.frozen else local_weights - here["experts"])
            forward["elementwise"] += dense
            recomputed["elementwise"] += dense
            backward["elementwise"] += (0 if self.frozen else SUMMING) * local_weights / self.streams
        else:
            self._sharded(local_weights, forward, backward)

    def _decode(self, number: int, here: Counter[str], passes: Iterable[Counter[str]]) -> None:
        """Add the time to dequantize a layer's quantized weights, in each forward and backward pass.

        Subtracts these weights from `here`, the number of the layer's weights by module.
        """
        seconds = decoded_bytes(self.meta, number, self.config.lora.quantize_base) / self.streams
        for work in passes:
            work["elementwise"] += seconds
        for shape in self.meta.base_matrices(number):
            here["experts" if len(shape) == 3 else "attention"] -= math.prod(shape)

    def _has_unsharded_experts(self) -> bool:
        return expert_data_parallel_size(self.parallel, self.world) == 1

    def _sharded(self, local_weights: float, forward: Counter[str], backward: Counter[str]) -> None:
        """Add FSDP2's copies and collectives of a micro-batch. step_time.py adds the collectives that run once per
        step.
        """
        strategy = self.parallel.data_parallel_sharding_strategy
        if freed := self.freed * local_weights:
            for work in (forward, backward):
                work["elementwise"] += GATHERING * freed / self.streams
                work["data"] += self._slowdown("all_gather", 2 * freed)
        if strategy == "optim":
            backward["elementwise"] += SUMMING * local_weights / self.streams
        else:
            backward["elementwise"] += REDUCING * local_weights / self.streams
            exchanged = self.parallel.uses_fp32_reduce_scatter
            kind, width = ("all_to_all", self.width) if exchanged else ("reduce_scatter", GRADIENT_BYTES)
            backward["data"] += self._slowdown(kind, width * local_weights)

    def _slowdown(self, kind: str, size: float) -> float:
        """Return the seconds by which a collective of `size` bytes over the shards slows down the GEMMs that it
        overlaps.
        """
        shards = shard_size(self.parallel, self.world)
        return GEMM_SLOWDOWN["NCCL"] * self.collective_time(
            kind, shards, self.tensor, size * (shards - 1) / shards
        )

    def _communication(self, number: int, forward: Counter[str], backward: Counter[str]) -> None:
        parallel = self.parallel
        if self.tensor > 1:
            tensor_forward, tensor_backward = self._tensor(number)
            forward["tensor"] += tensor_forward
            backward["tensor"] += tensor_backward
        if self.context > 1:
            sent = context_bytes(self.config, number) / token_fraction(self.config, number)
            kind = "copy" if "cp" in parallel.copy_engine_axes else "all_to_all"
            kind = kind if "a2a" in parallel.resolved_cp_comm_type else "all_gather"
            whole = self.collective_time(kind, self.context, self.tensor, sent)
            hidden = PING_PONG if parallel.overlaps else 1.0
            if parallel.resolved_cp_comm_type == "p2p":
                hidden = GEMM_SLOWDOWN["NCCL"]
            forward["context"] += hidden * whole / 3
            backward["context"] += hidden * whole * 2 / 3
        ep = parallel.expert_model_parallel_size
        if ep > 1 and number in self.expert_layers:
            whole = self.collective_time(
                "all_to_all", ep, parallel.expert_tensor_parallel_size, expert_bytes(self.config)
            )
            forward["expert"] += whole / 2
            backward["expert"] += whole / 2

    def _tensor(self, number: int) -> tuple[float, float]:
        """Return the exposed seconds of a layer's tensor-parallel collectives, forward and backward."""
        parallel = self.parallel
        part = self.tokens * self.model.hidden_size * self.width * (self.tensor - 1) / self.tensor
        kind = "copy" if "tp" in parallel.copy_engine_axes else "all_gather"
        one = self.collective_time(kind, self.tensor, 1, part)
        if self.sequence > 1:  # all-gathers before linears (of FP8 data), reduce-scatters after them
            gathers = 2 / self.width if self._dtype(number)[0] == "fp8" else 2
            recomputed = 0 if parallel.save_gathered_inputs and not self.eager else gathers
            forward, exposed, overlapped = gathers + 2, 2, 2 + recomputed  # in units of `one`
        else:
            forward, exposed, overlapped = 4, 0, 4
        if parallel.overlaps:
            return PING_PONG * forward * one, PING_PONG * (exposed + overlapped) * one
        return forward * one, (exposed + GEMM_SLOWDOWN["NCCL"] * overlapped) * one

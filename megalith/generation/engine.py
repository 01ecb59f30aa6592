"""The engine: many prompts continued at once, on one device or over a tensor-parallel axis.

It runs the modules of models/ with a static cache of keys and values (static_cache.py). A row of the cache is a
sequence under way; a row that ends is given to the next prompt (continuous batching).

    prompt ──all tokens but the last──▶ prefill: keys and values into the row        (of several prompts in one pass)
    last token ──▶ decode step ──▶ logits ──▶ Gumbel sampling ──▶ next token, and so on, all rows in one pass

All that a step reads and writes stays on the device: tokens, places, how many tokens a row may still have, whether it
has ended. So a step is one CUDA graph, and the host waits for none: it launches a window of steps, and while they run
it reads what the window before has written. A row that has ended goes on idle, on one key, until the host has seen it.

What is sampled depends on the weights and on (seed, the prompt's key, the number of the generation, the index in the
completion), not on rows, order, batch or layout (ops/gumbel.py). LongRoPE turns a sequence by other angles once it is
longer than the original context: such a row is filled anew there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import LoraConfig, ModelConfig
from megalith.errors import ConfigError
from megalith.generation.requests import (
    MOST_GENERATIONS,
    Completion,
    RowSequence,
    Sampling,
    check_keys,
    sequences_of,
)
from megalith.generation.static_cache import Decode, LinearStates, Prefill, empty_cache
from megalith.hardware import to_device
from megalith.models.adapters import add_adapters
from megalith.models.cache import Cache
from megalith.models.mixers.attention import SoftmaxOffset
from megalith.models.mixers.gated_delta_net import Decay
from megalith.models.norm import HeadNorms, Norm
from megalith.models.pass_context import Context, PassLayout
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.models.router import Router
from megalith.models.transformer import Stack, Transformer, layers_of
from megalith.ops.attention_core import seen_places
from megalith.ops.compiled import in_pieces, run_eagerly
from megalith.ops.cross_entropy import linear_logits
from megalith.ops.dropout import column_keys, mix, token_keys
from megalith.ops.gumbel import sample
from megalith.parallel.data.replicas import replica_axes
from megalith.parallel.seams import plug
from megalith.parallel.shards import LocalShard, local_shard, to_local_parameters
from megalith.parallel.tensor.lora_shards import shard_adapters
from megalith.parallel.tensor.tensor_parallel import apply_tensor

WINDOW = {"cpu": 1, "cuda": 8}  # steps that are launched before the host reads what was sampled
PREFILL_TOKENS = 2**14  # of a pass


@dataclass
class _Window:
    """Steps that were launched: what they have sampled, and whose rows these were."""

    owners: list[RowSequence | None]
    ids: Tensor  # int64 [steps, rows] on the host, -1 where a row was idle
    logprobs: Tensor  # float32 [steps, rows]
    copied: torch.cuda.Event | None


OnToken = Callable[[int, int, int], None]  # prompt, generation, id


class Engine:
    """Generates with weights of its own, in `dtype`, or those of a model that is given.

    `max_rows` sequences are under way at a time, of at most `max_tokens` tokens each, prompt and completion. Over `tp`
    every rank calls the same methods with the same prompts, and gets every completion.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        max_rows: int,
        max_tokens: int,
        tp: Axis = Axis(),  # noqa: B008 (immutable)
        lora: LoraConfig | None = None,
        model: Transformer | None = None,
        compile: bool | None = None,
        graphs: bool | None = None,
    ):
        """`lora`: the model has these adapters. `model` is run as it is and not changed. `compile` the layers, and run
        a step as a CUDA graph: None: on a GPU."""
        self.device, self.dtype, self.tp = torch.device(device), dtype, tp
        on_gpu = self.device.type == "cuda"
        grouped = on_gpu and dtype == torch.bfloat16
        # A step has few rows: no kernels are compiled for what is around their matmuls.
        experts = {"moe_grouped_gemm": grouped, "moe_permute_fusion": False}
        self.config = config = model_config.model_copy(update={"mtp_num_layers": None, **experts})
        if config.model_type == "t5":
            raise ConfigError(
                "model.model_type is t5, whose decoder answers another sequence, which an engine does not take: "
                "generate from the model (megalith.load, megalith.generate), or by `megalith generate`"
            )
        if not config.causal:
            raise ConfigError(
                f"model.model_type is {config.model_type}, whose tokens see those behind them: it continues no text, "
                "but model(input_ids) gives the logits at each place"
            )
        if max_rows < 1 or max_tokens < 2:
            raise ConfigError(
                f"an engine of {max_rows} rows of {max_tokens} tokens generates nothing; give it at least 1 row of 2"
            )
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.version = 0
        self.model = self._build(lora) if model is None else model
        self.shards: dict[str, LocalShard] = named_shards([self.model])
        # Experts whose rows the host has to know cannot be part of a graph.
        capturable = on_gpu and (not config.num_experts or self.model.config.moe_grouped_gemm)
        self._graphed = capturable if graphs is None else graphs
        if (on_gpu if compile is None else compile) and model is None:
            for layer in layers_of(self.model).values():
                if layer.has_experts:
                    plug(layer, "runner", partial(in_pieces, dynamic=False))
                else:
                    layer.compile(fullgraph=True, dynamic=False)
        self._window = WINDOW.get(self.device.type, 1)
        self._places = column_keys(max_tokens, self.device)  # a key for each index in a completion
        self._cache: Tensor | None = None
        self._linear: LinearStates | None = None
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.source: Any = None  # where `sync` (sync.py) has its weights from

    def _build(self, lora: LoraConfig | None) -> Transformer:
        """The model without values, in this rank's part: matrices in the engine's type; what the layers compute in fp32
        (norms, positions, decays, sinks, the router's biases) in fp32."""
        model = Transformer(self.config, compute_dtype=self.dtype, device="meta").requires_grad_(False)
        if lora is not None and lora.rank is not None:
            add_adapters(model, lora)
        for name, module in model.named_modules():
            if not isinstance(module, Norm | HeadNorms | Decay | SoftmaxOffset) and not name.endswith(
                "position_embeddings"
            ):
                for kind, parameter in module.named_parameters(recurse=False):
                    if not (isinstance(module, Router) and kind == "bias"):
                        parameter.data = parameter.data.to(self.dtype)
        tensor = apply_tensor(model, self.tp, sequence_parallel=False)
        if tensor is not None:
            shard_adapters(model, tensor)
        model.to_empty(device=self.device)
        for buffer in model.buffers():
            buffer.zero_()
        to_local_parameters(model)
        return model.requires_grad_(False).eval()

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Whole weights by our names, each cut to this rank's part, cast and copied in place: CUDA graphs stay valid.

        Raises ConfigError where one is missing, unknown or of another shape.
        """
        missing = set(self.shards)
        for name, tensor in tensors:
            if name not in self.shards:
                if self.is_mtp_parameter(name):
                    continue
                raise ConfigError(
                    f"the engine has no tensor {name}; load the weights of the model that it is for"
                )
            shard = self.shards[name]
            if tuple(tensor.shape) != shard.shape:
                raise ConfigError(
                    f"{name} is {list(tensor.shape)}, but the engine's is {list(shard.shape)}; load the weights of the "
                    "model that it is for"
                )
            shard.values.copy_(shard.slice_of(tensor))
            missing.discard(name)
        if missing:
            raise ConfigError(
                f"{sorted(missing)[0]} and {len(missing) - 1} others got no values; give every tensor"
            )
        self.version = version

    def is_mtp_parameter(self, name: str) -> bool:
        """Whether a tensor belongs to a layer of multi-token prediction, which generation leaves out."""
        parts = name.split(".")
        return parts[0] == "layers" and int(parts[1]) >= self.config.num_layers

    def memory(self) -> dict[str, int]:
        """Bytes of the weights and of the cache on this rank."""
        weights = {p.data_ptr(): p.nbytes for p in self.model.parameters()}
        cache = sum(part.nbytes for part in (self._cache, self._linear) if part is not None)
        return {"weights": sum(weights.values()), "cache": cache}

    def release(self) -> None:
        """Frees the cache and the graphs, for who shares the device; the next `generate` makes them anew."""
        self._graphs.clear()
        self._cache = self._linear = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
        num_generations: int = 1,
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """`num_generations` completions of each prompt, ordered by prompt, then generation.

        `keys`: a number of each prompt, 0 to 2^47 - 1, of which its noise depends; None: its index. `on_token` is
        called with (prompt, generation, id) for each token, soon after it was sampled. Raises ConfigError for an empty
        prompt, a token outside the vocabulary, more tokens than the model or a row has room for, or settings out of
        range.
        """
        sequences = sequences_of(prompts, sampling, num_generations, self.config, self.max_tokens)
        keys = range(len(prompts)) if keys is None else keys
        check_keys(keys, len(prompts), num_generations)
        numbers = [key * MOST_GENERATIONS + g for key in keys for g in range(num_generations)]
        numbers = torch.tensor(numbers, dtype=torch.int64)  # a replica has none where prompts are few
        noise = token_keys(sampling.seed, numbers, torch.zeros(1, dtype=torch.int64))[:, 0].tolist()
        self._begin(sampling)
        waiting, pending = deque(sequences), deque()
        owners: list[RowSequence | None] = [None] * self.max_rows
        while waiting or any(owners) or pending:
            self._fill(owners, waiting, noise)
            if any(owners):
                pending.append(self._launch(owners, sampling))
            if len(pending) > (self.device.type == "cuda") or not any(owners):
                self._read(pending.popleft(), owners, waiting, on_token)
        version = (self.version,)
        return [
            Completion(s.prompt_index, s.generation, s.ids, s.logprobs, not s.stopped, version)
            for s in sequences
        ]

    # What is on the device.

    def _begin(self, sampling: Sampling) -> None:
        """The state of all rows, idle, and the cache."""
        if self._cache is None:
            groups = -(-self.config.query_groups // self.tp.size)
            sizes = self.max_rows, self.max_tokens, groups
            self._cache = empty_cache(self.config, *sizes, self.device, self.dtype)
            self._linear = LinearStates.empty(
                self.config, self.max_rows, self.tp.size, self.device, self.dtype
            )
            # rows of: newest token, its place, tokens sampled, their limit, the noise's key, whether it goes on
            self._state = torch.zeros(6, self.max_rows, dtype=torch.int64, device=self.device)
            self._ids = torch.zeros(self._window, self.max_rows, dtype=torch.int64, device=self.device)
            self._logprobs = torch.zeros(self._window, self.max_rows, device=self.device)
            self._tick = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._stops = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.device)
        self._state.zero_()
        self._stops.zero_()
        self._tick.zero_()
        if sampling.stop and sampling.forced_lengths is None:
            self._stops[torch.tensor(sampling.stop, device=self.device)] = True
        if self._graphed:
            self._graph(sampling)

    def _fill(self, owners: list[RowSequence | None], waiting: deque[RowSequence], noise: list[int]) -> None:
        """Gives idle rows to those that wait. On a CPU, where a pass has only so many rows as are in use, the last ones
        then take the place of idle rows between."""
        idle = [row for row, owner in enumerate(owners) if owner is None]
        begun: list[tuple[int, RowSequence]] = []
        for row in idle:
            if not waiting:
                break
            owners[row] = waiting.popleft()
            begun.append((row, owners[row]))
        if begun:
            if self._linear is not None:
                self._linear.clear(torch.tensor([row for row, _ in begun], device=self.device))
            self._prefill(begun)
            state = [self._first_state(sequence, noise[sequence.number]) for _, sequence in begun]
            rows = to_device(torch.tensor([row for row, _ in begun]), self.device)
            self._state[:, rows] = to_device(torch.tensor(state).T.contiguous(), self.device)
        if self.device.type == "cpu" and not waiting:
            self._compact(owners)

    def _first_state(self, sequence: RowSequence, noise: int) -> list[int]:
        last = sequence.ids[-1] if sequence.ids else sequence.prompt[-1]
        sequence.pause, sequence.launched = sequence.limit, len(sequence.ids)
        if sequence.length <= self._original:
            sequence.pause = min(sequence.limit, self._original + 1 - len(sequence.prompt))
        return [last, sequence.length - 1, len(sequence.ids), sequence.pause, noise, 1]

    @property
    def _original(self) -> float:
        """Tokens up to which LongRoPE turns a sequence by its short angles."""
        scaling = self.config.rope_scaling
        is_long = scaling is not None and scaling.type == "longrope"
        return scaling.original_max_position_embeddings if is_long else math.inf

    def _compact(self, owners: list[RowSequence | None]) -> None:
        used = sum(owner is not None for owner in owners)
        holes = [row for row in range(used) if owners[row] is None]
        moved = [row for row in range(used, len(owners)) if owners[row] is not None]
        for hole, row in zip(holes, moved):
            owners[hole], owners[row] = owners[row], None
            length = owners[hole].length
            self._cache[:, :, hole, :length] = self._cache[:, :, row, :length]
            self._state[:, hole] = self._state[:, row]
            if self._linear is not None:
                self._linear.move(row, hole)

    def _prefill(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        """Keys and values of all tokens but the last of these sequences into their rows. Completions of one prompt
        share its pass."""
        alike: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for row, sequence in begun:
            name = (sequence.prompt_index, sequence.number if sequence.ids else -1)
            tokens = [*sequence.prompt, *sequence.ids][:-1]
            if tokens:
                alike.setdefault(name, (tokens, []))[1].append(row)
        batch: list[tuple[list[int], list[int]]] = []
        for tokens, rows in sorted(alike.values(), key=lambda each: len(each[0])):
            is_long = len(tokens) + 1 > self._original
            if batch and (
                len(tokens) * (len(batch) + 1) > PREFILL_TOKENS
                or is_long != (len(batch[0][0]) + 1 > self._original)
            ):
                self._prefill_pass(batch)
                batch = []
            batch.append((tokens, rows))
        if batch:
            self._prefill_pass(batch)

    def _prefill_pass(self, batch: list[tuple[list[int], list[int]]]) -> None:
        longest = len(batch[-1][0])
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in batch])
        rows = torch.tensor([row for _, rows in batch for row in rows])
        prompts = torch.tensor([number for number, (_, rows) in enumerate(batch) for _ in rows])
        lengths = torch.tensor([len(tokens) for tokens, _ in batch])
        ids, rows, prompts, lengths = (to_device(x, self.device) for x in (ids, rows, prompts, lengths))
        places = torch.arange(longest, device=self.device).expand(len(batch), longest)
        with run_eagerly():  # each has other sizes
            self._hidden(ids, places, Prefill(self._cache, rows, prompts, lengths, self._linear), longest + 1)

    def _hidden(self, ids: Tensor, places: Tensor, cache: Cache, length: int | None = None) -> Tensor:
        """The model's last hidden states [batch, seq, hidden] of ids at places, int64 [batch, seq]. `length` of the
        sequences; None: each has its place and those before."""
        context = Context(len(ids), PassLayout(), position_ids=places, cache=cache)
        if self.config.position_embedding_type == "rope":
            context.rotary = self._rotary(places, length)
            if self.config.rotary_base_local is not None:
                context.rotary_local = local_rotary_tables(self.config, places)
        if self.config.num_experts:
            context.numbers = torch.arange(ids.numel(), device=ids.device)
        model = self.model
        return Stack.forward(model, model.embed(ids, context), context)

    def _rotary(self, places: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        original = self._original
        if length is not None or original == math.inf:
            return rotary_tables(self.config, places, length or 0)
        short, long = (rotary_tables(self.config, places, n) for n in (original, original + 1))
        is_long = (places >= original)[..., None, None]
        return tuple(torch.where(is_long, b, a) for a, b in zip(short, long))

    def _launch(self, owners: list[RowSequence | None], sampling: Sampling) -> _Window:
        """A window of steps, and the copy of what they sample to the host, of which none is waited for on a GPU."""
        rows, longest = self.max_rows, self.max_tokens
        if self.device.type == "cpu":
            rows = max(row for row, owner in enumerate(owners) if owner is not None) + 1
            longest = max(owner.length for owner in owners if owner is not None)
        if self._graphed:
            graph = self._graph(sampling)
            for _ in range(self._window):
                graph.replay()
        else:
            for _ in range(self._window):
                self._step(sampling, rows, longest)
                longest = min(longest + 1, self.max_tokens)
        ids, logprobs = (x[:, :rows].to("cpu", non_blocking=True) for x in (self._ids, self._logprobs))
        copied = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        window = _Window(owners[:rows], ids, logprobs, copied)
        for row, sequence in enumerate(owners):
            if sequence is not None:
                sequence.launched += self._window
                if sequence.launched >= sequence.pause:  # it gives no more, whatever it samples
                    owners[row] = None
        return window

    def _graph(self, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph, for these settings. It is made while all rows are idle, and runs to warm up."""
        key = self._how(sampling)
        if key not in self._graphs:
            self._graphs.clear()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._step(sampling, self.max_rows, self.max_tokens)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step(sampling, self.max_rows, self.max_tokens)
            self._graphs[key] = graph
            self._tick.zero_()
        return self._graphs[key]

    def _how(self, sampling: Sampling) -> tuple:
        return (
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, self._vocabulary(sampling),
        )  # fmt: skip

    def _vocabulary(self, sampling: Sampling) -> int:
        return min(sampling.vocab_size or self.config.vocab_size, self.config.vocab_size)

    def _step(self, sampling: Sampling, rows: int, longest: int) -> None:
        """One token more for each of the first `rows` rows that goes on."""
        token, place, count, limit, noise, alive = self._state[:, :rows]
        linear = self._linear and self._linear.first(rows)
        cache = Decode(self._cache[:, :, :rows], place, seen_places(place, longest), linear)
        hidden = self._hidden(token[:, None], place[:, None], cache)[:, 0]  # [rows, hidden]
        of_head = self.model.output_weight, self.config.final_logit_softcapping, self.model.output_bias
        logits = linear_logits(self.model.head_input(hidden), *of_head)  # own entries
        first = self.tp.rank * -(-self.config.padded_vocab_size // self.tp.size)
        temperature, top_k, top_p, min_p, vocabulary = self._how(sampling)
        keys = mix(noise.to(torch.int32) ^ self._places[count])
        ids, logprobs = sample(
            logits,
            keys,
            temperature,
            vocab_size=vocabulary,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            axis=self.tp,
            first=first,
        )
        goes_on = alive.bool()
        self._ids[:, :rows].index_copy_(0, self._tick, torch.where(goes_on, ids, -1)[None])
        self._logprobs[:, :rows].index_copy_(0, self._tick, logprobs[None])
        self._tick.add_(1).remainder_(len(self._ids))
        count.add_(alive)
        alive.copy_(goes_on & ~self._stops[ids] & (count < limit))
        token.copy_(ids)
        place.add_(1).mul_(alive)  # what is idle looks at one key

    def _read(
        self,
        window: _Window,
        owners: list[RowSequence | None],
        waiting: deque[RowSequence],
        on_token: OnToken | None,
    ) -> None:
        """Hands the tokens of a window to the sequences that they are of, and frees the rows of those that ended."""
        if window.copied is not None:
            window.copied.synchronize()
        ids, logprobs = window.ids.T.tolist(), window.logprobs.T.tolist()
        for row, sequence in enumerate(window.owners):
            if sequence is None or sequence.ended:
                continue
            new = ids[row]
            taken = new.index(-1) if -1 in new else len(new)
            sequence.ids += new[:taken]
            sequence.logprobs += logprobs[row][:taken]
            if on_token is not None:
                for token in new[:taken]:
                    on_token(sequence.prompt_index, sequence.generation, token)
            if sequence.ended:
                if owners[row] is sequence:
                    owners[row] = None
            elif len(sequence.ids) >= sequence.pause:
                waiting.appendleft(sequence)


def named_shards(chunks: Iterable[torch.nn.Module]) -> dict[str, LocalShard]:
    """This rank's shards of parameters and persistent buffers; a tensor that has two names under its first."""
    named: dict[str, LocalShard] = {}
    seen: set[int] = set()
    for chunk in chunks:
        copies = replica_axes(chunk)
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[name] = local_shard(tensor, copies.get(name))
    return named

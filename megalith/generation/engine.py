"""Generation engine with continuous batching, on one device or over a tensor-parallel axis.

It runs the modules of models/ with a static KV cache (static_cache.py). Each row of the cache holds a sequence in
progress; a finished row is given to the next prompt (running_batch.py).

     prompt ──all tokens but the last──▶ prefill: keys and values into the row        (several prompts per pass)
     last token ──▶ decode step ──▶ logits ──▶ Gumbel sampling ──▶ next token, and so on, all rows in one pass

A step's inputs and outputs stay on the device, so that it is a CUDA graph and the host never waits for it: the host
launches a window of steps and meanwhile reads the results of the previous window. A finished row idles, attending to
one key, until the host has seen it.

With speculation (speculation.py), a step also verifies drafts of the next tokens and returns up to that many more.

Samples depend only on the weights and on (seed, key of the prompt, generation, index in the completion), not on rows,
order, batch, layout or drafts (ops/gumbel.py). LongRoPE changes the angles of a sequence that exceeds the original
context; such a row is prefilled again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import LoraConfig, ModelConfig
from megalith.config.rules.batch_invariant_rules import check_batch_invariant_engine
from megalith.errors import ConfigError
from megalith.generation.engine_model import SiteSlots, SlotSizes, engine_model, named_shards
from megalith.generation.logits_state import NO_PARTS, LogitsState, UsedParts
from megalith.generation.prefix_reuse import PrefixReuse, tokens_of_adapter
from megalith.generation.requests import (
    MAX_GENERATIONS,
    Completion,
    RowSequence,
    Sampling,
    check_keys,
    make_sequences,
    noise_keys,
)
from megalith.generation.running_batch import RunningBatch
from megalith.generation.speculation import (
    DecodeRows,
    Drafter,
    DraftMetrics,
    ModelDrafter,
    NgramDrafter,
    Speculation,
    accepted_tokens,
)
from megalith.generation.static_cache import (
    ContinuedPrefill,
    Decode,
    Prefill,
    RecurrentStates,
    cached_layers,
    empty_cache,
)
from megalith.hardware import to_device
from megalith.models.cache import Cache
from megalith.models.pass_context import Context, LayerRoutes, PassLayout
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.models.transformer import Stack, Transformer, layers_of
from megalith.ops.attention_core import cached_attention, continued_attention, visible_positions
from megalith.ops.batch_invariant import invariant_attention
from megalith.ops.batch_invariant.token_logprobs import BATCH_INVARIANT, token_logprobs
from megalith.ops.compiled import run_eagerly, run_with_breaks
from megalith.ops.cross_entropy import ORDINARY, linear_logits
from megalith.ops.dropout import column_keys, mix
from megalith.ops.gumbel import sample, sample_rows
from megalith.parallel.batch_invariant import apply_batch_invariant
from megalith.parallel.seams import plug
from megalith.parallel.shards import LocalShard

WINDOW = {"cpu": 1, "cuda": 8}  # steps launched before the host reads their samples
PREFILL_TOKENS = 2**14  # maximum tokens per prefill pass
PREFILL_SCORES = 2**24  # maximum pairs of a new token and a key in a pass after known prefixes


@dataclass(frozen=True)
class _Prefix:
    """Tokens that are prefilled for several rows, with the slot of their adapter."""

    tokens: list[int]
    rows: list[int]
    adapter: int


OnToken = Callable[[int, int, int], None]  # prompt, generation, id


class Engine:
    """Generates with its own weights in `dtype`, or with those of a given model.

    At most `max_rows` sequences of `max_tokens` tokens each (prompt and completion) are in progress. With `tp`, every
    rank makes the same calls with the same prompts and receives every completion.
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
        records_routes: bool = False,
        batch_invariant: bool = False,
        prefix_reuse: bool = True,
        prefix_cache_bytes: int = 0,
        speculation: Speculation | None = None,
        adapter_slots: SlotSizes | None = None,
    ):
        """Build the engine.

        Args:
            model_config: architecture of the model.
            device: device of weights and cache.
            dtype: compute dtype, and dtype of the matrices.
            max_rows: maximum number of concurrent sequences.
            max_tokens: maximum length of a sequence.
            tp: tensor-parallel axis.
            lora: settings of the model's adapters.
            model: run this model, unchanged, instead of building one.
            compile: compile the layers. Default: on a GPU.
            graphs: run steps as CUDA graphs. Default: on a GPU.
            records_routes: return the experts that the routers choose with the completions.
            batch_invariant: use the operators of a trainer with rl.exact or train.batch_invariant, uncompiled, so that
                log-probabilities are bitwise the trainer's: those of all tokens, also under top-k, top-p and min-p.
            prefix_reuse: begin sequences with the keys and values of known prefixes (prefix_reuse.py). With
                batch_invariant, this changes no bit; otherwise it changes log-probabilities by rounding. Models with
                recurrent layers, ALiBi or LongRoPE, and engines that record routes, prefill everything.
            prefix_cache_bytes: maximum bytes of keys and values that are kept, in addition to the rows.
            speculation: propose tokens and verify several per step. Changes speed only, not the completions.
            adapter_slots: room for several adapters (`set_adapter`), of which each sequence uses one or none.

        Raises:
            ConfigError: the model is not a decoder, it has no experts to record, or there is no room for a sequence.
        """
        self.device, self.dtype, self.tp = torch.device(device), dtype, tp
        on_gpu = self.device.type == "cuda"
        grouped = on_gpu and dtype == torch.bfloat16
        # A step has few rows: compiling kernels for the permutation around the matmuls does not pay.
        experts = {"moe_grouped_gemm": grouped, "moe_permute_fusion": False}
        self.config = config = model_config.model_copy(update={"mtp_num_layers": None, **experts})
        if config.model_type == "t5":
            raise ConfigError(
                "model.model_type is t5, but engines support decoders only; generate from the model (megalith.load, "
                "megalith.generate), or with `megalith generate`"
            )
        if not config.causal:
            raise ConfigError(
                f"model.model_type is {config.model_type}, an encoder, which cannot continue text; model(input_ids) "
                "returns the logits of each token"
            )
        if config.score_head:
            raise ConfigError(
                "model.score_head is on: this is a reward model, which scores texts and generates none; generate from "
                "a language model"
            )
        if max_rows < 1 or max_tokens < 2:
            raise ConfigError(
                f"an engine with {max_rows} rows of {max_tokens} tokens cannot generate; it needs at least 1 row of 2"
            )
        self._routed_layers = config.routed_layers if records_routes else []
        if records_routes and not self._routed_layers:
            raise ConfigError(
                "the model has no experts, so there are no routes to record; omit records_routes"
            )
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._prefix_cache_bytes, self._has_own_weights = prefix_cache_bytes, model is None
        self._reuses = prefix_reuse and not records_routes and config.position_embedding_type != "alibi"
        self._prefixes: PrefixReuse | None = None
        # Tokens of prompts since the last `take_prefill_tokens`.
        self.prefill_tokens = self.reused_tokens = 0
        self.version = 0
        self._slots: dict[str, SiteSlots] = {}
        self.slots = 0 if adapter_slots is None else adapter_slots.slots
        """Number of adapters that there is room for."""
        if model is None:
            self.model, self._slots = engine_model(config, dtype, self.device, tp, lora, adapter_slots)
        elif self.slots:
            raise ConfigError(
                "an engine that runs a given model has no slots for adapters; build it without `model`, and load the "
                "weights"
            )
        else:
            self.model = model
        self._batch_invariant, self._head_math = batch_invariant, ORDINARY
        self._attend_cached, self._attend_continued = cached_attention, continued_attention
        if batch_invariant:
            check_batch_invariant_engine(config, tp.size, lora, self.slots)
            apply_batch_invariant(self.model)
            self._head_math = BATCH_INVARIANT
            self._attend_cached = invariant_attention.cached_attention
            self._attend_continued = invariant_attention.continued_attention
            compile = False
        self.shards: dict[str, LocalShard] = named_shards([self.model])
        # Experts without grouped GEMM need row counts on the host, so they cannot be captured.
        capturable = on_gpu and (not config.num_experts or self.model.config.moe_grouped_gemm)
        self._graphed = capturable if graphs is None else graphs
        if (on_gpu if compile is None else compile) and model is None:
            for layer in layers_of(self.model).values():
                if layer.has_experts:
                    plug(layer, "runner", partial(run_with_breaks, dynamic=False))
                else:
                    layer.compile(fullgraph=True, dynamic=False)
        self.window = WINDOW.get(self.device.type, 1)
        drafts = 0 if speculation is None else speculation.num_speculative_tokens
        self._room = max_tokens + drafts  # a row also has drafts after its last token
        self._offsets = torch.arange(1 + drafts, device=self.device)
        self._drafter = None if speculation is None else self._make_drafter(speculation, compile)
        # random key of each index in a completion
        self._position_keys = column_keys(self._room, self.device)
        self._draft_counts = torch.zeros(3, dtype=torch.int64, device=self.device)  # see DraftMetrics
        self._cache: Tensor | None = None
        self._states: RecurrentStates | None = None
        self._cached_layers = cached_layers(config)
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._entries = -(-config.padded_vocab_size // tp.size)  # vocabulary entries of each rank
        self._logits_state = self._empty_logits_state()
        self.source: Any = None  # set by `sync` (sync.py)

    def _make_drafter(self, speculation: Speculation, compile: bool | None) -> Drafter:
        speculation.check(self.config)
        drafts, model = speculation.num_speculative_tokens, speculation.draft_model
        if model is None:
            return NgramDrafter(speculation, self.max_rows, self._room + 1, self.device)
        sizes = dict(max_rows=self.max_rows, max_tokens=self._room + 1)
        engine = Engine(
            model.config,
            self.device,
            self.dtype,
            **sizes,
            tp=self.tp,
            compile=compile,
            graphs=False,
            prefix_reuse=False,
        )
        engine.load(model.state_dict().items())
        return ModelDrafter(engine, drafts)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Load complete weights under our names: each is sharded, cast and copied in place, so CUDA graphs stay valid.

        Raises ConfigError if a tensor is missing, unexpected or has another shape.
        """
        missing, self.source = set(self.shards), None  # the next `sync` copies everything
        for name, tensor in tensors:
            if name not in self.shards:
                if self.is_mtp_parameter(name):
                    continue
                raise ConfigError(
                    f"the engine has no tensor {name}; load the weights of its own architecture"
                )
            shard = self.shards[name]
            if tuple(tensor.shape) != shard.shape:
                raise ConfigError(
                    f"{name} is {list(tensor.shape)}, but the engine's is {list(shard.shape)}; load the weights of its "
                    "own architecture"
                )
            shard.values.copy_(shard.slice_of(tensor))
            missing.discard(name)
        if missing:
            raise ConfigError(
                f"{sorted(missing)[0]} and {len(missing) - 1} others are missing; pass every tensor"
            )
        self.version = version

    @torch.no_grad()
    def set_adapter(self, slot: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Put an adapter into a slot, in place, so CUDA graphs stay valid. Every tensor-parallel rank calls it.

        Args:
            slot: number of the adapter, from 1. No sequence in progress uses it.
            pairs: full A and B by the name of the matrix (`Adapter.pair`). Empty: no adapter.

        Raises:
            ConfigError: the engine has no such slot, or no room for a matrix or a rank.
        """
        if not 1 <= slot <= self.slots:
            raise ConfigError(f"the engine has {self.slots} slots for adapters, and no slot {slot}")
        for name, (a, _) in pairs.items():
            if name not in self._slots:
                raise ConfigError(
                    f"the engine has no room for an adapter of {name}; it has it for other matrices"
                )
            room = self._slots[name].slots.lora_A.shape[-2]
            if a.shape[-2] > room:
                raise ConfigError(
                    f"the adapter of {name} has rank {a.shape[-2]} in all its parts, but the engine has room for "
                    f"{room}; serve it with a larger --max-lora-rank"
                )
        for name, site in self._slots.items():
            site.fill(slot, pairs.get(name))
        if self._prefixes is not None:  # those of the slot's last adapter
            self._prefixes.forget()

    def is_mtp_parameter(self, name: str) -> bool:
        """Return True for parameters of multi-token prediction, which generation omits."""
        parts = name.split(".")
        return parts[0] == "layers" and int(parts[1]) >= self.config.num_layers

    @property
    def version(self) -> int:
        """Version of the weights. Setting it drops the keys and values of earlier weights."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        if self._prefixes is not None:
            self._prefixes.forget()

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights and cache on this rank."""
        weights = {p.data_ptr(): p.nbytes for p in self.model.parameters()}
        for site in self._slots.values():
            weights |= {x.data_ptr(): x.nbytes for x in (site.slots.lora_A, site.slots.lora_B)}
        parts = self._cache, self._states, self._prefixes, self._logits_state
        cache = sum(part.nbytes for part in parts if part is not None)
        drafter = (0, 0) if self._drafter is None else self._drafter.nbytes
        return {"weights": sum(weights.values()) + drafter[0], "cache": cache + drafter[1]}

    def take_prefill_tokens(self) -> tuple[int, int]:
        """Return the numbers of prompt tokens since the last call that were prefilled, and that were not because their
        keys and values were known. The completions of a prompt that begin together count once."""
        counts = self.prefill_tokens, self.reused_tokens
        self.prefill_tokens = self.reused_tokens = 0
        return counts

    def release(self) -> None:
        """Free the cache and the CUDA graphs. The next `generate` creates them again."""
        self._graphs.clear()
        self._cache = self._states = self._prefixes = None
        self._logits_state = self._empty_logits_state()
        if self._drafter is not None:
            self._drafter.release()

    def take_draft_metrics(self) -> DraftMetrics | None:
        """Return the counts of speculative decoding since the last call. None: it is off."""
        if self._drafter is None:
            return None
        counts = self._draft_counts.tolist()
        self._draft_counts.zero_()
        return DraftMetrics(*counts)

    @property
    def vocabulary_entries(self) -> int:
        """Number of vocabulary entries of all ranks, with padding."""
        return self._entries * self.tp.size

    def _empty_logits_state(self) -> LogitsState:
        sizes = self.tp.rank * self._entries, self._entries, self.vocabulary_entries
        return LogitsState(self.max_rows, *sizes, self.device)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
        num_generations: int = 1,
        on_token: OnToken | None = None,
        max_new_tokens: Sequence[int] | None = None,
        adapters: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Generate `num_generations` completions per prompt.

        Args:
            prompts: token ids.
            sampling: sampling settings.
            keys: number of each prompt, 0 to 2^47 - 1, that its samples depend on. Default: its index.
            num_generations: completions per prompt.
            on_token: called with (prompt, generation, id) soon after each token is sampled.
            max_new_tokens: maximum tokens of the completions of each prompt. Default: sampling.max_new_tokens.
            adapters: slot of each prompt's adapter, 0 for none. Default: none.

        Returns:
            Completions ordered by prompt, then generation.

        Raises:
            ConfigError: empty prompt, token outside the vocabulary, more tokens than the model or a row has room for,
                or a
                setting out of range.
        """
        sequences = make_sequences(
            prompts, sampling, num_generations, self.config, self.max_tokens, max_new_tokens
        )
        keys = range(len(prompts)) if keys is None else keys
        check_keys(keys, len(prompts), num_generations)
        stream_keys = [key * MAX_GENERATIONS + g for key in keys for g in range(num_generations)]
        for sequence, noise in zip(sequences, noise_keys(sampling.seed, stream_keys), strict=True):
            sequence.noise = noise
            sequence.adapter = 0 if adapters is None else adapters[sequence.prompt_index]
        batch = RunningBatch(self, sampling)
        batch.add(sequences)
        while batch.is_busy:
            for sequence, ids in batch.step():
                for token in ids if on_token is not None else ():
                    on_token(sequence.prompt_index, sequence.generation, token)
        return [
            Completion(
                s.prompt_index,
                s.generation,
                s.ids,
                s.logprobs,
                not s.stopped,
                s.versions if len(set(s.versions)) > 1 else s.versions[:1],
                s.all_routes,
                s.ends_with_stop_id,
            )
            for s in sequences
        ]

    # State on the device.

    @torch.no_grad()
    def reset_state(self, sampling: Sampling) -> None:
        """Reset the state of all rows to idle; allocate the cache if needed."""
        if self._cache is None:
            groups = -(-self.config.query_groups // self.tp.size)
            sizes = self.max_rows, self._room, groups
            self._cache = empty_cache(self.config, *sizes, self.device, self.dtype)
            self._states = RecurrentStates.empty(self.model, self.max_rows, self.device, self.dtype)
            if self._reuses and self._states is None and self._original_context == math.inf:
                self._prefixes = PrefixReuse(self._cache, self._prefix_cache_bytes)
            # Per row: newest token, its position, number of sampled tokens, their limit, noise key, active flag, if
            # stop tokens end it, and the slot of its adapter.
            self._state = torch.zeros(8, self.max_rows, dtype=torch.int64, device=self.device)
            self._row_settings = torch.zeros(
                4, self.max_rows, device=self.device
            )  # see ops.gumbel.sample_rows
            tokens = self.window * len(self._offsets)
            self._ids = torch.zeros(tokens, self.max_rows, dtype=torch.int64, device=self.device)
            self._logprobs = torch.zeros(tokens, self.max_rows, device=self.device)
            self._routes = None  # int16 [tokens, rows, layers with experts, topk]
            if self._routed_layers:
                empty = self._route_memory(tokens * self.max_rows).transpose(0, 1).contiguous()
                self._routes = empty.unflatten(0, (tokens, self.max_rows))
            self._tick = self._offsets.clone()  # rows of these where a step writes
            self._stops = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.device)
        if self._prefixes is not None and not self._has_own_weights:  # they may have changed
            self._prefixes.forget()
        self._state.zero_()
        self._stops.zero_()
        self._tick.copy_(self._offsets)
        if self._drafter is not None:
            self._drafter.reset(sampling)
        if sampling.stop and sampling.forced_lengths is None:
            self._stops[torch.tensor(sampling.stop, device=self.device)] = True
        if self._graphed:
            for filters in (0, 1) if sampling.by_row else (sampling.top_k,):
                self._graph(replace(sampling, top_k=filters), UsedParts.of(sampling.processing))

    def _route_memory(self, tokens: int) -> Tensor | None:
        """Return memory for the routes of a pass, int16 [layers with experts, tokens, topk]; None: not recorded."""
        if not self._routed_layers:
            return None
        sizes = len(self._routed_layers), tokens, self.config.moe_router_topk
        return torch.zeros(sizes, dtype=torch.int16, device=self.device)

    def choose_rows(self, sequences: Sequence[RowSequence], free: Sequence[int]) -> list[int]:
        """Return a free row for each sequence. There must be enough free rows."""
        if self._prefixes is None:
            return list(free[: len(sequences)])
        return self._prefixes.choose_rows(sequences, free)

    def fill_rows(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        """Give rows to sequences: prefill them and set their state."""
        rows = to_device(torch.tensor([row for row, _ in begun]), self.device)
        if self._states is not None:
            self._states.clear(rows)
        routes = self.prefill(begun)
        if self._prefixes is not None:
            self._prefixes.filled(begun)
        if self._drafter is not None:
            self._drafter.fill_rows(begun)
        for row, sequence in begun:
            if row in routes and not sequence.routes:
                sequence.routes.append(routes[row])
        state = [self._first_state(sequence) for _, sequence in begun]
        self._state[:, rows] = to_device(torch.tensor(state).T.contiguous(), self.device)
        if any(sequence.sampling is not None for _, sequence in begun):
            settings = torch.tensor([sequence.sampling for _, sequence in begun])
            self._row_settings[:, rows] = to_device(settings.T.contiguous(), self.device)
        self._logits_state.begin(begun, lambda sequence: sequence.prompt)

    def set_masks(self, masks: np.ndarray) -> None:
        """Set the tokens that the next step may sample in each of the first rows, as bits, int32 [rows, words]."""
        self._logits_state.set_masks(masks)

    def _first_state(self, sequence: RowSequence) -> list[int]:
        last = sequence.ids[-1] if sequence.ids else sequence.prompt[-1]
        sequence.pause_at, sequence.launched = sequence.limit, len(sequence.ids)
        if sequence.length <= self._original_context:
            sequence.pause_at = min(sequence.limit, self._original_context + 1 - len(sequence.prompt))
        count, stops = len(sequence.ids), int(bool(sequence.stop))
        last_position, adapter = sequence.length - 1, sequence.adapter
        return [last, last_position, count, sequence.pause_at, sequence.noise, 1, stops, adapter]

    def clear_row(self, row: int) -> None:
        """Make a row idle."""
        self._state[:, row] = 0

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy a row with a sequence of `length` tokens to another one."""
        self._cache[:, :, target, :length] = self._cache[:, :, source, :length]
        self._state[:, target] = self._state[:, source]
        self._row_settings[:, target] = self._row_settings[:, source]
        self._logits_state.move(source, target)
        if self._states is not None:
            self._states.move(source, target)
        if self._prefixes is not None:
            self._prefixes.moved(source, target)
        if self._drafter is not None:
            self._drafter.move_row(source, target, length)

    @property
    def _original_context(self) -> float:
        """Length up to which LongRoPE uses its short factors."""
        scaling = self.config.rope_scaling
        is_long = scaling is not None and scaling.type == "longrope"
        return scaling.original_max_position_embeddings if is_long else math.inf

    def prefill(self, begun: Sequence[tuple[int, RowSequence]]) -> dict[int, np.ndarray]:
        """Fill the rows with keys and values of all tokens but the last, and return each row's routes if recorded.

        Completions of the same prompt share a pass.
        """
        routes: dict[int, np.ndarray] = {}
        groups: dict[tuple[int, int], _Prefix] = {}
        for row, sequence in begun:
            key = (sequence.prompt_index, sequence.number if sequence.ids else -1)
            tokens = [*sequence.prompt, *sequence.ids][:-1]
            if tokens:
                groups.setdefault(key, _Prefix(tokens, [], sequence.adapter)).rows.append(row)
        whole = list(groups.values())
        if self._prefixes is not None:
            placed = [(tokens_of_adapter(each.tokens, each.adapter), each.rows) for each in whole]
            lengths = self._prefixes.place(placed)
            self._prefill_rest([(each, begin) for each, begin in zip(whole, lengths) if begin])
            whole = [each for each, begin in zip(whole, lengths) if not begin]
        self.prefill_tokens += sum(len(each.tokens) for each in whole)
        batch: list[_Prefix] = []
        for each in sorted(whole, key=lambda each: len(each.tokens)):
            is_long = len(each.tokens) + 1 > self._original_context
            if batch and (
                len(each.tokens) * (len(batch) + 1) > PREFILL_TOKENS
                or is_long != (len(batch[0].tokens) + 1 > self._original_context)
            ):
                routes |= self._prefill_pass(batch)
                batch = []
            batch.append(each)
        return routes | self._prefill_pass(batch) if batch else routes

    def _prefill_rest(self, groups: Sequence[tuple[_Prefix, int]]) -> None:
        """Fill rows with the keys and values of the tokens after a prefix that they hold.

        Args:
            groups: tokens and rows, and the length of the prefix.
        """
        self.reused_tokens += sum(begin for _, begin in groups)
        batch: list[tuple[_Prefix, int]] = []
        rest = [(len(each.tokens) - begin, len(each.tokens), each) for each, begin in groups]
        for new, length, each in sorted((one for one in rest if one[0]), key=lambda one: one[:2]):
            longest = max([length, *(len(one.tokens) for one, _ in batch)])
            count = len(batch) + 1
            if batch and (new * count > PREFILL_TOKENS or new * longest * count > PREFILL_SCORES):
                self._continued_pass(batch)
                batch = []
            batch.append((each, length - new))
        if batch:
            self._continued_pass(batch)

    def _continued_pass(self, batch: list[tuple[_Prefix, int]]) -> None:
        new = [each.tokens[begin:] for each, begin in batch]
        longest = max(map(len, new))
        self.prefill_tokens += sum(map(len, new))
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in new])
        begins = torch.tensor([begin for _, begin in batch])
        rows = torch.tensor([each.rows[0] for each, _ in batch])
        adapters = torch.tensor([each.adapter for each, _ in batch])
        # Each new token of each row, by its place in the cache and its index in the pass.
        slots_and_indices = [
            (row * self._room + begin + at, number * longest + at)
            for number, (each, begin) in enumerate(batch)
            for row in each.rows
            for at in range(len(each.tokens) - begin)
        ]
        slots, indices = torch.tensor(slots_and_indices).T.contiguous()
        ids, begins, rows, slots, indices, adapters = (
            to_device(x, self.device) for x in (ids, begins, rows, slots, indices, adapters)
        )
        end = max(len(each.tokens) for each, _ in batch)
        positions = begins[:, None] + torch.arange(longest, device=self.device)
        positions = positions.clamp(max=end - 1)  # of padding
        cache = ContinuedPrefill(
            self._cache, self._cached_layers, rows, positions, end, slots, indices, self._attend_continued
        )
        with run_eagerly():
            self._hidden(ids, positions, cache, end + 1, adapters=adapters)

    def _prefill_pass(self, batch: list[_Prefix]) -> dict[int, np.ndarray]:
        longest = len(batch[-1].tokens)
        inputs = (
            [each.tokens + [0] * (longest - len(each.tokens)) for each in batch],
            [row for each in batch for row in each.rows],
            [number for number, each in enumerate(batch) for _ in each.rows],
            [len(each.tokens) for each in batch],
            [each.adapter for each in batch],
        )
        ids, rows, prompts, lengths, adapters = (to_device(torch.tensor(x), self.device) for x in inputs)
        positions = torch.arange(longest, device=self.device).expand(len(batch), longest)
        cache = Prefill(self._cache, self._cached_layers, rows, prompts, lengths, self._states)
        routes = self._route_memory(len(batch) * longest)
        with run_eagerly():  # sizes differ between passes
            self._hidden(ids, positions, cache, longest + 1, routes, adapters)
        if routes is None:
            return {}
        by_token = routes.transpose(0, 1).cpu().numpy()
        return {
            row: by_token[number * longest : number * longest + len(each.tokens)]
            for number, each in enumerate(batch)
            for row in each.rows
        }

    def _hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Cache,
        length: int | None = None,
        routes: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states [batch, seq, hidden] of ids at positions, int64 [batch, seq].

        Args:
            ids: token ids.
            positions: positions.
            cache: earlier tokens.
            length: length of the sequences. None: each ends at its position.
            routes: from `_route_memory`, for the experts that the routers choose. None: not recorded.
            adapters: slots of the sequences' adapters, int64 [batch]. None: they have none.
        """
        context = Context(len(ids), PassLayout(), position_ids=positions, cache=cache)
        if self.slots:
            context.adapters = ids.new_zeros(len(ids)) if adapters is None else adapters
        if self.config.position_embedding_type == "rope":
            context.rotary = self._rotary(positions, length)
            if self.config.rotary_base_local is not None:
                context.rotary_local = local_rotary_tables(self.config, positions)
        if self.config.num_experts:
            context.global_token_ids = torch.arange(ids.numel(), device=ids.device)
        if routes is not None:
            layers = zip(self._routed_layers, routes, strict=True)
            context.routes = {number: LayerRoutes(recorded=of_layer) for number, of_layer in layers}
        model = self.model
        return Stack.forward(model, model.embed(ids, context), context)

    def _rotary(self, positions: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        original = self._original_context
        if length is not None or original == math.inf:
            return rotary_tables(self.config, positions, length or 0)
        short, long = (rotary_tables(self.config, positions, n) for n in (original, original + 1))
        is_long = (positions >= original)[..., None, None]
        return tuple(torch.where(is_long, b, a) for a, b in zip(short, long))

    def run_window(
        self,
        sampling: Sampling,
        rows: int,
        longest: int,
        steps: int | None = None,
        used: UsedParts = NO_PARTS,
    ) -> tuple[Tensor, Tensor, Tensor | None, torch.cuda.Event | None]:
        """Launch a window of steps and the copy of their samples to the host. Does not wait on a GPU.

        Args:
            sampling: settings of the samples.
            rows: rows that are in use, from the first. A GPU runs all rows.
            longest: maximum length of their sequences.
            steps: number of steps, at most the engine's window. Default: the engine's window.
            used: parts of logits processing that the rows need.

        Returns:
            Ids, int64 [tokens, rows], -1 where a row got none; log-probabilities, float32 [tokens, rows]; the experts
            of the tokens before these, int16 [tokens, rows, layers with experts, topk], None if not recorded; the end
            of the copy. A step has one token per row, and one more for each draft.
        """
        steps = self.window if steps is None else steps
        if self._graphed:
            graph = self._graph(sampling, used)
            for _ in range(steps):
                graph.replay()
        else:
            for _ in range(steps):
                self._decode_step(sampling, rows, longest, used)
                longest = min(longest + len(self._offsets), self.max_tokens)
        tokens = steps * len(self._offsets)
        ids, logprobs, routes = (
            None if x is None else x[:tokens, :rows].to("cpu", non_blocking=True, copy=x is self._routes)
            for x in (self._ids, self._logprobs, self._routes)
        )
        if steps < self.window:
            self._tick.copy_(self._offsets)
        copied = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        return ids, logprobs, routes, copied

    def _graph(self, sampling: Sampling, used: UsedParts = NO_PARTS) -> torch.cuda.CUDAGraph:
        """Return the step as a CUDA graph for these settings, captured after warm-up. Rows in use keep their state."""
        key = (*self._sampling_key(sampling), used)
        if key not in self._graphs:
            if not sampling.by_row and not any(other[:-1] == key[:-1] for other in self._graphs):
                self._graphs.clear()
            self._logits_state.allocate(used)
            changed = [self._state, self._tick, self._draft_counts, *self._logits_state.tensors]
            changed += [] if self._states is None else self._states.parts
            kept = [tensor.clone() for tensor in changed]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._decode_step(sampling, self.max_rows, self.max_tokens, used)
                    for tensor, value in zip(changed, kept):
                        tensor.copy_(value)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._decode_step(sampling, self.max_rows, self.max_tokens, used)
            self._graphs[key] = graph
        return self._graphs[key]

    def _sampling_key(self, sampling: Sampling) -> tuple:
        return (
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, self._vocabulary(sampling),
            sampling.by_row,
        )  # fmt: skip

    def _vocabulary(self, sampling: Sampling) -> int:
        return min(sampling.vocab_size or self.config.vocab_size, self.config.vocab_size)

    def next_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        longest: int,
        routes: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Return the logits after each token, [rows * tokens, this rank's entries].

        Args:
            tokens: int64 [rows, tokens], of the first rows: the newest token and the ones after it.
            positions: int64 [rows, tokens].
            longest: maximum length of the sequences up to the newest token.
            routes: see `_hidden`.
            adapters: see `_hidden`.
        """
        rows = len(tokens)
        by_token = enumerate(positions.unbind(1))
        seen = [(at, visible_positions(at, longest + ahead)) for ahead, at in by_token]
        states = self._states and self._states.first(rows)
        cache = Decode(self._cache[:, :, :rows], self._cached_layers, seen, states, self._attend_cached)
        if self.config.learns_positions:  # drafts may follow the last position
            positions = positions.clamp(max=self.config.max_position_embeddings - 1)
        hidden = self._hidden(tokens, positions, cache, routes=routes, adapters=adapters).flatten(0, 1)
        head = self.model.output_weight, self.config.final_logit_softcapping, self.model.output_bias
        return linear_logits(self.model.head_input(hidden), *head, math=self._head_math)

    def sampling_keys(self, noise: Tensor, index: Tensor) -> Tensor:
        """Return the keys of the noise, int32, of rows with key `noise` at these indices of their completions."""
        return mix(noise.to(torch.int32) ^ self._position_keys[index])

    def sample_logits(
        self,
        logits: Tensor,
        keys: Tensor,
        sampling: Sampling,
        settings: Tensor | None,
        raw_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return a token and its log-probability for each row of logits (ops.gumbel).

        Args:
            logits: [rows, this rank's entries].
            keys: int32 [rows], from `sampling_keys`.
            sampling: settings of all rows.
            settings: float32 [4, rows], settings of each row (`sample_rows`). None: those of `sampling`.
            raw_logits: logits before processing, for batch-invariant log-probabilities. Default: `logits`.
        """
        first = self.tp.rank * self._entries
        shard = dict(vocab_size=self._vocabulary(sampling), axis=self.tp, first=first)
        if settings is not None:
            ids, logprobs = sample_rows(logits, keys, settings, bool(sampling.top_k), **shard)
        else:
            filters = dict(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
            ids, logprobs = sample(logits, keys, sampling.temperature, **filters, **shard)
        if self._batch_invariant:
            temperature = sampling.temperature if settings is None else settings[0, :, None]
            raw_logits = logits if raw_logits is None else raw_logits
            logprobs = self._exact_logprobs(raw_logits, ids, temperature, shard["vocab_size"])
        return ids, logprobs

    def _decode_step(self, sampling: Sampling, rows: int, longest: int, used: UsedParts = NO_PARTS) -> None:
        """Generate one token in each of the first `rows` rows that is active, and one more per accepted draft."""
        token, position, count, limit, noise, alive, stops, adapters = self._state[:, :rows]
        settings = self._row_settings[:, :rows] if sampling.by_row else None
        tokens, width, drafts = token[:, None], len(self._offsets), None
        if self._drafter is not None:
            drafts = self._drafter.propose(
                DecodeRows(token, position, count, noise, alive, settings, longest), sampling
            )
            tokens = torch.cat([tokens, drafts.clamp(0, self.config.vocab_size - 1)], 1)
        routes = self._route_memory(rows * width)
        # idle rows write to their first position only, so that another sequence can begin with the rest
        positions = position[:, None] + self._offsets * alive[:, None]
        raw_logits = self.next_logits(tokens, positions, longest, routes, adapters)
        logits = self._logits_state.process_drafted(raw_logits, drafts, used) if any(used) else raw_logits
        index = count[:, None] + self._offsets
        if settings is not None and width > 1:
            settings = settings.repeat_interleave(width, 1)
        keys = self.sampling_keys(noise[:, None], index).flatten()
        ids, logprobs = self.sample_logits(logits, keys, sampling, settings, raw_logits)
        ids, active = ids.view(rows, width), alive.bool()
        last, added, is_new = ids[:, 0], alive, active[:, None]
        if drafts is not None:
            self._drafter.add(position, ids)
            ends = self._stops[ids] & stops.bool()[:, None]
            added = torch.minimum(accepted_tokens(ids, drafts, ends), limit - count) * alive
            if used.masks:  # those after the first sample are not known
                added = added.clamp(max=1)
            last = ids.gather(1, (added - 1).clamp(min=0)[:, None])[:, 0]
            is_new = self._offsets < added[:, None]
            drafted = ((drafts >= 0).sum(1) * alive).sum()
            self._draft_counts.add_(torch.stack([alive.sum(), drafted, (added - alive).sum()]))
        self._logits_state.count(ids, is_new, used)
        self._ids[:, :rows].index_copy_(0, self._tick, torch.where(is_new, ids, -1).T)
        self._logprobs[:, :rows].index_copy_(0, self._tick, logprobs.view(rows, width).T)
        if routes is not None:
            by_token = routes.transpose(0, 1).unflatten(0, (rows, width)).transpose(0, 1)
            self._routes[:, :rows].index_copy_(0, self._tick, by_token)
        self._tick.add_(width).remainder_(len(self._ids))
        count.add_(added)
        position.add_(added)
        alive.copy_(active & ~(self._stops[last] & stops.bool()) & (count < limit))
        token.copy_(last)
        position.mul_(alive)  # idle rows attend to one key

    @staticmethod
    def _exact_logprobs(logits: Tensor, ids: Tensor, temperature: float | Tensor, vocab_size: int) -> Tensor:
        """Return the log-probabilities that the trainer's loss has, float32 [rows]; greedy ones at temperature 1."""
        if isinstance(temperature, Tensor):
            temperature = torch.where(temperature == 0, 1.0, temperature)
        elif temperature == 0:
            temperature = 1.0
        return token_logprobs(logits, ids, temperature, vocab_size)

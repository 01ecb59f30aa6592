"""Generation engine with continuous batching, on one device or over a tensor-parallel axis.

It runs the modules of models/ with a static KV cache (static_cache.py). Each row of the cache holds a sequence in
progress; a finished row is given to the next prompt (running_batch.py).

     prompt ──all tokens but the last──▶ prefill: keys and values into the row        (prefill_passes.py)
     last token ──▶ decode step ──▶ logits ──▶ Gumbel sampling ──▶ next token, and so on, all rows in one pass
                                                                                      (decode_steps.py)

A finished row attends to a single key, until the host has read the end of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import LoraConfig, ModelConfig
from megalith.config.rules.batch_invariant_rules import check_batch_invariant_engine
from megalith.errors import ConfigError, shorten
from megalith.generation.decode_steps import DecodeSteps
from megalith.generation.engine_model import SiteSlots, SlotSizes, engine_model
from megalith.generation.engine_rows import EngineRows
from megalith.generation.exact_cache import ExactDecode, ExactPrefill
from megalith.generation.logits_state import LogitsState
from megalith.generation.mtp_drafter import MTPDrafter
from megalith.generation.noise_keys import noise_keys
from megalith.generation.prefill_passes import PrefillPasses
from megalith.generation.prefix_reuse import PrefixReuse
from megalith.generation.requests import (
    MAX_GENERATIONS,
    Completion,
    Sampling,
    check_keys,
    make_sequences,
)
from megalith.generation.running_batch import RunningBatch
from megalith.generation.speculation import (
    Drafter,
    DraftMetrics,
    ModelDrafter,
    NgramDrafter,
    Speculation,
)
from megalith.generation.static_cache import Decode, Prefill, RecurrentStates, cached_layers
from megalith.models.transformer import Transformer, layers_of
from megalith.ops.batch_invariant import invariant_attention
from megalith.ops.batch_invariant.token_logprobs import BATCH_INVARIANT
from megalith.ops.cached_attention import cached_attention, continued_attention
from megalith.ops.compiled import run_with_breaks
from megalith.ops.dropout import column_keys
from megalith.ops.vocab_softmax import ORDINARY
from megalith.parallel.batch_invariant import apply_batch_invariant
from megalith.parallel.seams import plug
from megalith.parallel.shards import LocalShard, named_shards

WINDOW = {"cpu": 1, "cuda": 8}  # steps launched before the host reads their samples


OnToken = Callable[[int, int, int], None]  # prompt, generation, id


class Engine(PrefillPasses, DecodeSteps, EngineRows):
    """Generation engine. It has its own weights in `dtype`, or uses a model that is passed to it.

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
            records_routes: record the experts that the routers choose, and return them with each completion.
            batch_invariant: use the operators of a trainer with rl.exact or train.batch_invariant, uncompiled, so that
                log-probabilities are bitwise the trainer's. They are then normalized over all tokens, even under top-k,
                top-p and min-p.
            prefix_reuse: begin sequences with the keys and values of known prefixes (prefix_reuse.py). With
                batch_invariant, this changes no bit; otherwise it changes log-probabilities by rounding. Models with
                recurrent layers, ALiBi or LongRoPE, and engines with `records_routes`, prefill everything.
            prefix_cache_bytes: memory for keys and values of prefixes that no row holds, in bytes.
            speculation: propose tokens and verify several per step. Changes speed only, not the completions.
            adapter_slots: number of adapters that fit (`set_adapter`), and their sizes. Each sequence uses one adapter
                or none.

        Raises:
            ConfigError: the model is not a decoder, it has no experts to record, or there is no room for a sequence.
        """
        self.device, self.dtype, self.tp = torch.device(device), dtype, tp
        on_gpu = self.device.type == "cuda"
        grouped = on_gpu and dtype == torch.bfloat16
        # A step has few rows: compiling kernels for the permutation around the matmuls does not pay.
        experts = {"moe_grouped_gemm": grouped, "moe_permute_fusion": False}
        if speculation is None or speculation.method != "mtp":
            experts["mtp_num_layers"] = None
        self.config = config = model_config.model_copy(update=experts)
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
                "model.score_head is on: this is a reward model, which cannot generate text; "
                "generate from a language model"
            )
        if max_rows < 1 or max_tokens < 2:
            raise ConfigError(
                f"an engine with {max_rows} rows of {max_tokens} tokens cannot generate; it needs at least 1 "
                "row of 2 tokens"
            )
        self._routed_layers = config.routed_layers if records_routes else []
        if records_routes and not self._routed_layers:
            raise ConfigError(
                "the model has no experts, so there are no expert choices to record; leave records_routes out"
            )
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._prefix_cache_bytes, self._has_own_weights = prefix_cache_bytes, model is None
        self._reuses = prefix_reuse and not records_routes and config.position_embedding_type != "alibi"
        self._reuses = self._reuses and not config.mtp_layers  # which read the prompt's hidden states
        self._prefixes: PrefixReuse | None = None
        # Tokens of prompts since the last `take_prefill_tokens`.
        self.prefill_tokens = self.reused_tokens = 0
        self.decode_steps = 0
        """Number of decode steps since the engine was built."""
        self.wait_seconds = 0.0
        """Seconds that the host has waited for a GPU's samples since the engine was built."""
        self.version = 0
        self._slots: dict[str, SiteSlots] = {}
        self.slots = 0 if adapter_slots is None else adapter_slots.slots
        """Number of adapters that there is room for."""
        if model is None:
            self.model, self._slots = engine_model(config, dtype, self.device, tp, lora, adapter_slots)
        elif self.slots:
            raise ConfigError(
                "an engine that is built with `model` cannot have slots for adapters; build it "
                "without `model`, and load the weights"
            )
        else:
            self.model = model
        self._batch_invariant, self._head_math = batch_invariant, ORDINARY
        self._attend_cached, self._attend_continued = cached_attention, continued_attention
        self._prefill_cache, self._decode_cache = Prefill, Decode
        if batch_invariant:
            check_batch_invariant_engine(config, lora, self.slots)
            apply_batch_invariant(self.model, tp)
            self._head_math = BATCH_INVARIANT
            self._attend_cached = invariant_attention.cached_attention
            self._attend_continued = invariant_attention.continued_attention
            self._prefill_cache, self._decode_cache = ExactPrefill, ExactDecode
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
        if speculation.method == "mtp":
            return MTPDrafter(self, drafts)
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
        """Load complete weights under Megalith's names. Each is sharded, cast and copied in place, so CUDA graphs stay
        valid.

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
            names = shorten(sorted(missing))
            raise ConfigError(f"the weights lack {names}; pass all tensors of the model")
        self.version = version

    @torch.no_grad()
    def set_adapter(self, slot: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Put an adapter into a slot, in place, so CUDA graphs stay valid. Collective over the tensor-parallel group.

        Args:
            slot: the slot, counted from 1. No sequence in progress may use it.
            pairs: full A and B by the name of the matrix (`Adapter.pair`). Empty: no adapter.

        Raises:
            ConfigError: the engine has no such slot, or no room for a matrix or a rank.
        """
        if not 1 <= slot <= self.slots:
            raise ConfigError(
                f"slot is {slot}, but the engine has {self.slots} slots for adapters; choose one from 1 to "
                f"{self.slots}"
            )
        for name, (a, _) in pairs.items():
            if name not in self._slots:
                raise ConfigError(
                    f"the adapter changes {name}, a matrix for which the engine has no slots; serve an adapter "
                    "without this matrix"
                )
            room = self._slots[name].slots.lora_A.shape[-2]
            if a.shape[-2] > room:
                raise ConfigError(
                    f"the adapter of {name} has a total rank of {a.shape[-2]} over its parts, but the engine has "
                    f"room for rank {room}; raise --max-lora-rank"
                )
        for name, site in self._slots.items():
            site.fill(slot, pairs.get(name))
        if self._prefixes is not None:  # those of the slot's last adapter
            self._prefixes.forget()

    def is_mtp_parameter(self, name: str) -> bool:
        """Return True if the parameter belongs to an MTP layer and this engine has no MTP layers."""
        parts = name.split(".")
        omits = not self.config.mtp_layers
        return omits and parts[0] == "layers" and int(parts[1]) >= self.config.num_layers

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
        """Return (prefilled, reused): the number of prompt tokens since the last call that were prefilled, and that
        were reused.

        Keys and values of reused tokens were in the cache. A prompt that several completions share counts once if
        they begin together.
        """
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
        """Return the counts of speculative decoding since the last call. None without speculation."""
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
            keys: sampling key of each prompt, 0 to 2^47 - 1. Default: the prompt's index.
            num_generations: completions per prompt.
            on_token: called with (index of the prompt, index of the completion among those of the prompt, token id)
                soon after each token is sampled.
            max_new_tokens: maximum tokens of the completions of each prompt. Default: sampling.max_new_tokens.
            adapters: slot of each prompt's adapter, 0 for none. Default: none.

        Returns:
            Completions ordered by prompt, then generation.

        Raises:
            ConfigError: empty prompt, token outside the vocabulary, more tokens than the model or a row has room for,
                or a setting out of range.
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

"""Decode steps, launched in windows. Each step samples the next token of every row of the engine.

A step's inputs and outputs stay on the device. So a step can be a CUDA graph, and the host need not wait for each one:
it launches a window of steps and meanwhile reads the results of the previous window. With speculation (speculation.py),
a step also verifies drafts of the next tokens, and each accepted draft is an additional token.

Samples depend only on the weights and on (seed, key of the prompt, index of the completion among those of the prompt,
index of the token in the completion), not on rows, order, batch, layout or drafts (ops/gumbel.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.generation.logits_state import NO_PARTS, UsedParts
from megalith.generation.mtp_drafter import MTPDrafter
from megalith.generation.requests import Sampling
from megalith.generation.speculation import DecodeRows, accepted_tokens
from megalith.ops.batch_invariant.token_logprobs import token_logprobs
from megalith.ops.cached_attention import visible_positions
from megalith.ops.dropout import mix
from megalith.ops.gumbel import sample, sample_rows
from megalith.ops.vocab_softmax import linear_logits


class DecodeSteps:
    """Base class of Engine: decode steps on the engine's cache, layers and row state."""

    def run_window(
        self,
        sampling: Sampling,
        rows: int,
        longest: int,
        steps: int | None = None,
        used: UsedParts = NO_PARTS,
    ) -> tuple[Tensor, Tensor, Tensor | None, torch.cuda.Event | None]:
        """Launch a window of steps and the copy of their samples to the host. Does not wait on a GPU.

        A step gives each row up to 1 + drafts tokens, so slots = steps · (1 + drafts).

        Args:
            sampling: settings of the samples.
            rows: decode the rows 0 to rows - 1. With CUDA graphs, all rows are computed.
            longest: length in tokens of the longest sequence in them.
            steps: number of steps, at most the engine's window. Default: the engine's window.
            used: parts of logits processing that at least one of these rows needs.

        Returns:
            Ids, int64 [slots, rows], -1 for a slot without a token.
            Log-probabilities, float32 [slots, rows].
            Experts of the input tokens, int16 [slots, rows, MoE layers, topk]; None if not recorded.
            CUDA event after the copy; None on a CPU.
        """
        steps = self.window if steps is None else steps
        self.decode_steps += steps
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
        """Return the step as a CUDA graph for these settings, captured after warm-up. The state of rows in use is
        unchanged.
        """
        key = (*self._sampling_key(sampling), used)
        if key not in self._graphs:
            if not sampling.by_row and not any(other[:-1] == key[:-1] for other in self._graphs):
                self._graphs.clear()
            self._logits_state.allocate(used)
            changed = [self._state, self._tick, self._draft_counts, *self._logits_state.tensors]
            changed += [] if self._states is None else self._states.parts
            changed += self._drafter.state if isinstance(self._drafter, MTPDrafter) else []
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
        """Return the logits for the position after each token, [rows * tokens, this rank's vocabulary entries].

        Args:
            tokens: int64 [rows, tokens], newest token and drafts of each of the rows 0 to rows - 1.
            positions: positions of the tokens, int64 [rows, tokens].
            longest: maximum length of the sequences up to the newest token.
            routes: see `_hidden`.
            adapters: see `_hidden`.
        """
        rows = len(tokens)
        by_token = enumerate(positions.unbind(1))
        seen = [(at, visible_positions(at, longest + ahead)) for ahead, at in by_token]
        states = self._states and self._states.first(rows)
        cached = self._cache[:, :, :rows]
        cache = self._decode_cache(cached, self._cached_layers, seen, states, self._attend_cached)
        if self.config.learns_positions:  # drafts may follow the last position
            positions = positions.clamp(max=self.config.max_position_embeddings - 1)
        hidden = self._hidden(tokens, positions, cache, routes=routes, adapters=adapters)
        if isinstance(self._drafter, MTPDrafter):
            self._drafter.take_hidden(hidden)
        return self.head_logits(hidden.flatten(0, 1))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token from last hidden states: [tokens, this rank's vocabulary entries]."""
        head = self.model.output_weight, self.config.final_logit_softcapping, self.model.output_bias
        return linear_logits(self.model.head_input(hidden), *head, math=self._head_math)

    def sampling_keys(self, noise: Tensor, index: Tensor) -> Tensor:
        """Return int32 keys for the sampling noise, from each row's `noise` and the token's `index` in the
        completion.
        """
        return mix(noise.to(torch.int32) ^ self._position_keys[index])

    def sample_logits(
        self,
        logits: Tensor,
        keys: Tensor,
        sampling: Sampling,
        settings: Tensor | None,
        raw_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sample one token from each row of logits. Returns tokens and log-probabilities (ops.gumbel).

        Args:
            logits: [rows, this rank's entries].
            keys: int32 [rows], from `sampling_keys`.
            sampling: settings of all rows.
            settings: float32 [4, rows], settings of each row (`sample_rows`). None means the settings in `sampling`.
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
            logprobs = self._exact_logprobs(raw_logits, ids, temperature, **shard)
        return ids, logprobs

    def _decode_step(self, sampling: Sampling, rows: int, longest: int, used: UsedParts = NO_PARTS) -> None:
        """Generate one token, and one more per accepted draft, in each active row among rows 0 to `rows` - 1."""
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
    def _exact_logprobs(logits: Tensor, ids: Tensor, temperature: float | Tensor, **shard) -> Tensor:
        """Return log-probabilities computed as in the trainer's loss, float32 [rows].

        For greedy samples they are computed at temperature 1.
        """
        if isinstance(temperature, Tensor):
            temperature = torch.where(temperature == 0, 1.0, temperature)
        elif temperature == 0:
            temperature = 1.0
        return token_logprobs(logits, ids, temperature, **shard)

"""Pipeline parallelism: each rank runs its list of a schedule's actions (schedules.py).

A stage sends a micro-batch's streams to the next stage and receives their gradients. A stream is a residual stream,
[batch, seq, hidden] in the compute dtype: a decoder has one, an encoder-decoder has two, and a stage passes on a
stream that it does not use. A receive is posted one action ahead, so that the transfer overlaps the action before it;
sends do not block.

The first pass over micro-batches of a shape posts no receive ahead. On a GPU, a kernel that runs for the first time is
loaded, compiled or tuned, which waits for all work on the device, including a receive. The sender may wait in the same
way before its own receive, and the two would deadlock.

For each micro-batch in flight, a stage saves its inputs and its autograd graph but not its outputs: the gradients
enter the graph through its edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import Work
from torch.profiler import record_function

from megalith.comm.collectives import Axis, all_reduce_no_grad, gather_json
from megalith.models.transformer import Transformer
from megalith.parallel.pipeline import deferred_wgrad as deferred
from megalith.parallel.pipeline.links import Links
from megalith.parallel.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    build_forward_schedule,
    build_schedule,
)
from megalith.parallel.pipeline.stopwatch import Stopwatch
from megalith.parallel.pipeline.timeline import Span, Timeline, span_rows, timeline_of

# What the profiler calls a rank's whole pass through its actions, and in it the time that it stands waiting.
PASS, WAITS = "megalith: pipeline", "megalith: waiting for a stage"


class MicroBatch(Protocol):
    """What the pipeline itself reads of a micro-batch; the rest is for `forward`."""

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name: int64 [batch, seq] where it is tokens."""


Streams = Mapping[str, Tensor]
# A chunk's work on a micro-batch: the streams that it gives, or on the last stage the float32 sum of the losses.
Forward = Callable[[Transformer, Any, Streams | None], Streams | Tensor]
# The shape of a stream, from batch and seq of its tokens.
HiddenShape = Callable[[int, int], tuple[int, ...]]


def residual_shape(hidden_size: int, tensor_size: int, sequence_parallel: bool) -> HiddenShape:
    """The shape of the residual stream: [batch, seq, hidden], or under sequence parallelism [1, tokens / tp, hidden].

    Sequence parallelism leaves tokens whole that it cannot cut, as generation's.
    """

    def shape(batch: int, seq: int) -> tuple[int, ...]:
        if sequence_parallel and batch * seq % tensor_size == 0:
            return 1, batch * seq // tensor_size, hidden_size
        return batch, seq, hidden_size

    return shape


class Pipeline:
    """This rank's chunks of the model, and the steps that go through all of them.

    Every rank of `axis` calls the same methods with the same micro-batches. `before_backward(chunk, last)` is called
    before each backward pass through a chunk, `last` for the chunk's last one in the step: what data parallelism
    switches its reduction by. With `zero_bubble` it is never the last, for wgrads come later, outside of
    a pass; `after_weights(chunk, last)` is called when those of a micro-batch have come.
    """

    def __init__(
        self,
        chunks: Sequence[Transformer],
        axis: Axis,
        kind: str,
        forward: Forward,
        *,
        hidden_shape: HiddenShape,
        group: int | None = None,
        before_backward: Callable[[Transformer, bool], None] = lambda chunk, last: None,
        after_weights: Callable[[Transformer, bool], None] = lambda chunk, last: None,
    ):
        """Makes the communicators, so every process of the world calls it; after the chunks have been prepared.

        `kind` and `group` are the schedule's (build_schedule).
        """
        self.chunks, self.axis = list(chunks), axis
        self.is_last = axis.rank == axis.size - 1
        self.record = False  # whether a step keeps when its actions ran, for `gather_timeline`
        self.timeline: list[Span] = []  # of the last recorded step, milliseconds
        self._forward = forward
        self._hidden_shape = hidden_shape
        self._before_backward, self._after_weights = before_backward, after_weights
        self._links = Links(axis, len(chunks))
        self._weights = deferred.DeferredWgrads(chunks) if kind == "zero_bubble" else None
        self._warm: set[tuple[torch.Size, bool]] = set()  # shapes of micro-batches, with gradients or without
        self._schedule = lru_cache(lambda count: build_schedule(kind, axis.size, count, len(chunks), group))
        self._forward_schedule = lru_cache(
            lambda count: build_forward_schedule(axis.size, count, len(chunks))
        )

    def step(self, micro_batches: Sequence[MicroBatch], loss_factor: Tensor) -> Tensor:
        """Forward and backward of every micro-batch; gradients of loss · loss_factor are added to the parameters'.

        `loss_factor` is a float32 scalar. Returns the float32 sum of the losses on the last rank, zero elsewhere
        (`share` tells it to all). Raises ConfigError for a number of micro-batches that the schedule cannot take.
        """
        return _Pass(self, self._schedule(len(micro_batches)), micro_batches, loss_factor, self.record).run()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward passes alone. Returns the sum of the losses on the last rank, zero elsewhere."""
        return _Pass(self, self._forward_schedule(len(micro_batches)), micro_batches).run()

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> Tensor:
        """The logits [batch, seq, vocab] of input_ids int64 [batch, seq], on every rank."""

        def forward(chunk: Transformer, batch: MicroBatch, streams: Streams | None) -> Streams | Tensor:
            return chunk(batch["input_ids"], streams=streams)

        tokens = dict.fromkeys(self.chunks[0].streams.values(), input_ids)  # an encoder reads the same
        run = _Pass(self, self._forward_schedule(1), [tokens])
        run.forward = forward
        run.run()
        if self.is_last:
            logits = run.output.contiguous()
        else:
            chunk = self.chunks[0]
            shape = (*input_ids.shape, chunk.config.vocab_size)
            logits = torch.empty(shape, dtype=chunk.compute_dtype, device=input_ids.device)
        last = dist.get_process_group_ranks(self.axis.group)[-1]
        dist.broadcast(logits, last, group=self.axis.group)
        return logits

    def share(self, loss: Tensor) -> Tensor:
        """The last rank's loss on every rank, from what `step` or `evaluate` returned on each."""
        return all_reduce_no_grad(loss, self.axis)

    def gather_timeline(self) -> Timeline:
        """The last recorded step of all ranks, in milliseconds; every rank of the axis calls it."""
        return timeline_of(gather_json(span_rows(self.timeline), self.axis))


class _Pass:
    """One run of a schedule: what is under way between its actions."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        loss_factor: Tensor | None = None,
        record: bool = False,
    ):
        self.pipeline, self.schedule, self.micro_batches = pipeline, schedule, micro_batches
        self.forward = pipeline._forward
        self.rank, self.links, self.chunks = pipeline.axis.rank, pipeline._links, pipeline.chunks
        self.loss_factor = loss_factor
        self.record = record
        self.warm = (tuple(self._shapes(0).values()), torch.is_grad_enabled())
        self.device = micro_batches[0]["input_ids"].device
        self.loss = torch.zeros((), device=self.device)
        self.output: Tensor | None = None  # the last stage's, of the last micro-batch
        # By (micro-batch, chunk): inputs and graph between forward and backward, deferred wgrads.
        self.held: dict[tuple[int, int], tuple[Streams | None, list[GradientEdge | None]]] = {}
        self.deferred_wgrads: dict[tuple[int, int], list[deferred.DeferredWgrad]] = {}
        self.ended: Counter[int] = Counter()  # backward passes of each chunk that are whole

    @record_function(PASS)
    def run(self) -> Tensor:
        actions = self.schedule.actions[self.rank]
        stopwatch = Stopwatch(self.device, self.pipeline.axis) if self.record else None
        ahead = self.warm in self.pipeline._warm and len(self.micro_batches) > 1
        received = None
        for number, action in enumerate(actions):
            arriving, received = received or self._ask_for(action), None
            if ahead and number + 1 < len(actions):
                received = self._ask_for(actions[number + 1])
            streams = None
            if arriving is not None:
                works, streams = arriving
                with record_function(WAITS):
                    for work in works:
                        work.wait()
            if stopwatch:
                stopwatch.start()
            outputs = self._perform(action, streams)
            if stopwatch:
                stopwatch.stop()
            if target := self.schedule.target(self.rank, action):
                for output in outputs.values():
                    self.links.send(output, target.rank, action.kind is Kind.FORWARD)
        with record_function(WAITS):
            self.links.finish()
        self.pipeline._warm.add(self.warm)
        if stopwatch:
            self.pipeline.timeline = [
                Span(self.rank, action, start, end) for action, (start, end) in zip(actions, stopwatch.read())
            ]
        return self.loss

    def _shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Of a micro-batch's streams, in the order in which they are sent."""
        batch, shape = self.micro_batches[number], self.pipeline._hidden_shape
        return {name: shape(*batch[tokens].shape) for name, tokens in self.chunks[0].streams.items()}

    def _ask_for(self, action: Action) -> tuple[list[Work], Streams] | None:
        """Begins to receive what the action takes in."""
        source = self.schedule.source(self.rank, action)
        if source is None:
            return None
        options = dict(dtype=self.chunks[action.chunk].compute_dtype, device=self.device)
        streams = {
            name: torch.empty(shape, **options) for name, shape in self._shapes(action.micro_batch).items()
        }
        forward = action.kind is Kind.FORWARD
        return [self.links.receive(each, source.rank, forward) for each in streams.values()], streams

    def _perform(self, action: Action, received: Streams | None) -> Streams | None:
        """Does the action with what it received; returns what it has for another stage."""
        match action.kind:
            case Kind.FORWARD:
                return self._go_forward(action, received)
            case Kind.BACKWARD_INPUT:
                grad = self._go_backward(action, received, last=False)
                self.deferred_wgrads[action[1:]] = self.pipeline._weights.take()
                return grad
            case Kind.BACKWARD_WEIGHT:
                deferred.compute(self.deferred_wgrads.pop(action[1:]))
                self.pipeline._after_weights(self.chunks[action.chunk], self._count_backward(action.chunk))
                return None
            case Kind.BACKWARD:
                return self._go_backward(action, received, self._count_backward(action.chunk))

    def _go_forward(self, action: Action, streams: Streams | None) -> Streams:
        chunk = self.chunks[action.chunk]
        for stream in () if streams is None else streams.values():
            stream.requires_grad_(torch.is_grad_enabled())
        outputs = self.forward(chunk, self.micro_batches[action.micro_batch], streams)
        if isinstance(outputs, Tensor):
            self.output = outputs.detach()
            if outputs.ndim == 0:
                self.loss += self.output
            outputs = {"output": outputs}
        else:
            outputs = {name: outputs[name] for name in chunk.streams}  # in the order of the receives
        if torch.is_grad_enabled():
            edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs.values()]
            self.held[action[1:]] = streams, edges
        return {name: x.detach() for name, x in outputs.items()}

    def _go_backward(self, action: Action, grads: Streams | None, last: bool) -> Streams | None:
        self.pipeline._before_backward(self.chunks[action.chunk], last)
        streams, edges = self.held.pop(action[1:])
        given = [self.loss_factor] if grads is None else grads.values()
        trained = [both for both in zip(edges, given, strict=True) if both[0] is not None]
        if trained:  # else the stage is frozen, and so is all before it
            torch.autograd.backward(*zip(*trained))
        if streams is None:
            return None
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in streams.items()}

    def _count_backward(self, chunk: int) -> bool:
        """Counts a micro-batch's whole backward pass of the chunk; whether it is the step's last."""
        self.ended[chunk] += 1
        return self.ended[chunk] == self.schedule.micro_batches

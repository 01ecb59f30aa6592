"""Executes a pipeline schedule: each rank runs its list of actions (schedules.py).

A stage sends a micro-batch's streams to the next stage and receives their gradients. A stream is a residual stream,
[batch, seq, hidden] in the compute dtype: a decoder has one, an encoder-decoder has two, and a stage passes on a stream
that it does not use. A receive is posted one action before the action that needs it, so that the transfer overlaps.
Sends do not block.

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

from megalith.comm.collectives import Axis, gather_json
from megalith.models.transformer import Transformer
from megalith.ops.gemm import DeferredWgrad
from megalith.parallel.pipeline.deferred_wgrad import DeferredWgrads, compute_wgrads
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

# Profiler ranges: all actions of a rank in a step, and the time in which it waits for another stage.
PASS, WAITS = "megalith: pipeline", "megalith: waiting for a stage"


class MicroBatch(Protocol):
    """The fields of a micro-batch that the pipeline uses. The function `forward` may use others."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of this name; token tensors are int64 [batch, seq]."""


Streams = Mapping[str, Tensor]
# Runs a chunk on a micro-batch. Returns the output streams, or on the last stage the float32 sum of losses.
Forward = Callable[[Transformer, Any, Streams | None], Streams | Tensor]
# Maps (batch, seq) of the tokens to the shape of a stream.
HiddenShape = Callable[[int, int], tuple[int, ...]]


def residual_shape(hidden_size: int, tensor_size: int, sequence_parallel: bool) -> HiddenShape:
    """Return the shape function of the residual stream: [batch, seq, hidden], under SP [1, tokens / tp, hidden].

    If tp does not divide the number of tokens, as in generation, SP does not shard them.
    """

    def shape(batch: int, seq: int) -> tuple[int, ...]:
        if sequence_parallel and batch * seq % tensor_size == 0:
            return 1, batch * seq // tensor_size, hidden_size
        return batch, seq, hidden_size

    return shape


class Pipeline:
    """This rank's chunks of the model, and the passes of a step through all stages.

    Every rank of `axis` calls the same methods with the same micro-batches.
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
        loss_dtype: torch.dtype = torch.float32,
        before_backward: Callable[[Transformer, bool], None] = lambda chunk, last: None,
        after_backward: Callable[[Transformer], None] = lambda chunk: None,
        after_input_gradients: Callable[[Transformer], None] = lambda chunk: None,
        after_weights: Callable[[Transformer, bool], None] = lambda chunk, last: None,
    ):
        """Create the communicators. Collective over all ranks, after the chunks are parallelized.

        Args:
            chunks: this rank's chunks, in the order of the model.
            axis: the pipeline axis.
            kind: the schedule, see build_schedule.
            forward: runs a chunk on a micro-batch.
            hidden_shape: shape of a stream.
            group: micro-batches per group of an interleaved schedule.
            loss_dtype: dtype that the micro-batches' losses are added in.
            before_backward: called as (chunk, last) before each backward pass of a chunk. `last` is True for the
                chunk's last backward pass in the step, which reduces gradients; with `zero_bubble`, whose wgrads come
                later, it is never True.
            after_backward: called as (chunk) after each complete backward pass of a chunk, in the order of the
                micro-batches; not with `zero_bubble`.
            after_input_gradients: called as (chunk) after a backward pass whose wgrads are deferred.
            after_weights: called as (chunk, last) after the deferred wgrads of a micro-batch; `last` is True for the
                chunk's last ones in the step.
        """
        self.chunks, self.axis = list(chunks), axis
        self.is_last = axis.rank == axis.size - 1
        self.record = False  # record the times of a step's actions, for `gather_timeline`
        self.timeline: list[Span] = []  # of the last recorded step, milliseconds
        self._forward = forward
        self._hidden_shape, self.loss_dtype = hidden_shape, loss_dtype
        self._before_backward, self._after_weights = before_backward, after_weights
        self._after_backward, self._after_input_gradients = after_backward, after_input_gradients
        self._links = Links(axis, len(chunks))
        self._wgrads = DeferredWgrads(chunks) if kind == "zero_bubble" else None
        self._warm: set[tuple[torch.Size, bool]] = set()  # (shape of a micro-batch, with gradients)
        self._schedule = lru_cache(lambda count: build_schedule(kind, axis.size, count, len(chunks), group))
        self._forward_schedule = lru_cache(
            lambda count: build_forward_schedule(axis.size, count, len(chunks))
        )

    def step(self, micro_batches: Sequence[MicroBatch], loss_factor: Tensor) -> Tensor:
        """Run the forward and backward passes of all micro-batches and accumulate gradients of loss · loss_factor.

        Args:
            micro_batches: all micro-batches of the step.
            loss_factor: float32 scalar.

        Returns:
            The sum of losses on the last rank, zero on the others: a float32 scalar.

        Raises:
            ConfigError: the schedule does not support this number of micro-batches.
        """
        return _Pass(self, self._schedule(len(micro_batches)), micro_batches, loss_factor, self.record).run()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run forward passes only. Returns the sum of losses on the last rank, zero on the others."""
        return _Pass(self, self._forward_schedule(len(micro_batches)), micro_batches).run()

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits [batch, seq, vocab] of input_ids int64 [batch, seq], on every rank."""

        def forward(chunk: Transformer, batch: MicroBatch, streams: Streams | None) -> Streams | Tensor:
            return chunk(batch["input_ids"], streams=streams)

        tokens = dict.fromkeys(self.chunks[0].streams.values(), input_ids)  # an encoder reads the same tokens
        run = _Pass(self, self._forward_schedule(1), [tokens])
        run.forward = forward
        run.run()
        if self.is_last:
            logits = run.output.contiguous()
        else:
            chunk = self.chunks[0]
            shape = (*input_ids.shape, chunk.config.logits_size)
            logits = torch.empty(shape, dtype=chunk.compute_dtype, device=input_ids.device)
        last = dist.get_process_group_ranks(self.axis.group)[-1]
        dist.broadcast(logits, last, group=self.axis.group)
        return logits

    def gather_timeline(self) -> Timeline:
        """Return the timeline of the last recorded step over all ranks, in milliseconds. Collective."""
        return timeline_of(gather_json(span_rows(self.timeline), self.axis))


class _Pass:
    """One run of a schedule, with the state between its actions."""

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
        shapes = {tuple(self._shapes(number).values()) for number in range(len(micro_batches))}
        self.shapes = {(each, torch.is_grad_enabled()) for each in shapes}
        self.device = micro_batches[0]["input_ids"].device
        self.loss = torch.zeros((), dtype=pipeline.loss_dtype, device=self.device)
        self.output: Tensor | None = None  # output of the last stage for the last micro-batch
        # By (micro-batch, chunk): input streams and graph edges between forward and backward; deferred wgrads.
        self.saved: dict[tuple[int, int], tuple[Streams | None, list[GradientEdge | None]]] = {}
        self.deferred_wgrads: dict[tuple[int, int], list[DeferredWgrad]] = {}
        self.completed: Counter[int] = Counter()  # complete backward passes per chunk

    @record_function(PASS)
    def run(self) -> Tensor:
        actions = self.schedule.actions[self.rank]
        stopwatch = Stopwatch(self.device, self.pipeline.axis) if self.record else None
        posts_ahead = self.shapes <= self.pipeline._warm and len(self.micro_batches) > 1
        received = None
        for number, action in enumerate(actions):
            arriving, received = received or self._post_recv(action), None
            if posts_ahead and number + 1 < len(actions):
                received = self._post_recv(actions[number + 1])
            streams = None
            if arriving is not None:
                works, streams = arriving
                with record_function(WAITS):
                    for work in works:
                        work.wait()
            if stopwatch:
                stopwatch.start()
            outputs = self._run_action(action, streams)
            if stopwatch:
                stopwatch.stop()
            if target := self.schedule.target(self.rank, action):
                for output in outputs.values():
                    self.links.send(output, target.rank, action.kind is Kind.FORWARD)
        with record_function(WAITS):
            self.links.wait_sends()
        self.pipeline._warm.update(self.shapes)
        if stopwatch:
            self.pipeline.timeline = [
                Span(self.rank, action, start, end) for action, (start, end) in zip(actions, stopwatch.read())
            ]
        return self.loss

    def _shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes, by name, of the residual streams that micro-batch `number` sends to the next stage."""
        batch, shape = self.micro_batches[number], self.pipeline._hidden_shape
        return {name: shape(*batch[tokens].shape) for name, tokens in self.chunks[0].streams.items()}

    def _post_recv(self, action: Action) -> tuple[list[Work], Streams] | None:
        """Start receiving the action's input, or return None if it needs none."""
        source = self.schedule.source(self.rank, action)
        if source is None:
            return None
        options = dict(dtype=self.chunks[action.chunk].compute_dtype, device=self.device)
        streams = {
            name: torch.empty(shape, **options) for name, shape in self._shapes(action.micro_batch).items()
        }
        forward = action.kind is Kind.FORWARD
        return [self.links.recv(each, source.rank, forward) for each in streams.values()], streams

    def _run_action(self, action: Action, received: Streams | None) -> Streams | None:
        """Run the action on the received streams, and return the streams for the next stage."""
        match action.kind:
            case Kind.FORWARD:
                return self._run_forward(action, received)
            case Kind.BACKWARD_INPUT:
                grad = self._run_backward(action, received, last=False)
                self.deferred_wgrads[action[1:]] = self.pipeline._wgrads.take()
                self.pipeline._after_input_gradients(self.chunks[action.chunk])
                return grad
            case Kind.BACKWARD_WEIGHT:
                compute_wgrads(self.deferred_wgrads.pop(action[1:]))
                self.pipeline._after_weights(self.chunks[action.chunk], self._count_backward(action.chunk))
                return None
            case Kind.BACKWARD:
                grad = self._run_backward(action, received, self._count_backward(action.chunk))
                self.pipeline._after_backward(self.chunks[action.chunk])
                return grad

    def _run_forward(self, action: Action, streams: Streams | None) -> Streams:
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
            outputs = {name: outputs[name] for name in chunk.streams}  # in sending order
        if torch.is_grad_enabled():
            edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs.values()]
            self.saved[action[1:]] = streams, edges
        return {name: x.detach() for name, x in outputs.items()}

    def _run_backward(self, action: Action, grads: Streams | None, last: bool) -> Streams | None:
        self.pipeline._before_backward(self.chunks[action.chunk], last)
        streams, edges = self.saved.pop(action[1:])
        output_grads = [self.loss_factor] if grads is None else grads.values()
        pairs = [pair for pair in zip(edges, output_grads, strict=True) if pair[0] is not None]
        if pairs:  # otherwise this stage and all before it are frozen
            torch.autograd.backward(*zip(*pairs))
        if streams is None:
            return None
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in streams.items()}

    def _count_backward(self, chunk: int) -> bool:
        """Count a complete backward pass of the chunk. Return True if it is the chunk's last in the step."""
        self.completed[chunk] += 1
        return self.completed[chunk] == self.schedule.micro_batches

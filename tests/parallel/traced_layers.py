"""The graphs of a layer's forward and backward pass, traced for a rank of two without memory, processes or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.local_shards import local
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.ops import compiled
from megalith.parallel.context.context_parallel import apply_context
from megalith.parallel.memory.recompute import apply_recompute
from megalith.parallel.overlap.ping_pong import apply_ping_pong
from megalith.parallel.tensor.apply_tensor import apply_tensor

BATCH, SEQ = 64, 1024
LARGE = dict(
    preset="gpt2-large", num_attention_heads=16, num_layers=1, hidden_dropout=0.0, attention_dropout=0.0
)
LLAMA = dict(LARGE, num_query_groups=4, position_embedding_type="rope", swiglu=True, ffn_hidden_size=3392,
             normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True)  # fmt: skip


@contextmanager
def tracing() -> Iterator[None]:
    """In it, what torch.compile takes is traced and differentiated, but not made into machine code."""
    torch.compiler.reset()
    with (
        mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        mock.patch.object(
            compiled, "_in_pieces", compiled._in_pieces.__wrapped__
        ),  # which keeps what is compiled
    ):
        yield


def layer_graphs(model: dict = LARGE, halves: bool = True, **parallel) -> list[Graph]:
    """Return the graphs of a layer's forward and backward pass, as they come to post-grad passes.

    Args:
        model: settings; GPT-2-large by default. It computes in bf16, on BATCH sequences of SEQ tokens.
        halves: cut the micro-batch in two halves, whose collectives overlap.
        parallel: the layout.
    """
    config = RunConfig.from_tree({"model": model, "parallel": {**parallel, "tp_comm_overlap": halves}})
    torch._dynamo.reset()  # sizes that earlier tests changed would be dynamic
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        graphs = _traced(_model(config), config)
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
    return graphs


def _model(config: RunConfig) -> Transformer:
    mesh = dist.init_device_mesh("cpu", (2,))
    axis = Axis(2, 0, mesh.get_group(), mesh.get_group().group_name, mesh)
    parallel = config.parallel
    model = Transformer(config.model, compute_dtype=torch.bfloat16, device=torch.device("meta"))
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tensor = apply_tensor(
        model, axis if tp > 1 else Axis(), parallel.sequence_parallel, parallel.save_gathered_inputs
    )
    apply_context(model, axis if cp > 1 else Axis(), parallel.cp_comm_type)
    apply_ping_pong(model, parallel, tensor)
    apply_recompute(model, parallel)
    return model


def _traced(model: Transformer, config: RunConfig) -> list[Graph]:
    graphs = []

    def keep(module: GraphModule, inputs: list, **_) -> Callable:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(module, is_inference=False)
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def backend(module: GraphModule, inputs: list):
        return compile_fx(module, inputs, inner_compile=keep)

    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    (layer,) = model.layers.values()
    layer.compile(fullgraph=True, backend=backend)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in layer.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(local(parameter).shape)))
        ids = torch.zeros(BATCH, SEQ // cp, dtype=torch.int64)
        stream = (1, BATCH * SEQ // tp) if config.parallel.sequence_parallel else ids.shape
        x = torch.zeros(*stream, config.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        context = model.context(ids, TokenInputs(position_ids=ids, token_index=ids[0]))
        model.runner(list(model.layers.values()), x, context).sum().backward()
    return graphs

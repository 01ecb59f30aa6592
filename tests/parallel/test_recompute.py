"""Recomputation changes nothing but the memory: every mode gives the gradients of none, dropout on."""

import itertools
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from traced_layers import BATCH, LLAMA, SEQ, layer_graphs, tracing

from megalith.config import ModelConfig, ParallelConfig, RunConfig
from megalith.config.presets import PRESETS
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.layer import TransformerLayer
from megalith.models.transformer import Transformer
from megalith.ops import block_attention
from megalith.ops.attention_core import attention
from megalith.parallel.memory import recompute
from megalith.parallel.memory.recompute import apply_recompute
from megalith.parallel.mesh import build_mesh
from megalith.parity.job import start
from megalith.planner.counts import MetaModel
from megalith.planner.saved_activations import saved_activations

VOCAB = 61
MODES = {
    "uniform, each layer": dict(recompute_granularity="full", recompute_method="uniform"),
    "uniform, pairs, and a rest": dict(recompute_granularity="full", recompute_num_layers=2),
    "uniform, more than there are": dict(recompute_granularity="full", recompute_num_layers=9),
    "block, the first": dict(recompute_granularity="full", recompute_method="block"),
    "block, all": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=3),
    "attention's core": dict(recompute_granularity="selective"),
    "mlp": dict(recompute_granularity="selective", recompute_modules=["mlp"]),
    "activation functions": dict(recompute_granularity="selective", recompute_modules=["mlp_act"]),
    "norms": dict(recompute_granularity="selective", recompute_modules=["layernorm"]),
    "every module": dict(
        recompute_granularity="selective", recompute_modules=["core_attn", "mlp", "layernorm"]
    ),
}


def build(family: str, **parallel) -> Transformer:
    options = dict(
        num_layers=3, vocab_size=VOCAB, max_position_embeddings=32, hidden_dropout=0.1, attention_dropout=0.1
    )
    config = ModelConfig(**{**PRESETS[family], **options})
    model = Transformer(config, seed=3).train()
    initialize(model, config, seed=5)
    apply_recompute(model, ParallelConfig(**parallel))
    return model


def loss_and_gradients(model: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[7, 16], [16, 16]], dtype=torch.int32)
    loss = model(ids[:, :-1], labels=ids[:, 1:], token_inputs=TokenInputs(document_ends=documents))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def kept_for_backward(model: Transformer) -> int:
    """Elements that autograd keeps between the forward and the backward pass, parameters apart."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    ids = torch.zeros(2, 16, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids)
    del loss
    return sum(kept.values())


@pytest.mark.parametrize("mode", ["uniform, pairs, and a rest", "block, all", "attention's core"])
def test_a_core_that_draws_from_torchs_random_state_drops_the_same_again(mode):
    """As the kernels of a GPU do, whose dropout no counter keys."""

    def core(query, key, value, *, dropout, **settings):
        return torch.nn.functional.dropout(attention(query, key, value), dropout)

    outputs = []
    for parallel in ({}, MODES[mode]):
        model = build("tiny-gpt")
        for layer in model.layers.values():
            layer.self_attention.core = core
        apply_recompute(model, ParallelConfig(**parallel))
        torch.manual_seed(8)
        outputs.append(loss_and_gradients(model)[1])
    for name, gradient in outputs[0].items():
        assert torch.equal(gradient, outputs[1][name]), name


@pytest.mark.parametrize("family", ["tiny-gpt", "tiny-qwen"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bitwise_those_without_recomputation(family, mode):
    loss, gradients = loss_and_gradients(build(family))
    again, regained = loss_and_gradients(build(family, **MODES[mode]))
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, regained[name]), name


def losses_and_kernel_calls(
    config: ModelConfig, compiled: bool = False, **parallel
) -> tuple[dict[str, torch.Tensor], int]:
    """Of two micro-batches, whose passes are interleaved as in a pipeline; and how often attention was computed."""
    model = Transformer(config, seed=3).train()
    initialize(model, config, seed=5)
    apply_recompute(model, ParallelConfig(**parallel))
    for layer in model.layers.values() if compiled else ():
        layer.compile(fullgraph=True, backend="aot_eager")
    ids = torch.randint(0, VOCAB, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([[7, 16], [16, 16]], dtype=torch.int32)
    with mock.patch.object(block_attention, "block_forward", wraps=block_attention.block_forward) as computed:
        losses = [
            model(x[:, :-1], labels=x[:, 1:], token_inputs=TokenInputs(document_ends=ends)) for x in ids
        ]
        for loss in losses:
            loss.backward()
    outputs = {name: p.grad for name, p in model.named_parameters()}
    return outputs | {"losses": torch.stack(losses).detach()}, computed.call_count


# Each mode with one family, and latent attention with both methods, by default.
SAVED = [
    ("tiny-gpt", "uniform, each layer"),
    ("tiny-qwen", "uniform, pairs, and a rest"),
    ("tiny-deepseek", "uniform, more than there are"),
    ("tiny-gpt", "block, the first"),
    ("tiny-deepseek", "block, all"),
]
MORE_SAVED = [
    (family, mode)
    for family in ("tiny-gpt", "tiny-qwen", "tiny-deepseek")
    for mode in MODES
    if MODES[mode]["recompute_granularity"] == "full" and (family, mode) not in SAVED
]


@pytest.mark.parametrize(
    ("family", "mode"), SAVED + [pytest.param(*case, marks=pytest.mark.full) for case in MORE_SAVED]
)
def test_attention_that_is_saved_is_computed_once(family, mode):
    options = dict(num_layers=3, vocab_size=VOCAB, max_position_embeddings=32, hidden_dropout=0.1)
    config = ModelConfig(**{**PRESETS[family], **options, "attention_dropout": 0.0})
    plain, none = losses_and_kernel_calls(config)
    outputs, calls = losses_and_kernel_calls(config, **MODES[mode], recompute_saves_attention=True)
    assert (none, calls) == (0, 2 * config.num_layers)
    assert all((outputs[name] - x).norm() < 1e-6 * x.norm() for name, x in plain.items())


def test_attention_that_is_saved_is_computed_once_in_layers_compiled_for_pairs():
    config = ModelConfig(**{**PRESETS["tiny-qwen"], "vocab_size": VOCAB, "max_position_embeddings": 32})
    pairs = MODES["uniform, pairs, and a rest"]
    plain, _ = losses_and_kernel_calls(config)
    outputs, calls = losses_and_kernel_calls(config, compiled=True, **pairs, recompute_saves_attention=True)
    assert calls == 2 * config.num_layers
    assert all((outputs[name] - x).norm() < 1e-6 * x.norm() for name, x in plain.items())


@pytest.mark.parametrize("mode", MODES)
def test_less_is_kept_for_the_backward_pass(mode):
    assert kept_for_backward(build("tiny-qwen", **MODES[mode])) < kept_for_backward(build("tiny-qwen"))


@pytest.mark.full  # planner/test_counts.py counts what eager layers save
@pytest.mark.parametrize(
    ("saves_gathered_inputs", "modules", "halves"),
    [(True, [], 2), (False, ["layernorm", "mlp_act"], 2), (False, ["layernorm", "mlp_act"], 1)],
)
def test_a_compiled_layer_saves_what_the_planner_counts(saves_gathered_inputs, modules, halves):
    selective = dict(recompute_granularity="selective", recompute_modules=modules) if modules else {}
    parallel = dict(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        save_gathered_inputs=saves_gathered_inputs,
        **selective,
    )
    forward, backward = layer_graphs(LLAMA, halves == 2, **parallel)
    saved = [
        node for node in forward.output_node().args[0][halves:] if isinstance(node, Node)
    ]  # after the halves' results
    elements = sum(node.meta["val"].numel() for node in saved if node.meta["val"].dtype == torch.bfloat16)
    config = RunConfig.from_tree({"model": LLAMA, "parallel": parallel})
    meta = MetaModel(config.model).on_rank(config.parallel)
    counted = saved_activations(meta, recomputed=modules) * BATCH * SEQ + meta.in_layers([0]).total()
    assert elements == pytest.approx(counted, rel=1e-3)
    gathers = [sum("all_gather" in str(node.target) for node in graph.nodes) for graph in (forward, backward)]
    # Of each half; two of the backward pass are of gradients.
    assert gathers == [2 * halves, 2 * halves if saves_gathered_inputs else 4 * halves]


def test_block_recomputes_the_first_layers_alone():
    model = build("tiny-gpt", **MODES["block, the first"])
    passes = []
    for layer in model.layers.values():
        layer.register_forward_pre_hook(lambda layer, _: passes.append(layer.number))
    loss_and_gradients(model)
    assert passes == [0, 1, 2, 0]


def test_recomputing_more_layers_keeps_less():
    blocks = [
        dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=n)
        for n in (1, 2, 3)
    ]
    kept = [kept_for_backward(build("tiny-gpt", **block)) for block in blocks]
    assert all(more > less for more, less in itertools.pairwise(kept))
    assert kept_for_backward(build("tiny-gpt", **MODES["uniform, each layer"])) == kept[1]  # all but the last


def test_parameters_keep_their_names_and_evaluation_its_values():
    plain = build("tiny-gpt").eval()
    ids = torch.arange(16)[None]
    for mode in MODES.values():
        model = build("tiny-gpt", **mode).eval()
        assert list(model.state_dict()) == list(plain.state_dict())
        assert torch.equal(model(ids), plain(ids))


def kept_inputs(distribute: bool) -> tuple[list[int], list[bool], list[torch.Tensor]]:
    """Of each layer's input: the elements that this rank of two keeps as its part, and whether it holds the whole until
    the backward pass. The gradients; weights are the same on both."""
    axis = build_mesh(ParallelConfig(tensor_model_parallel_size=2), 2, "cpu").tp
    options = dict(num_layers=3, vocab_size=VOCAB, max_position_embeddings=32)
    config = ModelConfig(**PRESETS["tiny-gpt"] | options)
    model = Transformer(config, seed=3).train()
    initialize(model, config, seed=5)
    parallel = ParallelConfig(recompute_granularity="full", distribute_saved_activations=distribute)
    apply_recompute(model, parallel, axis)
    parts, wholes = [], []
    for layer in model.layers.values():
        layer.register_forward_pre_hook(
            lambda _, arguments: wholes.append(StorageWeakRef(arguments[0].untyped_storage()))
        )

    class Counted(saved_tensors_hooks):
        def __init__(self, pack, unpack):
            def packed(tensor):
                kept, is_part = pack(tensor)
                if is_part:
                    parts.append(kept.untyped_storage().nbytes() // kept.element_size())
                return kept, is_part

            super().__init__(packed, unpack)

    ids = torch.arange(34).view(2, 17)
    with mock.patch.object(recompute, "saved_tensors_hooks", Counted):
        loss = model(ids[:, :-1], labels=ids[:, 1:])
        held = [not whole.expired() for whole in wholes]
        loss.backward()
    return parts, held, [parameter.grad for parameter in model.parameters()]


def test_ranks_keep_a_part_each_of_a_unit_s_input_and_compute_with_all_of_it(pool):
    batch, seq, hidden = 2, 16, 64
    distributed, whole = (pool.run(kept_inputs, distribute, size=2) for distribute in (True, False))
    for (parts, held, gradients), (_, held_whole, plain) in zip(distributed, whole, strict=True):
        assert parts == [batch * seq * hidden // 2] * 2  # the last layer is not recomputed
        assert held == [False, False, True] and held_whole == [True] * 3
        assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))


def compiled(**parallel) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[str], int]:
    """Loss and gradients of a Llama whose layers are compiled; the calls of a layer's backward graph, and how many
    elements it is given."""
    torch.compiler.reset()
    graphs = []

    def seen(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        sizes = [x.numel() for x in inputs if isinstance(x, torch.Tensor) and isinstance(x.numel(), int)]
        graphs.append(([f"{node.target} {node.args}" for node in graph.graph.nodes], sum(sizes)))
        return make_boxed_func(graph.forward)

    sizes = dict(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2)
    config = ModelConfig(**{**PRESETS["llama3-8b"], **sizes, "vocab_size": VOCAB})
    model = Transformer(config, seed=3).train()
    initialize(model, config, seed=5)
    apply_recompute(model, ParallelConfig(**parallel), compiled=True)
    backend = aot_autograd(
        fw_compiler=seen, bw_compiler=seen, partition_fn=min_cut_rematerialization_partition
    )
    for layer in model.layers.values():
        layer.compile(fullgraph=True, backend=backend)
    ids = torch.arange(33).remainder(VOCAB)[None]
    loss = model(ids[:, :-1], labels=ids[:, 1:])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, *graphs[-1]


@pytest.mark.full
def test_a_compiled_layer_recomputes_what_a_gradient_needs_and_saves_attention_where_asked():
    """Of its four matmuls, whose gradients are eight, the last is not run again."""
    full = dict(recompute_granularity="full")
    plain, again = compiled(), compiled(**full)
    saving = compiled(**full, recompute_saves_attention=True)
    for outputs, matmuls, attends_again in ((plain, 8, False), (again, 8 + 3, True), (saving, 8 + 3, False)):
        torch.testing.assert_close(outputs[:2], plain[:2], rtol=1e-5, atol=1e-7)
        calls = outputs[2]
        assert sum(call.startswith("aten.mm.default") for call in calls) == matmuls
        attention = re.compile(r"flash_attention_for_cpu(\.default|')")  # called, or given to a call
        assert any(attention.search(call) for call in calls) == attends_again
    assert again[3] < saving[3] < plain[3]


@pytest.mark.full
def test_layers_beside_experts_stay_compiled_and_are_recomputed_so(tmp_path):
    """Experts' layers are several graphs: the first layer, which has none, is one in every pass of two steps."""
    again = {"recompute_granularity": "full", "recompute_method": "block"}
    tree = {
        "model": {"preset": "tiny-deepseek", "vocab_size": VOCAB}, "parallel": again,
        "data": {"mock": True, "seq_length": 16, "num_workers": 0},
        "train": {"train_iters": 2, "global_batch_size": 1, "eval_iters": 0, "output_dir": str(tmp_path)},
        "optim": {"lr": 1e-3}, "runtime": {"device": "cpu", "compile": True},
    }  # fmt: skip
    eager = []

    def watched(layer: TransformerLayer, *args) -> tuple:
        if not torch.compiler.is_compiling():
            eager.append(layer.number)
        return attention_branch(layer, *args)

    attention_branch = TransformerLayer.attention_branch
    with tracing(), mock.patch.object(TransformerLayer, "attention_branch", watched):
        run = start(RunConfig.from_tree(tree))
        with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
            for _ in range(2):
                run.train_step(batches)
    assert not eager

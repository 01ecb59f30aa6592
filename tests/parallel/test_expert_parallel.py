"""Experts over ranks where parity's runs do not go: ranks without tokens, traced layers, uneven shares, the mesh."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from default_cases import by_default
from parity.parity_cases import run_config
from torch import Tensor
from traced_layers import tracing

from megalith.comm.collectives import Axis, begin_all_to_all, end_all_to_all, local_chunk
from megalith.config import ModelConfig, ParallelConfig, RunConfig
from megalith.config.rules.expert_rules import check_expert_parallel
from megalith.data.indexed import IndexedWriter
from megalith.errors import ConfigError
from megalith.models.inputs import TokenInputs
from megalith.models.pass_context import PassLayout
from megalith.models.router import Router, Routing
from megalith.parallel.expert.expert_parallel import ExpertParallel, max_micro_batches
from megalith.parallel.mesh import build_mesh
from megalith.parallel.tensor.tensor_parallel import TensorParallel
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job, start

SMALL = {"model": {"num_layers": 2}, "train": {"train_iters": 2}}


def all_to_the_first(config: RunConfig) -> Outcome:
    """The job with every token sent to experts 0 and 1."""

    def first_two(self, scores, numbers):
        return torch.arange(2, device=scores.device).expand(len(scores), 2).contiguous()

    with mock.patch.object(Router, "_choose", first_two):
        return run_job(config)


@pytest.mark.parametrize(
    "layout", by_default(["ep4-zero3", "tp2-sp-etp2-ep2", "ep2-allgather"], "ep2-allgather")
)
def test_ranks_whose_experts_get_no_token_give_zero_gradients(pool, layout):
    config = run_config("moe", layout, "", **SMALL)
    ranks = pool.run(all_to_the_first, config, size=LAYOUTS[layout].processes)
    one = all_to_the_first(run_config("moe", None, "", **SMALL))
    assert compare(ranks, one).within()
    gradient = ranks[0].gradients["layers.0.mlp.experts.linear_fc1.weight"]
    assert gradient[:2].any() and not gradient[2:].any()


def expert_counts(config: RunConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The tallies of one training step, and the expert biases after it."""
    run = start(config)
    with run.data.train_loader(0, 0, run.device) as batches:
        run.train_step(batches)
    state = {name: x for chunk in run.model.chunks for name, x in chunk.named_buffers()}
    return run.model.tallies, {name: x for name, x in state.items() if name.endswith("expert_bias")}


@pytest.mark.parametrize("layout", by_default(["tp2-sp-ep2", "cp2-ep2", "pp2-ep2", "tp2-ep2"], "tp2-sp-ep2"))
def test_every_rank_counts_the_tokens_of_all_ranks_and_moves_its_biases_by_them(pool, layout):
    changes = {"model": {"num_layers": 2}, "train": {"global_batch_size": 8}}
    tallies, biases = expert_counts(run_config("deepseek documents", None, "", **changes))
    assert biases and all(bias.any() for bias in biases.values())
    config = run_config("deepseek documents", layout, "", **changes)
    for theirs, held in pool.run(expert_counts, config, size=LAYOUTS[layout].processes):
        torch.testing.assert_close(theirs, tallies, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(bias, biases[name]) for name, bias in held.items())


@pytest.mark.parametrize("layout", by_default(["ep2", "tp2-ep2"], "ep2"))
def test_experts_beside_adapters_stay_as_they_are(pool, layout):
    lora = {"rank": 2, "targets": ["q_proj", "v_proj", "linear_proj"]}
    ranks = pool.run(
        run_job, run_config("moe", layout, "", **SMALL, lora=lora), size=LAYOUTS[layout].processes
    )
    errors = compare(ranks, run_job(run_config("moe", None, "", **SMALL, lora=lora)))
    assert errors.within(), errors
    assert not [name for name in ranks[0].gradients if "experts" in name]


def traced(config: RunConfig) -> Outcome:
    """The job with layers that are traced and differentiated by torch.compile, but not made into machine code."""
    with tracing():
        return run_job(config)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "run"),
    [("tp2-sp-ep2", "deepseek documents"), ("ep2", "moe dropping, dropout"), ("tp2-ep2", "moe")],
)
def test_compiled_layers_equal_one_process_in_eager_mode(pool, layout, run):
    config = run_config(run, layout, "", **SMALL, runtime={"compile": True})
    ranks = pool.run(traced, config, size=LAYOUTS[layout].processes)
    errors = compare(ranks, run_job(run_config(run, None, "", **SMALL)))
    assert errors.within(), errors


@pytest.mark.parametrize("alike", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_as_many_micro_batches_are_gathered_as_the_ranks_of_a_group_have_at_most(ranks, alike):
    groups = [range(first, first + ranks) for first in range(0, ranks * alike, ranks)]
    assert max_micro_batches(ranks, alike) == max(len({rank // alike for rank in group}) for group in groups)


def exchange(sizes: list[list[int]]) -> tuple:
    """Row r of rank i goes to where sizes[i] says; rows and gradients tell where they came from."""
    axis = build_mesh(ParallelConfig(tensor_model_parallel_size=2), 2, "cpu").tp
    sent, received = sizes[axis.rank], [row[axis.rank] for row in sizes]
    x = (torch.arange(sum(sent)) + 100.0 * axis.rank)[:, None].requires_grad_()
    y = end_all_to_all(begin_all_to_all(x, axis, sent, received))
    (y * 2).sum().backward()
    whole = torch.arange(4.0)[:, None].requires_grad_()
    part = local_chunk(whole, axis)
    (part * (axis.rank + 1)).sum().backward()
    return (
        y.flatten().tolist(),
        x.grad.flatten().tolist(),
        part.flatten().tolist(),
        whole.grad.flatten().tolist(),
    )


def test_uneven_exchanges_and_shares_and_their_gradients(pool):
    first, second = pool.run(exchange, [[1, 2], [0, 3]], size=2)
    assert first[0] == [0.0] and second[0] == [1.0, 2.0, 100.0, 101.0, 102.0]
    assert first[1] == second[1] == [2.0] * 3
    assert first[2] == [0.0, 1.0] and second[2] == [2.0, 3.0]
    assert first[3] == second[3] == [1.0, 1.0, 2.0, 2.0]
    empty, all_of_them = pool.run(exchange, [[0, 2], [0, 2]], size=2)
    assert empty[0] == [] and all_of_them[0] == [0.0, 1.0, 100.0, 101.0]


def test_what_fills_a_share_up_takes_no_place_of_an_experts_capacity():
    """Three tokens over two TP ranks: the second dispatches the last one and a filler."""
    config, tp = ModelConfig(num_experts=4, moe_router_topk=2), Axis(2, 1)
    axes = dict.fromkeys(("ep", "etp", "ep_etp", "cp"), Axis())
    mesh = SimpleNamespace(**axes, tp=tp, expert_fsdp=None)
    dispatch = ExpertParallel(config, mesh, TensorParallel(tp, sequence_parallel=False), "allgather")
    experts = torch.tensor([[0, 1], [1, 2], [2, 3]])
    routing = Routing(experts, torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bool), capacity=2)
    assert dispatch.plan(routing, PassLayout()).counts.tolist() == [0, 0, 1, 1]


def members(parallel: ParallelConfig) -> dict:
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu", has_experts=True)
    axes = {name: getattr(mesh, name) for name in ("ep", "etp", "ep_etp", "cp_tp")}
    return {
        n: dist.get_process_group_ranks(a.group) if a.group else [dist.get_rank()] for n, a in axes.items()
    }


def test_expert_tensor_is_fastest_then_expert(pool):
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=2
    )
    ranks = pool.run(members, parallel)
    assert [rank["etp"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["ep"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert ranks[0]["ep_etp"] == [0, 1, 2, 3] and ranks[2]["cp_tp"] == [2, 3]


@pytest.mark.parametrize(
    ("settings", "world", "sentence"),
    [
        (
            {"expert_model_parallel_size": 3},
            6,
            "num_experts 8 is not divisible by .*expert_model_parallel_size 3",
        ),
        (
            {"expert_model_parallel_size": 4},
            6,
            r"stage has 6 ranks .* expert \(4\) × expert tensor \(1\) = 4",
        ),
        (
            {"expert_tensor_parallel_size": 5},
            5,
            "moe_ffn_hidden_size 24 is not divisible by .*expert_tensor_par",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(settings, world, sentence):
    model = run_config("moe", None, "").model
    with pytest.raises(ConfigError, match=sentence):
        check_expert_parallel(model, ParallelConfig(**settings), world)


def test_odd_hidden_size_is_refused_where_tokens_travel():
    model = run_config("moe", None, "", model={"hidden_size": 33}).model
    with pytest.raises(ConfigError, match="hidden_size 33 is odd, but tokens are dispatched"):
        check_expert_parallel(model, ParallelConfig(expert_model_parallel_size=2), 2)
    gathered = ParallelConfig(expert_model_parallel_size=2, moe_token_dispatcher_type="allgather")
    check_expert_parallel(model, gathered, 2)


@pytest.mark.parametrize(
    "layout", by_default(["tp2-sp-ep2", "cp2-ep2", "pp2-ep2", "ep4-zero3"], "tp2-sp-ep2")
)
@pytest.mark.parametrize("kind", by_default(["aux_loss", "seq_aux_loss"], "seq_aux_loss"))
def test_padding_is_left_out_of_the_balance_on_every_rank(pool, tmp_path, layout, kind):
    """Rows of one or two documents with padding after them; the losses' coefficients are large."""
    with IndexedWriter(tmp_path / "texts", np.int32) as writer:
        for length in [9, 14, 5, 20, 11, 17] * 12:
            writer.add_document(1 + np.arange(length) * 7 % 89)
    changes = {
        "model": {
            "num_layers": 2, "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1,
            "moe_router_load_balancing_type": kind,
        },
        "data": {"mock": False, "data_path": [str(tmp_path / "texts")], "split": "100,0,0", "packing": "best_fit"},
        "train": {"train_iters": 2, "eval_iters": 0},
    }  # fmt: skip
    one = run_job(run_config("moe", None, "", **changes))
    ranks = pool.run(run_job, run_config("moe", layout, "", **changes), size=LAYOUTS[layout].processes)
    errors = compare(ranks, one)
    assert errors.within(), errors
    with mock.patch.object(TokenInputs, "real_tokens", lambda self, token_index: None):
        counted = run_job(run_config("moe", None, "", **changes))
    assert not compare([counted], one).within()

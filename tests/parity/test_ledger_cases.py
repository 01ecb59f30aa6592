"""Cases of the correctness ledger (tests/ledger.toml) that no other test has."""

import torch
from parity_cases import run_config

from megalith.config import RunConfig
from megalith.parity.differences import compare
from megalith.parity.job import run_job, start


def square_of_sinks(config: RunConfig) -> float:
    """The square of the gradient's norm if the gradients of the sinks are 1 and there are no others."""
    run = start(config)
    sinks = [parameter for name, parameter in run.model.parameters.named if "softmax_offset" in name]
    for parameter in sinks:
        parameter.grad = torch.ones_like(parameter)
    return run.updates.gradient_squares(sinks).item()


def test_experts_and_attention_sinks_under_tensor_parallelism_alone_equal_one_process(pool):
    """Without expert parallelism, gradients below the experts are partial sums over TP; sinks are sharded by heads."""
    small = {"model": {"num_layers": 2}, "train": {"train_iters": 2, "global_batch_size": 4}}
    one = run_job(run_config("gpt-oss documents", None, "", **small))
    ranks = pool.run(run_job, run_config("gpt-oss documents", "tp2", "", **small), size=2)
    errors = compare(ranks, one)
    assert errors.within(), errors
    assert sum("sink" in name or "softmax_offset" in name for name in one.gradients) == 2
    assert all(gradient.any() for name, gradient in one.gradients.items() if "router" in name)
    config = run_config("gpt-oss documents", "tp2", "", **small)
    heads = config.model.num_layers * config.model.num_attention_heads
    assert pool.run(square_of_sinks, config, size=2) == [heads, heads]


def test_each_step_counts_its_own_tokens_and_moves_expert_biases_once():
    changes = {
        "model": {"num_layers": 2},
        "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 4},
    }
    run = start(run_config("deepseek documents", None, "", **changes))
    model = run.config.model
    routers = [
        module for chunk in run.model.chunks for module in chunk.modules() if hasattr(module, "expert_bias")
    ]
    tokens = 4 * run.config.data.seq_length * model.moe_router_topk
    with run.data.train_loader(0, 0, run.device) as batches:
        for _ in range(2):
            before = [router.expert_bias.clone() for router in routers]
            run.train_step(batches)
            assert (run.model.tallies[:, : model.num_experts].sum(1) == tokens).all()
            moved = [router.expert_bias - bias for router, bias in zip(routers, before)]
            assert moved and all(move.any() for move in moved)
            for move in moved:
                steps = move / model.moe_router_bias_update_rate
                torch.testing.assert_close(steps, steps.sign(), rtol=1e-4, atol=1e-4)

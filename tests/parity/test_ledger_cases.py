"""Cases of the correctness ledger (tests/ledger.toml) that no other test has."""

import torch
from parity_cases import run_config

from megalith.parity.differences import compare
from megalith.parity.job import run_job, start


def test_experts_and_attention_sinks_under_tensor_parallelism_alone_equal_one_process(pool):
    """Without expert parallelism, gradients below the experts are partial sums over TP; sinks are sharded by heads."""
    small = {"model": {"num_layers": 2}, "train": {"train_iters": 2, "global_batch_size": 4}}
    one = run_job(run_config("gpt-oss documents", None, "", **small))
    ranks = pool.run(run_job, run_config("gpt-oss documents", "tp2", "", **small), size=2)
    errors = compare(ranks, one)
    assert errors.within(), errors
    assert sum("sink" in name or "softmax_offset" in name for name in one.gradients) == 2
    assert all(gradient.any() for name, gradient in one.gradients.items() if "router" in name)


def test_expert_biases_move_once_per_step_of_several_micro_batches():
    changes = {
        "model": {"num_layers": 2},
        "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 4},
    }
    run = start(run_config("deepseek documents", None, "", **changes))
    rate = run.config.model.moe_router_bias_update_rate
    with run.data.train_loader(0, 0, run.device) as batches:
        run.train_step(batches)
    biases = [
        x for chunk in run.model.chunks for name, x in chunk.named_buffers() if name.endswith("expert_bias")
    ]
    assert biases and all(bias.any() for bias in biases)
    assert all(torch.equal(bias, rate * bias.sign()) for bias in biases)

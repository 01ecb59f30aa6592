"""15: a bit flipped in one replica's weights is found at the next comparison, and its rank is named."""

import pytest
import torch
from default_cases import by_default
from ranks import Ranks, saved, words

from megalith.training.run_state import Run


def flip(rank: int) -> None:
    """On rank 2, after step 4, the lowest bit of one weight."""
    inner = Run.train_step

    def train_step(self, *given):
        step = inner(self, *given)
        if rank == 2 and self.step == 4:
            weight = self.model.parameters.shards["layers.0.mlp.linear_fc1.weight"].values
            weight.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return step

    Run.train_step = train_step


@pytest.mark.parametrize("copies", by_default(["data parallel", "hybrid"], "data parallel"))
@pytest.mark.fault(15)
def test_the_rank_with_other_weights_is_named_and_nothing_of_it_is_saved(tmp_path, copies):
    output = tmp_path / "run"
    layout = {"train__global_batch_size": 6}
    size, named = 3, "the weights of rank 2 differ from its replicas"
    if copies == "hybrid":  # ranks 0 and 2 hold one half, 1 and 3 the other
        layout = {"parallel__data_parallel_sharding_strategy": "optim"}
        layout |= {"parallel__num_distributed_optimizer_instances": 2}
        size, named = 4, "the weights of ranks 0, 2 differ, without a majority that agrees"
    command = words(
        output,
        train__train_iters=20,
        checkpoint__save_interval=6,
        runtime__check_weight_hash_across_dp_replicas_interval=3,
        **layout,
    )
    running = Ranks(command, size, tmp_path / "log", prepare=flip)
    assert running.end() == [5] * size, running.text()
    said = running.text(0)
    assert f"after step 6 {named}" in said and "layers.0.mlp.linear_fc1.weight" in said
    assert "the replicas were identical at step 3" in said
    assert saved(output) == []

"""Weights that several ranks hold are compared wherever they stand, and a checkpoint makes them the same again."""

import pytest
import torch

from megalith.config import RunConfig
from megalith.errors import TrainingError
from megalith.optim.offload import select_for_offload
from megalith.parallel.pipeline.tied_parameters import NAME
from megalith.parity.job import start
from megalith.training.replica_check import digest


def flipped_in_a_tied_copy(tree: dict, output: str) -> tuple[str, bool, list[float]]:
    """What the check says once the last stage's copy of a tied embedding has another bit; whether a run that goes on
    from what is saved then passes it; and the sum of the copy's bits there."""
    trainer = start(RunConfig.from_tree(tree))
    with trainer.data.train_loader(0, 0, trainer.device) as batches:
        trainer.train_step(batches)
    trainer.replicas.check(trainer.step)
    shards = trainer.model.parameters.shards
    if trainer.mesh.pp.rank == trainer.mesh.pp.size - 1:
        shards[NAME].values.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    try:
        trainer.replicas.check(trainer.step)
        said = ""
    except TrainingError as error:
        said = str(error)
    trainer.replicas = None
    with trainer.saver:
        trainer.save_last()
    again = start(RunConfig.from_tree(tree | {"checkpoint": {"load": output}}))
    again.replicas.check(again.step)
    held = again.model.parameters.shards.get(NAME)
    return said, again.step == 1, [] if held is None else held.values.double().view(-1)[:3].tolist()


@pytest.mark.parametrize(("size", "stages", "holders"), [(3, 3, "0, 2"), (4, 2, "0, 2")])
def test_a_tied_embeddings_copies_are_compared_and_a_checkpoint_makes_them_the_same(
    pool, tmp_path, size, stages, holders
):
    """On three stages, and on two beside sharded data parallelism, where the first half of the rows differs."""
    output = str(tmp_path / "run")
    tree = {
        "model": {"preset": "tiny-gpt", "num_layers": 3, "vocab_size": 64, "hidden_size": 32},
        "parallel": {
            "pipeline_model_parallel_size": stages,
            "data_parallel_sharding_strategy": "optim_grads",
        },
        "data": {"mock": True, "seq_length": 16, "num_workers": 0},
        "optim": {"lr": 1e-2},
        "train": {"train_iters": 4, "micro_batch_size": 1, "global_batch_size": 4, "output_dir": output},
        "runtime": {"device": "cpu", "check_weight_hash_across_dp_replicas_interval": 1},
    }
    if stages == 2:
        tree["parallel"]["decoder_first_pipeline_num_layers"] = 1
    results = pool.run(flipped_in_a_tied_copy, tree, output, size=size)
    for said, goes_on, _ in results:
        assert f"the weights of ranks {holders} differ" in said
        assert f"({NAME}; 1 parameters in all)" in said and goes_on
    held = [values for _, _, values in results if values]
    last = size - size // stages  # the first rank of the last stage
    assert len(held) == 2 * size // stages and results[0][2] == results[last][2]


def test_a_digest_tells_values_apart_that_stand_in_another_order_whatever_its_blocks(monkeypatch):
    values = torch.arange(12, dtype=torch.float32)
    whole = digest(values)
    monkeypatch.setattr("megalith.training.replica_check.BLOCK", 4)
    assert torch.equal(digest(values), whole)
    assert not torch.equal(digest(values.roll(4)), whole)


def test_state_that_two_stages_hold_is_kept_on_the_device_by_both_or_on_the_host_by_both():
    """The fused kernels of the two do not round alike, and each stage chooses among parameters of its own."""
    shared, small, large = torch.empty(64), torch.empty(40), torch.empty(100)
    first, last = [("shared", shared), ("large", large)], [("shared", shared), ("small", small)]
    assert ["shared" in select_for_offload(stage, 0.7) for stage in (first, last)] == [False, True]
    assert [select_for_offload(stage, 0.7, {"shared"}) for stage in (first, last)] == [{"large"}, {"small"}]

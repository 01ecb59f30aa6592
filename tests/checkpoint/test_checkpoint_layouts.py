"""A run goes through 8, 4, 6, 1 and 8 processes, cut along every axis, experts too, and stays the same to the bit."""

import pytest
import torch

from megalith.checkpoint import open_checkpoint
from megalith.checkpoint.fingerprint import differences, tensor_digests
from megalith.config import RunConfig
from megalith.launch.pool import Pool
from megalith.parallel.shards import dtensor_of
from megalith.parity.job import start, state_by_name
from megalith.training.build import vocabulary_rows

ZERO1 = {"data_parallel_sharding_strategy": "optim"}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|ttL"}
PP3 = {"pipeline_model_parallel_size": 3}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
ETP2 = {"expert_tensor_parallel_size": 2}

JOURNEY = [  # processes, settings of the section parallel; what is left is data parallelism
    (8, TP2 | PP2 | EP4 | ZERO1),
    (4, TP2 | CP2 | EP2),
    (6, PP3 | ZERO1),
    (1, {}),
    (8, TP2 | CP2 | EP2 | ETP2 | ZERO3),
]


def config(output, parallel: dict, load) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": {
                "num_layers": 3, "num_experts": 4, "moe_layer_freq": [0, 1, 1], "moe_ffn_hidden_size": 24,
                "hidden_size": 32, "ffn_hidden_size": 40, "num_attention_heads": 8,
                "num_query_groups": 4, "kv_channels": 6, "qk_layernorm": True, "vocab_size": 131,
                "make_vocab_size_divisible_by": 10, "max_position_embeddings": 16,
                "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
                "add_bias_linear": False, "untie_embeddings_and_output_weights": False,
            },
            "parallel": parallel,
            "data": {"mock": True, "seq_length": 16, "num_workers": 0},
            "optim": {"lr": 1e-2},
            "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 8, "eval_iters": 0,
                      "output_dir": str(output)},
            "checkpoint": {"load": load and str(load)},
            "runtime": {"device": "cpu"},
        }
    )  # fmt: skip


def train_and_save(config: RunConfig) -> dict[str, torch.Tensor]:
    """Two steps from the beginning; returns the state as rank 0 gathered it, without the checkpoint."""
    trainer = start(config)
    with trainer.data.train_loader(0, 0, trainer.device) as batches:
        for _ in range(2):
            trainer.train_step(batches)
    trainer.save_last()
    return state_by_name(trainer)


def load_and_save(config: RunConfig) -> dict[str, torch.Tensor]:
    """What was loaded, its padding rows included, is saved again."""
    trainer = start(config)
    assert trainer.step == 2 and trainer.consumed_samples == 16
    for chunk in trainer.model.chunks:
        for name, parameter in chunk.named_parameters():
            parameter = dtensor_of(parameter)
            if name in vocabulary_rows(trainer.config) and parameter.shape == (140, 32):
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                assert not whole[131:].any()
    trainer.save_last()
    return state_by_name(trainer)


def on_rank_0(pool: Pool, processes: int, function, config: RunConfig):
    return function(config) if processes == 1 else pool.run(function, config, size=processes)[0]


def digests(folder) -> dict[str, str]:
    checkpoint = open_checkpoint(folder)
    return {
        name: digest for part in ("model", "optimizer") for name, digest in tensor_digests(checkpoint, part)
    }


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.full
@pytest.mark.fault(10)
def test_from_8_processes_to_4_to_6_to_1_to_8_weights_and_moments_stay_the_same_to_the_bit(
    pool_of_eight, tmp_path
):
    processes, parallel = JOURNEY[0]
    before = tmp_path / "0"
    gathered = on_rank_0(pool_of_eight, processes, train_and_save, config(before, parallel, None))
    first = open_checkpoint(before)
    stored = {**dict(first.tensors("model")), **dict(first.tensors("optimizer"))}
    assert equal(stored, gathered)
    assert any(stored[name].any() for name in stored if name.endswith("exp_avg_sq"))
    expected = digests(before)
    for number, (processes, parallel) in enumerate(JOURNEY[1:], start=1):
        after = tmp_path / str(number)
        loaded = on_rank_0(pool_of_eight, processes, load_and_save, config(after, parallel, before))
        assert equal(loaded, gathered), (processes, parallel)
        assert digests(after) == expected
        checkpoint = open_checkpoint(after)
        assert list(differences(first, checkpoint, "optimizer")) == []
        assert len(checkpoint.manifest.files_of("model")) == processes
        before = after

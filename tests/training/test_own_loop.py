"""A loop of one's own: what its step moves on, and what its checkpoints have beside the tensors."""

import torch

import megalith
from megalith.config import RunConfig
from megalith.parallel.mesh import build_mesh

MODEL = dict(num_layers=1, hidden_size=32, ffn_hidden_size=32, num_attention_heads=2, vocab_size=32, num_experts=4,
             moe_router_topk=1, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
             add_bias_linear=False, position_embedding_type="rope", hidden_dropout=0.0,
             attention_dropout=0.0)  # fmt: skip


def optimizer(**optim) -> megalith.Optimizer:
    """Of a model with experts and FP8 scales, and with a dynamic loss scale."""
    tree = {"model": MODEL, "data": {"seq_length": 16, "mock": True}, "optim": {"lr": 0.1, **optim},
            "train": {"fp8_format": "hybrid", "global_batch_size": 4, "train_iters": 2},
            "runtime": {"device": "cpu", "compile": False}}  # fmt: skip
    config = RunConfig.from_tree(tree)
    mesh = build_mesh(config.parallel, 1, "cpu", has_experts=True)
    return megalith.Optimizer(
        megalith.parallelize(config, mesh, torch.device("cpu")), config.optim, precision="fp16"
    )


def step(made: megalith.Optimizer) -> None:
    dataset = megalith.MockDataset(32, 16, 4, seed=0)
    loader = megalith.Loader(dataset, micro_batch_size=4, batch_sizes=[4], vocab_size=32)
    made.model.backward([*loader], loss_scale=made.loss_scale.scale)
    assert not made.step().skipped


def test_a_step_takes_the_configured_rates_and_moves_fp8_scales_and_expert_biases():
    made = optimizer(decoupled_lr=0.3, initial_loss_scale=4.0)
    step(made)
    table, router = made.model.amaxes, made.model.chunks[0].layers["0"].mlp.router
    assert {group["decoupled"]: group["lr"] for group in made.optimizer.param_groups} == {
        True: 0.3,
        False: 0.1,
    }
    assert torch.equal(
        table.history[0], table.step_amax
    )  # of the step's own passes, not of the first scales'
    assert router.expert_bias.any()
    step_amax = table.step_amax.clone()
    step(made)
    assert (table.step_amax < step_amax).any()  # what the step before has seen is forgotten


def test_a_checkpoint_has_the_step_the_samples_the_loss_scale_and_fp8_scales(tmp_path):
    saved, loaded = optimizer(initial_loss_scale=64.0, hysteresis=1), optimizer()
    step(saved)
    saved.loss_scale.update(torch.tensor(1.0))
    megalith.save_checkpoint(tmp_path, saved, step=3, consumed_samples=12)
    record = megalith.load_checkpoint(tmp_path, loaded)
    assert (record.step, record.consumed_samples) == (3, 12)
    assert loaded.loss_scale.state() == saved.loss_scale.state()
    assert loaded.loss_scale.scale == 32.0
    tables = saved.model.amaxes, loaded.model.amaxes
    assert tables[1].ready and torch.equal(tables[0].scale, tables[1].scale)

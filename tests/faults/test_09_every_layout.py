"""9: saved, ended and gone on in the same layout: bitwise a run that went straight on, along every axis."""

import pytest
from storage_job import run_config, started, train
from trained_runs import stored

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
LAYOUTS = {
    "tp2-sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp2": ({"pipeline_model_parallel_size": 2}, {}),
    "pp2-zero_bubble": ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero_bubble"}, {}),
    "cp2": ({"context_parallel_size": 2}, {}),
    "ep2": ({"expert_model_parallel_size": 2}, EXPERTS),
    "dp2": ({"data_parallel_sharding_strategy": "no_shard"}, {}),
    "dp2-zero1": ({"data_parallel_sharding_strategy": "optim"}, {}),
    "dp2-zero3": ({"data_parallel_sharding_strategy": "optim_grads_params"}, {}),
}


def train_and_save(config, steps: int) -> int:
    """Makes `steps` steps from where the run stands and saves; returns the step it stands at then."""
    trainer, _ = started(config)
    train(trainer, steps, save_each=False)
    trainer.save_last()
    return trainer.step


@pytest.mark.fault(9)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_parallel_mode_going_on_is_bitwise_going_straight_on(pool, tmp_path, layout):
    parallel, model = LAYOUTS[layout]

    def run(name: str, steps: int, **checkpoint) -> None:
        config = run_config(tmp_path / name, parallel, **checkpoint)
        tree = config.to_tree()
        tree["model"].update(model, hidden_dropout=0.1)
        assert pool.run(train_and_save, config.from_tree(tree), steps, size=2) in ([2, 2], [4, 4])

    run("straight", 4)
    run("stopped", 2)
    run("stopped", 2, load=tmp_path / "stopped")
    step = "checkpoints/step_00000004"
    straight, stopped = (stored(tmp_path / name / step) for name in ("straight", "stopped"))
    assert straight and straight == stopped

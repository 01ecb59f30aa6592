"""9: saved, ended and gone on in the same layout: bitwise a run that went straight on, along every axis."""

import pytest
from default_cases import by_default, cases_that_run
from storage_job import run_config, started, train
from trained_runs import stored

from megalith.config import RunConfig

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


def train_on(config, steps: int) -> int:
    """Makes `steps` steps from where the run stands, with a save after every second; returns where it stands then."""
    run, _ = started(config)
    for _ in range(steps // 2):
        train(run, 2, save_each=False)
        run.save()
    return run.step


@pytest.fixture(scope="module")
def states(pool, request, tmp_path_factory) -> dict[str, list[dict[str, bytes]]]:
    """What is stored after four steps, by layout: of a run that went on, and of one that ended after two."""
    folder, layouts = tmp_path_factory.mktemp("runs"), cases_that_run(request, LAYOUTS, "layout")

    def run(kind: str, steps: int, load: str | None = None) -> None:
        cases = {}
        for layout in layouts:
            parallel, model = LAYOUTS[layout]
            start = {"load": folder / layout / load} if load else {}
            tree = run_config(folder / layout / kind, parallel, **start).to_tree()
            tree["model"].update(model, hidden_dropout=0.1)
            cases[layout] = (RunConfig.from_tree(tree), steps)
        assert pool.run_cases(train_on, cases, size=2) == {layout: [4, 4] for layout in layouts}

    run("straight", 4)
    run("ended", 2, load="straight/checkpoints/step_00000002")
    step = "checkpoints/step_00000004"
    return {name: [stored(folder / name / kind / step) for kind in ("straight", "ended")] for name in layouts}


@pytest.mark.fault(9)
@pytest.mark.parametrize("layout", by_default(LAYOUTS, "tp2-sp", "pp2-zero_bubble", "ep2", "dp2-zero3"))
def test_in_every_parallel_mode_going_on_is_bitwise_going_straight_on(states, layout):
    straight, ended = states[layout]
    assert straight and straight == ended

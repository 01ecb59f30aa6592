"""vLLM in the trainer's processes: it has the weights of each step, sleeps meanwhile, and its faults are sentences."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import vllm_stand_in
from default_cases import by_default
from safetensors.torch import load_file
from small_policy import configuration, metrics, write_prompts
from test_loop import run_of

from megalith.bridge.exporter import export_hf
from megalith.errors import ConfigError, TrainingError
from megalith.rl.engines import weight_stream
from megalith.rl.grpo import train_grpo
from megalith.rl.rollouts.rollout_reader import load_rollouts

STEPS = 3
SYNC = ["wake_up weights", "reload_weights", "wake_up kv_cache", "reset_prefix_cache"]


@pytest.fixture
def vllm(monkeypatch):
    return vllm_stand_in.install(monkeypatch)


def a_run(folder, output="run", rl=None, **sections):
    base = dict(engine="vllm", temperature=0.7, save_rollouts=True)
    train = dict(train_iters=STEPS, output_dir=str(folder / output))
    return configuration(
        folder, rl=base | (rl or {}), train=train, checkpoint=dict(save_interval=1), **sections
    )


@pytest.mark.parametrize("level", by_default([0, 1, 2], 2))
def test_it_samples_by_the_weights_of_each_step_and_sleeps_while_they_are_trained(
    tmp_path, vllm, monkeypatch, level
):
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 2**14)
    train_grpo(a_run(tmp_path, rl=dict(vllm_sleep_level=level)))
    steps = metrics(tmp_path / "run")
    assert len(steps) == STEPS
    assert all(
        step["mismatch"] < 1.0001 and step["drift_canary"] < 1.0001 and step["ratio"] == 1 for step in steps
    )
    found = load_rollouts(sorted(map(str, (tmp_path / "run" / "rollouts").iterdir())))
    each = [one for group in found.groups for one in group.completions]
    assert [int(one.version[0]) for one in each] == [n for n in range(STEPS) for _ in range(8)]
    (llm,) = vllm.made
    exported = export_hf(
        tmp_path / "run" / "checkpoints" / "step_00000002", tmp_path / "hf", show_progress=False
    )
    expected = load_file(exported.path / "model.safetensors")
    assert expected.keys() == llm.received.keys()
    assert all(torch.equal(llm.received[name], tensor) for name, tensor in expected.items())
    first = ["reload_weights", "reset_prefix_cache", "generate", "generate"]  # the canary, a batch
    again = SYNC if level else [SYNC[1], SYNC[3]]
    sleep = ["sleep"] * (level > 0)
    assert llm.calls == [*first, *sleep, *([*again, "generate", "generate", *sleep] * (STEPS - 1))]


def test_it_is_made_of_the_runs_sizes_and_of_no_weights(tmp_path, vllm):
    train_grpo(a_run(tmp_path, rl=dict(vllm_gpu_memory_utilization=0.4)))
    arguments = vllm.made[0].arguments
    assert not (Path(arguments["model"]) / "model.safetensors").exists()
    wanted = dict(logprobs_mode="processed_logprobs", dtype="float32", tensor_parallel_size=1, max_num_seqs=8,
                  max_model_len=16, gpu_memory_utilization=0.4, enable_sleep_mode=True,
                  distributed_executor_backend=None)  # fmt: skip
    assert arguments | wanted == arguments


def test_where_devices_cannot_sleep_it_stays_awake(tmp_path, monkeypatch):
    vllm = vllm_stand_in.install(monkeypatch, has_sleep=False)
    train_grpo(a_run(tmp_path))
    assert not vllm.made[0].arguments["enable_sleep_mode"] and "sleep" not in vllm.made[0].calls


def losses_in_layout(folder: str, name: str, parallel: dict) -> tuple[list[float], dict]:
    with pytest.MonkeyPatch.context() as patch:
        vllm = vllm_stand_in.install(patch)
        train = dict(train_iters=STEPS, output_dir=str(Path(folder) / name))
        rl = dict(engine="vllm", temperature=0.7)
        run = run_of(configuration(Path(folder), rl=rl, train=train, parallel=parallel), 2)
        with run.data.train_loader(0, 0, run.device) as batches:
            found = [run.train_step(batches).loss.item() for _ in range(STEPS)]
        run.task.close()
        names = "tensor_parallel_size", "distributed_executor_backend"
        return found, {name: vllm.made[0].arguments[name] for name in names}


@pytest.mark.full
@pytest.mark.parametrize(
    "parallel",
    [dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2), {}],
    ids=["tp2", "pp2", "dp2"],
)
def test_every_layout_samples_as_one_process(pool, tmp_path, vllm, parallel):
    write_prompts(tmp_path)
    train_grpo(a_run(tmp_path))
    expected = [step["loss"] for step in metrics(tmp_path / "run")]
    for mine, arguments in pool.run(losses_in_layout, str(tmp_path), "layout", parallel, size=2):
        assert np.abs(np.subtract(mine, expected)).max() / np.abs(expected).max() < 1e-5
        assert arguments["tensor_parallel_size"] == parallel.get("tensor_model_parallel_size", 1)
        assert arguments["distributed_executor_backend"] == "external_launcher"


def raises(error):
    def planted(llm, *given):
        raise error

    return planted


def half_taken(llm, weights):
    next(weights)
    raise KeyError("layers.0.unknown")


FAULTS = {
    "weights": ("reload_weights", half_taken, "failed at taking weights .KeyError: 'layers.0.unknown'"),
    "wake": (
        "wake_up weights",
        raises(RuntimeError("no memory pool")),
        "at waking up its weights .*no memory pool",
    ),
    "sampling": ("generate", raises(ValueError("too long")), "failed at sampling .ValueError: too long"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_vllm_raises_ends_the_run_with_a_sentence(tmp_path, vllm, fault):
    method, act, said = FAULTS[fault]
    vllm.plant[method] = act
    with pytest.raises(TrainingError, match=said):
        train_grpo(a_run(tmp_path))


def test_weights_that_it_did_not_take_are_found_by_the_canary(tmp_path, vllm, monkeypatch):
    monkeypatch.setattr(
        vllm, "_reload_weights", lambda llm, weights_iterator: list(weights_iterator) and None
    )
    with pytest.raises(TrainingError, match=r"cannot be inspected"):
        train_grpo(a_run(tmp_path, rl=dict(vllm_sleep_level=0)))


def test_an_end_that_is_none_is_refused(tmp_path, vllm, monkeypatch):
    real = vllm._completion

    def aborted(*given):
        one = real(*given)
        one.finish_reason = "abort"
        return one

    monkeypatch.setattr(vllm, "_completion", aborted)
    with pytest.raises(TrainingError, match=r"has finish_reason 'abort', which is neither stop nor length"):
        train_grpo(a_run(tmp_path))


def test_where_vllm_is_absent_the_run_is_refused_before_it_begins_with_the_line_that_installs_it(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        ConfigError, match=r"vLLM cannot be imported .*pip install a vLLM for torch .*or name a server by"
    ):
        train_grpo(a_run(tmp_path))
    assert not (tmp_path / "run" / "engine_config").exists()


def test_no_batch_is_sampled_ahead_on_the_trainers_devices(tmp_path):
    with pytest.raises(
        ConfigError, match="samples on the trainer's own devices, which are training at that time"
    ):
        train_grpo(a_run(tmp_path, rl=dict(max_staleness=1)))

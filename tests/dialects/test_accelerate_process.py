"""What an Accelerator does for a script beside the model: what processes exchange, print, keep and end with."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from accelerate_job import adamw, close, fresh_accelerator, model_of, prepared, samples, stacked
from default_cases import by_default
from test_accelerate_commands import plain_script
from torch import nn

from megalith.accelerate import avg_losses_across_data_parallel_group, gather_across_data_parallel_groups
from megalith.dialects.accelerate import process_state
from megalith.errors import ConfigError
from megalith.launch import call_order
from megalith.launch.launcher import TIMEOUT
from megalith.launch.pool import RankFailed


def exchanged(accelerator):
    """What processes exchange, among replicas: `accelerator` may have a model, or not yet. test_accelerate_loop.py has
    the processes."""
    replica, replicas = accelerator._replica
    rank = torch.tensor(accelerator.process_index)
    both = list(range(replicas))
    own = {
        "loss": torch.tensor([float(replica)]),
        "more": (torch.tensor(replica), [torch.full((1, 2), replica)]),
    }
    found = accelerator.gather(own)
    assert found["loss"].tolist() == found["more"][0].tolist() == both
    assert found["more"][1][0].tolist() == [[one, one] for one in both]
    assert accelerator.gather_for_metrics(own["loss"]).tolist() == both
    assert accelerator.gather_for_metrics([replica, "a"]) == [one for n in both for one in (n, "a")]
    assert gather_across_data_parallel_groups(rank + 1).shape == (replicas,)
    mean = sum(both) / replicas
    assert avg_losses_across_data_parallel_group([own["loss"][0]]) == mean
    for kind, wanted in (("sum", sum(both)), ("mean", mean), ("max", max(both)), ("none", replica)):
        for dtype in (torch.int64, torch.float32):
            reduced = accelerator.reduce({"n": torch.tensor([replica], dtype=dtype)}, kind, scale=2.0)["n"]
            assert reduced.tolist() == [wanted]
            assert reduced.dtype == (torch.float32 if kind == "mean" else dtype)
    with pytest.raises(ConfigError, match="'avg'; use sum, mean"):
        accelerator.reduce(rank, "avg")
    ragged = {"ids": torch.ones(2, 3 + accelerator.process_index, dtype=torch.int64)}
    padded = accelerator.pad_across_processes(ragged, dim=1, pad_index=-100)["ids"]
    assert (
        padded.shape == (2, 2 + accelerator.num_processes)
        and int((padded == 1).sum()) == ragged["ids"].numel()
    )
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as share:
        assert share == (["a", "b", "c"] if replicas == 1 else [["a", "b"], ["c", "c"]][replica])


def called_by_the_main_process(folder, name, then):
    """As scripts for DDP have it, where these are no collectives."""
    call_order.report = lambda error: (folder / "message").write_text(str(error)) and error.exit_code
    accelerator = fresh_accelerator(tp_degree=2)
    model, _, loader, _ = prepared(accelerator, "llama", samples(8))
    if accelerator.is_main_process:
        getattr(accelerator, name)(model)
    model(**next(iter(loader))) if then == "the prepared model" else accelerator.wait_for_everyone()


@pytest.mark.full
@pytest.mark.parametrize(
    "name, then",
    by_default(
        [("unwrap_model", "wait_for_everyone"), ("get_state_dict", "the prepared model")],
        ("get_state_dict", "the prepared model"),
    ),
)
def test_a_collective_that_the_main_process_calls_alone_ends_with_a_sentence(pool, tmp_path, name, then):
    before = time.monotonic()
    with pytest.raises(RankFailed):
        pool.run(called_by_the_main_process, tmp_path, name, then, size=2)
    assert time.monotonic() - before < pool.timeout / 2
    message = (tmp_path / "message").read_text()
    assert (
        f"different calls: rank 0 in {then}" in message and f"; rank 1 in {name}. Every rank must" in message
    )


def calls_of_one_replica():
    accelerator = fresh_accelerator(tp_degree=2)
    order = AcceleratorState._shared_state[process_state.CALLS]
    before = order._count
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))
        accelerator.gather_for_metrics(["a"])
        accelerator.reduce(torch.ones(1))
    assert order._count == before
    accelerator.wait_for_everyone()
    assert order._count == before + 1


def test_one_replica_gathers_without_waiting_so_the_main_process_may_do_it_alone(pool):
    pool.run(calls_of_one_replica, size=2)


class Lines(GeneralTracker):
    """A tracker of a script's own."""

    name, requires_logging_directory = "lines", False

    def __init__(self):
        self.tracker = []
        super().__init__()

    @on_main_process
    def store_init_configuration(self, values):
        self.tracker.append(values)

    @on_main_process
    def log(self, values, step=None, **options):
        self.tracker.append((step, values))

    @on_main_process
    def finish(self):
        self.tracker.append("end")


def tracked():
    """What a tracker has seen on the main process, and nothing elsewhere."""
    lines = Lines()
    accelerator = fresh_accelerator(log_with=lines)
    accelerator.init_trackers("run", {"lr": 0.1})
    accelerator.log({"loss": 2.0}, step=3)
    main = accelerator.process_index == accelerator.num_processes - 1
    assert lines.tracker == ([{"lr": 0.1}, (3, {"loss": 2.0})] if main else [])
    return accelerator, lines


def test_trackers_and_prints_are_the_main_processs_until_training_ends(capfd):
    accelerator, lines = tracked()
    accelerator.print("printed")
    assert capfd.readouterr().out == "printed\n"
    accelerator.end_training()
    assert lines.tracker[-1] == "end" and not dist.is_initialized()


class Counted:
    """What a script registers to be saved."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_saved_states_are_named_limited_and_have_what_the_script_registers(tmp_path):
    naming = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = fresh_accelerator(project_config=naming)
    model, own, _, _ = prepared(accelerator, "llama", samples(8))
    counted = Counted(0)
    accelerator.register_for_checkpointing(counted)
    for _ in range(3):
        counted.count += 1
        accelerator.backward(model(**stacked(samples(4))).loss)
        own.step()
        accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_1",
        "checkpoint_2",
    ]
    for name, steps in (("checkpoint_1", 2), (None, 3)):
        accelerator.load_state(name and str(tmp_path / "checkpoints" / name))
        assert (counted.count, model.iteration) == (steps, steps)


def test_freed_memory_takes_another_model_and_sync_is_no_matter_of_the_script():
    accelerator, batch = fresh_accelerator(gradient_clipping=0.0), stacked(samples(8))
    model, own, loader, schedule = prepared(accelerator, "gpt2", samples(8))
    assert accelerator.free_memory(model, own, loader, schedule) == [None] * 4
    model, _, _, _ = prepared(accelerator, "llama", samples(8))
    plain = model_of("llama")
    with accelerator.no_sync(model), accelerator.autocast():
        accelerator.backward(model(**batch).loss)
    loss = model(**batch).loss
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(2 * loss)
    (3 * plain(**batch).loss).backward()
    close(
        accelerator.clip_grad_norm_(model.parameters(), 1.0),
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0),
    )


def test_processes_exchange_numbers_before_a_model_is_prepared():
    exchanged(fresh_accelerator())


@pytest.mark.parametrize("given, message", [
    ([torch.ones(1), "a"], "a Tensor"), ([{1: "a"}], "a dictionary with the key 1"), ([(b"a",)], "a bytes"),
])  # fmt: skip
def test_objects_that_json_would_not_give_back_are_refused(given, message):
    with pytest.raises(ConfigError, match=f"gather_for_metrics has {message}, but"):
        fresh_accelerator().gather_for_metrics(given, use_gather_object=True)


def test_what_the_script_says_of_the_loss_scale_and_the_processes_holds(monkeypatch):
    asked, join = [], process_state.init_process_groups
    monkeypatch.setattr(
        process_state, "init_process_groups", lambda cpu, timeout: asked.append(timeout) or join(cpu, timeout)
    )
    scaler = GradScalerKwargs(init_scale=1024.0, growth_interval=7)
    group = InitProcessGroupKwargs(timeout=timedelta(hours=2))
    accelerator = fresh_accelerator(precision="fp16", kwargs_handlers=[scaler, group])
    scale = prepared(accelerator, "llama", samples(8))[1].optimizer.loss_scale
    assert (scale.scale, scale.growth_interval, scale.hysteresis) == (1024.0, 7, 1)
    accelerator = fresh_accelerator(precision="fp16", kwargs_handlers=[GradScalerKwargs(growth_factor=4.0)])
    with pytest.raises(ConfigError, match=r"growth_factor 4 .* doubled and halved"):
        prepared(accelerator, "llama", samples(8))
    assert asked == [timedelta(hours=2), TIMEOUT]


def test_the_loss_scale_starts_where_accelerates_does_and_no_step_is_skipped():
    """Megatron's 2³² would skip the first ten or fifteen steps of a script."""
    accelerator = fresh_accelerator(precision="fp16")
    model, own, _, schedule = prepared(accelerator, "llama", samples(8))
    scale = own.optimizer.loss_scale
    assert (scale.scale, scale.growth_interval, scale.hysteresis) == (GradScalerKwargs().init_scale, 2000, 1)
    model.train()
    accelerator.backward(model(**stacked(samples(8))).loss)
    own.step()
    schedule.step()
    assert not accelerator.optimizer_step_was_skipped and schedule.scheduler.last_epoch == 1


@pytest.mark.parametrize("given, wanted", [
    (dict(kwargs_handlers=[GradScalerKwargs(init_scale=0.25)]), 0.25),  # torch's has no least one
    (dict(kwargs_handlers=[GradScalerKwargs(enabled=False)]), 1.0),
    (dict(other_megatron_args={"initial_loss_scale": 2.0**20}), 2.0**20),
    (dict(other_megatron_args={"loss_scale": 8.0}), 8.0),
])  # fmt: skip
def test_a_loss_scale_that_the_script_gives_is_where_it_starts(given, wanted):
    accelerator = fresh_accelerator(precision="fp16", **given)
    assert prepared(accelerator, "llama", samples(8))[1].optimizer.loss_scale.scale == wanted


def test_copy_engines_get_more_queues_before_cuda_is_asked_for_devices(monkeypatch):
    seen, asked = [], torch.cuda.is_available
    monkeypatch.setattr(
        torch.cuda,
        "is_available",
        lambda: seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")) or asked(),
    )
    fresh_accelerator()
    assert seen[0] == "32"


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam])
def test_an_optimizer_that_cannot_train_shards_is_refused_by_name(kind):
    accelerator, model = fresh_accelerator(), model_of("llama")
    with pytest.raises(
        ConfigError, match=f"the optimizer {kind.__name__}, which cannot train sharded parameters"
    ):
        accelerator.prepare(model, kind(model.parameters(), lr=0.1))


def test_fp8_is_asked_for_where_it_is_a_setting():
    with pytest.raises(ConfigError, match=r"other_megatron_args=.*fp8_format.*hybrid"):
        fresh_accelerator(precision="fp8")
    accelerator = fresh_accelerator(precision="bf16", other_megatron_args={"fp8_format": "hybrid"})
    assert prepared(accelerator, "llama", samples(8))[0].run.train.fp8_format == "hybrid"


class Adapted(nn.Module):
    """As PEFT puts it in the place of a linear layer."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": nn.Linear(linear.in_features, 4, bias=False)})


def test_adapters_in_a_model_and_a_model_that_merging_has_left_frozen_are_refused():
    model = model_of("llama")
    model.model.layers[1].self_attn.q_proj = Adapted(model.model.layers[1].self_attn.q_proj)
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM contains adapters.*merge_and_unload.*lora\.rank"
    ):
        fresh_accelerator().prepare(model, adamw(model))
    model = model_of("llama").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"parameters are frozen.*requires_grad_\(True\)"):
        fresh_accelerator().prepare(model, adamw(model))


LAUNCHED = """import sys
from accelerate import debug_launcher, notebook_launcher
from megalith.accelerate import patch
patch()
import accelerate_script
if __name__ == "__main__":
    port = {"use_port": sys.argv[2]} if sys.argv[1] == "notebook_launcher" else {}
    globals()[sys.argv[1]](accelerate_script.main, tuple(sys.argv[3:]), num_processes=2, **port)
"""


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["debug_launcher", "notebook_launcher"])
def test_accelerates_launchers_of_functions_train(tmp_path, launcher):
    words = ["-c", LAUNCHED, launcher, str(forked.free_port()), "1,2", str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = forked.run(words, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    (result,) = [line.split() for line in done.stdout.splitlines() if line.startswith("result")]
    assert [float(figure) for figure in result[2:]] == pytest.approx(plain_script(), rel=1e-5)

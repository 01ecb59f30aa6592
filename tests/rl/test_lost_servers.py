"""Servers that die, or start again with old weights, in a run: waited for, given the weights, asked again."""

import itertools
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Timer, active_count

import numpy as np
import pytest
import torch
from default_cases import by_default
from engine_stand_ins import KINDS, served
from small_policy import configuration, metrics, write_prompts
from test_engines import PROMPTS, SAMPLING, engine_at, model_tree, settings
from test_loop import run_of

from megalith.checkpoint.steps import list_steps
from megalith.errors import TrainingError
from megalith.rl.engines.json_http import ServerLost
from megalith.rl.engines.transfer_group import TorchGroup
from megalith.rl.engines.weight_stream import WeightStream
from megalith.rl.grpo import train_grpo

COMPLETIONS = "/v1/completions", "/generate"
STEPS = 3


def dies(server, paths, at, returns=True, then=(None, "")):
    """The server answers its request number `at` of these paths with `then` and is gone, for a moment or for ever."""
    seen = []
    routes = {path: act for (_, path), act in server.routes().items() if path in paths}

    def answer_of(path):
        def answer(handler, body):
            seen.append(path)
            if len(seen) != at:
                return 200, routes[path](body, {"mode": "wait"} if path == "/pause" else {})
            server.die()
            if returns:
                Timer(0.3, server.restart).start()
            return then

        return answer

    server.plant |= {path: answer_of(path) for path in routes}


def a_run(folder, output, server, rl=None, **sections):
    rl = settings(server, vllm_importance_sampling_correction=True) | (rl or {})
    train = dict(train_iters=STEPS, output_dir=str(folder / output))
    return configuration(folder, rl=rl, train=train, checkpoint=dict(save_interval=1), **sections)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return model_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tree):
    """The steps of a run in which nothing happens, and the folder of its prompts."""
    folder = tmp_path_factory.mktemp("whole")
    with served("vllm 0.24", tree) as server:
        train_grpo(a_run(folder, "run", server))
    return metrics(folder / "run")


WHERE = {
    "sampling": (COMPLETIONS, 4 + 2 + 4 + 1),  # the canary asks four times, a rollout batch twice
    "the canary": (COMPLETIONS, 4 + 2 + 2),
    "a bucket": (("/update_weights", "/update_weights_from_distributed"), 2),
    "the pause": (("/pause", "/pause_generation"), 2),
}


# By default one server of each kind, lost while it samples and in a weight sync.
RESTARTS = ("vllm 0.29", "sampling"), ("sglang", "a bucket")


@pytest.mark.parametrize(("kind", "where"), by_default(itertools.product(KINDS, WHERE), *RESTARTS))
def test_a_server_that_is_restarted_gets_the_weights_of_now_and_the_run_is_the_same(
    tmp_path, tree, whole, kind, where
):
    with served(kind, tree) as server:
        dies(server, *WHERE[where])
        train_grpo(a_run(tmp_path, "run", server))
    steps = metrics(tmp_path / "run")
    assert len(steps) == STEPS
    assert all(step["mismatch"] < 1.0001 and step["drift_canary"] < 1.0001 for step in steps)
    if kind != "sglang":  # whose noise is its own
        assert [step["loss"] for step in steps] == [step["loss"] for step in whole]


@pytest.mark.full
@pytest.mark.parametrize("method", by_default(["gloo", "checkpoint"], "gloo"))
def test_the_number_of_servers_changes_nothing_and_one_that_dies_is_named(
    tmp_path, tree, whole, capsys, method
):
    with ExitStack() as stack:
        servers = [stack.enter_context(served("vllm 0.29", tree)) for _ in range(3)]
        dies(servers[1], COMPLETIONS, 1 + 1 + 2)  # of the canary, of a batch, of the second canary; the next
        urls = dict(engine_url=[server.url for server in servers], weight_sync_method=method)
        train_grpo(a_run(tmp_path, "run", servers[0], urls))
        assert all(len(server.bodies) >= 2 * STEPS for server in servers[:2])
        assert len(servers[2].bodies) == STEPS  # of the canary's four prompts
        assert all(torch.equal(servers[0].received[name], one) for name, one in servers[1].received.items())
        assert method == "checkpoint" or servers[0].calls.count("/init_weight_transfer_engine") == 2
    assert [step["loss"] for step in metrics(tmp_path / "run")] == [step["loss"] for step in whole]
    said = capsys.readouterr().out
    assert (
        f"vLLM at {servers[1].url} closed the connection during POST" in said
        and "start it again; the run waits for it, then repeats the requests" in said
        and "resume" not in said
    )


def test_several_sglang_servers_are_one_group(run, tree):
    with served("sglang", tree) as one, served("sglang", tree) as two:
        two.is_second = True
        engine = engine_at(run, one, engine_url=[one.url, two.url])
        engine.update(0)
        engine.update(1)
        assert len(engine.generate([*PROMPTS, [3]], SAMPLING, num_generations=2)) == 6
        assert (len(one.bodies), len(two.bodies)) == (2, 1) and one.version == two.version == "1"
        assert one.received and all(torch.equal(one.received[name], x) for name, x in two.received.items())
        two.die()
        with pytest.raises(ServerLost, match=f"SGLang at {two.url} cannot be reached"):
            engine.generate(PROMPTS, SAMPLING)


def losses_in_layout(folder: str, name: str, parallel: dict, url: str) -> list[float]:
    """Of two ranks that share a server, and leave their checkpoints in folder/name."""
    rl = dict(engine="vllm", engine_url=url, weight_sync_method="gloo")
    train = dict(train_iters=STEPS, output_dir=str(Path(folder) / name))
    run = run_of(configuration(Path(folder), rl=rl, train=train, parallel=parallel), 2)
    with run.data.train_loader(0, 0, run.device) as batches:
        found = [run.train_step(batches).loss.item() for _ in range(STEPS)]
    run.task.close()
    return found


@pytest.mark.parametrize("name", by_default(["tp2", "dp2"], "tp2"))
def test_every_rank_waits_for_it(pool, tmp_path, tree, whole, name):
    write_prompts(tmp_path)
    parallel = {"tp2": dict(tensor_model_parallel_size=2), "dp2": {}}[name]
    expected = [step["loss"] for step in whole]
    with served("vllm 0.29", tree) as server:
        dies(server, *WHERE["sampling"])
        for mine in pool.run(losses_in_layout, str(tmp_path), name, parallel, server.url, size=2):
            assert np.abs(np.subtract(mine, expected)).max() / np.abs(expected).max() < 1e-5
        assert server.calls.count("/init_weight_transfer_engine") == 2


def test_the_hang_watch_leaves_time_for_it(tmp_path):
    rl = dict(engine="sglang", weight_sync_timeout=7.0, generation_timeout=30.0)
    assert configuration(tmp_path, rl=rl).rl.server_timeout == 37.0
    assert configuration(tmp_path).rl.server_timeout == 0.0


@pytest.mark.full
def test_by_a_folder_too(tmp_path, tree, whole):
    with served("vllm 0.24", tree) as server:
        dies(server, COMPLETIONS, WHERE["sampling"][1])
        train_grpo(a_run(tmp_path, "run", server, dict(weight_sync_method="checkpoint")))
        assert server.calls.count("/collective_rpc") == STEPS + 1
    assert [step["loss"] for step in metrics(tmp_path / "run")] == [step["loss"] for step in whole]


def test_a_server_that_does_not_come_back_ends_the_run_whose_checkpoint_goes_on(tmp_path, tree, whole):
    said = r"cannot be reached for GET /health .* stopped waiting after 3 s \(rl.weight_sync_timeout\)"
    with served("vllm 0.29", tree) as server:
        dies(server, COMPLETIONS, WHERE["sampling"][1], returns=False)
        with pytest.raises(TrainingError, match=said):
            train_grpo(a_run(tmp_path, "run", server, dict(weight_sync_timeout=3.0)))
    assert max(list_steps(tmp_path / "run" / "checkpoints")) == 1
    with served("vllm 0.29", tree) as server:
        again = a_run(tmp_path, "run", server).with_settings({"checkpoint.load": str(tmp_path / "run")})
        train_grpo(again)
    assert [step["loss"] for step in metrics(tmp_path / "run")] == [step["loss"] for step in whole]


def test_a_server_that_dies_again_and_again_ends_the_run(tmp_path, tree):
    with served("vllm 0.29", tree) as server:
        server.plant["/v1/completions"] = lambda handler, body: (None, "")
        with pytest.raises(TrainingError, match="closed the connection during POST /v1/completions"):
            train_grpo(a_run(tmp_path, "run", server))
        assert server.calls.count("/init_weight_transfer_engine") == 3


def test_a_batch_ahead_is_sampled_again_where_its_server_was_restarted(tmp_path, tree):
    with served("vllm 0.29", tree) as server:
        dies(server, COMPLETIONS, 4 + 2 + 1)
        train_grpo(a_run(tmp_path, "run", server, dict(max_staleness=1), optim=dict(lr=1e-3)))
    steps = metrics(tmp_path / "run")
    assert [step["staleness"] for step in steps] == [0, 1, 1]
    assert all(step["drift_canary"] < 1.0001 for step in steps)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = run_of(configuration(tmp_path_factory.mktemp("policy")), 1)
    yield run
    run.task.close()


@pytest.mark.parametrize("kind", by_default(KINDS, "vllm 0.29"))
def test_a_broadcast_that_would_never_end_is_aborted_and_the_weights_go_in_a_new_group(
    run, tree, kind, monkeypatch
):
    """As over NCCL, whose kernel waits for a dead worker for ever; by gloo, with a broadcast that does the same."""
    made, hangs = [], Event()
    broadcast = TorchGroup.broadcast

    def waits(group, tensors):
        made.append(group)
        if group is made[0]:
            assert hangs.wait(60)
            raise RuntimeError("aborted")
        broadcast(group, tensors)

    monkeypatch.setattr(TorchGroup, "broadcast", waits)
    monkeypatch.setattr(TorchGroup, "abort", lambda group: hangs.set() if group is made[0] else None)
    threads = active_count()
    with served(kind, tree) as server:
        dies(server, ("/update_weights", "/update_weights_from_distributed"), 1)
        engine = engine_at(run, server)
        engine.update(0)
        assert hangs.is_set() and len({*made}) == 2 and engine.version == 0
        buckets = WeightStream(run.model, run.config).buckets("cpu")
        sent = {name: tensor for one in buckets for name, tensor in zip(one.names, one.tensors)}
        assert all(torch.equal(server.received[name], tensor) for name, tensor in sent.items())
        assert engine.generate(PROMPTS[:1], SAMPLING)
    assert active_count() <= threads  # nobody waits for the dead one


@pytest.mark.parametrize("kind", ["vllm 0.29", "sglang"])
def test_old_weights_are_seen_before_anything_is_sampled(run, tree, kind):
    with served(kind, tree) as server:
        engine = engine_at(run, server)
        engine.update(5)
        server.die()
        server.restart()
        with pytest.raises(
            ServerLost, match=r"has weights with version '(None|default)', but those of step 5"
        ):
            engine.generate(PROMPTS, SAMPLING)
        assert not server.bodies
        engine.update(5)
        assert len(engine.generate(PROMPTS, SAMPLING)) == 2


@pytest.mark.parametrize("status", by_default([500, 502, 503], 502))
def test_an_error_is_the_last_word_of_a_server_that_is_gone_then(run, tree, status):
    with served("vllm 0.24", tree) as server:
        engine = engine_at(run, server)
        engine.update(5)
        dies(server, COMPLETIONS, 1, then=(status, {"error": "EngineDeadError"}))
        with pytest.raises(ServerLost):
            engine.generate(PROMPTS, SAMPLING)
        engine.update(5)
        assert len(engine.generate(PROMPTS, SAMPLING)) == 2


def test_a_server_that_comes_back_as_another_is_refused(run, tree):
    """It is looked at anew."""
    with served("vllm 0.29", tree) as server:
        engine = engine_at(run, server)
        engine.update(5)
        server.die()
        server.logprobs_mode = "raw_logprobs"
        server.restart()
        with pytest.raises(TrainingError, match="has logprobs_mode raw_logprobs"):
            engine.update(6)

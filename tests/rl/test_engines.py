"""vLLM's and SGLang's servers as engines: weights bitwise, true completions, and a sentence for each planted fault."""

import base64
import itertools
import math
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch
from default_cases import by_default, in_full
from engine_stand_ins import KINDS, PATIENCE, served
from safetensors.torch import load_file
from small_policy import VOCAB, configuration, metrics, write_prompts
from test_loop import run_of

import megalith
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import family_for
from megalith.errors import ConfigError, TrainingError
from megalith.generation.requests import Sampling
from megalith.parallel.mesh import build_mesh
from megalith.rl.engines import engine_of, json_http, weight_stream, weight_transfers
from megalith.rl.engines.deadline import Deadline
from megalith.rl.engines.weight_stream import WeightStream
from megalith.rl.grpo import PolicyTask, train_grpo
from megalith.rl.rollouts.rollout_reader import load_rollouts
from megalith.rl.sampling.scored_groups import decode_queue
from megalith.training.build import prepare
from megalith.training.run_state import Run


def model_tree(folder) -> dict:
    config, *_ = prepare(configuration(folder), 1)
    return family_for(config.model).write_config(config.model)


def settings(server, **more) -> dict:
    return dict(engine=server.release.split(".")[0].replace("0", "vllm"), engine_url=server.url,
                weight_sync_method="gloo") | more  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "method"),
    by_default(
        itertools.product(KINDS, ["gloo", "checkpoint"]),
        *((kind, "checkpoint" if kind == "vllm 0.24" else "gloo") for kind in KINDS),
    ),
)
def test_a_run_samples_from_a_server_that_has_the_weights_of_each_step(tmp_path, monkeypatch, kind, method):
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 2**14)
    with served(kind, model_tree(tmp_path)) as server:
        rl = settings(server, weight_sync_method=method, temperature=0.7, save_rollouts=True)
        train_grpo(
            configuration(tmp_path, rl=rl, train=dict(train_iters=2), checkpoint=dict(save_interval=1))
        )
    steps = metrics(tmp_path / "run")
    assert len(steps) == 2 and all(step["mismatch"] < 1.0001 and step["ratio"] == 1.0 for step in steps)
    assert all(step["drift_canary"] < 1.0001 for step in steps)
    found = load_rollouts(sorted(map(str, (tmp_path / "run" / "rollouts").iterdir())))
    each = [one for group in found.groups for one in group.completions]
    assert [int(one.version[0]) for one in each] == [0] * 8 + [1] * 8
    assert all(one.truncated == (one.ids[-1] != VOCAB - 1) and len(one.ids) <= 8 for one in each)
    exported = export_hf(
        tmp_path / "run" / "checkpoints" / "step_00000001", tmp_path / "hf", show_progress=False
    )
    expected = load_file(exported.path / "model.safetensors")
    assert expected.keys() == server.received.keys()
    for name, tensor in expected.items():
        got = server.received[name]
        assert got.dtype == tensor.dtype and torch.equal(got, tensor), name
    assert not server.paused and (method == "checkpoint" or server.buckets > 4)
    if "/v1/completions" in server.calls:
        assert (
            len({body["seed"] for body in server.bodies}) == 4 + 2 * 2
        )  # the canary's prompts and the steps'
        assert all(body["top_p"] == 1.0 and body["top_k"] == 0 for body in server.bodies)


def sent_in_layout(folder: str, parallel: dict, url: str, dtype: str) -> int:
    """Updates a server twice from a layout of two ranks."""
    rl = dict(engine="vllm", engine_url=url, weight_sync_method="gloo")
    run = run_of(configuration(Path(folder), rl=rl, parallel=parallel, train=dict(precision=dtype)), 2)
    engine = engine_of(run, [])
    engine.update(0)
    report = engine.update(1)
    run.task.close()
    return report.bytes


LAYOUTS = {
    "tp2": (dict(tensor_model_parallel_size=2), "bf16"),
    "pp2": (dict(pipeline_model_parallel_size=2), "fp32"),
    "dp2": (dict(data_parallel_sharding_strategy="optim_grads_params"), "fp32"),
}


def test_every_layout_sends_the_tensors_of_one_process(pool, tmp_path):
    write_prompts(tmp_path)
    one = run_of(configuration(tmp_path), 1)
    expected = {
        name: tensor
        for bucket in WeightStream(one.model, one.config).buckets("cpu")
        for name, tensor in zip(bucket.names, bucket.tensors)
    }
    one.task.close()
    for name, (parallel, dtype) in LAYOUTS.items():
        with served("vllm 0.24", model_tree(tmp_path)) as server:
            sent = pool.run(sent_in_layout, str(tmp_path), parallel, server.url, dtype, size=2)
            assert sent[0] > 0 and sent[1] == 0, name
            for tensor, whole in expected.items():
                got = server.received[tensor]
                assert got.dtype == getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype])
                assert torch.equal(got, whole.to(got.dtype)), (name, tensor)


PROMPTS, SAMPLING = [[1, 2, 3], [4, 5]], Sampling(max_new_tokens=6, stop=(VOCAB - 1,), seed=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    run = run_of(configuration(folder), 1)
    yield run
    run.task.close()


def engine_at(run, server, **more):
    """An engine of this run's model, whose settings are the server's."""
    run.config = run.config.with_settings({f"rl.{k}": v for k, v in settings(server, **more).items()})
    return engine_of(run, [])


def answers(change):
    """A fault in what a server gives: `change` gets the completions as it has them."""

    def plant(server):
        path = "/generate" if server.release == "sglang" else "/v1/completions"
        act = server.routes()["POST", path]

        def faulty(handler, body):
            said = act(body, {})
            if path == "/generate":
                return 200, change(said)
            return 200, {"choices": change(said["choices"])}

        server.plant[path] = faulty

    return plant


def first(edit):
    return answers(lambda found: [edit(found[0]), *found[1:]])


def tokens(ids, logprobs):
    """One completion's, as either server would say them."""
    pairs = [[value, one, None] for one, value in zip(ids or [None] * len(logprobs or []), logprobs or [])]

    def edit(one):
        if "meta_info" in one:
            meta = one["meta_info"] | {"output_token_logprobs": None if logprobs is None else pairs}
            return one | {"output_ids": ids, "meta_info": meta}
        return one | {"token_ids": ids, "logprobs": logprobs and {"token_logprobs": logprobs}}

    return edit


def ended(why):
    def edit(one):
        if "meta_info" in one:
            return one | {"meta_info": one["meta_info"] | {"finish_reason": {"type": why}}}
        return one | {"finish_reason": why}

    return edit


def everywhere(act):
    """What an edit that reads the server's own answer does to the path of its completions."""
    return lambda server: act(COMPLETIONS[server.release == "sglang"])(server)


def status(path, code, words):
    def plant(server):
        server.plant[path] = lambda handler, body: (code, words)

    return plant


def hangs(path):
    """The server takes the request and never answers; what comes after its last good answer has little time."""

    def plant(server):
        def hang(handler, body):
            server.end.wait()
            return None, ""

        server.plant[path] = hang

    return plant


def sets(**values):
    return lambda server: [setattr(server, name, value) for name, value in values.items()]


def cut_off(path):
    """It dies within its answer."""

    def plant(server):
        def answer(handler, body):
            handler.send_response(200)
            handler.send_header("Content-Length", "100")
            handler.end_headers()
            handler.wfile.write(b"{")
            handler.close_connection = True
            return None, ""

        server.plant[path] = answer

    return plant


COMPLETIONS = "/v1/completions", "/generate"
BAD_ANSWERS = {
    "fewer completions": (answers(lambda found: found[1:]), "returned 2 completions .* but 3 were requested"),
    "no ids": (first(tokens(None, [-0.5])), "has no token ids"),
    "no log-probabilities": (first(tokens([1, 2], None)), "no log-probabilities"),
    "null ones": (first(tokens([1, 2], [None, None])), "no log-probabilities"),
    "NaN": (first(tokens([1, 2], [None, math.nan])), "no log-probabilities"),
    "fewer log-probabilities": (first(tokens([1, 2, 3], [-0.5])), "3 tokens but 1 log-prob"),
    "odd log-probabilities": (first(tokens([1, 2], [-0.5, "x"])), "log-probability 'x', but log-probabilities are"),
    "too long": (first(tokens([1] * 7, [-0.5] * 7)), "7 tokens, but at most 6"),
    "outside": (first(tokens([1, 17], [-0.5, -0.5])), "token 17, but the vocabulary has 17"),
    "aborted": (first(ended("abort")), "ended a completion with finish_reason 'abort'"),
    "above 0": (first(tokens([1, 2], [-0.5, 3.5])), "log-probability 3.5, but log-probabilities are"),
    "no completions": (everywhere(lambda path: status(path, 200, {"error": "x"})), "without (choices|completions)"),
    "no JSON": (everywhere(lambda path: status(path, 200, None)), "without (choices|completions)"),
    "half an answer": (everywhere(cut_off), "closed the connection during POST .*IncompleteRead"),
    "an error": (everywhere(lambda path: status(path, 500, {"error": "out of memory"})), "with 500: .*out of memory"),
    "died": (everywhere(lambda path: status(path, None, "")), "closed the connection during POST /(v1|generate)"),
    "old weights": (sets(version="4"), "with version '4', but those of step 5 were sent"),
    "restarted": (sets(version=None), "with version 'default', but those of step 5"),
}  # fmt: skip
UNTOLD = {("vllm 0.24", "old weights"), ("vllm 0.24", "restarted")}  # it has no word for its weights


@pytest.fixture(scope="module")
def synced(run, tmp_path_factory):
    """Of each kind a server with the run's weights, as those of step 5."""
    tree, found = model_tree(tmp_path_factory.mktemp("tree")), {}
    with served("vllm 0.24", tree) as a, served("vllm 0.29", tree) as b, served("sglang", tree) as c:
        for kind, server in zip(KINDS, (a, b, c)):
            engine = engine_at(run, server)
            engine.update(5)
            found[kind] = server, engine
        yield found


@pytest.mark.parametrize("fault", BAD_ANSWERS)
@pytest.mark.parametrize("kind", by_default(KINDS, "sglang"))
def test_what_is_no_completion_of_these_weights_is_a_sentence(synced, kind, fault):
    plant, said = BAD_ANSWERS[fault]
    server, engine = synced[kind]
    kept = server.version
    plant(server)
    try:
        if (kind, fault) in UNTOLD:
            engine.generate(PROMPTS, SAMPLING, num_generations=3)
        else:
            with pytest.raises(TrainingError, match=said):
                engine.generate(PROMPTS, SAMPLING, num_generations=3)
    finally:
        server.plant.clear()
        server.version = kept
    found = engine.generate(PROMPTS, SAMPLING, num_generations=3)
    assert [(one.prompt, one.generation) for one in found] == [(p, g) for p in range(2) for g in range(3)]
    assert all(one.versions == (5,) for one in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_probability_that_is_null_alone_is_not_known(synced, kind):
    server, engine = synced[kind]
    first(tokens([1, 2], [None, -0.5]))(server)
    try:
        found = engine.generate([[1, 2, 3]], SAMPLING, num_generations=3)
    finally:
        server.plant.clear()
    assert [math.isnan(value) for one in found for value in one.logprobs].count(True) == 1


def test_the_stand_ins_log_probabilities_are_the_trainers(run, synced):
    """The same tokens by our own engine's model and by the server's."""
    for server, engine in synced.values():
        one = engine.generate([[1, 2, 3]], SAMPLING)[0]
        with torch.no_grad():
            logits = run.model(torch.tensor([[1, 2, 3, *one.ids]]))[0].float()
        ours = logits.log_softmax(-1)[2 : 2 + len(one.ids)].gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        assert np.allclose(ours, one.logprobs, atol=1e-5), server.release


def unreachable(server):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        server.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"


UPDATE, GROUP, BEGIN, FINISH = range(4)
PATHS = {
    "vllm": ("/update_weights", "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"),
    "sglang": (
        "/update_weights_from_distributed", "/init_weights_update_group", "/pause_generation", "/continue_generation",
    ),
}  # fmt: skip


def path_of(server, request):
    return PATHS["sglang" if server.release == "sglang" else "vllm"][request]


def at(request, act, *more):
    return lambda server: act(path_of(server, request), *more)(server)


BAD_SYNCS = {
    "not there": (unreachable, "cannot be reached for GET /health .*: it is not running, .* stopped waiting after"),
    "slow": (at(UPDATE, hangs), r"has not answered POST /update_weights\w* within .* s .rl.weight_sync_timeout"),
    "dead": (at(UPDATE, status, None, ""), "closed the connection during POST /update_weights"),
    "refuses the update": (at(UPDATE, status, 500, {"error": "shape mismatch"}), "with 500: .*shape mismatch"),
    "refuses the group": (at(GROUP, status, 500, {"error": "no port"}), "500: .*no port"),
    "no transfer": (at(BEGIN, status, 404, {}), "(has no|refuses POST) /(start_weight_update|pause_generation)"),
    "does not resume": (at(FINISH, status, 500, {}), "refuses POST /(finish_weight_update|continue_generation)"),
    "loading for ever": (status("/health", 503, {}), "refuses GET /health with 503.* stopped waiting after 1 s"),
    "more workers than join": (
        sets(workers=2, sizes={"tp_size": 2}),
        "joining the group of weights (is not over|failed)|answered POST /init_weight\\w* within",
    ),
}  # fmt: skip
OF_VLLM = {
    "no developers' mode": (status("/server_info", 404, {}), "not in development mode, or older than 0.21"),
    "raw log-probabilities": (
        sets(logprobs_mode="raw_logprobs"),
        "logprobs_mode raw_logprobs, but the ratio needs log-probabilities after",
    ),
    "another backend": (
        sets(transfer={"backend": "nccl"}),
        "weight_sync_method is gloo, but the weight transfer backend of .* is nccl; set rl.weight_sync_method",
    ),
    "no backend": (sets(transfer=None), "weight_sync_method is gloo, but the weight .* is none; set rl"),
    "not vLLM": (status("/v1/models", 200, {}), "returns no model"),
    "no workers": (sets(workers=None), "returns a world size of None"),
}
OF_SGLANG = {
    "no success": (
        at(UPDATE, status, 200, {"success": False, "message": "no group"}),
        "failed at POST .*: no group",
    ),
    "no sizes": (sets(sizes={"tp_size": "two"}), "returns the sizes .*check that it is an SGLang server"),
    "stages": (sets(sizes={"pp_size": 2}), "has pp_size 2 and dp_size 1, but SGLang numbers the workers"),
}
WAITED_OUT = (
    "slow",
    "loading for ever",
    "more workers than join",
    "not there",
)  # by default for one server each
SYNCS = [("vllm 0.24", fault) for fault in BAD_SYNCS | OF_VLLM]
SYNCS += [
    ("vllm 0.29", fault) for fault in BAD_SYNCS | OF_VLLM if fault not in ("slow", "more workers than join")
]
SYNCS += [("sglang", fault) for fault in BAD_SYNCS | OF_SGLANG]
CHOSEN = [
    (kind, fault)
    for kind, fault in SYNCS
    if (kind != "vllm 0.24" and fault not in WAITED_OUT)
    or (kind, fault) in (
        ("vllm 0.24", "slow"), ("sglang", "loading for ever"), ("vllm 0.24", "more workers than join"),
        ("sglang", "not there"),
    )
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fault"), by_default(SYNCS, *CHOSEN))
def test_a_sync_that_cannot_be_ends_within_its_time_with_a_sentence(run, tmp_path, kind, fault):
    plant, said = (BAD_SYNCS | OF_VLLM | OF_SGLANG)[fault]
    with served(kind, model_tree(tmp_path)) as server:
        plant(server)
        times = {"not there": 0.5, "loading for ever": 1.0, "slow": 1.0, "more workers than join": 1.0}
        engine = engine_at(run, server, weight_sync_timeout=times.get(fault, 600.0))
        with pytest.raises(TrainingError, match=said):
            engine.update(0)
        assert engine.version == -1
        resumes = ("/resume", path_of(server, FINISH))
        assert fault in ("slow", "not there") or not server.paused or server.calls[-1] in resumes


@pytest.mark.parametrize("kind", by_default(KINDS, "vllm 0.29"))
def test_completions_that_do_not_come_end_within_their_time(run, tmp_path, kind):
    with served(kind, model_tree(tmp_path)) as server:
        engine = engine_at(run, server, generation_timeout=0.5)
        engine.update(0)
        everywhere(hangs)(server)
        with pytest.raises(
            TrainingError, match=r"has not answered POST /\S+ within 0.5 s .rl.generation_timeout"
        ):
            engine.generate(PROMPTS, SAMPLING)


def test_a_server_is_waited_for_and_a_restarted_one_gets_a_new_group(run, tmp_path):
    with served("vllm 0.29", model_tree(tmp_path)) as server:
        answers_left = [503, 503]
        server.plant["/health"] = lambda handler, body: (answers_left.pop() if answers_left else 200, {})
        engine = engine_at(run, server)
        engine.update(0)
        assert server.calls.count("/health") == 3
        engine.update(1)
        assert server.calls.count("/init_weight_transfer_engine") == 1
        server.version = server.group = None  # as after a restart
        engine.update(2)
        assert server.calls.count("/init_weight_transfer_engine") == 2 and server.version == "2"


@pytest.mark.parametrize("kind", ["vllm 0.20", "vllm 0.27"])
def test_releases_between_the_shapes_are_spoken_or_named(run, tmp_path, kind):
    """0.20 has nothing to begin an update by, 0.27 the older transfer with versions already."""
    with served(kind, model_tree(tmp_path)) as server:
        engine = engine_at(run, server)
        if kind == "vllm 0.20":
            with pytest.raises(
                TrainingError, match=r"has no /start_weight_update: .*older than 0\.21 .*checkpoint"
            ):
                engine.update(4)
            engine = engine_at(run, server, weight_sync_method="checkpoint")
        engine.update(4)
        assert engine.generate(PROMPTS[:1], SAMPLING)[0].versions == (4,) and server.received


def test_a_server_that_fails_to_say_what_it_is_may_be_right(run, tmp_path):
    """As vLLM 0.29 on a CPU, whose /server_info ends with a 500 on some machines."""
    with served("vllm 0.29", model_tree(tmp_path)) as server:
        server.plant["/server_info"] = lambda handler, body: (500, {"error": "'NoneType' has no attribute"})
        engine = engine_at(run, server)
        engine.update(0)
        assert len(engine.generate(PROMPTS, SAMPLING)) == 2


@pytest.mark.parametrize("other", ["vllm 0.24", "vllm 0.29"])
def test_several_servers_share_the_prompts_and_all_get_the_weights(run, tmp_path, other):
    tree = model_tree(tmp_path)
    with served("vllm 0.24", tree) as one, served(other, tree) as two:
        engine = engine_at(run, one, engine_url=f"{one.url}, {two.url}/")
        engine.update(0)
        found = engine.generate([[1, 2], [3, 4], [5, 6]], SAMPLING, num_generations=2)
        assert [one_.prompt for one_ in found] == [0, 0, 1, 1, 2, 2]
        assert len(one.bodies) == 2 and len(two.bodies) == 1
        assert all(torch.equal(one.received[name], two.received[name]) for name in one.received)


def test_weights_that_a_server_says_it_took_and_did_not_are_found_by_the_canary(tmp_path):
    with served("vllm 0.24", model_tree(tmp_path)) as server:
        server.load = lambda tensors: None
        with pytest.raises(TrainingError, match="the server's weights cannot be inspected"):
            train_grpo(configuration(tmp_path, rl=settings(server), train=dict(train_iters=1)))


def test_the_next_batch_is_sampled_while_this_one_is_trained_on(tmp_path, monkeypatch):
    """A server that gives no further completion until the trainer's next backward pass has begun, and the run after it
    was cut, from its checkpoint."""
    tree, trained = model_tree(tmp_path), [Event() for _ in range(5)]
    real = Run.gradients

    def gradients(run, micro_batches):
        trained[run.step].set()
        return real(run, micro_batches)

    def waits(server):
        act, seen = server.routes()["POST", "/v1/completions"], []

        def answer(handler, body):
            seen.append(body["n"])
            batch = (
                sum(count == 4 for count in seen) - 1
            ) // 2  # of two prompts; the canary asks for one completion
            if body["n"] == 4 and batch > 0:
                assert trained[batch - 1].wait(PATIENCE.seconds)
            return 200, act(body, {})

        server.plant["/v1/completions"] = answer

    def a_run(folder, **train):
        with served("vllm 0.24", tree) as server:
            waits(server) if not train else None
            rl = settings(server, max_staleness=1)
            sections = dict(rl=rl, train=dict(train_iters=4, output_dir=str(tmp_path / folder)) | train)
            sections["optim"] = dict(lr=1e-3)
            begun = (tmp_path / folder).exists()
            sections["checkpoint"] = {"save_interval": 1} | (
                {"load": str(tmp_path / folder)} if begun else {}
            )
            train_grpo(configuration(tmp_path, **sections))

    with monkeypatch.context() as patch:
        patch.setattr(Run, "gradients", gradients)
        a_run("whole")
    steps = metrics(tmp_path / "whole")
    assert [step["staleness"] for step in steps] == [0, 1, 1, 1]
    assert steps[0]["mismatch"] < 1.0001 < min(step["mismatch"] for step in steps[1:])
    assert all(step["drift_canary"] < 1.0001 for step in steps)
    a_run("cut", exit_interval=2)
    kept = tmp_path / "cut" / "checkpoints" / "step_00000002" / "task" / "queue.json.zst"
    queue, _ = decode_queue(kept.read_bytes())
    assert list(queue) == [2] and queue[2].is_scored
    assert {v for record in queue[2].records for one in record.samples for v in one.versions} == {1}
    a_run("cut", exit_interval=None)
    again = metrics(tmp_path / "cut")
    assert [step["loss"] for step in again] == [step["loss"] for step in steps]
    assert [step["staleness"] for step in again] == [0, 1, 1, 1]


def test_a_batch_ahead_that_fails_ends_the_run(tmp_path):
    with served("vllm 0.24", model_tree(tmp_path)) as server:
        act, seen = server.routes()["POST", "/v1/completions"], []

        def fails(handler, body):
            seen.append(body["n"])
            return (500, {"error": "gone"}) if seen.count(4) > 2 else (200, act(body, {}))

        server.plant["/v1/completions"] = fails
        with pytest.raises(TrainingError, match=r"refuses POST /v1/completions with 500: .*gone"):
            train_grpo(configuration(tmp_path, rl=settings(server, max_staleness=1)))
    assert len(metrics(tmp_path / "run")) == 0


@pytest.mark.parametrize("kind", ["vllm 0.26", "vllm 0.27", "vllm 0.29"])
def test_by_ipc_a_server_is_told_where_each_tensor_lies(run, tmp_path, monkeypatch, kind):
    """With the tensors themselves in the place of handles, which only a GPU has."""

    def handles(tensors):
        return base64.b64encode(pickle.dumps([{"GPU-0": tensor.tolist()} for tensor in tensors])).decode()

    monkeypatch.setattr(weight_transfers, "memory_handles", handles)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with served(kind, model_tree(tmp_path)) as server:
        server.transfer = {"backend": "ipc"}
        engine = engine_at(run, server, weight_sync_method="gloo")
        engine.settings = engine.settings.model_copy(update={"weight_sync_method": "ipc"})
        for version in (1, 2):
            engine.update(version)
        assert server.calls.count("/init_weight_transfer_engine") == 1 and server.group is None
        sent = {
            name: tensor
            for one in WeightStream(run.model, run.config).buckets("cpu")
            for name, tensor in zip(one.names, one.tensors)
        }
        assert sent.keys() == server.received.keys()
        assert all(torch.equal(server.received[name], tensor) for name, tensor in sent.items())
        assert engine.generate([[1, 2, 3]], SAMPLING, num_generations=1)[0].versions == (2,)
        server.workers = 2
        engine.forget()
        with pytest.raises(TrainingError, match="has 2 workers on different GPUs"):
            engine.update(3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_reach_another_gpu_by_nccl(tmp_path):
    """Over the group that SGLang makes; the trainer is on the first GPU, the stand-in on the second."""
    with served("sglang", model_tree(tmp_path)) as server:
        server.device = torch.device("cuda", 1)
        rl = settings(server, weight_sync_method="nccl")
        tree = configuration(tmp_path, rl=rl, train=dict(precision="bf16"), runtime=dict(device="cuda"))
        config, tokenizer, _ = prepare(tree, 1)
        run = Run(
            config, tokenizer, build_mesh(config.parallel, 1, "cuda"), torch.device("cuda", 0), PolicyTask()
        )
        engine = engine_of(run, [])
        engine.update(0)
        engine.update(1)
        run.task.close()
        buckets = WeightStream(run.model, config).buckets("cpu")
        sent = {name: tensor for one in buckets for name, tensor in zip(one.names, one.tensors)}
    assert sent.keys() == server.received.keys() and server.version == "1"
    assert all(torch.equal(server.received[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (dict(rl=dict(engine="sglang", weight_sync_method="nccl")), "is nccl, but the trainer is on cpu"),
        (dict(rl=dict(engine="sglang", weight_sync_method="ipc")), "ipc, but rl.engine is sglang"),
        (
            dict(rl=dict(engine="vllm", engine_url="http://127.0.0.1:1", weight_sync_method="ipc")),
            "is ipc, but the trainer is on cpu",
        ),
        (dict(rl=dict(engine="vllm", engine_url="localhost:8000")), "must be an address such as http://"),
        (
            dict(rl=dict(engine="vllm", engine_url="http://h:80a")),
            "is 'http://h:80a', but must be an address such as http://",
        ),
        (dict(rl=dict(engine="vllm", engine_url="http://me:pw@h:80")), "a user name for h, but"),
        (dict(rl=dict(engine="vllm", engine_url=[])), "rl.engine_url is empty"),
        (dict(rl=dict(engine="vllm", engine_url="http://a:1,http://b:1, http://a:1/")), "http://a:1 2 times"),
        (dict(rl=dict(engine="sglang", top_p=0.9)), "rl.top_p is 0.9"),
        (dict(rl=dict(max_staleness=1)), "rl.max_staleness"),
        (
            dict(rl=dict(engine="sglang", max_staleness=1, vllm_importance_sampling_correction=False)),
            "nothing would correct",
        ),
        (
            dict(rl=dict(engine="sglang", max_staleness=1, filter_zero_std=True, max_resamples=1)),
            "are known only after",
        ),
    ],
)
def test_what_no_server_can_be_asked_is_refused(tmp_path, sections, said):
    with pytest.raises(ConfigError, match=said):
        train_grpo(configuration(tmp_path, **sections))


def test_a_server_gets_the_weights_with_their_adapters_merged(tmp_path):
    train_grpo(configuration(tmp_path, train=dict(train_iters=1)))
    policy = str(tmp_path / "run")
    with served("vllm 0.24", model_tree(tmp_path)) as server:
        lora = dict(rank=4, alpha=8.0, targets=["linear_qkv", "linear_fc1", "linear_fc2"])
        train = dict(train_iters=3, output_dir=str(tmp_path / "lora"))
        sections = dict(
            lora=lora, train=train, model=dict(init_from=policy), checkpoint=dict(save_interval=1)
        )
        train_grpo(configuration(tmp_path, rl=settings(server), **sections))
    steps = metrics(tmp_path / "lora")
    assert len(steps) == 3 and all(step["drift_canary"] < 1.0001 for step in steps)
    merge(tmp_path / "lora" / "checkpoints" / "step_00000002", tmp_path / "merged", show_progress=False)
    exported = export_hf(tmp_path / "merged", tmp_path / "hf", show_progress=False)
    expected = load_file(exported.path / "model.safetensors")
    began = load_file(export_hf(policy, tmp_path / "first", show_progress=False).path / "model.safetensors")
    assert all(torch.equal(server.received[name], tensor) for name, tensor in expected.items())
    assert sum(not torch.equal(began[name], tensor) for name, tensor in expected.items()) >= 10


@pytest.mark.parametrize("kind", ["vllm 0.24", "sglang", in_full("vllm 0.29")])
def test_a_server_loads_the_adapters_alone_on_its_base(tmp_path, kind):
    train_grpo(configuration(tmp_path, train=dict(train_iters=1)))
    policy, moved = str(tmp_path / "run"), []
    base = load_file(export_hf(policy, tmp_path / "base", show_progress=False).path / "model.safetensors")
    with served(kind, model_tree(tmp_path)) as server:
        server.load(base.items())
        server.received.clear()
        lora = dict(rank=4, alpha=8.0, targets=["linear_qkv", "linear_fc1", "linear_fc2"])
        train = dict(train_iters=3, output_dir=str(tmp_path / "lora"))
        rl = settings(server, weight_sync_method="lora")
        sections = dict(
            lora=lora, train=train, model=dict(init_from=policy), checkpoint=dict(save_interval=1)
        )
        train_grpo(configuration(tmp_path, rl=rl, **sections))
        assert not server.received and not server.paused  # no weight was sent
        (name,) = server.adapted  # earlier ones are unloaded
        assert (
            [folder.name for folder in (tmp_path / "lora/engine_adapters").iterdir()]
            == [name]
            == ["megalith-2"]
        )
        ids = torch.tensor([[1, 2, 3, 4]])
        merge(tmp_path / "lora/checkpoints/step_00000002", tmp_path / "merged", show_progress=False)
        with torch.no_grad():
            theirs = server.adapted[name](ids).logits
            ours = megalith.load(tmp_path / "merged")(ids)
            moved = (theirs - server.model(ids).logits).abs().max() / theirs.abs().max()
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max() < moved
        field = "lora_path" if kind == "sglang" else "model"
        assert {body[field] for body in server.bodies} == {f"megalith-{version}" for version in range(3)}
    steps = metrics(tmp_path / "lora")
    assert len(steps) == 3 and all(step["drift_canary"] < 1.0001 for step in steps)


def adapters_in_layout(folder: str, policy: str, parallel: dict, url: str) -> int:
    """Updates a server from a layout of two ranks."""
    rl = dict(engine="vllm", engine_url=url, weight_sync_method="lora")
    sections = dict(rl=rl, parallel=parallel, lora=dict(rank=2), model=dict(init_from=policy))
    run = run_of(configuration(Path(folder), **sections), len(parallel) + 1)
    engine = engine_of(run, [])
    sent = engine.update(0).bytes
    run.task.close()
    return sent


def test_every_layout_writes_the_adapters_of_one_process_and_nothing_else(pool, tmp_path):
    train_grpo(configuration(tmp_path, train=dict(train_iters=1)))
    policy, folder, found = str(tmp_path / "run"), tmp_path / "run/engine_adapters/megalith-0", {}
    with served("vllm 0.24", model_tree(tmp_path)) as server:
        for name in ("one", "tp2", "dp2"):
            parallel = {} if name == "one" else LAYOUTS[name][0]
            arguments = str(tmp_path), policy, parallel, server.url
            if name == "one":
                sent = adapters_in_layout(*arguments)
            else:
                sent, other = pool.run(adapters_in_layout, *arguments, size=2)
                assert other == 0
            found[name] = load_file(folder / "adapter_model.safetensors")
            assert sent == sum(tensor.nbytes for tensor in found[name].values()) > 0
            assert found[name].keys() == found["one"].keys()
            assert all(torch.equal(found["one"][key], tensor) for key, tensor in found[name].items())


def test_adapters_that_a_server_cannot_load_are_sent_merged_and_a_base_without_them_is_refused(tmp_path):
    train_grpo(configuration(tmp_path, train=dict(train_iters=1)))
    policy = str(tmp_path / "run")
    with served("vllm 0.24", model_tree(tmp_path)) as server:
        lora = dict(rank=4, targets=["linear_fc2"], use_dora=True)
        rl, train = (
            settings(server, weight_sync_method="lora"),
            dict(train_iters=1, output_dir=str(tmp_path / "lora")),
        )
        train_grpo(configuration(tmp_path, rl=rl, lora=lora, train=train, model=dict(init_from=policy)))
        assert server.received and not server.adapted
        with pytest.raises(ConfigError, match="weight_sync_method is lora, but the run trains no adapters"):
            train_grpo(configuration(tmp_path, rl=rl))
        lora = dict(rank=4, targets=["linear_fc2"])
        server.plant["/v1/load_lora_adapter"] = lambda handler, body: (404, {"detail": "Not Found"})
        train["output_dir"] = str(tmp_path / "other")
        with pytest.raises(TrainingError, match="start it with: VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
            train_grpo(configuration(tmp_path, rl=rl, lora=lora, train=train, model=dict(init_from=policy)))
        assert not server.paused


def test_a_deadline_covers_headers_that_trickle():
    """Each byte is within the socket's time-out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle():
            with listener.accept()[0] as client, suppress(OSError):
                client.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while True:
                    client.sendall(b"x")
                    over.wait(0.01)

        over = Event()
        Thread(target=trickle, daemon=True).start()
        server = json_http.JsonServer(f"http://127.0.0.1:{listener.getsockname()[1]}", "vLLM")
        with pytest.raises(TrainingError, match=r"has not answered GET /x within 0\.2 s"):
            server.get("/x", Deadline(0.2, "rl.weight_sync_timeout"))


@contextmanager
def answering(head: bytes, piece: bytes) -> Iterator[json_http.JsonServer]:
    """A server that answers with a head and a piece of a body, again and again; an empty piece is not sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with listener.accept()[0] as client, suppress(OSError):
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 " + head + b"\r\n\r\n")
                while piece:  # sending nothing never fails: the thread would spin beside all later tests
                    client.sendall(piece)

        Thread(target=answer, daemon=True).start()
        yield json_http.JsonServer(f"http://127.0.0.1:{listener.getsockname()[1]}", "vLLM")


def test_an_answer_without_end_is_ended_by_its_bytes(monkeypatch):
    monkeypatch.setattr(json_http, "MAX_BYTES", 1 << 20)
    for completion_bytes in (0, 1 << 20):
        said = rf"answers POST /x with more than {(1 << 20) + completion_bytes:,} bytes, which no engine does"
        with answering(b"200 OK", b"x" * 4096) as server, pytest.raises(TrainingError, match=said):
            server.post("/x", {}, Deadline(60.0, "rl.weight_sync_timeout"), completion_bytes)


@pytest.mark.parametrize("target", ["http://127.0.0.1:9/other", "file:///etc/passwd", "/there"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status, target):
    head = f"{status} Elsewhere\r\nLocation: {target}\r\nContent-Length: 0".encode()
    said = f"redirects POST /x to {target}, but redirects are not followed"
    with answering(head, b"") as server, pytest.raises(TrainingError, match=said):
        server.post("/x", {"prompt": "private"}, Deadline(60.0, "rl.weight_sync_timeout"))


def test_json_that_is_nested_too_deeply_is_a_sentence():
    body, said = b"[" * 1_000_000, "answers GET /x with JSON nested too deeply to read"
    head = b"200 OK\r\nContent-Length: %d" % len(body)
    with answering(head, body) as server, pytest.raises(TrainingError, match=said):
        server.get("/x", Deadline(60.0, "rl.weight_sync_timeout"))


def test_a_deadline_covers_an_answer_that_trickles():
    deadline = Deadline(60.0, "rl.weight_sync_timeout")

    class Trickle:
        def read1(self, size):
            deadline._end = 0.0
            return b" "

    server = json_http.JsonServer("http://127.0.0.1:1", "vLLM")
    with pytest.raises(TrainingError, match="has not answered GET /x within 60 s"):
        server._read(Trickle(), "GET /x", deadline, 1)


@pytest.mark.parametrize("kind", ["vllm 0.29", "sglang"])
def test_only_changed_parts_of_layers_are_sent_and_everything_after_a_restart(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 2**14)
    run = run_of(configuration(tmp_path), 1)
    weights = {name: shard.values for name, shard in run.model.parameters.shards.items()}

    def sent(server, engine, version) -> set[str]:
        """Names that an update sends, after which the server has the bits of all weights."""
        before, server.received = server.received, {}
        report, names = engine.update(version), set(server.received)
        assert report.sent_bytes == sum(tensor.nbytes for tensor in server.received.values())
        server.received = before | server.received
        for bucket in WeightStream(run.model, run.config).buckets("cpu"):
            for name, tensor in zip(bucket.names, bucket.tensors):
                assert torch.equal(server.received[name].view(torch.int32), tensor.view(torch.int32)), name
        return names

    with served(kind, model_tree(tmp_path)) as server, torch.no_grad():
        engine = engine_at(run, server, weight_sync_delta=True)
        every = sent(server, engine, 0)
        assert len(sent(server, engine, 1)) == 1  # which carries the version
        assert server.version == "1"
        weights["layers.1.mlp.linear_fc2.weight"][3, 4].mul_(1.5)
        weights["final_layernorm.weight"][2] = -0.0
        changed = sent(server, engine, 2)
        assert {name.rpartition(".layers.")[2] for name in changed} == {
            *(f"1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")), "model.norm.weight",
        }  # fmt: skip
        assert sent(server, engine, 2) == every  # of the same version: the server has lost it
        if kind == "vllm 0.29":
            server.version = server.group = None  # as after a restart
            assert sent(server, engine, 3) == every
        status(path_of(server, UPDATE), 500, {"error": "out of memory"})(server)
        weights["layers.0.mlp.linear_fc2.weight"][0] += 1
        with pytest.raises(TrainingError):
            engine.update(4)
        server.plant.clear()
        assert sent(server, engine, 5) == every
    run.task.close()


@pytest.mark.parametrize("settings", [
    dict(engine="own"), dict(engine="vllm"), dict(engine="sglang", weight_sync_method="checkpoint"),
])  # fmt: skip
def test_deltas_are_refused_where_complete_weights_are_loaded(tmp_path, settings):
    with pytest.raises(ConfigError, match=r"rl\.weight_sync_delta is"):
        prepare(configuration(tmp_path, rl=dict(weight_sync_delta=True) | settings), 1)

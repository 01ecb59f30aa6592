"""Router replay: transformers with the same experts forced, routes as sampled, files, and runs of the loop."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_trajectories
import torch
import transformers
from default_cases import by_default
from models.reference import VOCAB, reference_and_ours, saved_tensors
from rollout_files import configuration as file_configuration
from rollout_files import rollouts
from small_policy import MODEL, configuration, metrics
from test_environments import Guessing
from test_grpo_layouts import RUNS, STEPS, assert_same, outcome, run_of
from test_trajectories import CHATTY, settings
from tool_policy import TEMPLATE, write_tokenizer

import megalith
from megalith.bridge.families import family_of
from megalith.bridge.transfer import to_ours
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.errors import ConfigError, DataError
from megalith.generation.engine import Engine
from megalith.generation.requests import Completion, Sampling
from megalith.models.inputs import TokenInputs
from megalith.models.pass_context import LayerRoutes
from megalith.models.transformer import Stack
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import relative_error
from megalith.rl.agents.trajectory import Trajectory
from megalith.rl.auxiliary_models.critic import Critic
from megalith.rl.engines.server_engine import ServerEngine
from megalith.rl.engines.sglang_server import SglangServer
from megalith.rl.engines.vllm_server import VllmServer
from megalith.rl.grpo import open_rollouts, train_grpo
from megalith.rl.rollouts.rollout_reader import load_rollouts
from megalith.rl.rollouts.rollouts import Rollouts, save_rollouts
from megalith.rl.rollouts.routes import decode_routes, encode_routes, server_routes
from megalith.rl.sampling import scored_groups
from megalith.rl.sampling.scored_groups import Sampled
from megalith.rl.teachers.teacher_advantages import TeacherAdvantages

EXPERTS = dict(num_experts=4, moe_router_topk=2, num_layers=2)
REPLAY = dict(router_replay="policy")


def random_routes(shape: tuple[int, ...], experts: int, topk: int, seed: int = 0) -> np.ndarray:
    """Return `topk` different experts for each entry, int16 [*shape, topk]."""
    order = np.random.default_rng(seed).random((*shape, experts)).argsort(-1)
    return order[..., :topk].astype(np.int16)


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_loss_and_gradients_equal_transformers_with_the_same_experts(name, monkeypatch):
    reference, model = reference_and_ours(name, std=0.3)
    config, ids = model.config, torch.randint(0, VOCAB, (2, 25))
    layers, topk = len(config.routed_layers), config.moe_router_topk
    routes = torch.from_numpy(random_routes((2, 24, layers), config.num_experts, topk))
    # the last tokens leave the choice to the router, as padding does
    routes[:, -3:] = -1
    forced = iter(routes.transpose(0, 2).transpose(1, 2).flatten(1, 2))  # of each layer, [tokens, topk]
    choose = torch.topk

    def take_over(values, *args, **options):
        chosen = choose(values, *args, **options).indices
        replayed = next(forced).long()
        chosen = torch.where(replayed >= 0, replayed, chosen)
        return values.gather(1, chosen), chosen

    monkeypatch.setattr(torch, "topk", take_over)
    logits = reference(ids[:, :-1]).logits
    monkeypatch.undo()
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    labels = ids[:, 1:].contiguous()
    ours = model(ids[:, :-1].contiguous(), token_inputs=TokenInputs(routes=routes), labels=labels)
    assert torch.allclose(ours, theirs, rtol=1e-5)
    assert not torch.allclose(model(ids[:, :-1].contiguous(), labels=labels), theirs, rtol=1e-3)
    theirs.backward()
    ours.backward()
    for parameter in reference.parameters():
        parameter.data = parameter.grad
    gradients = saved_tensors(reference)  # under the names of a saved model
    named, routers = dict(model.named_parameters()), 0
    for group in family_of(reference.config.to_dict(), name).groups(config):
        expected, gradient = to_ours(group, gradients.__getitem__), named[group.name].grad
        assert (gradient[: len(expected)] - expected).abs().max() <= 1e-5 * expected.abs().max(), group.name
        routers += "router" in group.name
    assert routers == layers


def test_an_engine_returns_the_experts_that_the_model_chooses():
    _, model = reference_and_ours("mixtral")
    config = model.config
    engine = Engine(config, "cpu", torch.float32, max_rows=3, max_tokens=24, model=model, records_routes=True)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    shape = len(config.routed_layers), config.moe_router_topk
    for one in engine.generate(prompts, Sampling(max_new_tokens=7, stop=(3, 5, 9)), num_generations=2):
        ids = torch.tensor([prompts[one.prompt] + one.ids])
        tokens = ids.shape[1] - 1
        assert one.routes.shape == (tokens, *shape)
        chosen = model(ids[:, :-1])
        replayed = model(ids[:, :-1], token_inputs=TokenInputs(routes=torch.from_numpy(one.routes)[None]))
        assert torch.equal(replayed, chosen)
        others = (one.routes + 1) % config.num_experts
        replayed = model(ids[:, :-1], token_inputs=TokenInputs(routes=torch.from_numpy(others)[None]))
        assert not torch.allclose(replayed, chosen, atol=1e-3)


def test_replay_removes_what_other_choices_of_experts_add_to_the_drift():
    """An engine whose router scores differ by 0.5 % stands for one with other kernels."""
    _, model = reference_and_ours("mixtral", std=0.3)
    _, other = reference_and_ours("mixtral")
    other.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    for name, parameter in other.named_parameters():
        if "router" in name:
            parameter.data *= 1 + 0.005 * torch.randn_like(parameter)
    engine = Engine(
        model.config, "cpu", torch.float32, max_rows=8, max_tokens=40, model=other, records_routes=True
    )
    completions = engine.generate([[n] for n in range(8)], Sampling(max_new_tokens=32), num_generations=1)
    drift = {"replayed": [], "chosen": []}
    for one in completions:
        ids = torch.tensor([[one.prompt, *one.ids]])
        for name, routes in ("replayed", torch.from_numpy(one.routes)[None]), ("chosen", None):
            with torch.no_grad():
                logits = model(ids[:, :-1], token_inputs=TokenInputs(routes=routes))
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0]
            drift[name] += (logprobs - torch.tensor(one.logprobs)).abs().tolist()
    assert max(drift["replayed"]) < 0.01 and max(drift["chosen"]) > 0.1


def routed(folder) -> Rollouts:
    """The rollouts of rollout_files.py with random routes, in folder/rollouts.jsonl."""
    made, seed = rollouts(), 0
    groups = []
    for group in made.groups:
        completions = []
        for one in group.completions:
            tokens, seed = len(group.prompt_ids) + len(one.ids) - 1, seed + 1
            completions.append(replace(one, routes=random_routes((tokens, 2), 4, 2, seed)))
        groups.append(replace(group, completions=completions))
    save_rollouts(folder / "rollouts.jsonl", made := Rollouts(groups, made.rewards))
    return made


def test_files_keep_routes_and_damaged_ones_are_refused(tmp_path):
    made = routed(tmp_path)
    path = tmp_path / "rollouts.jsonl"
    for mine, group in zip(load_rollouts(path).groups, made.groups, strict=True):
        for one, expected in zip(mine.completions, group.completions, strict=True):
            assert one.routes.dtype == np.int16 and np.array_equal(one.routes, expected.routes)
    config = file_configuration(tmp_path, model=EXPERTS, **REPLAY)
    opened = open_rollouts(config, None)
    group = opened.read(opened.entries[1:2])[0]
    assert np.array_equal(np.asarray(group.completions[2].routes), made.groups[1].completions[2].routes)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    routes = made.groups[0].completions[0].routes
    twice = np.repeat(routes[..., :1], 2, -1)
    encoded = encode_routes(routes)
    for value, said in (
        (None, r"line 2, sample 0 has no expert choices \(routes\), which rl.router_replay needs"),
        (5, "has routes 5; routes must be an object"),
        (encoded | {"dtype": "float64"}, "routes must be an object with shape"),
        (encoded | {"data": "$" + encoded["data"][1:]}, "routes must be an object with shape"),
        (encoded | {"shape": [1, 2]}, "routes must be an object with shape"),
        (encoded | {"data": encoded["data"][:-4]}, "bytes of data; sample again"),
        (encode_routes(routes[1:]), "needed: all tokens of prompt and completion except the last,"),
        (encode_routes(routes[:, :1]), "needed: all tokens of prompt and completion except the last,"),
        (encode_routes(routes + 3), "the model has the experts 0 to 3"),
        (encode_routes(twice), "routed to the same expert twice"),
    ):
        lines[1]["samples"][0]["routes"] = value
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(DataError, match=said):
            open_rollouts(config, None)
    open_rollouts(config.with_settings({"rl.router_replay": "none"}), None)
    large = np.array([[[300, 2]]])
    assert np.array_equal(decode_routes("", encode_routes(large)), large)


NAMES = "ep2", "tp2-sp-ep2", "pp2-ep2", "cp2-ep2", "tp2-sp-etp2-ep2", "pp2-zero_bubble-tp2-sp-ep2"
CASES = [(layout, kind) for layout in NAMES for kind in ("padded", "packed")]


@pytest.mark.parametrize(
    ("layout", "kind"), by_default(CASES, ("cp2-ep2", "packed"), ("tp2-sp-ep2", "padded"))
)
def test_every_layout_replays_as_one_process(pool, tmp_path, layout, kind):
    routed(tmp_path)

    def run(parallel: dict | None = None, **more) -> RunConfig:
        changes = RUNS[kind] | REPLAY | more
        train = dict(train_iters=STEPS + 1)
        return file_configuration(tmp_path, parallel, train=train, lr=1e-3, model=EXPERTS, **changes)

    one = outcome(run())
    assert relative_error(outcome(run(router_replay="none"))["norms"], one["norms"]) > 1e-3
    for mine in pool.run(outcome, run(LAYOUTS[layout].parallel), size=LAYOUTS[layout].processes):
        assert_same(mine, one, (layout, kind))


@pytest.mark.parametrize("passes", ["policy", "all"])
def test_the_reference_replays_if_all_passes_do(tmp_path, passes):
    routed(tmp_path)
    run = run_of(file_configuration(tmp_path, model=EXPERTS, beta=0.1, router_replay=passes))
    score, batches = run.data._reference, []
    run.data._reference = lambda flat: batches.extend(flat) or score(flat)
    with run.data.train_loader(0, 0, run.device) as micro_batches:
        first = next(micro_batches)
    assert all((batch.routes is not None) == (passes == "all") for batch in batches)
    assert batches and first.routes.dtype == torch.int16 and (first.routes >= 0).any()
    assert (first.routes[first.all_padding] == -1).all() and (first.routes[~first.all_padding] >= 0).all()


def test_a_teacher_and_a_critic_choose_experts_by_themselves(tmp_path):
    routed(tmp_path)
    run, scored = run_of(file_configuration(tmp_path, model=EXPERTS, router_replay="all")), []
    with run.data.train_loader(0, 0, run.device) as micro_batches:
        batches = [next(micro_batches)]

    def score(flat: list) -> list[torch.Tensor]:
        scored.extend(flat)
        return [torch.zeros(batch.labels.shape) for batch in flat]

    teacher, critic = object.__new__(TeacherAdvantages), object.__new__(Critic)
    teacher._run, teacher._rl, teacher._teacher = run, run.config.rl, score
    critic._run, critic._rl, critic.model = run, run.config.rl, SimpleNamespace(all_logprobs=score)
    results = [*teacher.add(batches), *critic.with_advantages([batches])[0]]
    assert len(scored) == 2 and all(batch.routes is None for batch in scored)
    assert all(batch.routes is not None for batch in results)  # the policy's passes replay


def chosen_routes(model, ids: torch.Tensor) -> np.ndarray:
    """Return the experts that the model's routers choose for ids [1, tokens], int16 [tokens, layers, topk]."""
    context, layers = model.context(ids), model.config.routed_layers
    recorded = torch.zeros(len(layers), ids.shape[1], model.config.moe_router_topk, dtype=torch.int16)
    context.routes = {number: LayerRoutes(recorded=part) for number, part in zip(layers, recorded)}
    with torch.no_grad():
        Stack.forward(model, model.embed(ids, context), context)
    return recorded.transpose(0, 1).numpy()


def all_samples(folder):
    """Yield token ids, number of tokens in the prompt and completion of each rollout of a run."""
    for path in sorted((folder / "rollouts").iterdir()):
        for group in load_rollouts(path).groups:
            for one in group.completions:
                prompt = group.prompt_of(one)
                yield torch.tensor([[*prompt, *one.ids]]), len(prompt), one


def test_a_run_resumes_inside_a_rollout_batch_with_its_routes(tmp_path):
    def train(name: str, steps: int, load: str | None = None) -> list[dict]:
        sections = dict(
            model=MODEL | EXPERTS | dict(init_method_std=0.2),
            rl=REPLAY | dict(num_iterations=2, save_rollouts=True),
            checkpoint=dict(save_interval=1) | ({"load": load} if load else {}),
            train=dict(
                train_iters=steps, micro_batch_size=2, global_batch_size=8, output_dir=str(tmp_path / name)
            ),
        )
        train_grpo(configuration(tmp_path, **sections))
        return metrics(tmp_path / name)

    whole = train("whole", 4)
    assert whole[0]["mismatch"] == pytest.approx(1, abs=1e-5)
    model = megalith.load(tmp_path / "whole" / "checkpoints" / "step_00000002")  # sampled the second batch
    samples = [one for one in all_samples(tmp_path / "whole") if one[2].version[0] == 2]
    assert len(samples) == 8
    for ids, _, one in samples:
        assert np.array_equal(one.routes, chosen_routes(model, ids[:, :-1]))
    resumed = train("resumed", 4, str(tmp_path / "whole" / "checkpoints" / "step_00000003"))
    assert [step["loss"] for step in resumed] == [whole[3]["loss"]]


def test_a_completion_of_several_requests_keeps_the_first_route_of_each_token():
    routes = random_routes((8, 2), 4, 2)

    def piece(ids: list[int], tokens: int, earlier: int) -> Sampled:
        recorded = routes[:tokens].copy()
        recorded[: max(0, tokens - len(ids)) if earlier else 0] = 9  # computed again, by other weights
        completion = Completion(0, 0, ids, [-1.0] * len(ids), True, (0,), recorded)
        return scored_groups._piece(completion, 3, earlier)

    whole = (
        Sampled().extended(piece([1, 2, 3], 5, 0)).extended(piece([4, 5, 6], 8, 3))
    )  # a prompt of three tokens
    assert np.array_equal(replace(whole, rewards=[1.0]).rated().routes, routes)
    trajectory = Trajectory(0, 0, 0, 0, [7, 8, 9])
    trajectory.sample(Completion(0, 0, [1, 2], [-1.0] * 2, False, (0,), routes[:4]))
    trajectory.add([5, 5])
    later = routes.copy()
    later[:4] = 9
    trajectory.sample(Completion(0, 0, [3, 4], [-1.0] * 2, False, (0,), later))
    assert np.array_equal(replace(Sampled.from_trajectory(trajectory), rewards=[1.0]).rated().routes, routes)


def test_turns_keep_the_routes_of_their_own_sampling(tmp_path):
    sizes = dict(vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=160, num_local_experts=4)  # fmt: skip
    torch.manual_seed(0)
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, initializer_range=0.2))
    folder = tmp_path / "model"
    write_tokenizer(folder, TEMPLATE.partition("\n")[2])
    eod = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][1]["id"]
    mixtral.lm_head.weight.data[eod] *= 8
    mixtral.save_pretrained(folder)
    call_format = f"{Path(test_trajectories.__file__)}:calls_by_the_way"
    rl = REPLAY | {"tool_call_format": call_format}
    config = settings(folder, tmp_path, rl=rl, train={"output_dir": str(tmp_path / "run"), "train_iters": 1})
    train_grpo(RunConfig.from_tree(config), "length", CHATTY, environment_factory=Guessing)
    [step] = metrics(tmp_path / "run")
    assert step["turns"] > 1 and step["mismatch"] == pytest.approx(1, abs=1e-5)
    model = megalith.load(folder)
    for ids, _, one in all_samples(tmp_path / "run"):
        assert np.array_equal(one.routes, chosen_routes(model, ids[:, :-1]))


@pytest.mark.parametrize(
    ("model", "rl", "said"),
    [
        ({}, {}, "the model has no experts"),
        (EXPERTS, dict(engine="vllm"), "vLLM in the trainer's processes returns no expert choices"),
        (
            EXPERTS,
            dict(agent="a.py:agent"),
            "rl.agent is set, but the requests of an agent do not record expert choices",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, model, rl, said):
    with pytest.raises(ConfigError, match=said):
        train_grpo(configuration(tmp_path, model=MODEL | model, rl=REPLAY | rl))


def base64_of(array: np.ndarray, is_file: bool) -> str:
    """Return values in base64: int32 as SGLang sends them, or a .npy file as vLLM does."""
    if not is_file:
        return base64.b64encode(array.astype("<i4").tobytes()).decode()
    np.save(file := io.BytesIO(), array)
    return base64.b64encode(file.getvalue()).decode()


def test_routes_of_servers_are_read_in_each_of_their_forms(tmp_path):
    model = file_configuration(tmp_path, model=EXPERTS | dict(num_layers=3, moe_layer_freq=[0, 1, 1])).model
    routes = random_routes((7, 2), 4, 2)  # of 3 prompt tokens and 5 of a completion, but the last
    all_layers = np.concatenate([np.zeros_like(routes[:, :1]), routes], 1)
    with_last = np.concatenate([routes, routes[:1]])
    for pieces in (
        [base64_of(all_layers, is_file=False)],
        [base64_of(routes, is_file=False)],
        [None, base64_of(routes.astype(np.uint8), is_file=True)],
        [None, base64_of(with_last, is_file=True)],
        [routes[:3].tolist(), with_last[3:].tolist()],
    ):
        assert np.array_equal(server_routes("", pieces, 7, model), routes)
    for pieces, said in (
        ([None, None], "no expert choices .*start the server with --enable-return-routed-experts"),
        ([base64_of(routes[1:], is_file=False)], "but \\[7, 2, 2\\] is needed"),
        ([base64_of(routes[1:], is_file=True)], "but \\[7, 2, 2\\] is needed"),
        ([routes[:3].tolist(), routes[3:, :1].tolist()], "but \\[7, 2, 2\\] is needed"),
        ([[[1], [1, 2]]], "are not integers"),
        (["$"], "are not integers"),
        ([base64_of(routes * 0.5, is_file=True)], "are not integers"),
        ([base64_of(routes + 1, is_file=False)], "the model has the experts 0 to 3"),
    ):
        with pytest.raises(DataError, match=said):
            server_routes("", pieces, 7, model)


@pytest.mark.parametrize("kind", [SglangServer, VllmServer])
def test_servers_send_routes_with_their_completions(kind, tmp_path):
    routes = random_routes((7, 2), 4, 2)
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 3, None]] * 5}
    meta["routed_experts"] = base64_of(routes, is_file=False)
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [3] * 5,
        "logprobs": {"token_logprobs": [-1.0] * 5},
    }
    choice["routed_experts"] = routes[3:].tolist()
    vllm = {"choices": [choice], "prompt_routed_experts": routes[:3].tolist()}
    response = {"output_ids": [3] * 5, "meta_info": meta} if kind is SglangServer else vllm
    config = file_configuration(tmp_path, model=EXPERTS, **REPLAY)
    run = SimpleNamespace(
        config=config, mesh=SimpleNamespace(world=Axis(), tp=Axis()), device=torch.device("cpu"), model=None
    )
    server = kind("http://127.0.0.1:1")
    bodies = []
    server.http.post = lambda path, body, deadline, size: bodies.append(body) or response
    server.weight_version = lambda deadline: None
    server.facts = {"model": "policy"}
    run.config = config.with_settings({"rl.weight_sync_method": "checkpoint"})
    [completion] = ServerEngine(run, [server]).generate([[1, 2, 3]], Sampling(max_new_tokens=5))
    assert completion.ids == [3] * 5 and np.array_equal(completion.routes, routes)
    assert ("return_routed_experts" in bodies[0]) == (kind is SglangServer)
    assert server.completion_bytes([1, 2, 3], Sampling(max_new_tokens=5), 2) == 10 * 1024 + 16 * 2 * 2 * len(
        "4, "
    )


def test_verls_modes_are_read(tmp_path):
    for value, meaning in ("R3", "policy"), ("disabled", "none"), (None, "none"):
        assert file_configuration(tmp_path, model=EXPERTS, router_replay=value).rl.router_replay == meaning
    with pytest.raises(ConfigError, match="router_replay"):
        file_configuration(tmp_path, model=EXPERTS, router_replay="R2")

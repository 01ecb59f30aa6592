"""Runs with tools and with agents: the same in every layout, and after a resume."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from default_cases import by_default, in_full
from engine_stand_ins import Refusal, served
from rl_run_job import agent_outcomes
from small_policy import MODEL, metrics

from megalith.bridge.families import family_for
from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.errors import ConfigError, TrainingError
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import BOUND, relative_error
from megalith.rl.grpo import train_grpo
from megalith.rl.rollouts.rollout_reader import load_rollouts
from megalith.training.build import prepare

EXAMPLES = Path(__file__).parents[2] / "examples"
CALLS = '''
from megalith.data.chat.call_formats import ParsedTurn, ToolCall

def always(text, context):
    """Take each turn for a call."""
    call = {"name": "add", "arguments": {"a": len(text), "b": 1}}
    message = {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": call}]}
    return ParsedTurn(message, [ToolCall(**call)])

async def rewriting(client, row) -> float:
    """Ask three times: the second time it continues, the third time with another history."""
    ask, messages = client.chat.completions.create, list(row["prompt"])
    first = (await ask(model="any", messages=messages, max_tokens=5)).choices[0].message
    messages += [{"role": "assistant", "content": first.content or "?"}, {"role": "user", "content": "1 + 1"}]
    second = (await ask(model="any", messages=messages, max_tokens=6)).choices[0].message
    third = (await ask(model="any", messages=[*row["prompt"], {"role": "assistant", "content": "7"}, messages[-1]]))
    return float(len(second.content or "") + len(third.choices[0].message.content or "") % 3)
'''
KINDS = {
    "tools": dict(tools="{examples}/grpo/calculator.py:add", tool_call_format="{folder}/calls.py:always",
                  max_turns=3, reward_funcs="length", tool_workers=0),
    "agent": dict(agent="{folder}/calls.py:rewriting", agent_workers=0, max_completion_length=24),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    runpy.run_path(str(EXAMPLES / "grpo" / "calculator.py"))["main"](str(folder / "data"), 1)
    (folder / "calls.py").write_text(CALLS)
    return folder


def configuration(folder: Path, kind: str, name: str, parallel: dict | None = None, **train) -> RunConfig:
    rl = {
        key: value.format(folder=folder, examples=EXAMPLES) if isinstance(value, str) else value
        for key, value in KINDS[kind].items()
    }
    shared = dict(prompts=str(folder / "data" / "sums.jsonl"), num_generations=4, max_completion_length=48,
                  packing=True, save_rollouts=True)  # fmt: skip
    return RunConfig.from_tree(
        dict(
            model={key: value for key, value in MODEL.items() if key != "vocab_size"}
            | dict(max_position_embeddings=160, init_method_std=0.1),
            data=dict(
                seq_length=128, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "data")
            ),
            rl=shared | rl,
            optim=dict(lr=1e-3, lr_decay_style="constant"),
            train=dict(train_iters=2, micro_batch_size=2, global_batch_size=8, output_dir=str(folder / name))
            | train,
            parallel=parallel or {},
            runtime=dict(device="cpu", compile=False),
            log=dict(layout_report=False),
        )
    )


def rollouts_of(folder: Path) -> list:
    """The token ids, segments and branches of a run's rollouts."""
    found = []
    for path in sorted((folder / "rollouts").iterdir()):
        for group in load_rollouts(path).groups:
            for one in group.completions:
                parts = [one, *one.branches]
                found.append([(part.ids.tolist(), part.segments, part.rewards.tolist()) for part in parts])
    return found


@pytest.fixture(scope="module")
def ones(folder) -> dict[str, dict]:
    return {kind: agent_outcomes([configuration(folder, kind, f"{kind}-one")])[0] for kind in KINDS}


def test_the_runs_have_several_turns_and_branches(folder, ones):
    tools = rollouts_of(folder / "tools-one")
    assert sum(len(one[0][1]) > 1 for one in tools) >= 2 and max(len(one[0][1]) for one in tools) == 5
    agents = rollouts_of(folder / "agent-one")
    assert {len(one) for one in agents} >= {2} and sum(
        len(part[1]) == 3 for one in agents for part in one
    ) >= 1
    steps = [step for kind in KINDS for step in ones[kind]["losses"]]
    assert np.isfinite(steps).all() and any(steps)


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [("tp2-sp", (*KINDS,)), ("dp2-zero3", ("agent",)), in_full("dp2-zero3", ("tools",))],
    ids=["tp2-sp", "dp2-zero3", "dp2-zero3 tools"],
)
def test_layouts_sample_and_train_as_one_process(pool, folder, ones, layout, kinds):
    configs = [configuration(folder, kind, f"{kind}-{layout}", LAYOUTS[layout].parallel) for kind in kinds]
    for found in pool.run(agent_outcomes, configs, size=2):
        for kind, one in zip(kinds, found, strict=True):
            assert relative_error(one["norms"], ones[kind]["norms"]) < BOUND, kind
            scale = max(map(abs, ones[kind]["losses"]))
            assert one["losses"] == pytest.approx(ones[kind]["losses"], abs=BOUND * scale), kind
    for kind in kinds:
        assert rollouts_of(folder / f"{kind}-{layout}") == rollouts_of(folder / f"{kind}-one"), kind


@pytest.fixture(scope="module", params=KINDS)
def trained(request, folder) -> tuple[str, RunConfig]:
    """A kind, and the run of three steps of it."""
    config = configuration(folder, request.param, f"{request.param}-trained", train_iters=3)
    config = config.with_settings({"rl.log_completions": True})
    train_grpo(config)
    return request.param, config


def test_a_resumed_run_samples_the_same_turns(trained, tmp_path):
    """To the bit, but for what requests at other times give: the rounding of the engine's log-probabilities."""
    kind, config = trained
    whole_folder, parts = Path(config.train.output_dir), str(tmp_path / "parts")
    for more in ({"train.exit_interval": 2}, {"checkpoint.load": parts}):
        train_grpo(config.with_settings({"train.output_dir": parts} | more))
    whole, resumed = metrics(whole_folder), metrics(parts)
    assert [step["step"] for step in resumed] == [1, 2, 3]
    for name in ("loss", "grad_norm", "rewards_mean", "turns", "trajectory_length"):
        values = [step[name] for step in whole]
        bound = BOUND * max(map(abs, values)) if kind == "agent" else 0.0
        assert [step[name] for step in resumed] == pytest.approx(values, rel=0, abs=bound), name
    assert rollouts_of(whole_folder) == rollouts_of(Path(parts))


@pytest.mark.parametrize("kind", by_default(["vllm 0.24", "vllm 0.29", "sglang"], "vllm 0.29", "sglang"))
def test_servers_sample_for_an_agent(folder, tmp_path, kind):
    """Each request's tokens have the log-probabilities of the step's weights; a lost server gets them again."""
    config = configuration(folder, "agent", "unused")
    lost = []

    def once(handler, body):
        """End the connection of the tenth request."""
        lost.append(body)
        if len(lost) == 10:
            del server.plant[path]
            return None, None
        return 200, server.routes()["POST", path](body, {})

    model = prepare(config, 1)[0].model
    with served(kind, family_for(model).write_config(model)) as server:
        path = "/generate" if kind == "sglang" else "/v1/completions"
        server.plant[path] = once
        engine = dict(engine=kind.split()[0], engine_url=server.url, weight_sync_method="gloo")
        more = {f"rl.{name}": value for name, value in engine.items()} | {"rl.agent_workers": 4}
        train_grpo(config.with_settings(more | {"train.output_dir": str(tmp_path)}))
    steps = metrics(tmp_path)
    assert len(steps) == 2 and len(lost) == 10
    assert all(step["mismatch"] < 1.0001 and step["ratio"] == 1.0 for step in steps)
    assert all(step["agents/failed"] == 0 and step["turns"] == 3 for step in steps)
    found = [load_rollouts(path).groups for path in sorted((tmp_path / "rollouts").iterdir())]
    for version, groups in enumerate(found):
        each = [one for group in groups for one in group.completions]
        assert {int(np.unique(one.version).item()) for one in each} == {version}
        assert sum(len(one.branches) for one in each) >= 8


def test_the_report_shows_transcripts_and_rollout_prints_pass_at_k(trained, folder, tmp_path, capsys):
    kind, config = trained
    run = config.train.output_dir
    page = tmp_path / "page.html"
    assert main(["report", run, "--output", str(page)]) == 0
    html = page.read_text()
    assert 'class="turn sampled"' in html and "sampled and" in html and ("add(" in html) == (kind == "tools")
    rl = config.rl
    options = [
        "--tool",
        rl.tools,
        "--tool-call-format",
        rl.tool_call_format,
        "--max-turns",
        "2",
        "--reward",
        "length",
    ]
    options = ["--agent", rl.agent] if kind == "agent" else options
    sizes = ["--limit", "3", "--num-generations", "2", "--max-completion-length", "24", "--device", "cpu"]
    capsys.readouterr()
    assert (
        main(["rollout", run, rl.prompts, *options, *sizes, "--json", "--output", str(tmp_path / "r.jsonl")])
        == 0
    )
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["prompts"] == 3 and figures["turns"] > 1 and 0 <= figures["pass@2"] <= 1
    assert (kind == "tools") == ("tools/calls" in figures)
    assert len(load_rollouts(tmp_path / "r.jsonl").groups) == 3


@pytest.mark.full
def test_the_examples_agent_learns_to_call_the_calculator(tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    runpy.run_path(str(EXAMPLES / "grpo" / "calculator.py"))["main"]()
    cpu = ("--runtime.device", "cpu", "--runtime.compile", "false")
    assert main(["sft", "examples/grpo/calculator_sft.yaml", *cpu]) == 0
    assert main(["grpo", "examples/agents/calculator.yaml", *cpu]) == 0
    steps = metrics(tmp_path / "runs" / "calculator_agent")
    rewards = [step["rewards_mean"] for step in steps]
    assert np.mean(rewards[:2]) < 0.35 and np.mean(rewards[-5:]) > 0.7, rewards
    assert steps[-1]["agents/failed"] == 0
    assert json.loads((tmp_path / "runs" / "calculator_agent" / "completions.jsonl").open().readline())[
        "messages"
    ]


def test_an_agent_of_a_server_that_refuses_ends_the_run_with_its_sentence(folder, tmp_path):
    config = configuration(folder, "agent", "unused")
    with pytest.raises(
        ConfigError, match=r"takes no requests while it samples; set rl\.engine_url to a server"
    ):
        prepare(config.with_settings({"rl.engine": "vllm"}), 1)
    model = prepare(config, 1)[0].model
    with served("vllm 0.29", family_for(model).write_config(model)) as server:
        engine = dict(engine="vllm", engine_url=server.url, weight_sync_method="gloo")
        more = {f"rl.{name}": value for name, value in engine.items()}
        server.complete = refused_after(8, server.complete)
        with pytest.raises(
            TrainingError, match=r"refuses POST /v1/completions with 400: .*the prompt is too long"
        ):
            train_grpo(config.with_settings(more | {"train.output_dir": str(tmp_path)}))


def refused_after(count: int, complete):
    """Refuse all requests for completions after the first ones."""
    calls = []

    def answer(body, query):
        calls.append(body)
        if len(calls) > count:
            raise Refusal("the prompt is too long")
        return complete(body, query)

    return answer


@pytest.mark.parametrize("layout", [None, "tp2-sp"])
def test_tools_that_overlap_with_sampling_give_the_same_turns(pool, folder, ones, layout):
    """The runs' other settings are those of the run in which all completions take turns together."""
    parallel = {} if layout is None else LAYOUTS[layout].parallel
    config = configuration(folder, "tools", f"overlap-{layout}", parallel)
    config = config.with_settings({"rl.overlap_tools": True, "rl.tool_workers": 2 * (layout is None)})
    if layout is None:
        found = agent_outcomes([config])
    else:
        found = [outcomes[0] for outcomes in pool.run(agent_outcomes, [config], size=2)]
    for one in found:
        assert relative_error(one["norms"], ones["tools"]["norms"]) < BOUND
    assert rollouts_of(folder / f"overlap-{layout}") == rollouts_of(folder / "tools-one")


AHEAD = 2


def run_ahead(folder: Path, output: Path, kind: str, load: Path | None = None) -> list[dict]:
    """Return the metrics of a run whose batches are sampled ahead by a server of its own."""
    config = configuration(folder, kind, "unused", train_iters=4)
    model = prepare(config, 1)[0].model
    with served("vllm 0.29", family_for(model).write_config(model)) as server:
        rl = dict(engine="vllm", engine_url=server.url, weight_sync_method="gloo", max_staleness=AHEAD)
        more = {f"rl.{name}": value for name, value in rl.items()} | {"checkpoint.save_interval": 1}
        more |= {"train.output_dir": str(output)} | ({"checkpoint.load": str(load)} if load else {})
        more |= {"rl.tool_workers": 2} if kind == "tools" else {"rl.agent_workers": 3}
        train_grpo(config.with_settings(more))
    return metrics(output)


@pytest.fixture(scope="module", params=[in_full("tools"), "agent"])
def ahead(request, folder, tmp_path_factory) -> tuple[str, Path, list[dict]]:
    output = tmp_path_factory.mktemp(f"ahead-{request.param}")
    return request.param, output, run_ahead(folder, output, request.param)


def test_batches_ahead_have_whole_completions_of_the_versions_that_the_settings_give(ahead):
    _, output, steps = ahead
    for batch, path in enumerate(sorted((output / "rollouts").iterdir())):
        groups = load_rollouts(path).groups
        versions = [{int(np.unique(one.version).item()) for one in group.completions} for group in groups]
        periods = range(batch - min(batch, AHEAD), batch) or [0]
        expected = [{version} for version in periods for _ in range(len(groups) // len(periods))]
        assert versions == expected, batch
    assert [step["staleness_max"] for step in steps] == [0, 1, 2, 2]
    assert [step["queue_length"] for step in steps] == [2, 2, 1, 0]
    assert all(step["drift_canary"] < 1.0001 and step["tokens_dropped"] == 0 for step in steps)
    assert any(step["turns"] > 1 for step in steps)


@pytest.mark.parametrize("step", [2])
def test_a_resumed_run_has_the_bits_of_the_queue_with_turns(ahead, folder, tmp_path, step):
    kind, output, steps = ahead
    load = output / "checkpoints" / f"step_{step:08d}"
    again = run_ahead(folder, tmp_path, kind, load)
    same = ("loss", "grad_norm", "rewards_mean", "staleness", "queue_length", "turns", "trajectory_length")
    assert [[one[name] for name in same] for one in again] == [
        [one[name] for name in same] for one in steps[step:]
    ]
    for path in sorted((tmp_path / "rollouts").iterdir()):
        assert path.read_bytes() == (output / "rollouts" / path.name).read_bytes(), path.name

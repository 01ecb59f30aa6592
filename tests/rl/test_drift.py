"""The drift check stops a run at the first step in which engine and trainer differ, and names the planted fault."""

import math
from dataclasses import replace

import numpy as np
import pytest
from small_policy import configuration, metrics

from megalith.errors import TrainingError
from megalith.generation.engine import Engine
from megalith.rl.engines import rollout_engine
from megalith.rl.grpo import train_grpo
from megalith.rl.sampling.drift import CANARY_KEY, mean_ratio

QKV = "layers.1.self_attention.linear_qkv.weight"


def not_synced(monkeypatch):
    first = {}

    def sync(engine, model, version):
        report = REAL_SYNC(engine, model, version=version)
        values = engine.shards[QKV].values
        values.copy_(first.setdefault(QKV, values.clone()))
        return report

    monkeypatch.setattr(rollout_engine, "sync", sync)


def permuted(monkeypatch):
    def sync(engine, model, version):
        report = REAL_SYNC(engine, model, version=version)
        values = engine.shards[QKV].values
        values.copy_(values.roll(5, 0))
        return report

    monkeypatch.setattr(rollout_engine, "sync", sync)


def behind(monkeypatch):
    kept = []

    def sync(engine, model, version):
        kept[:] = kept or [REAL_SYNC(engine, model, version=version)]
        engine.version = version
        return kept[0]

    monkeypatch.setattr(rollout_engine, "sync", sync)


def generates(change):
    def plant(monkeypatch):
        def generate(engine, prompts, sampling, **more):
            return REAL_GENERATE(engine, *change(prompts, sampling), **more)

        monkeypatch.setattr(Engine, "generate", generate)

    return plant


REAL_SYNC, REAL_GENERATE = rollout_engine.sync, Engine.generate
FAULTS = {  # what is planted, after how many good steps it shows, and what the error says
    "a tensor not synced": (not_synced, 1, rf"{QKV} of the engine was not synced"),
    "rows permuted": (permuted, 0, rf"{QKV} of the engine has its rows permuted"),
    "one version behind": (behind, 1, "the engine's weights are one version behind"),
    "temperature forgotten": (
        generates(lambda prompts, s: (prompts, replace(s, temperature=1.0))), 0,
        r"are those at temperature 1, not at rl.temperature 0.7",
    ),
    "BOS doubled": (generates(lambda prompts, s: ([p[:1] + p for p in prompts], s)), 0, r"\(BOS\) twice"),
    "top-p renormalised": (generates(lambda prompts, s: (prompts, replace(s, top_p=0.7))), 0, "top-p"),
}  # fmt: skip


def total(completion_ids, **columns) -> list[float]:
    """A reward with a spread, so that every step moves the weights."""
    return [float(sum(ids)) for ids in completion_ids]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_stops_the_run_and_is_named(tmp_path, monkeypatch, fault):
    plant, good_steps, said = FAULTS[fault]
    plant(monkeypatch)
    config = configuration(
        tmp_path,
        optim=dict(lr=3e-2),
        rl=dict(temperature=0.7, reward_workers=0),
        checkpoint=dict(save_at_end=False),
    )
    with pytest.raises(TrainingError, match=said) as raised:
        train_grpo(config, total)
    trainer = rf"-\d+\.\d+ from the trainer \(weights of step {good_steps}\), "
    place = rf"is at prompt q\d+ of the canary, token \d+: {trainer}-\d"
    assert raised.match(place) and raised.match(rf"from the engine \(weights of step {good_steps}\)")
    assert len(metrics(tmp_path / "run")) == good_steps


@pytest.mark.parametrize("where", ["of the canary", "of step 1"])
def test_nothing_to_compare_stops_the_run(tmp_path, monkeypatch, where):
    """As with an engine that has no log-probabilities: equal weights are not shown by them."""

    def generate(engine, prompts, sampling, keys, **more):
        found = REAL_GENERATE(engine, prompts, sampling, keys=keys, **more)
        if (keys[0] >= CANARY_KEY) != (where == "of the canary"):
            return found
        return [replace(one, logprobs=[math.nan] * len(one.ids)) for one in found]

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(TrainingError, match=f"cannot be compared: no token {where} has"):
        train_grpo(configuration(tmp_path))
    assert not metrics(tmp_path / "run")


def test_tokens_without_a_log_probability_do_not_hide_the_others():
    trainer, engine = np.array([-1.0, -2.0, -3.0]), np.array([math.nan, -2.5, math.nan])
    assert mean_ratio(trainer, engine) == pytest.approx(math.exp(0.5))


def test_what_the_canary_does_not_show_stops_the_step_that_has_it(tmp_path, monkeypatch):
    """The first token's log-probability is wrong, but not of the canary."""

    def generate(engine, prompts, sampling, keys, **more):
        found = REAL_GENERATE(engine, prompts, sampling, keys=keys, **more)
        if keys[0] >= CANARY_KEY:
            return found
        return [replace(one, logprobs=[one.logprobs[0] - 1, *one.logprobs[1:]]) for one in found]

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(
        TrainingError,
        match=r"largest difference is at prompt q\d+, completion \d, token 0: .*the canary agreed",
    ):
        train_grpo(configuration(tmp_path, rl=dict(packing=True)))

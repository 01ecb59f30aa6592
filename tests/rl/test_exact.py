"""rl.exact: the engine's log-probabilities are the trainer's bit for bit. train.batch_invariant: losses are, too."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from default_cases import by_default, in_full
from exact_cases import (
    EXPERTS,
    PROMPTS,
    SAMPLING,
    SEQ,
    TEMPERATURE,
    VOCAB,
    context_layouts,
    engine_samples,
    equal_samples,
    exact_in_layout,
    expert_layouts,
    grpo_steps,
    parallel_model,
    pretraining,
    run_config,
    same_in_smaller_batches,
    scores,
    tensor_layouts,
    total,
    trained,
)
from small_policy import configuration, metrics

from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.sync import engine_for
from megalith.parity.job import start
from megalith.rl.grpo import train_grpo
from megalith.rl.rollouts.rollout_rows import Sample
from megalith.training.training_job import train

MODELS = {
    "llama with grouped queries": dict(num_query_groups=2),
    "qwen3 with norms of heads": dict(num_query_groups=1, kv_channels=20, qk_layernorm=True),
    "windows": dict(window_size=[5, 0], window_attn_skip_freq=2, norm_placement="sandwich"),
    "gpt2": dict(
        normalization="LayerNorm", position_embedding_type="learned_absolute", swiglu=False, add_bias_linear=True,
    ),
    "latent attention": dict(
        multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8,
        v_head_dim=12,
    ),
    "multi-token prediction": dict(mtp_num_layers=2),
    "experts": EXPERTS | dict(moe_router_pre_softmax=True),
    "sigmoid experts": EXPERTS | dict(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_topk=3,
        moe_shared_expert_intermediate_size=24,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_engine_and_trainer_have_the_same_bits_in_every_batch(tmp_path, name):
    config = run_config(tmp_path, MODELS[name])
    model = parallel_model(config)
    samples = engine_samples(model, 10)
    assert len({tuple(each.completion.ids) for each in samples}) > 5
    assert same_in_smaller_batches(model, samples)
    for packing, micro in itertools.product((False, True), (1, 4)):
        ours, engines = scores(config, model, samples, packing, micro)
        assert len(ours) > 60 and torch.equal(ours, engines), (packing, micro)


def test_an_engine_that_takes_requests_at_any_time_has_the_same_bits(tmp_path):
    model = parallel_model(run_config(tmp_path, MODELS["llama with grouped queries"]))
    samples, found = engine_samples(model, 10)[::2], {}
    still_open = set(range(len(PROMPTS)))
    live = LiveEngine(engine_for(model, max_rows=3, max_tokens=SEQ), stop=SAMPLING.stop, vocab_size=VOCAB)

    def submit(number: int) -> None:
        def on_tokens(ids, logprobs, reason):
            found.setdefault(number, []).extend(logprobs)
            if reason is not None:
                still_open.remove(number)
                if number + 3 < len(PROMPTS):
                    submit(number + 3)
                if not still_open:
                    live.close()

        request = LiveRequest(
            PROMPTS[number], SAMPLING.max_new_tokens, TEMPERATURE, seed=3, key=number * 2**16
        )
        live.submit([request], [on_tokens])

    for number in range(3):
        submit(number)
    live.run()
    for number, sample in enumerate(samples):
        assert np.array_equal(np.array(found[number], np.float32), sample.completion.logprobs)


@pytest.mark.parametrize(("packing", "mini_batches", "count"), [(True, 1, 6), (False, 2, 4)])
def test_on_policy_the_ratio_is_1_and_the_drift_0_in_every_step(tmp_path, packing, mini_batches, count):
    config = configuration(
        tmp_path,
        model=EXPERTS | dict(qk_layernorm=True) if packing else {},
        parallel=dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        optim=dict(lr=1e-3),
        train=dict(train_iters=count),
        rl=dict(exact=True, temperature=0.9, reward_workers=0, packing=packing, mini_batches=mini_batches),
        checkpoint=dict(save_at_end=False),
    )
    train_grpo(config, total)
    steps = metrics(tmp_path / "run")
    assert len(steps) == count and sum(each["grad_norm"] > 0 for each in steps) > count / 2
    for number, step in enumerate(steps):
        if number % mini_batches == 0:  # later ones are off policy
            assert step["ratio"] == 1.0
        assert (step["mismatch"], step["drift"], step["drift_largest"]) == (1.0, 0.0, 0.0)


def test_ppo_is_exact_with_a_critic(tmp_path):
    results = {}
    for exact in (True, False):
        config = configuration(
            tmp_path,
            optim=dict(lr=1e-3),
            train=dict(train_iters=3, output_dir=str(tmp_path / str(exact))),
            rl=dict(exact=exact, advantage_estimator="gae", reward_workers=0, mini_batches=2),
            checkpoint=dict(save_at_end=False),
        )
        train_grpo(config, total)
        results[exact] = metrics(tmp_path / str(exact))
    for step, ordinary in zip(results[True], results[False], strict=True):
        assert (step["mismatch"], step["drift"], step["drift_largest"]) == (1.0, 0.0, 0.0)
        assert (
            step["value_loss"] == pytest.approx(ordinary["value_loss"], rel=1e-3) and step["value_loss"] > 0
        )
        assert step["loss"] == pytest.approx(ordinary["loss"], rel=1e-3, abs=1e-6)
    assert results[True][0]["ratio"] == 1.0


def scores_equal(config: RunConfig, samples: list[Sample]) -> bool:
    """Whether this rank's model scores samples as their engine did."""
    ours, engines = scores(config, parallel_model(config), samples, True, 2)
    return torch.equal(ours, engines)


LAYOUTS = {
    "pipeline": dict(pipeline_model_parallel_size=2),
    "zero-bubble": dict(pipeline_model_parallel_size=2, pipeline_schedule="zero_bubble"),
    "fsdp": dict(data_parallel_sharding_strategy="optim_grads_params"),
}


def test_pipelines_and_shards_score_as_the_engine_of_one_process_did(pool, tmp_path):
    config = run_config(tmp_path, MODELS["experts"])
    samples = engine_samples(parallel_model(config), 4)
    cases = {
        name: (config.with_settings({f"parallel.{key}": value for key, value in layout.items()}), samples)
        for name, layout in LAYOUTS.items()
    }
    for name, ranks in pool.run_cases(scores_equal, cases, size=2).items():
        assert all(ranks), name


TENSOR_MODELS = {
    "llama with grouped queries": dict(num_query_groups=2),
    "gpt2": MODELS["gpt2"],
    "latent attention": MODELS["latent attention"],
    "sigmoid experts": MODELS["sigmoid experts"],
    "tied, of an uneven vocabulary": dict(vocab_size=301, untie_embeddings_and_output_weights=False),
}


EXPERT_MODELS = {
    "experts": MODELS["experts"],
    "sigmoid experts": MODELS["sigmoid experts"],
    "experts with biases": EXPERTS | dict(add_bias_linear=True, moe_router_topk=3),
}
CONTEXT_MODELS = {
    "llama with grouped queries": dict(num_query_groups=2),
    "windows": MODELS["windows"],
    "latent attention": MODELS["latent attention"],
}


KINDS = {
    "tensor": (TENSOR_MODELS, tensor_layouts),
    "experts": (EXPERT_MODELS, expert_layouts),
    "context": (CONTEXT_MODELS, context_layouts),
}
BY_DEFAULT = {  # every model and every layout of two ranks
    *((name, "tp2 sp") for name in TENSOR_MODELS), ("sigmoid experts", "tp2"),
    ("sigmoid experts", "ep2 allgather"), ("sigmoid experts", "ep2 static"), ("sigmoid experts", "etp2 tp2 sp"),
    ("experts", "ep2"), ("experts with biases", "etp2"), ("experts with biases", "ep2 tp2"),
    ("llama with grouped queries", "cp2 a2a"), ("windows", "cp2 all_gather"), ("latent attention", "cp2 a2a"),
}  # fmt: skip


@pytest.mark.parametrize("pairs", ["by default", in_full("others"), in_full("four ranks")])
@pytest.mark.parametrize("kind", KINDS)
def test_parallel_engines_and_trainers_have_the_bits_of_one_process(pool, tmp_path, kind, pairs):
    models, layouts = KINDS[kind]
    size = 4 if pairs == "four ranks" else 2
    cases, alone = {}, {}
    for name, layout in itertools.product(models, layouts(size)):
        if size == 2 and ((name, layout) in BY_DEFAULT) != (pairs == "by default"):
            continue
        config = run_config(tmp_path, models[name])
        if name not in alone:
            alone[name] = engine_samples(parallel_model(config), 4)
        settings = {f"parallel.{key}": value for key, value in layouts(size)[layout].items()}
        cases[name, layout] = (config.with_settings(settings),)
    for (name, layout), ranks in pool.run_cases(exact_in_layout, cases, size=size).items():
        for samples, is_exact in ranks:
            assert is_exact, (name, layout)
            if "uneven" not in name:  # whose parts are not those of one process
                assert equal_samples(samples, alone[name]), (name, layout)


FEW = {"tp2", "etp2 tp2 sp", "cp2 a2a"}


@pytest.mark.parametrize("few", [True, in_full(False)])
def test_on_policy_the_ratio_is_1_in_every_step_of_a_parallel_run(pool, tmp_path, few):
    def config(name: str, parallel: dict) -> RunConfig:
        model = EXPERTS if "sp" in name or "ep" in name or "etp" in name else dict(num_query_groups=2)
        if name in ("tp2", "ep2", "cp2 a2a"):
            model = model | dict(mtp_num_layers=1)
        return configuration(
            tmp_path,
            model=model,
            parallel=parallel,
            optim=dict(lr=1e-3),
            train=dict(train_iters=4),
            rl=dict(exact=True, temperature=0.9, reward_workers=0, packing="sp" in name or "all" in name),
        )

    layouts = tensor_layouts(2) | expert_layouts(2) | context_layouts(2)
    chosen = FEW if few else layouts.keys() - FEW
    cases = {name: (config(name, layouts[name]),) for name in sorted(chosen)}
    for name, ranks in pool.run_cases(grpo_steps, cases, size=2).items():
        for step in itertools.chain(*ranks):
            assert (step["ratio"], step["mismatch"]) == (1.0, 1.0), name
            assert (step["drift"], step["drift_largest"]) == (0.0, 0.0), name
        assert len({step["rewards_mean"] for step in ranks[0]}) > 2, name


def figures(config: RunConfig) -> list[list[float]]:
    """The loss and the gradient norm of a run's steps, with experts their balancing loss, and with MTP its losses."""
    train(config)
    names = ("loss", "grad_norm", "moe_aux_loss", "mtp_1_loss", "mtp_2_loss")
    return [[step[name] for name in names if name in step] for step in metrics(config.train.output_dir)]


MTP = dict(mtp_num_layers=2)
BALANCED = EXPERTS | dict(moe_aux_loss_coeff=0.1)
TRAINED = {"dense": {}, "experts": BALANCED, "mtp": MTP, "experts and mtp": BALANCED | MTP}


@pytest.mark.parametrize("name", by_default(TRAINED, "dense", "experts and mtp"))
def test_losses_and_gradients_have_the_same_bits_for_every_micro_batch_size(tmp_path, name):
    configs = {micro: pretraining(tmp_path, micro, model=TRAINED[name]) for micro in (1, 8)}
    one, other = map(figures, configs.values())
    assert len({loss for loss, *_ in one}) == 4
    assert other == one
    changed = {"train.batch_invariant": False, "train.output_dir": str(tmp_path / "ordinary")}
    ordinary = figures(configs[1].with_settings(changed))
    for ours, theirs in zip(one, ordinary, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("size", [8, in_full(6)])
@pytest.mark.parametrize("name", by_default(TRAINED, "dense", "experts and mtp"))
def test_runs_have_the_same_bits_for_every_data_parallel_size(pool, tmp_path, name, size):
    model = TRAINED[name]
    batch = {"train.global_batch_size": size}
    micro_sizes = {1: (4,), 2: (1, 4), 4: (2,)} if size == 8 else {1: (2,), 2: (1, 3)}
    expected = None
    for ranks, micro in ((ranks, micro) for ranks, each in micro_sizes.items() for micro in each):
        config = pretraining(tmp_path, micro, model=model).with_settings(batch)
        results = [trained(config)] if ranks == 1 else pool.run(trained, config, size=ranks)
        for losses, *tensors in results:
            expected = expected or (losses, tensors)
            assert losses == expected[0], (ranks, micro)
            for ours, theirs in zip(tensors, expected[1], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (ranks, micro)
    changed = {"train.batch_invariant": False, "optim.clip_grad": 0.0}
    ordinary = trained(pretraining(tmp_path, 1, model=model).with_settings(batch | changed))
    unclipped = trained(pretraining(tmp_path, 2, model=model).with_settings(batch | {"optim.clip_grad": 0.0}))
    for ours, theirs in zip(unclipped[1], ordinary[1], strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm().clamp(min=1e-6)


PAIRS = {
    "tensor": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "experts": dict(expert_model_parallel_size=2),
    "sharded experts": dict(expert_tensor_parallel_size=2, moe_token_dispatcher_type="allgather"),
    "context": dict(context_parallel_size=2, cp_comm_type="all_gather"),
    "context by heads": dict(context_parallel_size=2, cp_comm_type="a2a"),
}


@pytest.mark.parametrize("name", by_default(PAIRS, "tensor", "experts", "context"))
def test_with_other_parallelism_runs_have_the_same_bits_for_every_data_parallel_size(pool, tmp_path, name):
    model = EXPERTS | dict(moe_shared_expert_intermediate_size=24, num_query_groups=2)
    layout = {f"parallel.{key}": value for key, value in PAIRS[name].items()}
    alone = trained(pretraining(tmp_path, 2, model=model))[0]
    results = {}
    for ranks, micro in ((2, 1), (4, 2)):
        config = pretraining(tmp_path, micro, model=model).with_settings(layout)
        results[ranks, micro] = pool.run(trained, config, size=ranks)
    expected = results[2, 1]
    assert expected[0][0][0] == alone[0]  # the first loss; gradients have an order of their own
    assert expected[0][0] == pytest.approx(alone, rel=1e-4)
    for name, each in results.items():
        for rank, (losses, *tensors) in enumerate(each):
            assert losses == expected[0][0], name
            for ours, theirs in zip(tensors, expected[rank % 2][1:], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), name


def trained_shards(config: RunConfig) -> tuple[list[float], dict[str, tuple]]:
    """As `trained`, with the rank's shards of gradients and weights by name: offset, gradient and weight."""
    run, gradients = start(config), {}
    compute = run.gradients

    def keep(micro_batches):
        loss = compute(micro_batches)
        for name, weight in run.model.parameters.named:
            gradients.setdefault(name, weight.grad.clone())
        return loss

    run.gradients = keep
    losses = []
    with run.data.train_loader(0, 0, run.device) as batches:
        for _ in range(3):
            step = run.train_step(batches)
            losses += [step.loss.item(), step.grad_norm.item()]
    shards = run.model.parameters.shards
    return losses, {
        name: (shards[name].offset, gradients[name], weight.clone())
        for name, weight in run.model.parameters.named
    }


def assert_shards_of(ranks: list, losses: list[float], whole: dict[str, tuple], case: object) -> None:
    """Assert that ranks have these losses, and shards of these gradients and weights."""
    for rank_losses, shards in ranks:
        assert rank_losses == losses, case
        for name, (offset, *tensors) in shards.items():
            for ours, theirs in zip(tensors, whole[name][1:], strict=True):
                part = tuple(slice(at, at + size) for at, size in zip(offset, ours.shape))
                assert torch.equal(ours, theirs[part]), (case, name)


@pytest.mark.parametrize("strategy", [in_full("optim"), in_full("optim_grads"), "optim_grads_params"])
def test_sharded_runs_have_the_same_bits_for_every_data_parallel_size(pool, tmp_path, strategy):
    model = EXPERTS | dict(moe_aux_loss_coeff=0.1)
    sharded = {"parallel.data_parallel_sharding_strategy": strategy}

    def config(micro: int) -> RunConfig:
        return pretraining(tmp_path, micro, model=model).with_settings(sharded)

    losses, whole = trained_shards(config(2))
    for ranks, micro in ((2, 4), (4, 1)):
        assert_shards_of(pool.run(trained_shards, config(micro), size=ranks), losses, whole, ranks)
    replicas = trained(pretraining(tmp_path, 2, model=model))[0]
    assert losses[0] == replicas[0] and losses == pytest.approx(replicas, rel=1e-5)


PIPELINES = {
    "1f1b": dict(),
    "interleaved": dict(virtual_pipeline_model_parallel_size=2),
    "fsdp": dict(data_parallel_sharding_strategy="optim_grads_params"),
    "zero-bubble": dict(pipeline_schedule="zero_bubble"),
    "zero-bubble optim": dict(pipeline_schedule="zero_bubble", data_parallel_sharding_strategy="optim"),
}


@pytest.mark.parametrize("name", by_default(PIPELINES, "interleaved", "zero-bubble optim"))
def test_pipelines_have_the_same_bits_for_every_data_parallel_size(pool, tmp_path, name):
    def config(micro: int) -> RunConfig:
        parallel = dict(pipeline_model_parallel_size=2) | PIPELINES[name]
        return pretraining(tmp_path, micro, model=dict(num_layers=4), parallel=parallel)

    two, four = (pool.run(trained_shards, config(2), size=ranks) for ranks in (2, 4))
    losses, whole = two[0][0], two[0][1] | two[1][1]
    assert_shards_of(two, losses, whole, 2)
    assert_shards_of(four, losses, whole, 4)
    alone = trained(pretraining(tmp_path, 2, model=dict(num_layers=4)))[0]
    assert losses == pytest.approx(alone, rel=1e-5) and losses[0] == alone[0]


REFUSED = {
    "model.attn_logit_softcapping": (dict(attn_logit_softcapping=20.0), {}),
    "model.hidden_dropout": (dict(hidden_dropout=0.1), {}),
    "model.moe_expert_capacity_factor": (EXPERTS | dict(moe_expert_capacity_factor=1.0), {}),
    "train.fp8_format": ({}, {"train.fp8_format": "hybrid", "rl.old_logprobs": "rollout"}),
    "parallel.expert_tensor_parallel_size": (
        EXPERTS | dict(moe_ffn_hidden_size=39),
        {"parallel.expert_tensor_parallel_size": 3, "train.global_batch_size": 12},
    ),
    "parallel.cp_comm_type": ({}, {"parallel.context_parallel_size": 2, "parallel.cp_comm_type": "p2p"}),
    "runtime.compile": ({}, {"runtime.compile": True}),
    "rl.engine": ({}, {"rl.engine": "sglang"}),
    "rl.max_drift": ({}, {"rl.max_drift": 1.5}),
    "rl.prompts or rl.rollouts": ({}, {"train.batch_invariant": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_invariant_operators_is_refused_by_name(tmp_path, name):
    model, settings = REFUSED[name]
    config = configuration(tmp_path, model=model, rl=dict(exact=True)).with_settings(settings)
    ranks = 3 if name == "parallel.expert_tensor_parallel_size" else 2
    way_out = (
        "set parallel.cp_comm_type to a2a" if name == "parallel.cp_comm_type" else "change one of the two"
    )
    with pytest.raises(ConfigError, match=rf"{name} is .* is on, but .*; {way_out}"):
        check_training(config, ranks)
    if name != "rl.prompts or rl.rollouts":
        check_training(config.with_settings({"rl.exact": False}), ranks)


def test_a_single_wrong_bit_ends_the_run(tmp_path, monkeypatch):
    from megalith.errors import TrainingError
    from megalith.generation.engine import Engine

    generate = Engine.generate

    def inexact(engine, *args, **options):
        done = generate(engine, *args, **options)
        first = [float(np.nextafter(np.float32(done[0].logprobs[0]), np.float32(-9))), *done[0].logprobs[1:]]
        return [replace(done[0], logprobs=first), *done[1:]]

    monkeypatch.setattr(Engine, "generate", inexact)
    config = configuration(tmp_path, rl=dict(exact=True, reward_workers=0))
    with pytest.raises(TrainingError, match="the engine and the trainer differ"):
        train_grpo(config, total)

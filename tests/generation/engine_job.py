"""What the tests of the engine run on every rank of the pool."""

from __future__ import annotations

from collections.abc import Callable

import torch
from generation.brief_training import LLAMA

from megalith.config import ModelConfig, ParallelConfig, RunConfig
from megalith.generation.engine import Engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.requests import Sampling
from megalith.generation.sampling import complete_data_parallel
from megalith.generation.speculation import Speculation
from megalith.generation.sync import engine_for, sync
from megalith.models.init import initial_value
from megalith.models.model_types import make_model
from megalith.parallel.mesh import build_mesh
from megalith.parallel.parallel_model import ParallelModel
from megalith.training.custom_loop import parallelize

PROMPTS = [[5, 9, 2], [7, 1, 4, 4, 11, 80], [3]]
SAMPLING = Sampling(max_new_tokens=4, temperature=1.3, seed=3, top_p=0.97)
EXPERTS = dict(num_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2, moe_shared_expert_intermediate_size=32,
               moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)  # fmt: skip


def over_tensor_ranks(
    config: ModelConfig, weights: dict[str, torch.Tensor], prompts, sampling: Sampling, slots: tuple = ()
) -> list:
    """Every rank's completions by one engine over all ranks; `slots` are sizes, adapters, and each prompt's slot."""
    size = torch.distributed.get_world_size()
    mesh = build_mesh(ParallelConfig(tensor_model_parallel_size=size), size, "cpu")
    sizes, pairs, adapters = slots or (None, {}, None)
    engine = Engine(config, "cpu", torch.float32, max_rows=3, max_tokens=128, tp=mesh.tp, adapter_slots=sizes)
    engine.load(weights.items())
    for slot, each in pairs.items():
        engine.set_adapter(slot, each)
    return engine.generate(prompts, sampling, adapters=adapters)


def in_shares(
    config: ModelConfig, weights: dict[str, torch.Tensor], prompts, sampling: Sampling, tp: int
) -> list:
    """What `megalith generate --nproc` does: tensor-parallel replicas share out the prompts."""
    model = make_model(config)
    model.load_state_dict(weights)
    size = torch.distributed.get_world_size()
    mesh = build_mesh(ParallelConfig(tensor_model_parallel_size=tp), size, "cpu")
    return complete_data_parallel(model, prompts, sampling, mesh, torch.device("cpu"), num_generations=2)


def parallel_trainer(model: dict, parallel: dict) -> tuple[RunConfig, ParallelModel]:
    """A run and its model in this layout."""
    run = RunConfig.from_tree(
        {
            "model": LLAMA | model,
            "data": dict(mock=True, seq_length=32),
            "parallel": parallel,
            "train": dict(micro_batch_size=1, global_batch_size=4),
            "runtime": dict(device="cpu"),
        }
    )
    size = torch.distributed.get_world_size()
    mesh = build_mesh(run.parallel, size, "cpu", has_experts=run.model.num_experts is not None)
    trainer = parallelize(run, mesh, torch.device("cpu"))
    return run, trainer


def from_a_trainer(model: dict, parallel: dict) -> tuple[bool, int, list]:
    """Whether an engine of this trainer's layout has its weights to the bit, before and after they change; how many
    tensors travelled; the tokens of the initial weights."""
    run, trainer = parallel_trainer(model, parallel)
    engine = engine_for(trainer, max_rows=2, max_tokens=32)
    right = agrees(engine, run, 1.0)
    tokens = [each.ids for each in engine.generate(PROMPTS, SAMPLING)]
    with torch.no_grad():
        for _, parameter in trainer.parameters.named:
            parameter.mul_(-0.5)
    report = sync(engine, trainer, version=7)
    return right and agrees(engine, run, -0.5) and engine.version == 7, report.gathered, tokens


def agrees(engine: Engine, run: RunConfig, factor: float) -> bool:
    """With the initial weights, which follow from names alone, times a factor."""
    buffers = dict(engine.model.named_buffers())
    return all(
        torch.equal(
            shard.values,
            shard.slice_of(factor * initial_value(name, torch.Size(shard.shape), run.model, run.train.seed)),
        )
        for name, shard in engine.shards.items()
        if name not in buffers
    )


def live_tokens(
    config: ModelConfig, weights: dict[str, torch.Tensor], requests: list, tp: int, slots: tuple = ()
) -> list | None:
    """The first rank's completions of requests to replicas of `tp` ranks, half of them when others have ended."""
    size = torch.distributed.get_world_size()
    mesh = build_mesh(ParallelConfig(tensor_model_parallel_size=tp), size, "cpu")
    sizes, pairs = slots or (None, {})
    options = dict(tp=mesh.tp, adapter_slots=sizes)
    engine = Engine(config, "cpu", torch.float32, max_rows=2, max_tokens=128, **options)
    engine.load(weights.items())
    for slot, each in pairs.items():
        engine.set_adapter(slot, each)
    live = LiveEngine(engine, stop=(3,), group=mesh.world)
    live.warm_up()
    assert engine.take_prefill_tokens() == (0, 0)
    if torch.distributed.get_rank():
        live.follow()
        return None
    results, open_requests = [([], []) for _ in requests], set(range(len(requests)))

    def callback(number: int):
        def on_tokens(ids, logprobs, reason):
            results[number][0].extend(ids)
            results[number][1].extend(logprobs)
            if reason is not None:
                open_requests.remove(number)
                if number == 0:
                    submit(range(5, len(requests)))
                if not open_requests:
                    live.close()

        return on_tokens

    def submit(numbers):
        for number in numbers:
            live.submit([requests[number]], [callback(number)])

    submit(range(5))
    live.run()
    return results


def turns_over_tensor_ranks(
    config: ModelConfig, weights: dict[str, torch.Tensor], turns: Callable
) -> tuple[list, int]:
    """Every rank's completions of several turns, and the number of tokens that it did not prefill again."""
    size = torch.distributed.get_world_size()
    mesh = build_mesh(ParallelConfig(tensor_model_parallel_size=size), size, "cpu")
    engine = Engine(config, "cpu", torch.float32, max_rows=3, max_tokens=128, tp=mesh.tp)
    engine.load(weights.items())
    return turns(engine), engine.reused_tokens


def speculative_over_tensor_ranks(
    config: ModelConfig,
    weights: dict,
    draft_config: ModelConfig,
    draft_weights: dict,
    prompts,
    sampling: Sampling,
) -> list:
    """This rank's tokens and accepted drafts, by n-grams, by a draft model and by MTP layers."""
    size = torch.distributed.get_world_size()
    mesh = build_mesh(ParallelConfig(tensor_model_parallel_size=size), size, "cpu")
    draft = make_model(draft_config)
    draft.load_state_dict(draft_weights)
    results = []
    methods = Speculation("ngram"), Speculation("draft_model", draft_model=draft), Speculation("mtp")
    for speculation in methods:
        sizes = dict(max_rows=3, max_tokens=128, tp=mesh.tp, speculation=speculation)
        engine = Engine(config, "cpu", torch.float32, **sizes)
        engine.load(weights.items())
        done = engine.generate(prompts, sampling)
        results.append(([each.ids for each in done], engine.take_draft_metrics().accepted))
    return results


def changes_travel(model: dict, parallel: dict, dtype: torch.dtype) -> list:
    """Of four syncs to an engine: whether it has the bits of a full one, and the fraction of the first one's bytes that
    travelled. All weights are sent, none has changed, some have, and all have."""
    _, trainer = parallel_trainer(model, parallel)
    engine = engine_for(trainer, max_rows=2, max_tokens=32, dtype=dtype)
    engine.source = None
    results = []
    for step in range(4):
        with torch.no_grad():
            for _, parameter in trainer.parameters.named:
                if step == 2:  # also below the precision of bf16, and a sign of 0
                    parameter.view(-1)[::29].mul_(1 + 1e-7)
                    parameter.view(-1)[3::211].mul_(1.25)
                    parameter.view(-1)[5::211] = 0.0
                    parameter.view(-1)[7::211] = -0.0
                if step == 3:
                    parameter.mul_(-0.5)
        sent = sync(engine, trainer).sent_bytes
        full = engine_for(trainer, max_rows=1, max_tokens=2, dtype=dtype)
        is_equal = all(
            torch.equal(bits(shard.values), bits(full.shards[name].values))
            for name, shard in engine.shards.items()
        )
        results.append((is_equal, sent))
    return [(is_equal, sent / results[0][1]) for is_equal, sent in results]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32) if x.is_floating_point() else x


def updated_over_ranks(config: ModelConfig, weights: list[dict], requests: list, tp: int) -> list | None:
    """The first rank's ids and versions of requests to replicas of `tp` ranks, updated after the first six tokens."""
    size = torch.distributed.get_world_size()
    mesh = build_mesh(ParallelConfig(tensor_model_parallel_size=tp), size, "cpu")
    engine = Engine(config, "cpu", torch.float32, max_rows=2, max_tokens=128, tp=mesh.tp)
    engine.load(weights[0].items(), version=1)
    load = lambda version: engine.load(weights[version - 1].items())  # noqa: E731
    live = LiveEngine(engine, group=mesh.world, load_weights=load)
    if torch.distributed.get_rank():
        live.follow()
        assert engine.version == 2
        return None
    results, still_open = [([], []) for _ in requests], set(range(len(requests)))

    def callback(number: int):
        def on_tokens(ids, logprobs, reason):
            results[number][0].extend(ids)
            results[number][1].extend([live.sampled_version] * len(ids))
            if number == 0 and len(results[0][0]) == 6:
                live.update_weights(2, "keep")
            if reason is not None:
                still_open.remove(number)
            if not still_open:
                live.close()

        return on_tokens

    for number, request in enumerate(requests):
        live.submit([request], [callback(number)])
    live.run()
    return results

"""Models, engines, scores and layouts of the tests of rl.exact."""

import numpy as np
import torch
import torch.distributed as dist
from small_policy import configuration

from megalith.config import RunConfig
from megalith.generation.requests import Sampling
from megalith.generation.sync import engine_for
from megalith.parallel.mesh import build_mesh
from megalith.parity.job import start
from megalith.rl.grpo import PolicyTask
from megalith.rl.rollouts.rollout_rows import Sample, make_batch, pack_rows
from megalith.rl.rollouts.rollouts import RatedCompletion
from megalith.training.build import build_model

VOCAB, SEQ, TEMPERATURE = 300, 80, 0.7
EXPERTS = dict(num_experts=4, moe_ffn_hidden_size=40, moe_router_topk=2, moe_grouped_gemm=False)
PROMPTS = [[5, 9, 2], [7, 1, 4, 4, 11, 80], [3], list(range(20, 55)), [9] * 17]
LONG_PROMPTS = [[5, 9, 2], list(range(20, 80)), [3], [9] * 17, list(range(90, 153))]
"""Some of whose completions begin in the first chunk of a recurrence and end in the second one."""
SAMPLING = Sampling(max_new_tokens=8, temperature=TEMPERATURE, seed=3, stop=(0,))


def run_config(folder, model: dict, **sections) -> RunConfig:
    sizes = dict(vocab_size=VOCAB, hidden_size=40, ffn_hidden_size=88, max_position_embeddings=SEQ + 1)
    sections["rl"] = dict(exact=True, temperature=TEMPERATURE) | sections.get("rl", {})
    data = dict(seq_length=SEQ, tokenizer_type=None)
    return configuration(folder, model=sizes | dict(init_method_std=0.3) | model, data=data, **sections)


def parallel_model(config: RunConfig):
    size = dist.get_world_size() if dist.is_initialized() else 1
    has_experts = config.model.num_experts is not None
    return build_model(
        config, build_mesh(config.parallel, size, "cpu", has_experts=has_experts), torch.device("cpu")
    )


def engine_samples(model, rows: int, prompts: list[list[int]] = PROMPTS) -> list[Sample]:
    """Two completions of each prompt by an engine with this number of rows, which decides what runs together."""
    engine = engine_for(model, max_rows=rows, max_tokens=SEQ)
    done = engine.generate(prompts, SAMPLING, num_generations=2)
    return [
        Sample(
            np.array(prompts[each.prompt]),
            RatedCompletion(np.array(each.ids), np.zeros(1), logprobs=np.array(each.logprobs, np.float32)),
            1.0,
            True,
        )
        for each in done
    ]


def scores(config: RunConfig, model, samples: list[Sample], packing: bool, micro: int) -> list[torch.Tensor]:
    """The trainer's and the engine's log-probabilities of the completions, both ordered by the rows of a layout."""
    config = config.with_settings({"rl.packing": packing, "train.micro_batch_size": micro})
    rows = pack_rows(samples, SEQ * packing)
    rows += [[]] * (-len(rows) % micro)
    batches = [make_batch(config, rows[at : at + micro], 0) for at in range(0, len(rows), micro)]
    ours = model.all_logprobs(batches, TEMPERATURE, config.model.vocab_size)
    return [
        torch.cat([x[batch.loss_mask > 0] for x, batch in zip(each, batches)])
        for each in (ours, [batch.rollout_logprobs for batch in batches])
    ]


def total(completion_ids, **columns) -> list[float]:
    """A reward with a spread, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def exact_in_layout(config: RunConfig, prompts: list[list[int]] = PROMPTS) -> tuple[list[Sample], bool]:
    """The completions of this rank's engine, and whether its trainer scores them alike in every batch."""
    model = parallel_model(config)
    samples = engine_samples(model, 6, prompts)
    pairs = [scores(config, model, samples, *batch) for batch in ((False, 1), (True, 4))]
    return samples, all(len(ours) > 60 and torch.equal(ours, engines) for ours, engines in pairs)


def tensor_layouts(size: int) -> dict[str, dict]:
    """Layouts of 2 or 4 ranks with tensor parallelism."""
    tensor, sequence = dict(tensor_model_parallel_size=size), dict(sequence_parallel=True)
    if size == 2:
        return {"tp2": tensor, "tp2 sp": tensor | sequence}
    half = dict(tensor_model_parallel_size=2)
    return {
        "tp4": tensor,
        "tp4 sp": tensor | sequence,
        "tp2 pp2": half | sequence | dict(pipeline_model_parallel_size=2),
        "tp2 fsdp2": half | dict(data_parallel_sharding_strategy="optim_grads_params"),
    }


def expert_layouts(size: int) -> dict[str, dict]:
    """Layouts of 2 or 4 ranks whose experts are distributed or sharded."""
    expert, sharded = dict(expert_model_parallel_size=2), dict(expert_tensor_parallel_size=2)
    gather, tensor = dict(moe_token_dispatcher_type="allgather"), dict(tensor_model_parallel_size=2)
    if size == 2:
        return {
            "ep2": expert,
            "ep2 allgather": expert | gather,
            "ep2 static": expert | dict(moe_static_dispatch=True),
            "etp2": sharded,
            "ep2 tp2": expert | tensor,
            "etp2 tp2 sp": sharded | tensor | dict(sequence_parallel=True),
        }
    return {
        "ep2 etp2": expert | sharded,
        "ep2 etp2 allgather": expert | sharded | gather,
        "ep2 pp2": expert | dict(pipeline_model_parallel_size=2),
        "ep2 fsdp2": expert | dict(data_parallel_sharding_strategy="optim_grads_params"),
        "ep4": dict(expert_model_parallel_size=4),
        "ep2 cp2 tp2": expert | tensor | dict(context_parallel_size=2, cp_comm_type="all_gather"),
    }


def context_layouts(size: int) -> dict[str, dict]:
    """Layouts of 2 or 4 ranks with context parallelism."""
    gather = dict(context_parallel_size=2, cp_comm_type="all_gather")
    heads = gather | dict(cp_comm_type="a2a")
    if size == 2:
        return {"cp2 all_gather": gather, "cp2 a2a": heads}
    tensor = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    return {
        "cp4 all_gather": gather | dict(context_parallel_size=4),
        "cp4 a2a": heads | dict(context_parallel_size=4),
        "cp2 tp2 sp": gather | tensor,
        "cp2 pp2": heads | dict(pipeline_model_parallel_size=2),
        "cp2 fsdp2": gather | dict(data_parallel_sharding_strategy="optim_grads_params"),
    }


def same_in_smaller_batches(model, samples: list[Sample], prompts: list[list[int]] = PROMPTS) -> bool:
    """Return True if engines of three rows, and of one row for two prompts, sample these completions."""
    return all(
        equal_samples(samples[: 2 * count], engine_samples(model, rows, prompts[:count]))
        for rows, count in ((3, len(prompts)), (1, 2))
    )


def equal_samples(samples: list[Sample], others: list[Sample]) -> bool:
    """Whether completions have the same tokens, and log-probabilities of the same bits."""
    return all(
        np.array_equal(getattr(one.completion, name), getattr(other.completion, name))
        for one, other in zip(samples, others, strict=True)
        for name in ("ids", "logprobs")
    )


def grpo_steps(config: RunConfig) -> list[dict]:
    """The figures of a GRPO run's steps, without the loop."""
    run = start(config, PolicyTask([total]))
    with run.data.train_loader(0, 0, run.device) as batches:
        return [run.train_step(batches).extra_metrics() | {"step": step} for step in range(run.total_steps)]


def pretraining(folder, micro: int, **sections) -> RunConfig:
    seq = sections.pop("seq", 24)
    sizes = dict(vocab_size=64, hidden_dropout=0.1, max_position_embeddings=seq + 1)
    return configuration(
        folder,
        model=sizes | sections.pop("model", {}),
        data=dict(seq_length=seq, tokenizer_type=None, mock=True),
        train=dict(
            train_iters=4, micro_batch_size=micro, global_batch_size=8, eval_iters=0,
            batch_invariant=True, output_dir=str(folder / f"micro{micro}"),
        ),
        rl=dict(prompts=None, reward_funcs=None, num_generations=8, max_completion_length=256),
        checkpoint=dict(save_at_end=False),
        optim=dict(lr=1e-3),  # 1e-2 multiplies rounding by about 20 in each step
        **sections,
    )  # fmt: skip


def trained(config: RunConfig) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """The losses of three steps without the loop, the gradients of the first, and the weights after the last one."""
    run, losses, gradients = start(config), [], []
    compute = run.gradients

    def keep(micro_batches):
        loss = compute(micro_batches)
        if not gradients:
            gradients.extend(weight.grad.clone() for _, weight in run.model.parameters.named)
        return loss

    run.gradients = keep
    with run.data.train_loader(0, 0, run.device) as batches:
        for _ in range(3):
            step = run.train_step(batches)
            losses += [step.loss.item(), step.grad_norm.item()]
    return losses, gradients, [weight.clone() for _, weight in run.model.parameters.named]

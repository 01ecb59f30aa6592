"""Dynamic context parallelism changes where sequences are computed, and nothing else of a run."""

import math
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from default_cases import by_default, in_full
from torch import nn
from tuning_runs import VOCAB, config_of, token_samples, tuning_tree

from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine, resolve_auto
from megalith.config.train import BatchSizeSchedule
from megalith.data.dynamic_context import schedule_step
from megalith.data.order import SingleOrder
from megalith.errors import ConfigError
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job, start, state_by_name
from megalith.planner.pass_costs import pass_costs
from megalith.training.build import prepare
from megalith.training.context_schedules import ContextSchedules
from megalith.training.run_data import RunData
from megalith.training.run_datasets import Data

SEQ = 64
EXPERTS = dict(
    init_from=None, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=VOCAB,
    max_position_embeddings=SEQ, position_embedding_type="rope", normalization="RMSNorm", swiglu=True,
    add_bias_linear=False, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
)  # fmt: skip
DYNAMIC = {"dynamic_context_parallel": True}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
LAYOUTS = {
    "dp2 cp2": {"context_parallel_size": 2, "cp_comm_type": "p2p"},
    "cp4": {"context_parallel_size": 4, "cp_comm_type": "all_gather"},
    "dp4": {"max_seqlen_per_dp_cp_rank": 24, "cp_comm_type": "p2p"},
    "dp4 zero3": {"max_seqlen_per_dp_cp_rank": 24, "cp_comm_type": "a2a", **ZERO3},
    "dp2 cp2 at least 2": {"context_parallel_size": 2, "min_dynamic_context_parallel_size": 2},
    "dp2 cp2 core_attn": {
        "context_parallel_size": 2,
        "cp_comm_type": "p2p",
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
    "dp4 saved attention": {
        "max_seqlen_per_dp_cp_rank": 24,
        "cp_comm_type": "a2a",
        "recompute_granularity": "full",
        "recompute_saves_attention": True,
    },
    "dp2 tp2 sp": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "max_seqlen_per_dp_cp_rank": 40,
        "recompute_granularity": "full",
    },
}


LATENT = {name: value for name, value in EXPERTS.items() if not name.startswith(("moe", "num_e", "num_q"))} | dict(
    multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8,
)  # fmt: skip
PIPELINES = {
    "pp2 cp2": {"context_parallel_size": 2, "cp_comm_type": "p2p"},
    "pp2 dp2": {"max_seqlen_per_dp_cp_rank": 40, "cp_comm_type": "a2a"},
    "pp2 cp2 zero bubble": {
        "context_parallel_size": 2,
        "cp_comm_type": "all_gather",
        "pipeline_schedule": "zero_bubble",
    },
    "pp2 dp2 interleaved zero2": {
        "max_seqlen_per_dp_cp_rank": 40,
        "virtual_pipeline_model_parallel_size": 2,
        "data_parallel_sharding_strategy": "optim_grads",
    },
    "pp2 tp2 sp": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute_granularity": "full",
    },
}


BY_DEFAULT = {  # every way of attention, of sharding and of pipelining once; test-all runs the others, too
    "dp2 cp2", "cp4", "dp4 zero3", "dp2 cp2 at least 2", "dp4 saved attention", "dp2 tp2 sp",
    "dp2 cp2 ep4", "pp2 cp2 ep2",
    "pp2 cp2 zero bubble", "pp2 dp2 interleaved zero2", "pp2 tp2 sp",
}  # fmt: skip
LATENT_BY_DEFAULT = {"dp4 a2a zero3", "cp2 tp2"}  # a resumed run shows pipelines, too
by_default_and_others = pytest.mark.parametrize("others", [False, in_full(True)])


def chosen(layouts: dict, others: bool, names: set = BY_DEFAULT) -> dict:
    """Return the layouts that `make test` runs, or the others."""
    return {name: layout for name, layout in layouts.items() if (name in names) != others}


def samples(count: int) -> list[dict]:
    """Tokens of lognormal lengths: many short samples, a few as long as a row, and one token to learn in the first."""

    def length_of(number: int, rng: random.Random) -> int:
        length = min(max(int(math.exp(rng.gauss(2.2, 1.0))), 2), SEQ)
        return {1: SEQ, 5: SEQ - 3}.get(number, length)

    return token_samples(count, count, length_of)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("dynamic")
    files = {"train_data_path": samples(120), "valid_data_path": samples(17)}
    return tuning_tree(folder, files, seq=SEQ, micro=1, batch=8) | {"sft": {"enabled": True}}


@pytest.fixture(scope="module")
def alone(tree: dict) -> Outcome:
    return run_job(config_of(tree))


@by_default_and_others
def test_every_layout_equals_one_process(pool, tree: dict, alone: Outcome, others: bool):
    """Losses, gradients, evaluation and generated tokens."""
    layouts = chosen(LAYOUTS, others)
    cases = {name: (config_of(tree, parallel=DYNAMIC | layout),) for name, layout in layouts.items()}
    for name, ranks in pool.run_cases(run_job, cases, size=4).items():
        errors = compare(ranks, alone)
        assert errors.within(), (name, errors)


def test_adapters_and_padded_rows_equal_one_process(pool, tree: dict):
    changes = {
        "adapters, prefetching threads": dict(lora={"rank": 2}, data={"num_workers": 2}),
        "one sample per row": dict(sft={"packing": False}),
        "dynamic fine-tuning, a batch size that changes": dict(
            sft={"loss_type": "dft"}, train={"step_batch_size_schedule": [[0, 4], [4, 8]]}
        ),
    }
    layout = LAYOUTS["dp2 cp2"] | DYNAMIC
    cases = {name: (config_of(tree, parallel=layout, **more),) for name, more in changes.items()}
    for name, ranks in pool.run_cases(run_job, cases, size=4).items():
        errors = compare(ranks, run_job(config_of(tree, **changes[name])))
        assert errors.within(), (name, errors)


@by_default_and_others
def test_learned_positions_and_mtp_equal_one_process(pool, tree: dict, others: bool):
    """Padding after the longest sample has no position, and MTP's targets are those of the sample's own group."""
    dense = {name: value for name, value in EXPERTS.items() if not name.startswith(("moe", "num_experts"))}
    models = {
        "learned positions": dense | {"position_embedding_type": "learned_absolute"},
        "mtp": dense | {"mtp_num_layers": 1},
    }
    layouts = {"dp4": LAYOUTS["dp4"], "pp2": PIPELINES["pp2 dp2"] | {"pipeline_model_parallel_size": 2}}
    cases = {
        (name, layout): (config_of(tree, model=model, parallel=DYNAMIC | layouts[layout]),)
        for name, model in models.items()
        for layout in layouts
        if ((name, layout) in (("learned positions", "pp2"), ("mtp", "dp4"))) != others
    }
    alone = {name: run_job(config_of(tree, model=model)) for name, model in models.items()}
    for (name, layout), ranks in pool.run_cases(run_job, cases, size=4).items():
        errors = compare(ranks, alone[name])
        assert errors.within(), (name, layout, errors)


@by_default_and_others
def test_experts_equal_one_process(pool, tree: dict, others: bool):
    """Experts distributed over ranks whose groups differ, and all experts on each rank."""
    layouts = {
        "dp2 cp2 ep4": LAYOUTS["dp2 cp2"] | {"expert_model_parallel_size": 4},
        "dp4 ep2 zero3": LAYOUTS["dp4 zero3"] | {"expert_model_parallel_size": 2},
        "dp2 tp2 sp ep2": LAYOUTS["dp2 tp2 sp"] | {"expert_model_parallel_size": 2},
        "cp4": LAYOUTS["cp4"],
        "pp2 cp2 ep2": PIPELINES["pp2 cp2"]
        | {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    }
    cases = {
        name: (config_of(tree, model=EXPERTS, parallel=DYNAMIC | layout),)
        for name, layout in chosen(layouts, others).items()
    }
    alone = run_job(config_of(tree, model=EXPERTS))
    for name, ranks in pool.run_cases(run_job, cases, size=4).items():
        errors = compare(ranks, alone)
        assert errors.within(), (name, errors)


@by_default_and_others
def test_pipelines_equal_one_process(pool, tree: dict, others: bool):
    """Stages exchange rows of a different length in each pass."""
    model = {name: value for name, value in EXPERTS.items() if not name.startswith(("moe", "num_experts"))}
    model |= {"num_layers": 4}
    stages = DYNAMIC | {"pipeline_model_parallel_size": 2}
    alone = run_job(config_of(tree, model=model))
    cases = {
        name: (config_of(tree, model=model, parallel=stages | each),)
        for name, each in chosen(PIPELINES, others).items()
    }
    for name, ranks in pool.run_cases(run_job, cases, size=4).items():
        errors = compare(ranks, alone)
        assert errors.within(), (name, errors)


@pytest.mark.full
def test_pipelines_and_latent_attention_on_eight_ranks_equal_one_process(pool_of_eight, tree: dict):
    sharded = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}
    model = LATENT | {"num_layers": 4}
    cases = {
        "pp2 cp2 tp2 sp": DYNAMIC | sharded | {"pipeline_model_parallel_size": 2, "cp_comm_type": "p2p"},
        "pp2 dp2 cp2": DYNAMIC | PIPELINES["pp2 cp2"] | {"pipeline_model_parallel_size": 2},
        "dp2 cp2 tp2 sp": DYNAMIC | sharded | {"cp_comm_type": "all_gather"},
    }
    alone = run_job(config_of(tree, model=model))
    jobs = {name: (config_of(tree, model=model, parallel=layout),) for name, layout in cases.items()}
    for name, ranks in pool_of_eight.run_cases(run_job, jobs, size=8).items():
        errors = compare(ranks, alone)
        assert errors.within(), (name, errors)


def test_a_pipeline_gets_passes_of_padding_that_fit_its_schedule(tree: dict):
    """An interleaved schedule takes a multiple of its stages, whatever the lengths of a step's sequences."""
    parallel = DYNAMIC | {"pipeline_model_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 40}
    parallel |= {"virtual_pipeline_model_parallel_size": 2}
    model = {
        "init_from": None,
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
    }
    model |= {"max_position_embeddings": SEQ}
    config = prepare(config_of(tree, model=model, parallel=parallel), 4)[0]
    schedules = ContextSchedules(config, SimpleNamespace(rank=0, size=2))
    rows = Data(config, BatchSizeSchedule.from_config(config.train, 2), 1, None, Axis()).train
    order, odd = SingleOrder(len(rows)), 0
    for count in range(1, len(rows)):
        plain = schedule_step(
            rows.samples.lengths[[each for i in range(count) for each in rows.sequences(i)]],
            schedules.limits,
            pass_costs(config),
        )
        passes = schedules.of_batch(rows, order, range(count)).passes
        assert len(passes) == len(plain.passes) + len(plain.passes) % 2
        odd += len(plain.passes) % 2
        groups = [group for each in passes for group in each]
        assert sorted(i for group in groups for i in group.sequences) == sorted(
            i for row in range(count) for i in rows.sequences(row)
        )
    assert odd


@by_default_and_others
def test_latent_attention_equals_one_process(pool, tree: dict, others: bool):
    layouts = {
        "dp2 cp2": LAYOUTS["dp2 cp2"],
        "cp4": LAYOUTS["cp4"],
        "dp4 a2a zero3": LAYOUTS["dp4 zero3"],
        "cp2 tp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "cp_comm_type": "p2p"},
        "dp2 tp2 sp": LAYOUTS["dp2 tp2 sp"],
        "pp2 cp2": PIPELINES["pp2 cp2"] | {"pipeline_model_parallel_size": 2},
    }
    cases = {
        name: (config_of(tree, model=LATENT, parallel=DYNAMIC | layout),)
        for name, layout in chosen(layouts, others, LATENT_BY_DEFAULT).items()
    }
    alone = run_job(config_of(tree, model=LATENT))
    for name, ranks in pool.run_cases(run_job, cases, size=4).items():
        errors = compare(ranks, alone)
        assert errors.within(), (name, errors)


def batches_of(config: RunConfig, ranks: int) -> list[list[list]]:
    """Return the micro-batches of each rank and step."""
    config = prepare(config, ranks)[0]
    size = config.parallel.context_parallel_size
    sizes, dp = (
        BatchSizeSchedule.from_config(config.train, ranks // size),
        SimpleNamespace(size=ranks // size),
    )
    result = []
    for rank in range(ranks):
        dp.rank = rank // size
        axis = SimpleNamespace(rank=rank, size=ranks)
        data = Data(config, sizes, config.train.train_iters, None, dp, dp_cp=axis)
        with data.train_loader(0, 0, torch.device("cpu")) as loader:
            steps = []
            for step in range(config.train.train_iters):
                steps.append(
                    [next(loader) for _ in range(data.micro_batches(step * sizes.global_batch_size))]
                )
        result.append(steps)
    return result


def sequences_of(batch) -> list[tuple[int, ...]]:
    """Return the tokens of the sequences of a micro-batch, without padding."""
    sequences = []
    for row in range(len(batch.input_ids)):
        ends = [SEQ] if batch.document_ends is None else batch.document_ends[row].tolist()
        for first, end in zip([0, *ends], ends):
            real = ~batch.all_padding[row, first:end]
            sequences.append(tuple(batch.input_ids[row, first:end][real].tolist()))
    return [each for each in sequences if each]


def test_a_step_has_the_sequences_of_the_static_layout_and_ranks_run_equally_many_passes(tree: dict):
    static, sizes = batches_of(config_of(tree), 1)[0], set()
    for room, smallest in ((24, 1), (44, 2)):
        limit = {"max_seqlen_per_dp_cp_rank": room, "min_dynamic_context_parallel_size": smallest}
        ranks = batches_of(config_of(tree, parallel=DYNAMIC | limit), 4)
        for step, batches in enumerate(static):
            passes = list(zip(*(steps[step] for steps in ranks), strict=True))
            sequences = [each for groups in passes for each in of_pass(groups, room)]
            assert sorted(sequences) == sorted(each for batch in batches for each in sequences_of(batch))
            sizes |= {batch.cp_size for groups in passes for batch in groups}
    assert sizes == {1, 2, 4}


def of_pass(ranks, room: int) -> list[tuple[int, ...]]:
    """Return the sequences of a pass, whose groups are aligned and have room for their rows."""
    sequences = []
    for rank, batch in enumerate(ranks):
        first, length = rank // batch.cp_size * batch.cp_size, batch.input_ids.shape[1]
        assert length <= room * batch.cp_size and length % (2 * batch.cp_size) == 0
        assert ranks[first].cp_size == batch.cp_size and torch.equal(ranks[first].input_ids, batch.input_ids)
        if rank == first:
            sequences += sequences_of(batch)
    return sequences


def test_data_show_needs_no_ranks(tree: dict):
    shown = RunData(config_of(tree, parallel=DYNAMIC | LAYOUTS["dp4"])).samples_of_next_step()
    assert shown == RunData(config_of(tree)).samples_of_next_step()


def train_to(config: RunConfig, step: int) -> tuple[list[list], dict]:
    """Train to a step and save. Return the metrics and the state."""
    run, metrics = start(config), []
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        while run.step < step:
            done = run.train_step(batches)
            counts = done.token_counts
            metrics.append([done.loss.item(), done.grad_norm.item(), done.consumed_samples, *counts])
    run.save_last()
    return metrics, state_by_name(run)


RESUMED = {
    "dp2 cp2": (DYNAMIC | LAYOUTS["dp2 cp2"], {}),
    "pp2 cp2": (DYNAMIC | PIPELINES["pp2 cp2"] | {"pipeline_model_parallel_size": 2}, LATENT),
    "mla tp2 cp2": (DYNAMIC | PIPELINES["pp2 cp2"] | {"tensor_model_parallel_size": 2}, LATENT),
}


@pytest.mark.parametrize("layout", by_default(RESUMED, "pp2 cp2"))
def test_a_run_resumes_bitwise_and_in_a_static_layout(pool, tree: dict, tmp_path, layout: str):
    parallel, model = RESUMED[layout]
    steps = dict(train_iters=4, deterministic=True)

    def config(folder: str, load: bool = False, **more) -> RunConfig:
        path = str(tmp_path / folder)
        train = {**steps, "output_dir": path}
        return config_of(
            tree,
            **{"parallel": parallel, "model": model, "train": train} | more,
            checkpoint={"load": path} if load else {},
        )

    straight, state = pool.run(train_to, config("straight"), 4, size=4)[0]
    before, _ = pool.run(train_to, config("parts"), 2, size=4)[0]
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    after, resumed = pool.run(train_to, config("parts", load=True), 4, size=4)[0]
    assert before + after == straight
    assert state.keys() == resumed.keys() and all(torch.equal(state[name], resumed[name]) for name in state)

    static = {"parallel": {"context_parallel_size": 2}}
    other, _ = pool.run(train_to, config("other", load=True, **static), 4, size=2)[0]
    for (loss, norm, *counts), (other_loss, other_norm, *other_counts) in zip(
        straight[2:], other, strict=True
    ):
        assert counts == other_counts
        assert (loss, norm) == pytest.approx((other_loss, other_norm), rel=1e-5)


def losses_of(config: RunConfig) -> list[float]:
    """Train with layers that are traced as for a GPU, but run without Inductor, which takes minutes."""
    compile_module = nn.Module.compile

    def trace(module, *args, **options):
        compile_module(module, backend="aot_eager", fullgraph=options.get("fullgraph", False))

    with mock.patch.object(nn.Module, "compile", trace):
        run = start(config)
        with run.data.train_loader(0, 0, run.device) as batches:
            losses = [run.train_step(batches).loss.item() for _ in range(run.total_steps)]
    torch._dynamo.reset()
    return losses


@pytest.mark.full
@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_compiled_layers_follow_the_groups(pool, tree: dict, kind: str):
    parallel = DYNAMIC | {"max_seqlen_per_dp_cp_rank": 40, "cp_comm_type": kind}
    eager, compiled = (
        pool.run(losses_of, config_of(tree, parallel=parallel, runtime={"compile": value}), size=2)[0]
        for value in (False, True)
    )
    assert compiled == pytest.approx(eager, rel=1e-6)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sft": {"enabled": False}, "data": {"mock": True, "train_data_path": None, "valid_data_path": None}},
         "sft.enabled is False, which parallel.dyn"),
        ({"model": {"hidden_dropout": 0.1}}, "model.hidden_dropout is 0.1, which .* keyed by the position in the row"),
        ({"train": {"calculate_per_token_loss": False}}, "calculate_per_token_loss is False, which"),
        ({"train": {"fp8_format": "hybrid"}}, "train.fp8_format is hybrid, which"),
        ({"model": EXPERTS | {"moe_aux_loss_coeff": 0.01}}, "model.moe_aux_loss_coeff is 0.01, which"),
        ({"data": {"balance_batches": True}}, "data.balance_batches is True, which .* balanced already"),
        ({"parallel": {"max_seqlen_per_dp_cp_rank": 15}},
         r"at most 4 data × context ranks.*; set parallel.max_seqlen_per_dp_cp_rank \(now .*\) to at least 16"),
        ({"parallel": {"min_dynamic_context_parallel_size": 3}}, r"choose among \[1, 2, 4\]"),
        ({"parallel": {"dynamic_context_parallel": False, "max_seqlen_per_dp_cp_rank": 32}},
         "requires parallel.dynamic_context_parallel true"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(tree: dict, sections: dict, message: str):
    sections = {**sections, "parallel": DYNAMIC | sections.get("parallel", {})}
    with pytest.raises(ConfigError, match=message):
        prepare(config_of(tree, **sections), 4)


def test_heads_that_do_not_divide_among_all_ranks_are_refused_or_go_around_a_ring(tree: dict):
    parallel = DYNAMIC | {"cp_comm_type": "a2a"}
    with pytest.raises(
        ConfigError,
        match=r"up to 8 ranks, but .* has 4 heads, which 8 does not divide.* to p2p",
    ):
        prepare(config_of(tree, parallel=parallel), 8)
    machine = Machine(ranks_per_host=8, ranks=8)
    for ranks, chosen in ((8, "p2p"), (4, "a2a")):
        config = prepare(config_of(tree, parallel=DYNAMIC), ranks)[0]
        assert resolve_auto(config, replace(machine, ranks=ranks))[0].parallel.cp_comm_type == chosen

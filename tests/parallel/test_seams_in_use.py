"""The examples of examples/seams: what a seam is for, used, equals one process in every layout that its model has."""

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.seams.causal_convolution import CausalConvolution
from examples.seams.counting_gemm import count_matmuls
from examples.seams.encoder_decoder import EncoderDecoder
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.pairs import T5Batch
from megalith.errors import ConfigError
from megalith.launch.pool import RankFailed
from megalith.models.encoders.t5 import T5
from megalith.models.inputs import TokenInputs
from megalith.models.linear import Linear
from megalith.models.transformer import Transformer
from megalith.parallel.gather import global_tensors
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.model_spec import TransformerSpec
from megalith.parallel.parallel_model import ParallelModel
from megalith.parity.differences import BOUND, gradient_errors, relative_error

ROOT = Path(__file__).parents[2]
EXAMPLES = ("counting_gemm", "causal_convolution", "encoder_decoder")
VOCAB, SEQ, ENCODER_SEQ, SAMPLES, MICRO_BATCH = 61, 8, 12, 16, 4
SIZES = dict(num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=VOCAB,
             make_vocab_size_divisible_by=8, max_position_embeddings=16, hidden_dropout=0.1, attention_dropout=0.1,
             init_method_std=0.3)  # fmt: skip
LLAMA = dict(position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
             untie_embeddings_and_output_weights=True, hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
T5_RELATIVE = dict(model_type="t5", encoder_num_layers=1, position_embedding_type="relative",
                   relative_attention_num_buckets=8, relative_attention_max_distance=9, normalization="RMSNorm",
                   add_bias_linear=False, query_pre_attn_scalar=1, num_query_groups=0, scale_decoder_outputs=True,
                   init_method_std=0.1)  # fmt: skip

TP, PP = dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2)
SP = TP | dict(sequence_parallel=True)
CHUNKS = PP | dict(virtual_pipeline_model_parallel_size=2)
CP = dict(context_parallel_size=2, cp_comm_type="a2a")
ZERO3 = dict(data_parallel_sharding_strategy="optim_grads_params")
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
PARTS = dict(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm"])


@dataclass
class Padded(T5Batch):
    padding_mask: Tensor  # bool [batch, seq]


class Encoder(Transformer):
    reads = ("padding_mask",)

    def forward(self, input_ids, *, padding_mask=None, token_inputs=None, **rest):
        token_inputs = (token_inputs or TokenInputs()).with_padding_mask(padding_mask)
        return super().forward(input_ids, token_inputs=token_inputs, **rest)


MODELS = {
    "encoder-decoder": (lambda config: EncoderDecoder(config, 2, device="meta", seed=7), {}),
    "encoder-decoder, llama": (lambda config: EncoderDecoder(config, 1, device="meta"), LLAMA | {"num_layers": 3}),
    "t5": (lambda config: T5(config, device="meta", seed=7), T5_RELATIVE),
    "t5, learned positions": (lambda config: T5(config, device="meta", seed=7), {"model_type": "t5"}),
    "encoder": (lambda config: Encoder(config, causal=False, device="meta", seed=7), {}),
    "convolution": (lambda config: Transformer(config, mixer=CausalConvolution, device="meta", seed=7), {}),
}  # fmt: skip
CASES = [
    ("t5", SP | ZERO3),
    ("t5", PP | CP),
    ("convolution", SP | CHUNKS),
]
MORE = [
    ("encoder-decoder", TP | PP | {"pipeline_schedule": "zero_bubble"}),
    ("encoder-decoder", PP | ZERO3 | PARTS | {"pipeline_model_parallel_layout": "Ett|ttL"}),
    ("t5", SP | PP),  # cut inside of the decoder
    ("encoder-decoder", SP | PP | {"pipeline_model_parallel_layout": "Ettt|tL"}),
    ("encoder-decoder", SP | {"tp_comm_overlap": True}),
    ("t5", {"pipeline_model_parallel_size": 4} | PARTS),  # no stage has layers of both stacks
    ("encoder", SP | PP),
    ("encoder-decoder", SP | CHUNKS),
    ("t5", {"data_parallel_sharding_strategy": "no_shard"} | TP | PARTS),
    ("t5", PP | ZERO3 | {"pipeline_model_parallel_layout": "Ettt|tL"}),
    ("t5", {"data_parallel_sharding_strategy": "no_shard"} | PP | {"pipeline_schedule": "zero_bubble"}),
    ("t5", SP | {"tensor_model_parallel_size": 4} | FULL),
    ("t5", ZERO3 | FULL),
    ("t5", TP | CP | PARTS),
    ("t5, learned positions", CP | ZERO3 | FULL),
    ("t5, learned positions", SP | PP | {"pipeline_model_parallel_layout": "Ettt|tL"}),
    ("t5, learned positions", TP | PP | {"pipeline_schedule": "zero_bubble"}),
    ("encoder-decoder", SP | {"tensor_model_parallel_size": 4} | FULL),
    ("encoder-decoder, llama", SP | PP | {"pipeline_model_parallel_layout": "Ett|tL"}),
]


def configuration(name: str, parallel: dict) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": SIZES | MODELS[name][1],
            "parallel": parallel,
            "data": {"seq_length": SEQ, "mock": True},
            "train": {"micro_batch_size": MICRO_BATCH, "global_batch_size": SAMPLES},
            "runtime": {"device": "cpu", "compile": False},
        }
    )


def micro_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    tokens, others = (
        torch.randint(0, VOCAB, (SAMPLES, seq), generator=generator) for seq in (SEQ + 1, ENCODER_SEQ)
    )
    padding = torch.arange(ENCODER_SEQ) < torch.randint(4, ENCODER_SEQ + 1, (SAMPLES, 1), generator=generator)
    whole = Padded(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.ones(SAMPLES, SEQ),
        torch.arange(SEQ).expand(SAMPLES, SEQ), None, torch.arange(SAMPLES), others, padding, None,
        padding[:, :SEQ],
    )  # fmt: skip
    rows = range(0, SAMPLES, MICRO_BATCH)
    return [whole._each(lambda x, row=row: x[row : row + MICRO_BATCH]) for row in rows]


def parallel_model(model: Transformer, config: RunConfig, mesh: Mesh) -> ParallelModel:
    return ParallelModel(TransformerSpec(model, config), config.parallel, mesh, torch.device("cpu"))


def outcome(name: str, parallel: dict) -> tuple[float, dict[str, Tensor], float]:
    """Loss, gradients and evaluation of a step."""
    config = configuration(name, parallel)
    mesh = build_mesh(config.parallel, dist.get_world_size() if dist.is_initialized() else 1, "cpu")
    model = parallel_model(MODELS[name][0](config.model), config, mesh)
    local = micro_batches()[mesh.dp.rank :: mesh.dp.size]
    loss = model.backward(local).item()
    shards = model.parameters.shards
    gradients = {name: replace(shards[name], values=plain.grad) for name, plain in model.parameters.named}
    gradients = {name: x.gather() for name, x in global_tensors(gradients, mesh.world).items()}
    evaluated, tokens = model.evaluate(local)
    return loss, gradients, (evaluated / tokens).item()


def outcomes(cases: list[tuple[str, dict]]) -> list[tuple]:
    return [outcome(*case) for case in cases]


@functools.cache
def alone(name: str) -> tuple[float, dict[str, Tensor], float]:
    return outcome(name, {})


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.full)], ids=["some", "more"])
def test_stacks_cross_attention_and_another_mixer_equal_one_process(pool, cases):
    ranks = pool.run(outcomes, cases)
    for number, (name, parallel) in enumerate(cases):
        loss, gradients, evaluation = alone(name)
        for rank in ranks:
            assert relative_error([*rank[number][::2]], [loss, evaluation]) < BOUND, (name, parallel)
        assert max(gradient_errors(ranks[0][number][1], gradients).values()) < BOUND, (name, parallel)
        assert all(gradient.any() for gradient in gradients.values()), name


def counted() -> tuple[dict, dict, int]:
    """The matmuls of a step on this rank, of an evaluation, and how many linears are here."""
    config = configuration("encoder-decoder", TP | PP if dist.is_initialized() else {})
    mesh = build_mesh(config.parallel, dist.get_world_size() if dist.is_initialized() else 1, "cpu")
    model = parallel_model(EncoderDecoder(config.model, 2, device="meta"), config, mesh)
    calls = count_matmuls(model.chunks)
    model.backward(micro_batches())
    step = dict(calls)
    model.evaluate(micro_batches())
    linears = [m for chunk in model.chunks for m in chunk.modules() if isinstance(m, Linear)]
    return step, dict(calls), len(linears)


def test_another_gemm_does_every_matmul_of_every_linear(pool):
    _, _, linears = counted()
    assert linears == 2 * 4 + 2 * 7
    ranks, steps = pool.run(counted), SAMPLES // MICRO_BATCH
    assert [here for _, _, here in ranks] == [2 * 4, 2 * 4, 2 * 7, 2 * 7]
    for step, both, here in ranks:
        assert step == dict.fromkeys(("forward", "dgrad", "wgrad"), steps * here)
        assert both == step | {"forward": 2 * steps * here}


class Unknown(nn.Module):
    def __init__(self, config, number, device=None):
        super().__init__()
        self.gate = Linear(config.hidden_size, config.hidden_size, bias=False, device=device)


def refused(parallel: dict, **kinds) -> None:
    config = configuration("encoder", parallel)
    mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
    parallel_model(Transformer(config.model, device="meta", **kinds), config, mesh)


@pytest.mark.parametrize(
    ("parallel", "kinds", "message"),
    [
        (
            {"context_parallel_size": 2},
            {"cross": True},
            "the model has CrossAttention, which needs full sequences; set context_parallel_size",
        ),
        ({"context_parallel_size": 2}, {"mixer": CausalConvolution}, "the model has CausalConvolution"),
        (
            TP,
            {"mixer": Unknown},
            r"no role for layers\.0\.self_attention\.gate: give Unknown a class attribute",
        ),
    ],
)
def test_what_an_axis_cannot_cut_is_refused_in_a_sentence(pool, parallel, kinds, message):
    with pytest.raises(RankFailed) as failure:
        pool.run(functools.partial(refused, parallel, **kinds), size=2)
    assert isinstance(failure.value.__cause__, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise failure.value.__cause__


def test_the_architecture_page_shows_the_examples_as_they_are():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.findall(r"`(examples/seams/\w+\.py)`\n\n```python\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in shown] == [f"examples/seams/{name}.py" for name in EXAMPLES]
    for name, code in shown:
        assert code in (ROOT / name).read_text(encoding="utf-8"), name

"""A job in FP8, and the scales of its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from parity_cases import LATENT, run_config
from torch import Tensor, nn

from megalith.config import RunConfig
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.transformer import layers_of
from megalith.ops.fp8 import recipes
from megalith.ops.fp8.codes import WEIGHT
from megalith.ops.fp8.recipes import AmaxTable, CurrentScaling, DelayedScaling
from megalith.ops.gemm import Gemm
from megalith.parallel import parallel_model
from megalith.parallel.fp8_counts import KINDS
from megalith.parity.job import Outcome, run_job, start, state_by_name

STEPS = 3  # the scales of two of them are of steps before
# Sizes that FP8 matmuls take, on two tensor-parallel ranks too.
LLAMA = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16,
         "num_layers": 2}  # fmt: skip


@dataclass
class Fp8Outcome:
    outcome: Outcome
    first_scale: Tensor | None  # float32 [linears, 3]: of the first step, with delayed scaling


# And blocks of 128: of weights, and of 128 tokens on each of two tensor-parallel ranks.
BLOCKS = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 4,
          "kv_channels": 32, "num_layers": 2, "max_position_embeddings": 128}  # fmt: skip
MOE = LLAMA | {"moe_ffn_hidden_size": 32}


def fp8_config(layout: str | None, run: str = "llama", groups: int = 2, **train: Any) -> RunConfig:
    model = LLAMA | {"num_query_groups": groups}
    return run_config(run, layout, "", model=model, train={"fp8_format": "hybrid", **train})


def block_config(layout: str | None) -> RunConfig:
    train = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
    return run_config("llama", layout, "", model=BLOCKS, data={"seq_length": 128}, train=train)


MIXERS = {
    "mamba": dict(experimental_attention_variant="mamba2", mamba_num_groups=2),
    "mamba, a group shared": dict(experimental_attention_variant="mamba2", mamba_num_groups=1),
    "short convolution": dict(experimental_attention_variant="short_conv"),
    "delta net": dict(
        experimental_attention_variant="gated_delta_net", linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16,
    ),
}  # fmt: skip
MAMBA = dict(mamba_num_heads=32, mamba_head_dim=4, mamba_state_dim=16)  # 16 heads on each of two ranks


def mixer_config(layout: str | None, mixer: str, **train: Any) -> RunConfig:
    model = LLAMA | MIXERS[mixer] | {"linear_attention_freq": [1, 0]}
    if "mamba" in mixer:
        model |= MAMBA
    return run_config("llama", layout, "", model=model, train={"fp8_format": "hybrid", **train})


def expert_config(layout: str | None) -> RunConfig:
    return run_config("moe", layout, "", model=MOE, train={"fp8_format": "hybrid"})


def encoder_config(layout: str | None, run: str, recipe: str = "delayed") -> RunConfig:
    """A run of BERT or T5."""
    blocks = recipe == "blockwise"
    model = {
        name: value for name, value in (BLOCKS if blocks else LLAMA).items() if name != "num_query_groups"
    }
    model["max_position_embeddings"] = 128
    data = {"seq_length": 128} if blocks else {}
    if run.startswith("t5"):
        data["decoder_seq_length"] = 128 if blocks else 48  # another than the encoder's
    # At this seed rounding moves no code of the first step (docs/fp8.md has others). At 171 one of the 3,072 of a
    # gradient in T5's cross-attention falls otherwise under TP, which moves the encoder's gradients by 1e-2.
    train = {"fp8_format": "e4m3" if blocks else "hybrid", "fp8_recipe": recipe, "seed": 176}
    return run_config(run, layout, "", model=model, data=data, train=train)


def latent_config(layout: str | None, recipe: str) -> RunConfig:
    """Multi-latent attention, with latents of sizes that a matmul takes; rounding moves no code of the first step."""
    blocks = recipe == "blockwise"
    size = 128 if blocks else 16
    model = (BLOCKS if blocks else LLAMA) | LATENT | {"num_attention_heads": 4, "q_lora_rank": 2 * size}
    model |= {
        "kv_lora_rank": size,
        "qk_head_dim": size // 2,
        "v_head_dim": size // 2,
        "qk_pos_emb_head_dim": size,
    }
    train = {"fp8_format": "e4m3" if blocks else "hybrid", "fp8_recipe": recipe, "seed": 177}
    return run_config(
        "llama", layout, "", model=model, data={"seq_length": 128} if blocks else {}, train=train
    )


def run_fp8_job(config: RunConfig) -> Fp8Outcome:
    """The parity job, with the scales that the first step's matmuls took."""
    scales: list[Tensor] = []
    end_step = AmaxTable.end_step

    def noted(self: AmaxTable, skipped: Tensor | float) -> None:
        end_step(self, skipped)
        scales.append(self.scale.clone())

    with mock.patch.object(AmaxTable, "end_step", noted):
        outcome = run_job(config, STEPS)
    return Fp8Outcome(outcome, scales[0] if scales else None)


@contextmanager
def casts_of_weights() -> Iterator[list[bool]]:
    """For each cast to FP8 made in it on this rank, by whatever recipe, whether it was of a weight."""
    casts: list[bool] = []

    def counted(cast: Callable, of_weight: Callable[..., bool]) -> Callable:
        def count(*args):
            casts.append(of_weight(*args))
            return cast(*args)

        return count

    def of_kind(self, kind: int, *rest) -> bool:
        return kind == WEIGHT

    in_tiles = counted(recipes.cast_blocks, lambda x, row, column, tiles: tiles)
    with (
        mock.patch.object(recipes, "cast_blocks", in_tiles),
        mock.patch.object(CurrentScaling, "codes", counted(CurrentScaling.codes, of_kind)),
        mock.patch.object(DelayedScaling, "codes", counted(DelayedScaling.codes, of_kind)),
    ):
        yield casts


@dataclass
class Casts:
    outcome: Outcome
    casts: int  # of weights, on this rank
    freed: set[int]  # at the beginnings of backward passes: weights of the pass's chunks that have no memory


def run_counting_casts(config: RunConfig) -> Casts:
    """The parity job, and what this rank cast and freed in it."""
    freed: set[int] = set()
    begins = parallel_model.prepare_backward

    def watched(chunks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> None:
        linears = [m for chunk in chunks for m in chunk.modules() if isinstance(m, Linear)]
        freed.add(sum(local(linear.weight).untyped_storage().size() == 0 for linear in linears))
        begins(chunks, *args, **kwargs)

    with casts_of_weights() as casts, mock.patch.object(parallel_model, "prepare_backward", watched):
        return Casts(run_job(config, STEPS), sum(casts), freed)


FAILURES = (
    ("forward", 0),
    ("forward", 1),
    ("dgrad", 1),
)  # what of the last matmuls fails, in which micro-batch


@contextmanager
def _failing(gemm: Gemm, matmul: str, at: int) -> Iterator[list[None]]:
    """In it, call number `at` of this matmul finds no memory; the calls."""
    calls: list[None] = []
    compute = getattr(gemm, matmul)

    def computed(*args: Any) -> Tensor:
        calls.append(None)
        if len(calls) > at:
            raise torch.OutOfMemoryError("no memory")
        return compute(*args)

    with mock.patch.object(gemm, matmul, computed):
        yield calls


def run_with_failures(config: RunConfig) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of an evaluation and a step after each of FAILURES, and the state at the end."""
    run, found = start(config), []
    gemm = list(layers_of(run.model.chunks[0]).values())[-1].mlp.linear_fc2.gemm
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        for matmul, micro_batch in FAILURES:
            with _failing(gemm, matmul, micro_batch) as calls, suppress(torch.OutOfMemoryError):
                run.train_step(batches)
            assert len(calls) == micro_batch + 1
            found += [run.mean_loss(run.data.valid), run.train_step(batches).loss.item()]
    return found, state_by_name(run)


@dataclass
class Steps:
    losses: list[float]
    figures: list[dict[str, float]]
    amaxes: dict[str, float]  # after the second step, with delayed scaling; as in its figures


def figures_of_steps(config: RunConfig) -> Steps:
    run, found = start(config), Steps([], [], {})
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        for number in range(3):
            step = run.train_step(batches)
            found.losses.append(step.loss.item())
            found.figures.append(step.extra_metrics() if step.extra_metrics else {})
            if number == 1 and run.model.amaxes is not None:
                for name, row in run.model.amaxes.rows.items():
                    amaxes = run.model.amaxes.history[0, row].tolist()
                    found.amaxes |= {f"fp8_amax/{name}.{kind}": amax for kind, amax in zip(KINDS, amaxes)}
    return found

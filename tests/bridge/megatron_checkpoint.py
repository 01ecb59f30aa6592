"""Checkpoints in Megatron-LM's two forms, written from a model of ours by Megatron's published names."""

import argparse
import enum
import json
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megalith.checkpoint import RunRecord, save_checkpoint
from megalith.config import ModelConfig, RunConfig
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.optim import build_optimizer
from megalith.training.build import vocabulary_rows

PADDED_VOCAB = 256
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
NAMES_OF_BERT = [("lm_head.layernorm", "lm_head.layer_norm"), ("lm_head.vocabulary", "output_layer"),
                 ("pooler", "pooler.dense")]  # fmt: skip


def core_state(model: Transformer, te: bool) -> dict[str, Tensor]:
    """Every tensor under the name that Megatron core gives it; with `te`, norms fused as Transformer Engine does."""
    state = {}
    stack = "decoder" if model.config.causal else "encoder"
    for name, value in model.state_dict().items():
        for ours, theirs in NAMES_OF_BERT:
            name = name.replace(ours, theirs)
        if name in PADDED:
            value = torch.cat(
                [value[: model.config.vocab_size], torch.full((PADDED_VOCAB, *value.shape[1:]), 9.0)]
            )
            value = value[:PADDED_VOCAB]
        apart = (
            name.split(".pre_mlp")[0] + ".mlp.router.weight" in model.state_dict()
        )  # the norm before experts
        if name.startswith(("layers.", "final_layernorm.")):
            name = f"{stack}.{name}"
        name = name.replace(".shared_expert_gate.weight", ".shared_experts.gate_weight")
        if te:
            name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if te and not apart:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        parts = {name: value}
        if ".mlp.experts." in name:  # [experts, rows, columns]
            parts = {
                name.replace("experts", f"experts.local_experts.{e}"): part for e, part in enumerate(value)
            }
        for one, part in parts.items():
            if "linear_fc1.weight" in one and model.config.swiglu:
                part = torch.cat([part[0::2], part[1::2]])
            state[one] = part.clone()
    return state


def save_run(
    folder: Path, model: ModelConfig, optimizer: str = "adamw", precision: str = "fp32", skipped: int = 0
) -> Transformer:
    """A run at step 2 whose weights and optimizer's state are random, as a checkpoint; its model.

    fp16 has skipped `skipped` of the two steps.
    """
    config = RunConfig.from_tree({
        "model": model.model_dump(exclude_unset=True),
        "train": {"precision": precision, "train_iters": 8, "micro_batch_size": 4, "global_batch_size": 4},
        "optim": {"lr": 0.01, "optimizer": optimizer, "weight_decay": 0.1},
    })  # fmt: skip
    built = make_model(config.model)
    generator = torch.Generator().manual_seed(5)
    stepped = build_optimizer(built.named_parameters(), config.optim)
    states = [value for state in stepped.state.values() for value in state.values()]
    with torch.no_grad():
        for value in (*built.parameters(), *built.buffers(), *states):
            value.fill_(2) if value.ndim == 0 else value.normal_(0, 0.1, generator=generator)
        for state in stepped.state.values():
            for key in state.keys() & {"exp_avg_sq"}:
                state[key].abs_()
    record = RunRecord(
        step=2,
        consumed_samples=8,
        skipped_steps=skipped,
        skipped_samples=4 * skipped,
        config=config.to_tree(),
    )
    save_checkpoint(folder / "checkpoints", record, built, stepped, unpadded_rows=vocabulary_rows(config))
    return built.eval()


def arguments(model: ModelConfig, **others: object) -> argparse.Namespace:
    """Return the arguments that Megatron stores in a checkpoint, with one of its enums."""
    return argparse.Namespace(
        num_layers=model.num_layers, hidden_size=model.hidden_size, ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.num_attention_heads, group_query_attention=model.num_query_groups > 0,
        num_query_groups=model.num_query_groups or 1, kv_channels=model.head_dim,
        max_position_embeddings=model.max_position_embeddings, position_embedding_type=model.position_embedding_type,
        rotary_base=10000, rotary_percent=1.0, rotary_interleaved=False, normalization=model.normalization,
        norm_epsilon=1e-5, apply_layernorm_1p=False, mscale=1.0, mscale_all_dim=0.0,
        swiglu=model.swiglu, bias_gelu_fusion=not model.swiglu, openai_gelu=False, squared_relu=False,
        add_bias_linear=model.add_bias_linear, add_qkv_bias=model.add_qkv_bias, qk_layernorm=model.qk_layernorm,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights, num_experts=None,
        vocab_size=None, padded_vocab_size=PADDED_VOCAB, params_dtype=torch.float32,
        attention_backend=_megatron_enum()(1), exit_signal=None, save=Path("somewhere"), **others,
    )  # fmt: skip


def _megatron_enum() -> type:
    """A class that says that it is Megatron's, which is not installed."""
    backend = enum.Enum("AttnBackend", {"auto": 1}, module="megatron.core.transformer.enums")
    for name in ("megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.enums"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["megatron.core.transformer.enums"].AttnBackend = backend
    return backend


def forget_megatron() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]


def write_torch_dist(folder: Path, state: dict[str, Tensor], args: argparse.Namespace) -> None:
    """`iter_0000005` as torch_dist has it: layers stacked, with optimizer state and other bytes."""
    stacked: dict[str, list[Tensor]] = {}
    flat: dict[str, object] = {}
    for name, value in state.items():
        if name.startswith("decoder.layers."):
            stacked.setdefault("decoder.layers." + name.split(".", 3)[3], []).append(value)
        else:
            flat[name] = value
    flat |= {name: torch.stack(values) for name, values in stacked.items()}
    flat |= {
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(3),
        "rng_state/shard_0.0_1.1": b"x",
    }
    iteration = folder / "iter_0000005"
    dcp.save(flat, storage_writer=dcp.FileSystemWriter(iteration), no_dist=True)
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 5}, iteration / "common.pt")
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def write_legacy(
    folder: Path, state: dict[str, Tensor], args: argparse.Namespace, tp: int, pp: int, chunks: int
) -> None:
    """`iter_0000005/mp_rank_TT_PPP`: matrices split by tensor rank, layers from 0 in each chunk of a stage."""
    layers = args.num_layers // (pp * chunks)
    for tensor_rank in range(tp):
        for stage in range(pp):
            saved = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": 5,
                "rng_state": [np.random.get_state()],
            }
            for chunk in range(chunks):
                first = (chunk * pp + stage) * layers
                ends = (chunk == 0 and stage == 0, chunk == chunks - 1 and stage == pp - 1)
                held = {}
                for name, value in state.items():
                    if name.startswith("decoder.layers."):
                        number, rest = name.split(".", 3)[2:]
                        if first <= int(number) < first + layers:
                            held[f"decoder.layers.{int(number) - first}.{rest}"] = cut(
                                name, value, tensor_rank, tp, args
                            )
                    elif ends[not name.startswith("embedding.")]:
                        held[name] = cut(name, value, tensor_rank, tp, args)
                if ends[1] and not args.untie_embeddings_and_output_weights:
                    name = "embedding.word_embeddings.weight"
                    held["output_layer.weight"] = cut(name, state[name], tensor_rank, tp, args)
                held["decoder.layers.0.self_attention.core_attention._extra_state"] = None
                saved["model" if chunks == 1 else f"model{chunk}"] = held
            rank = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            (folder / "iter_0000005" / rank).mkdir(parents=True)
            path = folder / "iter_0000005" / rank / "model_optim_rng.pt"
            torch.save(saved, path, _use_new_zipfile_serialization=tp > 1)  # and the form before torch 1.6
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def cut(name: str, value: Tensor, rank: int, ranks: int, args: argparse.Namespace) -> Tensor:
    """A tensor rank's part."""
    if "layer_norm" in name or "layernorm" in name or "position_embeddings" in name:
        return value
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return value.chunk(ranks, dim=1)[rank].clone()
    if name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return value
    if "linear_fc1" in name and args.swiglu:
        return torch.cat([half.chunk(ranks)[rank] for half in value.chunk(2)])
    return value.chunk(ranks)[rank].clone()


class Bomb:
    """Makes a file where it is unpickled without care."""

    def __reduce__(self):
        return open, ("exploded", "w")


def bomb() -> bytes:
    return pickle.dumps({"args": Bomb()}, protocol=2)

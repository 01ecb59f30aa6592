"""`megalith export-megatron` and `megalith convert`: write checkpoints that Megatron core loads."""

from __future__ import annotations

import itertools
import math
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalith.bridge.exporter import export_hf
from megalith.bridge.folder import CONFIG, DTYPE_NAMES, path_exists
from megalith.bridge.importer import PRECISIONS, SEED, common_dtype, import_hf
from megalith.bridge.load import config_of, is_foreign_weights, open_weights
from megalith.bridge.megatron.megatron_importer import (
    LATEST,
    import_megatron,
    is_megatron_folder,
    read_arguments,
)
from megalith.bridge.megatron.megatron_writer import STATE, CoreTensors, Read, write_ranks, write_torch_dist
from megalith.bridge.megatron.table import family_of
from megalith.bridge.partial import new_folder
from megalith.checkpoint import Checkpoint, open_checkpoint, open_existing
from megalith.checkpoint.extent import Extent
from megalith.config import ModelConfig, RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.optim.schedule import build_schedule
from megalith.progress import Progress
from megalith.remote import open_location

FORMATS = ("torch_dist", "torch")
VERSION = 3.0  # of the order of queries, keys and values in a matrix


@dataclass(frozen=True)
class _ExportSource:
    """Source of an export: a configuration and tensors."""

    config: RunConfig
    read: Read
    step: int = 0
    samples: int = 0
    position: tuple[int, int] = (0, 0)
    """Steps and samples that schedules count: without steps skipped in fp16, as in Megatron."""
    updates: int | None = None
    """Steps of the optimizer; None without optimizer state."""


def export_megatron(
    source: str | Path,
    out: str | Path,
    *,
    ckpt_format: str = "torch_dist",
    tp: int = 1,
    pp: int = 1,
    dtype: str | None = None,
    transformer_impl: str = "transformer_engine",
    make_vocab_size_divisible_by: int = 128,
    with_optimizer: bool = False,
    trust: bool = False,
    show_progress: bool = True,
) -> Path:
    """Write a checkpoint in Megatron's format.

    Args:
        source: a run, whose newest checkpoint is used, one step of it, or a Hugging Face or Megatron folder.
        out: folder or URL to write; must not exist.
        ckpt_format: `torch_dist`, or `torch` for the legacy format.
        tp: Megatron's tensor-parallel size. `torch` has a file per rank; `torch_dist` is loaded in any layout.
        pp: Megatron's pipeline-parallel size.
        dtype: float32, bfloat16 or float16; default: the run's compute dtype.
        transformer_impl: Megatron's setting in the job that will load the checkpoint.
        make_vocab_size_divisible_by: as in Megatron, for each TP rank.
        with_optimizer: include AdamW's state and the schedule; only from a Megalith run and in `torch_dist`.
        trust: as in `import_megatron`.
        show_progress: draw a progress bar.

    Returns:
        The iteration's folder; `release` for step 0.

    Raises:
        ConfigError: Megatron core cannot express the model, or sizes are not divisible.
        CheckpointError: there is no complete checkpoint, or `out` exists or cannot be written. Nothing is left at
            `out`.
    """
    exported = _open_export_source(source, trust, with_optimizer, show_progress)
    if with_optimizer and ckpt_format != "torch_dist":
        raise ConfigError(
            "the optimizer's state is written only in the format torch_dist; choose torch_dist, or export without "
            "the optimizer"
        )
    model, kind = exported.config.model, DTYPE_NAMES.get(dtype) or _precision(exported.config)
    arguments = _arguments(exported, tp, pp, kind, make_vocab_size_divisible_by)
    arguments.ckpt_format, arguments.transformer_impl = ckpt_format, transformer_impl
    if transformer_impl == "local" and (model.hybrid_layer_pattern or model.linear_attention_layers):
        raise ConfigError(
            "transformer_impl is local, but Megatron core builds gated delta nets and hybrid models only with "
            "Transformer Engine; choose transformer_engine"
        )
    if transformer_impl == "local" and arguments.use_te_activation_func:
        raise ConfigError(
            "transformer_impl is local, but model.activation is gelu_tanh without biases, which Megatron core computes "
            "only with Transformer Engine (--use-te-activation-func); leave transformer_impl out"
        )
    if ckpt_format == "torch" and transformer_impl == "local":
        _check_latents(model, tp)
    groups = family_of(model).groups(model)
    reads = tp if ckpt_format == "torch" else 1 + len(STATE) * with_optimizer
    total = reads * sum(len(list(group.boxes())) for group in groups)
    progress = Progress("export", total, "tensors", show=show_progress)

    def read(*box: Any) -> torch.Tensor:
        progress.add()
        return exported.read(*box)

    tensors = CoreTensors(groups, read, kind, arguments.padded_vocab_size)
    common = {"args": arguments, "checkpoint_version": VERSION, "iteration": exported.step}
    name = f"iter_{exported.step:07d}" if exported.step else "release"
    by_engine = transformer_impl == "transformer_engine"
    with new_folder(open_location(out)) as folder, progress:
        if ckpt_format == "torch_dist":
            common |= _optimizer(exported) if with_optimizer else {}
            write_torch_dist(folder / name, tensors, common, by_engine, with_optimizer)
        else:
            write_ranks(folder / name, tensors, common, by_engine, tp, pp)
        (folder / LATEST).write_text(str(exported.step or "release"))
    return open_location(out) / name


def _open_export_source(
    source: str | Path, trust: bool, with_optimizer: bool, show_progress: bool
) -> _ExportSource:
    if is_foreign_weights(source):
        if with_optimizer:
            raise ConfigError(
                f"{source} is not a Megalith run, so it has no optimizer state; leave --optimizer out"
            )
        matched = open_weights(source, trust)
        by_name = {group.name: group for group in matched.groups}
        config = RunConfig.from_tree({"train": {"precision": PRECISIONS[common_dtype(matched)]}})
        config = config.model_copy(update={"model": matched.groups[0].model})
        return _ExportSource(config, lambda part, name, *box: matched.read(by_name[name], SEED, *box))
    parts = ("model", "optimizer") if with_optimizer else ("model",)
    checkpoint = open_existing(source, parts, show_progress=show_progress)
    config = config_of(checkpoint)
    if config.lora.rank is not None:
        raise ConfigError(
            f"{checkpoint.folder} contains only adapters; merge them with their base first: "
            "megalith lora merge"
        )

    def read(part: str, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        of_model = part == "model"
        stored = name if of_model else f"optim.{name}.{part}"
        return checkpoint.read("model" if of_model else "optimizer", stored, Extent(offset, shape))

    record = checkpoint.manifest
    updates = _updates(checkpoint, config) if with_optimizer else None
    position = record.step - record.skipped_steps, record.consumed_samples - record.skipped_samples
    return _ExportSource(config, read, record.step, record.consumed_samples, position, updates)


def _updates(checkpoint: Checkpoint, config: RunConfig) -> int:
    if config.optim.param_groups:
        raise ConfigError(
            f"{checkpoint.folder} has optim.param_groups, whose optimizer state is not exported to Megatron; "
            "leave --optimizer out"
        )
    if config.optim.optimizer not in ("adamw", "adam"):
        raise ConfigError(
            f"{checkpoint.folder} has optimizer state of {config.optim.optimizer}, but only that of Adam and AdamW "
            "can be "
            "exported to Megatron; leave --optimizer out"
        )
    name = next(name for name in checkpoint.table("optimizer") if name.endswith(".step"))
    return int(checkpoint.read("optimizer", name))


def _precision(config: RunConfig) -> torch.dtype:
    return next(dtype for dtype, name in PRECISIONS.items() if name == config.train.precision)


def _arguments(exported: _ExportSource, tp: int, pp: int, dtype: torch.dtype, divisible_by: int) -> Namespace:
    """Return the arguments that Megatron stores in a checkpoint. Raises ConfigError."""
    config = exported.config
    model = config.model
    if model.num_experts and model.mlp_bias and not model.add_router_bias:
        raise ConfigError(
            "the model's experts have biases but its router has none (model.add_router_bias), and in "
            "Megatron core experts with biases imply a router bias; export the model to Hugging Face's format"
        )
    try:
        args = family_of(model).write_config(model)
    except ConfigError as error:
        raise ConfigError(
            f"Megatron core cannot express this model: {error}; export it to Hugging Face's format"
        ) from None
    _check_sizes(model, tp, pp, divisible_by)
    rows = divisible_by * tp
    return Namespace(
        **{name: value for name, value in args.items() if name not in ("architectures", "model_type")}
        | {
            "layernorm_epsilon": args["norm_epsilon"],  # core 0.20's spelling
            "layernorm_zero_centered_gamma": args["apply_layernorm_1p"],
            "make_vocab_size_divisible_by": divisible_by,
            "padded_vocab_size": math.ceil(model.vocab_size / rows) * rows,
            "seq_length": config.data.seq_length or model.max_position_embeddings,
            "encoder_num_layers": model.num_layers,
            "add_position_embedding": True,
            "apply_query_key_layer_scaling": False,
            "tokenizer_type": config.data.tokenizer_type,
            "tokenizer_model": config.data.tokenizer_model,
            "null_tokenizer_eod_id": None,  # as from core 0.18 on, vocab_size contains the end of document
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": tp,
            "data_parallel_size": 1,
            "world_size": tp * pp,
            "use_distributed_optimizer": exported.updates is not None,
            "no_save_optim": exported.updates is None,
            "no_save_rng": True,
            "iteration": exported.step,
            "consumed_train_samples": exported.samples,
            "skipped_train_samples": 0,
            "consumed_valid_samples": 0,
        }
    )


def _check_sizes(model: ModelConfig, tp: int, pp: int, divisible_by: int) -> None:
    if min(tp, pp, divisible_by) < 1:
        raise ConfigError(
            f"tp is {tp}, pp is {pp} and make_vocab_size_divisible_by is {divisible_by}; each "
            "must be at least 1"
        )
    cut = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "ffn_hidden_size": model.ffn_size,
        "moe_ffn_hidden_size": model.expert_size if model.num_experts else None,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
    }
    if "gated_delta_net" in model.recurrent_mixers:
        cut |= {name: getattr(model, name) for name in ("linear_num_key_heads", "linear_num_value_heads")}
    if "mamba2" in model.recurrent_mixers:
        cut |= {"mamba_num_heads": model.mamba_heads, "mamba_num_groups": model.mamba_num_groups}
    others = [f"{name} {size}" for name, size in cut.items() if size and size % tp]
    if others:
        raise ConfigError(
            f"tp is {tp}, which does not divide {', '.join(others)}; choose a tp that divides these"
        )
    if model.num_layers % pp:
        raise ConfigError(
            f"pp is {pp}, which does not divide num_layers {model.num_layers}; choose a divisor"
        )


def _check_latents(model: ModelConfig, tp: int) -> None:
    """Raise ConfigError if TP does not divide the latents' rows, which are split without Transformer Engine."""
    if not model.multi_latent_attention:
        return
    rows = {"q_lora_rank": model.q_lora_rank, "kv_lora_rank + qk_pos_emb_head_dim":
            model.kv_lora_rank + model.qk_pos_emb_head_dim}  # fmt: skip
    if others := [f"{name} {size}" for name, size in rows.items() if size and size % tp]:
        raise ConfigError(
            f"tp is {tp}, which does not divide {', '.join(others)}; choose a tp that divides these"
        )


def _optimizer(exported: _ExportSource) -> dict[str, Any]:
    """Return the optimizer and schedule state other than tensors, as Megatron stores it.

    The plain optimizer over fp32 weights has groups and `state` at the top, the others below `optimizer`.
    """
    config = exported.config
    optim, schedule = config.optim, build_schedule(config.optim, config.train)
    steps, samples = exported.position
    decay, kinds = schedule.weight_decay(steps, samples), [False] + [True] * (optim.decoupled_lr is not None)
    groups = [
        {
            "wd_mult": float(decays), "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": decoupled,
            "default_config": decays and not decoupled, "lr": schedule.learning_rate(steps, samples),
            "weight_decay": decay * decays, "betas": (optim.adam_beta1, optim.adam_beta2), "eps": optim.adam_eps,
            "bias_correction": True, "step": exported.updates,
        }
        for decoupled, decays in itertools.product(kinds, (True, False))
        if decays or not decoupled  # the embedding and the head decay
    ]  # fmt: skip
    inner = {"param_groups": groups, "state": {"common_step": torch.tensor(float(exported.updates))}}
    per_step = schedule.samples_per_iteration
    return {
        "optimizer": {**inner, "optimizer": inner, "param_state_sharding_type": "fully_reshardable"},
        "opt_param_scheduler": {
            "max_lr": schedule.lr,
            "min_lr": schedule.min_lr,
            "lr_warmup_steps": schedule.warmup_steps,
            "lr_decay_style": schedule.decay_style,
            "lr_decay_steps": schedule.decay_steps,
            "num_steps": samples if per_step is None else steps * per_step,
            "start_wd": schedule.start_weight_decay,
            "end_wd": schedule.end_weight_decay,
            "wd_incr_style": schedule.weight_decay_style,
            "wd_incr_steps": schedule.weight_decay_steps,
        },
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        },
    }


def convert(
    path: str | Path,
    out: str | Path,
    target: str,
    source: str | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
    trust: bool = False,
    **options: Any,
) -> Path:
    """Convert weights between Hugging Face's, Megatron's and Megalith's formats.

    Args:
        path: Hugging Face or Megatron folder, or Megalith run.
        out: folder or URL to write; must not exist.
        target: `hf`, `megatron` or `megalith`.
        source: expected format of `path`; `megatron` also accepts a Megalith run. Default: detected.
        sizes: expected TP and PP sizes of a Megatron source.
        trust: as in `import_megatron`.
        options: further arguments of `export_megatron`.

    Returns:
        The folder written.

    Raises:
        ConfigError: `path` does not have the format `source` or the sizes `sizes`.
        CheckpointError: as in the functions that read and write these formats.
    """
    kind = "hf"
    if is_megatron_folder(path):
        kind = "megatron"
        _check_source(path, sizes, trust)
    elif not is_foreign_weights(path):
        kind = "megalith"
        if open_checkpoint(path, ()) is None:
            raise CheckpointError(
                f"{path} has nothing to convert: no {CONFIG} with weights (hf), no Megatron "
                "checkpoint, no Megalith run; pass a folder with one of these"
            )
    if source not in (None, kind) and (source, kind) != ("megatron", "megalith"):
        if not path_exists(open_location(path)):
            raise CheckpointError(f"there is no folder {path}; check the path")
        raise ConfigError(f"the source should be {source}, but {path} is {kind}; correct one of them")
    if kind == target != "megatron":
        raise ConfigError(f"{path} is already {kind}; choose another target")
    if target == "megatron":
        return export_megatron(path, out, trust=trust, **options)
    if target == "megalith":
        return import_megatron(path, out, trust=trust) if kind == "megatron" else import_hf(path, out)
    if kind == "megalith":
        return export_hf(path, out).path
    if path_exists(open_location(out)):
        raise CheckpointError(f"{out} already exists; remove it, or choose another path")
    with tempfile.TemporaryDirectory(dir=Path(out).absolute().parent) as between:
        import_megatron(path, f"{between}/run", trust=trust)
        return export_hf(f"{between}/run", out).path


def _check_source(path: str | Path, sizes: tuple[int | None, int | None], trust: bool) -> None:
    """Raise ConfigError if TP and PP differ from the arguments in a Megatron checkpoint."""
    args = read_arguments(path, trust)
    for name, size in zip(("tensor", "pipeline"), sizes):
        stored = args.get(f"{name}_model_parallel_size")
        if size is not None and stored is not None and size != stored:
            raise ConfigError(
                f"--source-{name[0]}p is {size}, but {path} was written with {stored}; set "
                f"--source-{name[0]}p to {stored}, or leave it out"
            )

"""Adapters of a run, loaded from PEFT's format, computed from their base, or exported to PEFT's format.

A run with LoRA saves only its adapters. Their base is the model that `model.init_from` names.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megalith.bridge.adapters.open_adapters import (
    adapter_family,
    base_reader,
    copy_shards,
    low_rank_adapters,
    open_adapter_run,
    open_adapters_of,
    open_peft,
)
from megalith.bridge.families import family_named
from megalith.bridge.family import Family, build_on_meta
from megalith.bridge.importer import check_absent
from megalith.bridge.initial_factors import initialize_factors
from megalith.bridge.partial import new_folder
from megalith.bridge.peft.peft_writer import save_peft
from megalith.bridge.quantize_base import CodedBase
from megalith.checkpoint.rewrite import part_bytes
from megalith.checkpoint.state import MODEL, Model, checkpoint_shards
from megalith.comm.collectives import Axis
from megalith.config import LoraConfig, ModelConfig, RunConfig
from megalith.config.lora import model_sites
from megalith.errors import CheckpointError, ConfigError, shorten
from megalith.models.adapters import ADAPTER, adapters, is_initial_factor
from megalith.models.score_model import SCORE
from megalith.models.token_rows import TokenRows
from megalith.ops.weight_codes import decode
from megalith.parallel.gather import ALONE
from megalith.progress import Progress
from megalith.remote import open_location

MAGNITUDE = f"{ADAPTER}lora_magnitude."


def load_peft_adapters(path: str, config: ModelConfig, model: Model) -> None:
    """Load this rank's shards of the adapters in a folder in PEFT's format."""
    folder = open_peft(path, config)
    without_score = not folder.has_score
    copy_shards(model, folder.read, lambda name: is_initial_factor(name) or (name == SCORE and without_score))


def initialize_from_base(
    config: RunConfig,
    model: Model,
    world: Axis = ALONE,
    device: torch.device | str = "cpu",
) -> None:
    """Set this rank's shards of the adapter values that are computed from the base. Collective over `world`.

    The values are the factors of PiSSA, OLoRA and LoftQ, DoRA's magnitudes (the norms of the base's rows), and the rows
    of trained tokens.
    """
    trained = checkpoint_shards(model)
    shards = {name: shard for name, shard in trained.items() if MAGNITUDE in name}
    tokens = config.lora.tokens_by_matrix()
    if not shards and not tokens and not config.lora.decomposes_base and not config.lora.begins_with_loftq:
        return
    full = low_rank_adapters(build_on_meta(config.model, config.lora))
    read = base_reader(config.model.init_from, config.checkpoint.trust, config.model, config.train.seed)
    for path, rows in tokens.items():
        if (shard := trained.get(f"{path}{ADAPTER}weight")) is not None:
            shard.values.copy_(shard.slice_of(read(f"{path}.weight")[rows]))
    if config.lora.decomposes_base:
        initialize_factors(model, config.lora, full, read, config.train.seed, world, device)

    if config.lora.begins_with_loftq:
        coded = CodedBase(config, device)

        def quantized(name: str, weight: Tensor, taken: Tensor | None) -> Tensor:
            codes = coded.codes(name, weight) if taken is None else coded.codes_without(name, weight, taken)
            return decode(coded.form, codes, torch.float32)

        seed = config.train.seed
        initialize_factors(model, config.lora, full, read, seed, world, device, quantized=quantized)

    if config.lora.has_quantized_base:
        read = CodedBase(config).full

    @lru_cache(maxsize=1)
    def lengths(linear: str) -> dict[str, Tensor]:
        return full[linear].row_norms(read(f"{linear}.weight"))

    for name, shard in shards.items():
        linear, part = name.removesuffix(".weight").split(MAGNITUDE)
        shard.values.copy_(shard.slice_of(lengths(linear)[part]))


def export_adapters(
    run: str | Path, out: str | Path, family: str | None = None, show_progress: bool = True
) -> Family:
    """Write the adapters of a run in PEFT's format.

    Args:
        run: a run, whose newest checkpoint is used, or one step of it.
        out: folder or URL; must not exist. On an error nothing is left there.
        family: architecture or model type; default: the base's, else the first that can express the model.
        show_progress: draw a progress bar.

    Returns:
        The family whose module names are used.

    Raises:
        CheckpointError: the run has no adapters, or `out` exists.
    """
    out = open_location(out)
    check_absent(out)
    checkpoint, config = open_adapter_run(run, show_progress)
    if config.lora.begins_with_loftq and config.lora.keeps_initial_factors:
        raise CheckpointError(
            f"{checkpoint.folder} was trained with lora.loftq_iter {config.lora.loftq_iter} on a base that PEFT "
            "cannot reproduce from the published weights; merge the adapters instead (megalith lora merge)"
        )
    chosen = family_named(family, "--family") if family else adapter_family(config.model)
    total = part_bytes(checkpoint, MODEL)
    with new_folder(out) as folder, Progress("export", total, show=show_progress) as progress:

        def read(name: str) -> Tensor:
            values = checkpoint.read(MODEL, name)
            progress.add(values.nbytes)
            return values

        save_peft(folder, chosen, config.model, config.lora, read, config.model.init_from)
    return chosen


@torch.no_grad()
def load_adapter_pairs(
    source: str | Path, base: str | Path, model: ModelConfig, fingerprint: str | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return full A and B of each adapted matrix, so that several adapters can share one base.

    Args:
        source: a run with adapters, a step of one, or a folder in PEFT's format.
        base: weights of the base.
        model: configuration of the base.
        fingerprint: result of `fingerprint_of` for the base.

    Raises:
        ConfigError, CheckpointError: `source` has no adapters, adapters of another base, or more than LoRA.
    """
    adapted, config = open_adapters_of(source, base, model, fingerprint)
    if config is not None and config.lora.has_quantized_base:
        raise ConfigError(
            f"{source} was trained on a base quantized to {config.lora.quantize_base}; merge the adapters (megalith "
            "lora merge), or run megalith lora export and serve its output on the unquantized base"
        )
    if adapted.saved_names:
        raise ConfigError(
            f"{source} has modules that were trained in full ({shorten(sorted(adapted.saved_names))}), so it cannot be "
            "served as an adapter next to others; merge it into the base (megalith lora merge), and serve the result"
        )
    if any(isinstance(adapter, TokenRows) for _, adapter in adapters(adapted)):
        raise ConfigError(
            f"{source} has trained embedding rows (lora.trainable_token_indices), so it cannot be served as an adapter "
            "next to others; merge it into the base (megalith lora merge), and serve the result"
        )
    pairs = {}
    for name, adapter in adapters(adapted):
        if adapter.rescales:
            raise ConfigError(
                f"{source} was trained with DoRA, so it cannot be served as an adapter next to others; merge it into "
                "the base (megalith lora merge), and serve the result"
            )
        pairs[name] = adapter.pair()
    return pairs


def slot_ranks(model: ModelConfig, rank: int) -> dict[str, int]:
    """Return, by matrix name, the sum of the ranks of its adapters if each sub-matrix has an adapter of rank `rank`."""
    lora = LoraConfig(rank=rank, targets=[*model_sites(model)])
    return {name: sum(adapter.ranks.values()) for name, adapter in adapters(build_on_meta(model, lora))}

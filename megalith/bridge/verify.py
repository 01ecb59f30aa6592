"""Certificate of a conversion: compares all tensors bitwise, and logits on a small batch of probe tokens.

Tensors: the checkpoint's, converted to Hugging Face's format, must equal the folder's bitwise; the folder's, converted
to Megalith's format, must equal the checkpoint's, rounded to the folder's dtypes. Logits: Megalith's from the
checkpoint against transformers' from the folder, in float32. Without transformers, Megalith computes both. Tensors are
compared one at a time; the logits need both models in memory.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.families import family_of
from megalith.bridge.importer import SEED, open_hf_folder
from megalith.bridge.load import load_source
from megalith.bridge.match import Match
from megalith.bridge.transfer import to_theirs
from megalith.checkpoint import Checkpoint, Extent, load_model, open_checkpoint, open_existing
from megalith.checkpoint.averaged_checkpoint import with_average
from megalith.errors import CheckpointError, printable
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.models.vocabulary import VOCABULARY
from megalith.progress import Progress

BOUND = 1e-5  # relative to the largest logit
PROBE = (2, 64)  # sequences and tokens
# Classes of transformers 5.24 that leave out their language model's logit_scale.
WITHOUT_LOGIT_SCALE = ("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration")


def certify(
    checkpoint: str | Path, folder: str | Path, out_prefix: str | Path, averaged: bool = False
) -> Path:
    """Compare a checkpoint with a Hugging Face folder and write a certificate.

    Args:
        checkpoint: a run or one step of it.
        folder: the Hugging Face folder.
        out_prefix: path of the certificate without `.certificate.json`.
        averaged: compare the averaged weights of the optimizer state, if there are any.

    Returns:
        The path of the certificate.

    Raises:
        CheckpointError: checkpoint and folder are not the same model. The certificate lists the differences.
    """
    opened = open_checkpoint(checkpoint, parts=("model",))
    if averaged:
        opened, _ = with_average(open_existing(opened.folder))
    matched = open_hf_folder(folder, allow=True)
    certificate = {
        "checkpoint": str(opened.folder),
        "folder": str(matched.source.path),
        "architecture": matched.source.config.get("architectures"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in ("megalith", "torch", "transformers")},
        "allowed": {"missing": matched.missing, "extra": matched.extra},
        "tensors": compare_tensors(opened, matched),
        "logits": compare_logits(opened, matched),
    }
    passed = not certificate["tensors"]["different"] and certificate["logits"]["within_bound"]
    path = Path(f"{out_prefix}.certificate.json")
    path.write_text(json.dumps({"passed": passed, **certificate}, indent=2) + "\n", encoding="utf-8")
    if not passed:
        raise CheckpointError(
            f"{opened.folder} and {matched.source.path} are not the same model; see the differences in {path}"
        )
    return path


def certificate_line(path: Path) -> str:
    """Return a one-line summary of a certificate."""
    certificate = json.loads(path.read_text(encoding="utf-8"))
    tensors, logits = certificate["tensors"]["compared"], certificate["logits"]
    difference, largest = logits["largest_difference"], logits["largest_logit"]
    return (
        f"verified: {printable(path)}: {tensors} tensors equal, logits within {difference:.1e} of those of "
        f"{logits['against']} (the largest is {largest:.2g})"
    )


def compare_tensors(checkpoint: Checkpoint, matched: Match) -> dict[str, Any]:
    """Return the number and bytes of compared tensors, and the names of those that differ."""
    dtypes, different, count, size = matched.dtypes, [], 0, 0
    compared = [group for group in matched.groups if not set(group.sources) & set(matched.missing)]
    with Progress("verify", sum(map(matched.bytes, compared))) as progress:
        for group in compared:
            kinds = {dtypes[name] for name in group.sources}
            for offset, shape in group.boxes():
                ours = checkpoint.read("model", group.name, Extent(offset, shape))
                for name, value in to_theirs(group, ours, dtypes, first_expert=offset[0]):
                    count, size = count + 1, size + value.nbytes
                    if not same_bits(value, matched.source.read(name)):
                        different.append(name)
                    progress.add(value.nbytes)
                back = matched.read(group, SEED, offset, shape)
                if len(kinds) == 1 and not same_bits(back, ours.to(min(kinds, key=str)).float()):
                    different.append(group.name)
    return {"compared": count, "bytes": size, "different": different}


@torch.no_grad()
def compare_logits(checkpoint: Checkpoint, matched: Match) -> dict[str, Any]:
    """Return the largest difference between the logits of a probe batch, with its bound and the reference."""
    model = matched.groups[0].model
    ours = make_model(model, device="cpu").eval()
    rows = {name: model.vocab_size for name in VOCABULARY if name in checkpoint.table("model")}
    load_model(checkpoint, ours, rows, show_progress=True)
    _round(ours, matched)
    generator = torch.Generator().manual_seed(SEED)
    shape = (PROBE[0], min(PROBE[1], model.max_position_embeddings))
    # In RoBERTa token 1 is padding.
    ids = torch.randint(min(2, model.vocab_size - 1), model.vocab_size, shape, generator=generator)
    theirs = _hugging_face_logits(matched, ids)
    against = "megalith" if theirs is None else "transformers"
    theirs = _megalith_logits(matched, ids) if theirs is None else theirs
    difference, largest = (ours(ids) - theirs).abs().max().item(), theirs.abs().max().item()
    return {
        "against": against,
        "batch": list(shape),
        "largest_difference": difference,
        "largest_logit": largest,
        "bound": BOUND * largest,
        "within_bound": difference <= BOUND * largest,
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))


def _round(model: Transformer, matched: Match) -> None:
    """Round the model's weights to their dtypes in the folder."""
    state = model.state_dict()
    for group in matched.groups:
        kinds = {matched.dtypes[name] for name in group.sources if name in matched.dtypes}
        if len(kinds) == 1:
            state[group.name].copy_(state[group.name].to(kinds.pop()))


def _hugging_face_logits(matched: Match, ids: Tensor) -> Tensor | None:
    """Return the logits of transformers, or None if it is not installed or lacks the model's class."""
    if not importlib.util.find_spec("transformers"):
        return None
    import transformers

    family = family_of(matched.source.config, str(matched.source.path))
    shared = "AutoModelForCausalLM" if family.transformers_class else family.architecture
    name = matched.source.wrapper or shared
    kind = getattr(transformers, name, None)
    if kind is None:
        return None
    with no_progress_bars():
        model = kind.from_pretrained(matched.source.path, dtype=torch.float32, attn_implementation="eager")
    model = getattr(model, "thinker", model)  # of a model that also speaks
    if name == "Llama4ForConditionalGeneration":
        model = model.language_model  # transformers 5.24 fails in the whole model without an image
    decoder_inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    logits = model.eval()(ids, **decoder_inputs)[0]
    return logits * model.config.text_config.logit_scale if name in WITHOUT_LOGIT_SCALE else logits


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would also be written to files and pipes."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _megalith_logits(matched: Match, ids: Tensor) -> Tensor:
    model = make_model(matched.groups[0].model, device="cpu").eval()
    load_source(matched, model, SEED, show_progress=True)
    return model(ids)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

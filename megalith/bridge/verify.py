"""The certificate of a conversion: every tensor both ways, bit by bit, and the logits of a probe batch.

Tensors: what the checkpoint holds, turned into theirs, has the bits of the folder's; and the folder's, turned into
ours, have the bits of the checkpoint's in the folder's types. Logits: ours from the checkpoint against transformers'
from the folder, both in float32, or, where transformers is not installed, against ours from the folder. The logits
need both models in memory; the tensors one at a time.
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
from megalith.bridge.family import VOCABULARY
from megalith.bridge.importer import SEED, open_hf_folder
from megalith.bridge.load import load_source
from megalith.bridge.match import Match
from megalith.bridge.transfer import to_theirs
from megalith.checkpoint import Checkpoint, Extent, load_model, open_checkpoint
from megalith.errors import CheckpointError, printable
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.progress import Progress

BOUND = 1e-5  # of the largest logit
PROBE = (2, 64)  # sequences and tokens


def certify(checkpoint: str | Path, folder: str | Path, beside: str | Path) -> Path:
    """Compares a checkpoint with a Hugging Face folder and writes `BESIDE.certificate.json`; returns its path.

    Raises CheckpointError when they are not the same model; the certificate then says in what they differ.
    """
    opened = open_checkpoint(checkpoint, parts=("model",))
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
    path = Path(f"{beside}.certificate.json")
    path.write_text(json.dumps({"passed": passed, **certificate}, indent=2) + "\n", encoding="utf-8")
    if not passed:
        raise CheckpointError(
            f"{opened.folder} and {matched.source.path} are not the same model; {path} says in what"
        )
    return path


def certificate_line(certificate: Path) -> str:
    """A line of what a certificate says."""
    found = json.loads(certificate.read_text(encoding="utf-8"))
    tensors, logits = found["tensors"]["compared"], found["logits"]
    difference, largest = logits["largest_difference"], logits["largest_logit"]
    return (
        f"verified: {printable(certificate)}: {tensors} tensors equal, logits within {difference:.1e} of those of "
        f"{logits['against']} (the largest is {largest:.2g})"
    )


def compare_tensors(checkpoint: Checkpoint, matched: Match) -> dict[str, Any]:
    """How many tensors of theirs were compared, of how many bytes, and the names of those that differ."""
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
                back = matched.ours(group, SEED, offset, shape)
                if len(kinds) == 1 and not same_bits(back, ours.to(min(kinds, key=str)).float()):
                    different.append(group.name)
    return {"compared": count, "bytes": size, "different": different}


@torch.no_grad()
def compare_logits(checkpoint: Checkpoint, matched: Match) -> dict[str, Any]:
    """The largest difference between the logits of a probe batch, with what it was taken against."""
    model = matched.groups[0].model
    ours = make_model(model, device="cpu").eval()
    rows = {name: model.vocab_size for name in VOCABULARY if name in checkpoint.table("model")}
    load_model(checkpoint, ours, rows, show_progress=True)
    _round(ours, matched)
    generator = torch.Generator().manual_seed(SEED)
    shape = (PROBE[0], min(PROBE[1], model.max_position_embeddings))
    ids = torch.randint(0, model.vocab_size, shape, generator=generator)
    against = "transformers" if importlib.util.find_spec("transformers") else "megalith"
    theirs = _their_logits(matched, ids) if against == "transformers" else _own_logits(matched, ids)
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
    """Whether two tensors have the same type, shape and bits."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _round(model: Transformer, matched: Match) -> None:
    """Gives our weights the precision that they have in the folder."""
    state = model.state_dict()
    for group in matched.groups:
        kinds = {matched.dtypes[name] for name in group.sources if name in matched.dtypes}
        if len(kinds) == 1:
            state[group.name].copy_(state[group.name].to(kinds.pop()))


def _their_logits(matched: Match, ids: Tensor) -> Tensor:
    import transformers

    family = family_of(matched.source.config, str(matched.source.path))
    kind = getattr(transformers, matched.source.wrapper or family.architecture)
    with no_progress_bars():
        model = kind.from_pretrained(matched.source.path, dtype=torch.float32, attn_implementation="eager")
    given = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model.eval()(ids, **given)[0]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without transformers' own progress bars, which it draws into files and pipes too."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _own_logits(matched: Match, ids: Tensor) -> Tensor:
    model = make_model(matched.groups[0].model, device="cpu").eval()
    load_source(matched, model, SEED, show_progress=True)
    return model(ids)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

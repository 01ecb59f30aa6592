"""Rank files of Megatron-LM, of tensor, pipeline and expert ranks, give the model that they were written from."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from megatron_checkpoint import arguments, core_state, forget_megatron, save_run, write_legacy
from test_megatron import MODELS, assert_same_model, random_model

import megalith
from megalith.bridge.megatron.megatron_exporter import export_megatron
from megalith.bridge.megatron.megatron_importer import import_megatron
from megalith.errors import CheckpointError
from megalith.models.init import initialize
from megalith.models.transformer import Transformer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_legacy_ranks_are_put_together(name: str, tp: int, pp: int, chunks: int, tmp_path: Path) -> None:
    model = random_model(name)
    write_legacy(tmp_path / "megatron", core_state(model, te=True), arguments(model.config), tp, pp, chunks)
    forget_megatron()
    import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True, vocab_size=151, show_progress=False)
    assert_same_model(tmp_path / "run", model)


def test_more_than_ten_chunks_of_a_stage_are_in_their_order(tmp_path: Path) -> None:
    config = MODELS["gpt"].model_copy(update={"num_layers": 24, "hidden_size": 16, "ffn_hidden_size": 16})
    model = Transformer(config)
    initialize(model, config, seed=3)
    write_legacy(tmp_path / "megatron", core_state(model, te=True), arguments(config), 1, 2, 12)
    forget_megatron()
    import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True, vocab_size=151, show_progress=False)
    assert_same_model(tmp_path / "run", model.eval())


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("te", [True, False], ids=["grouped", "sequential"])
def test_files_of_expert_ranks_are_put_together(pp: int, te: bool, tmp_path: Path) -> None:
    config = MODELS["llama"].model_copy(
        update={"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_grouped_gemm": te}
    )
    save_run(tmp_path / "ours", config)
    implementation = "transformer_engine" if te else "local"
    options = dict(ckpt_format="torch", tp=2, pp=pp, transformer_impl=implementation)
    export_megatron(tmp_path / "ours", tmp_path / "megatron", **options)
    for path in list((tmp_path / "megatron").rglob("model_optim_rng.pt")):
        split_experts(path, ranks=2)
    import_megatron(tmp_path / "megatron", tmp_path / "run", show_progress=False)
    assert_same_model(tmp_path / "run", megalith.load(tmp_path / "ours"))
    shutil.rmtree(next((tmp_path / "megatron").glob("*/mp_rank_00*_001")))
    with pytest.raises(
        CheckpointError, match=r"has \d of 2 × \d × 2 \(tensor × pipeline × expert\) rank folders"
    ):
        import_megatron(tmp_path / "megatron", tmp_path / "again", show_progress=False)


def split_experts(path: Path, ranks: int) -> None:
    """Replace a rank's file with those of `ranks` expert-parallel ranks, which number their experts from 0."""
    saved = torch.load(path, weights_only=False)
    saved["args"].expert_model_parallel_size = ranks
    local = saved["args"].num_experts // ranks
    for rank in range(ranks):
        held = {}
        for name, value in saved["model"].items():
            number = re.search(r"(?<=local_experts\.)\d+|(?<=experts\.linear_fc[12]\.weight)\d+", name)
            if number is None:
                held[name] = value
            elif int(number[0]) // local == rank:
                held[name[: number.start()] + str(int(number[0]) % local) + name[number.end() :]] = value
        folder = path.parent.with_name(f"{path.parent.name}_{rank:03d}")
        folder.mkdir()
        torch.save({**saved, "model": held}, folder / path.name)
    path.unlink()
    path.parent.rmdir()


def test_expert_tensor_ranks_that_files_cannot_tell_are_refused(tmp_path: Path) -> None:
    args = arguments(MODELS["llama"])
    args.num_experts, args.expert_tensor_parallel_size = 4, 1
    write_legacy(tmp_path / "megatron", core_state(random_model("llama"), True), args, 2, 1, 1)
    forget_megatron()
    with pytest.raises(
        CheckpointError, match="2 tensor-parallel ranks with expert_tensor_parallel_size 1; only"
    ):
        import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True)

"""What is saved comes back bitwise, and a resumed run is the run that was not interrupted."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint import list_steps, load_model, load_optimizer, open_checkpoint
from megalith.checkpoint.files import list_safetensors, tensor_record, write_safetensors
from megalith.errors import CheckpointError

OPTIMIZERS = {
    "adamw": dict(optimizer_name="adamw"),
    "adam": dict(optimizer_name="adam"),
    "sgd": dict(optimizer_name="sgd"),
    "sgd without state": dict(optimizer_name="sgd", sgd_momentum=0.0),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resuming_is_bitwise_going_straight_on(tiny_run, tmp_path, optimizer):
    straight = tiny_run(**OPTIMIZERS[optimizer]).train(7)
    first = tiny_run(**OPTIMIZERS[optimizer]).train(3)
    first.save(tmp_path)
    resumed = tiny_run(seed=99, **OPTIMIZERS[optimizer]).load(open_checkpoint(tmp_path))
    assert resumed.equals(first)
    resumed.train(4)
    assert resumed.equals(straight)
    assert resumed.loss_scale.state() == straight.loss_scale.state()


def test_the_record_comes_back(tiny_run, tmp_path):
    run = tiny_run().train(2)
    folder = run.save(tmp_path)
    manifest = open_checkpoint(folder).manifest
    for name, value in run.record().model_dump().items():
        got = getattr(manifest, name)
        assert (got.model_dump() if name == "tokenizer" else got) == value
    assert folder == tmp_path / "checkpoints" / "step_00000002"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000002\n"


def test_files_are_safetensors_with_global_names_and_no_padding(tiny_run, tmp_path):
    run = tiny_run().train(2)
    folder = run.save(tmp_path)
    weights, state = (
        load_file(folder / "model-00000-000.safetensors"),
        load_file(folder / "optimizer-00000-000.safetensors"),
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in {**weights, **state}.items()}
    assert shapes == {
        "embedding.weight": (13, 4),
        "expert_bias": (3,),
        "norm.weight": (4,),
        "norm.bias": (4,),
        "optim.embedding.weight.exp_avg": (13, 4),
        "optim.embedding.weight.exp_avg_sq": (13, 4),
        "optim.embedding.weight.step": (),
        "optim.norm.weight.exp_avg": (4,),
        "optim.norm.weight.exp_avg_sq": (4,),
        "optim.norm.weight.step": (),
        "optim.norm.bias.exp_avg": (4,),
        "optim.norm.bias.exp_avg_sq": (4,),
        "optim.norm.bias.step": (),
    }
    assert torch.equal(weights["embedding.weight"], run.model.embedding.weight[:13])
    listed = json.loads((folder / "manifest.json").read_text())["tensors"]["model"]
    piece = {"file": "model-00000-000.safetensors", "offset": [0, 0], "shape": [13, 4]}
    assert listed["embedding.weight"] == {"dtype": "F32", "shape": [13, 4], "pieces": [piece]}


def test_padding_rows_are_zero_after_loading(tiny_run, tmp_path):
    run = tiny_run().train(1)
    run.save(tmp_path)
    with torch.no_grad():
        for tensor in (run.model.embedding.weight, *run.optimizer.state[run.model.embedding.weight].values()):
            tensor.fill_(7.0)
    run.load(open_checkpoint(tmp_path))
    state = run.optimizer.state[run.model.embedding.weight]
    for tensor in (run.model.embedding.weight, state["exp_avg"], state["exp_avg_sq"]):
        assert tensor.shape == (16, 4)
        assert not tensor[13:].any()
        assert tensor[:13].any()


def test_any_given_folder_leads_to_the_newest_step(tiny_run, tmp_path):
    run = tiny_run()
    folders = [run.train(1).save(tmp_path) for _ in range(3)]
    assert open_checkpoint(tmp_path).folder == folders[2]
    assert open_checkpoint(str(tmp_path / "checkpoints")).folder == folders[2]
    assert open_checkpoint(folders[0]).folder == folders[0]
    assert list_steps(tmp_path / "checkpoints") == dict(zip((1, 2, 3), folders))


def test_the_first_start_finds_nothing(tmp_path):
    assert open_checkpoint(tmp_path / "absent") is None
    assert open_checkpoint(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_00000004.tmp").mkdir()
    assert open_checkpoint(tmp_path) is None


def test_a_named_step_that_is_absent_is_an_error(tiny_run, tmp_path):
    tiny_run().train(1).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint .*step_00000009; .* has the steps 1"):
        open_checkpoint(tmp_path / "checkpoints" / "step_00000009")


def test_a_folder_with_other_weights_is_an_error_and_no_fresh_start(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(
        CheckpointError, match=r"model-00001-of-00002\.safetensors but no step_NNNNNNNN folder"
    ):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        open_checkpoint(tmp_path / "model-00001-of-00002.safetensors")


def test_weights_can_be_loaded_without_the_optimizer(tiny_run, tmp_path):
    run = tiny_run().train(2)
    folder = run.save(tmp_path, with_optimizer=False)
    assert not (folder / "optimizer-00000-000.safetensors").exists()
    other = tiny_run(seed=5)
    load_model(open_checkpoint(tmp_path, parts=["model"]), other.model, other.rows)
    assert torch.equal(other.model.embedding.weight, run.model.embedding.weight)
    with pytest.raises(
        CheckpointError, match=r"was saved without optimizer;.*set checkpoint\.load_optim to false"
    ):
        open_checkpoint(tmp_path)


def test_the_tokenizer_goes_along(tiny_run, tmp_path):
    def write(folder):
        (folder / "tokenizer.json").write_text("{}")
        (folder / "merges").mkdir()
        (folder / "merges" / "a.txt").write_text("a b")

    folder = tiny_run().save(tmp_path, write_tokenizer=write)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tokenizer_folder == folder / "tokenizer"
    assert {"tokenizer/tokenizer.json", "tokenizer/merges/a.txt"} < checkpoint.manifest.files.keys()
    (folder / "tokenizer" / "merges" / "a.txt").write_text("a c")
    with pytest.raises(CheckpointError, match=r"merges/a\.txt is damaged"):
        open_checkpoint(folder)


def test_tensors_that_do_not_fit_are_named_and_nothing_is_loaded(tiny_run, tmp_path):
    tiny_run().train(1).save(tmp_path)
    wide = tiny_run(width=6)
    wide.model.extra = torch.nn.Linear(2, 2)
    del wide.model.norm
    before = wide.model.embedding.weight.detach().clone()
    with pytest.raises(CheckpointError) as error:
        load_model(open_checkpoint(tmp_path), wide.model, wide.rows)
    for words in (
        "missing: extra.weight, extra.bias",
        "unexpected: norm.weight, norm.bias",
        "embedding.weight (stored F32 [13, 4], needed F32 [13, 6])",
    ):
        assert words in str(error.value)
    assert torch.equal(wide.model.embedding.weight, before)


def test_a_type_that_differs_is_named(tiny_run, tmp_path):
    tiny_run().save(tmp_path)
    half = tiny_run()
    half.model.bfloat16()
    with pytest.raises(CheckpointError, match=r"norm\.bias \(stored F32 \[4\], needed BF16 \[4\]\)"):
        load_model(open_checkpoint(tmp_path), half.model, half.rows)


def test_another_optimizers_state_is_refused(tiny_run, tmp_path):
    tiny_run(optimizer_name="sgd").train(1).save(tmp_path)
    run = tiny_run()
    with pytest.raises(
        CheckpointError, match=r"missing: optim\.embedding\.weight\.step.*load_optim to false"
    ):
        load_optimizer(open_checkpoint(tmp_path), run.optimizer, run.rows)


def test_long_lists_of_misfits_are_cut(tiny_run, tmp_path):
    tiny_run().save(tmp_path)
    deep = torch.nn.Sequential(*[torch.nn.Linear(1, 1, bias=False) for _ in range(14)])
    with pytest.raises(CheckpointError, match=r"missing: 0\.weight, .*9\.weight and 4 more;"):
        load_model(open_checkpoint(tmp_path), deep)


def test_every_type_and_odd_shape_round_trips_and_the_library_agrees(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).half(),
        "bf16": torch.randn(7).bfloat16(),
        "single": torch.randn(2, 3, 4).transpose(0, 2),
        "double": torch.randn((), dtype=torch.float64),
        "integers": torch.arange(-3, 9),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
    }
    path = tmp_path / "x.safetensors"
    record = write_safetensors(path, tensors)
    assert record.bytes == path.stat().st_size
    listed = list_safetensors(path, "")
    assert [f"{stored.dtype} {list(stored.shape)}" for stored in listed.values()] == [
        str(tensor_record(tensors[name])) for name in listed
    ]
    ours = {name: stored.read() for name, stored in listed.items()}
    for read in (load_file(path), ours):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)

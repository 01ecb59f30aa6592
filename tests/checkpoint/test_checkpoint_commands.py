"""`megalith checkpoint …`: every step told of, and the same tensors in whatever files."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint import RunRecord, StepWriter, open_checkpoint
from megalith.checkpoint.files import list_safetensors
from megalith.checkpoint.manifest import content_checksum
from megalith.cli.main import main
from megalith.launch.lock import OutputLock


@pytest.fixture
def command(capsys):
    """Runs `megalith checkpoint` with words; returns the exit code and what was printed."""

    def command(*words) -> tuple[int, str]:
        code = main(["checkpoint", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return command


@pytest.fixture
def steps(tiny_run, tmp_path):
    """The folder of a run with the steps 1 and 2."""
    run = tiny_run()
    for _ in range(2):
        run.train(1).save(
            tmp_path / "run", write_tokenizer=lambda folder: (folder / "t.json").write_text("{}")
        )
    return tmp_path / "run"


def test_list_has_a_line_a_step(command, steps):
    (steps / "checkpoints" / "step_00000003").mkdir()
    code, text = command("list", steps)
    lines = text.splitlines()
    assert code == 0 and len(lines) == 4
    assert lines[1].split()[:2] == ["step_00000001", "3"] and lines[1].endswith("model optimizer")
    assert "step_00000003" in lines[3] and "unreadable" in lines[3]
    assert len(command("list", steps / "checkpoints" / "step_00000002")[1].splitlines()) == 2


def test_verify_names_the_damaged_file_of_each_step(command, steps):
    assert command("verify", steps) == (0, "step_00000001 intact\nstep_00000002 intact\n")
    damaged = steps / "checkpoints" / "step_00000001" / "optimizer-00000-000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    (steps / "checkpoints" / "step_00000001" / "tokenizer" / "t.json").unlink()
    code, text = command("verify", steps)
    assert code == 4
    assert "step_00000001 DAMAGED" in text and "step_00000002 intact" in text
    assert "optimizer-00000-000.safetensors is damaged" in text and "t.json is missing" in text


@pytest.mark.parametrize("name", ["list", "verify", "hash"])
def test_a_folder_without_steps_is_a_sentence(command, tmp_path, name):
    code, text = command(name, tmp_path)
    assert code == 4 and text.startswith("error: there is no ")


def test_resharded_steps_have_the_same_tensors_and_load(command, steps, tiny_run, tmp_path):
    for count in (1, 2, 3, 50):
        out = tmp_path / f"in {count}"
        code, text = command("reshard", steps, out, "--files", count)
        assert (code, text) == (0, f"wrote {out / 'checkpoints' / 'step_00000002'}\n")
        assert command("verify", out)[0] == 0
        assert command("diff", steps, out) == (0, "0 tensors differ, 13 are bitwise equal\n")
        assert command("hash", out)[1] == command("hash", steps)[1]
        checkpoint = open_checkpoint(out)
        assert len(checkpoint.manifest.files_of("model")) == min(count, 13)  # rows of the longest tensor
        assert tiny_run(seed=7).load(checkpoint).equals(tiny_run().train(2))
        assert (checkpoint.tokenizer_folder / "t.json").read_text() == "{}"
        ours, theirs = (
            open_checkpoint(folder).manifest.model_dump(exclude={"files", "tensors", "save_number"})
            for folder in (steps, out)
        )
        assert ours == theirs
    code, text = command("reshard", steps, tmp_path / "in 2", "--files", 2)
    assert code == 4 and "already exists; choose another output folder" in text
    assert command("reshard", steps, tmp_path / "x", "--files", 0)[0] == 2


def test_resharding_copies_of_the_tokenizer_what_the_manifest_lists(command, steps, tmp_path):
    (tmp_path / "secret").write_text("mine")
    (steps / "checkpoints" / "step_00000002" / "tokenizer" / "link").symlink_to(tmp_path / "secret")
    assert command("reshard", steps, tmp_path / "out", "--files", 1)[0] == 0
    copied = open_checkpoint(tmp_path / "out").tokenizer_folder
    assert [path.name for path in copied.iterdir()] == ["t.json"]


def test_a_file_is_compared_with_the_manifest_once_however_many_tensors_it_has(command, steps, monkeypatch):
    compared = []
    counting = lambda path, *rest: compared.append(path) or list_safetensors(path, *rest)  # noqa: E731
    monkeypatch.setattr("megalith.checkpoint.read.list_safetensors", counting)
    assert command("hash", steps)[0] == 0
    assert len(compared) == len(set(compared)) == 2


def test_diff_tells_which_tensors_differ_and_by_how_much(command, tiny_run, tmp_path):
    one, other = tiny_run().train(1), tiny_run().train(1)
    one.save(tmp_path / "a")
    with torch.no_grad():
        other.model.norm.weight[1] += 0.5
        other.model.norm.weight[2] -= 0.25
        other.model.norm.bias[0] = torch.nan
        other.model.expert_bias = torch.zeros(4)
    other.model.extra = torch.nn.Parameter(torch.ones(1))
    other.save(tmp_path / "b", with_optimizer=False)
    code, text = command("diff", tmp_path / "a", tmp_path / "b", "--part", "model")
    assert code == 1
    assert text.splitlines() == [
        "expert_bias: F32 [3] in the first, F32 [4] in the second",
        "extra: only in the second",
        "norm.bias: 1 of 4 elements differ, by at most inf",
        "norm.weight: 2 of 4 elements differ, by at most 0.5",
        "4 tensors differ, 1 are bitwise equal",
    ]
    code, text = command("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and text.count(": only in the first") == 9


def test_equal_not_a_numbers_are_equal_and_zeros_of_other_sign_are_not(command, tiny_run, tmp_path):
    for name, zero in (("a", 0.0), ("b", -0.0)):
        run = tiny_run()
        with torch.no_grad():
            run.model.norm.bias.copy_(torch.tensor([torch.nan, zero, 1.0, 2.0]))
        run.save(tmp_path / name, with_optimizer=False)
    text = command("diff", tmp_path / "a", tmp_path / "b")[1]
    assert text.splitlines()[0] == "norm.bias: 1 of 4 elements differ, by at most 0"


def test_merge_makes_one_file_that_others_read(command, steps, tiny_run, tmp_path):
    weights = tiny_run().train(2).model.state_dict()
    expected = {name: tensor for name, tensor in weights.items() if name != "output.weight"}
    expected["embedding.weight"] = expected["embedding.weight"][:13]
    for name, read in (("m.safetensors", load_file), ("pytorch_model.bin", torch.load), ("m.pt", torch.load)):
        assert command("merge", steps, tmp_path / "new" / name) == (0, f"wrote {tmp_path / 'new' / name}\n")
        found = read(tmp_path / "new" / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    command("merge", steps, tmp_path / "o.safetensors", "--part", "optimizer")
    assert "optim.norm.bias.exp_avg" in load_file(tmp_path / "o.safetensors")
    code, text = command("merge", steps, tmp_path / "m.gguf")
    assert code == 4 and "the suffix of m.gguf is not supported" in text
    (tmp_path / "file").write_text("")
    code, text = command("merge", steps, tmp_path / "file" / "m.pt")
    assert code == 4 and "could not be written" in text


def test_hash_changes_with_a_bit_a_type_or_a_shape_and_not_with_the_files(command, tiny_run, tmp_path):
    digests = set()
    for number, change in enumerate(
        [
            lambda model: None,
            lambda model: model.norm.bias.data.view(torch.int32).bitwise_xor_(1),
            lambda model: setattr(model, "expert_bias", torch.zeros(3, 1)),
            lambda model: setattr(model, "expert_bias", torch.zeros(3, dtype=torch.int32)),
        ]
    ):
        run = tiny_run()
        change(run.model)
        run.save(tmp_path / str(number))
        digests.add(command("hash", tmp_path / str(number), "--part", "model")[1].splitlines()[-1])
    assert len(digests) == 4


def test_commands_refuse_a_damaged_step(command, steps, tmp_path):
    for step in ("step_00000001", "step_00000002"):
        manifest = steps / "checkpoints" / step / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 9}))
    for words in (
        ["hash", steps],
        ["reshard", steps, tmp_path / "o", "--files", "2"],
        ["diff", steps, steps],
    ):
        code, text = command(*words)
        assert code == 4 and "manifest.json is damaged" in text
    assert not (tmp_path / "o").exists()


def test_reshard_writes_nothing_into_the_folder_of_a_run_in_progress(command, steps, tmp_path):
    in_flight = tmp_path / "out" / "checkpoints" / "step_00000009.tmp"
    in_flight.mkdir(parents=True)
    with OutputLock(tmp_path / "out"):
        code, text = command("reshard", steps, tmp_path / "out", "--files", "1")
    assert code == 2 and f"in use by process {os.getpid()}" in text
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == [in_flight]


def test_verify_looks_at_the_tensors_that_a_whole_file_holds(command, steps):
    manifest = steps / "checkpoints" / "step_00000002" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["checksum"]
    content["tensors"]["model"]["norm.other"] = content["tensors"]["model"].pop("norm.weight")
    manifest.write_text(json.dumps({"checksum": content_checksum(content), **content}))
    code, text = command("verify", steps)
    assert code == 4 and "step_00000002 DAMAGED" in text and "does not contain the tensors" in text


def test_hashes_are_listed_by_name_in_whatever_order_tensors_were_saved(command, tmp_path):
    texts = []
    for order in ("abc", "cab"):
        record = RunRecord(step=1, consumed_samples=0, config={})
        with StepWriter(tmp_path / order / "checkpoints", record) as writer:
            for name in order:
                writer.add("model", name, torch.full((2,), float(ord(name))))
        texts.append(command("hash", tmp_path / order)[1])
    assert texts[0] == texts[1] and [line.split()[1] for line in texts[0].splitlines()] == [
        "a",
        "b",
        "c",
        "all",
    ]

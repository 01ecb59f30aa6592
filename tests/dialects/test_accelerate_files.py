"""The files that Accelerate's guide names, written in every layout and read back in any."""

import json
import shutil

import pytest
import torch
from accelerate_job import (
    BATCH,
    STEPS,
    check,
    fresh_accelerator,
    model_of,
    prepared,
    reference,
    samples,
    train,
)

from megalith.checkpoint.files import file_record
from megalith.checkpoint.manifest import MANIFEST, manifest_text
from megalith.cli.main import main

ZERO, FSDP = dict(use_distributed_optimizer=True), dict(use_custom_fsdp=True)
GRADIENTS = dict(other_megatron_args={"data_parallel_sharding_strategy": "optim_grads"})
EXPERTS, ALL_EXPERTS = dict(expert_model_parallel_size=2), dict(expert_model_parallel_size=4)
# By what is in the files, the layouts of four processes that write the same; the first has neither ZeRO nor EP.
SAME = {
    "TP2": (dict(tp_degree=2), [GRADIENTS, {**EXPERTS, **ZERO}]),
    "TP2, experts too": (dict(tp_degree=2, expert_tensor_parallel_size=2), [EXPERTS]),
    "PP2": (dict(pp_degree=2, num_micro_batches=2), [{**EXPERTS, **FSDP}]),
}  # fmt: skip
GUIDE_FIELDS = {"TP2": [ZERO, FSDP, EXPERTS, ALL_EXPERTS], "TP2, experts too": [ZERO], "PP2": [ZERO]}


def bins(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def written(folder, more):
    """Trains half of the turns, and saves what it has then in every layout; goes on in another from the files alone."""
    data, state = samples(2 * STEPS * BATCH), folder / "first"
    accelerator = fresh_accelerator(tp_degree=2, legacy_bin=True, **EXPERTS, **ZERO)
    objects = prepared(accelerator, "mixtral", data[: STEPS * BATCH])
    losses = train(accelerator, objects)
    accelerator.save_state(state)
    half = accelerator.get_state_dict(objects[0])
    if accelerator.is_main_process:
        shutil.rmtree(state / "megalith")  # from here on there are the files alone
    accelerator.wait_for_everyone()
    for name, (layout, others) in SAME.items():
        wanted = None
        for number, other in enumerate([{}, *(GUIDE_FIELDS[name] if more else others)]):
            accelerator = fresh_accelerator(**layout, **other, legacy_bin=True)
            prepared(accelerator, "mixtral", data)
            accelerator.load_state(state)
            accelerator.save_state(folder / f"{name}{number}")
            found = bins(folder / f"{name}{number}")
            wanted = wanted or found
            assert len(found) == 4 and found == wanted, (name, other)
    accelerator = fresh_accelerator(pp_degree=2, num_micro_batches=2, **ZERO)
    objects = prepared(accelerator, "mixtral", data[STEPS * BATCH :])
    accelerator.load_state(state)
    losses += train(accelerator, objects)
    return losses, accelerator.get_state_dict(objects[0]), half


def overwrite(file, content):
    """Another content of a file that the manifest knows."""
    file.write_bytes(content)
    text = json.loads((file.parent / MANIFEST).read_text())
    text["files"][file.name] = file_record(file).model_dump()
    text.pop("checksum")
    (file.parent / MANIFEST).write_text(manifest_text(text))


class Harm:
    def __reduce__(self):
        return print, ("this was run",)


@pytest.mark.full  # test_accelerate_saving.py saves and loads in two processes by default
@pytest.mark.parametrize("more", [False, True])
def test_the_guides_files_do_not_depend_on_zero_and_experts_and_any_layout_goes_on_from_them(
    pool, tmp_path, capsys, more
):
    wanted = reference("mixtral", steps=2 * STEPS)
    *found, half = pool.run(written, tmp_path, more, size=4)[0]
    check(found, wanted)
    files, merged = tmp_path / "first", tmp_path / "merged" / "pytorch_model.bin"
    assert main(["checkpoint", "merge", "--hf", str(files), str(merged)]) == 0
    again = type(model_of("mixtral")).from_pretrained(merged.parent).state_dict()
    assert again.keys() == half.keys() and all(torch.equal(again[name], half[name]) for name in half)
    assert (
        main(["checkpoint", "merge", str(files), str(tmp_path / "o.safetensors"), "--part", "optimizer"]) == 0
    )

    capsys.readouterr()
    file = files / "pytorch_model_tp_1_pp_0.bin"
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    assert main(["checkpoint", "merge", "--hf", str(files), str(merged)]) != 0
    assert "does not match the SHA-256" in capsys.readouterr().err
    torch.save({"embedding.word_embeddings.weight": Harm()}, tmp_path / "harm.bin")
    for content, message in (((tmp_path / "harm.bin").read_bytes(), "weights_only"), (b"", "weights_only")):
        overwrite(file, content)
        assert main(["checkpoint", "merge", "--hf", str(files), str(merged)]) != 0
        output = capsys.readouterr()
        assert message in output.err and "this was run" not in output.out

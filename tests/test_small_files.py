"""Small files of a stranger's folder: pipes, devices, huge ones and links out of it are refused, soon and by name."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zstandard
from hostile import little_memory
from tokenizers import Tokenizer, models

from megalith.bridge.exporter import export_hf
from megalith.bridge.folder import CONFIG, GENERATION, TOKENIZER_FILES, SourceFolder
from megalith.bridge.importer import import_hf
from megalith.bridge.megatron.megatron_exporter import export_megatron
from megalith.bridge.megatron.megatron_importer import import_megatron
from megalith.checkpoint import RunRecord, StepWriter, open_checkpoint
from megalith.checkpoint.steps import save_number
from megalith.cli.main import main
from megalith.data.chat.chat_template import read_template
from megalith.data.tokenizers.huggingface import SIDE_FILES, TOOL_TEMPLATE
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import DataError, MegalithError
from megalith.report.metrics import read_records
from megalith.report.page import write_report
from megalith.rl.rollouts.rollouts import decompress_zstd
from megalith.small_files import LARGEST, read_bounded, read_small_file

SECRET = "PRIVATE KEY of the user"
KINDS = ("link", "pipe", "device", "sparse", "folder", "circle")


def spoil(file: Path, kind: str) -> None:
    """Puts something else in the place of a file."""
    file.unlink(missing_ok=True)
    if kind == "link":
        secret = file.parents[2] / f"{file.parent.name}.secret"
        secret.write_text(SECRET)
        file.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "sparse":
        file.touch()
        os.truncate(file, 30 * 2**30)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(file.name)


def refusals(folder: Path, names: tuple[str, ...], read: Callable[[Path], object]) -> Iterator[str]:
    """What is wrong with how each of the names is refused in each of the kinds."""
    for name in names:
        for kind in KINDS:
            copied = Path(
                shutil.copytree(folder, folder.with_name(f"{folder.name}.{Path(name).name}.{kind}"))
            )
            spoil(copied / name, kind)
            start = time.process_time()
            try:
                with little_memory():
                    read(copied)
                told = "read"
            except MegalithError as error:
                told = "" if name in str(error) else str(error)
            seconds = time.process_time() - start
            if (told and kind != "circle") or seconds > 2:  # a circle of links is as good as nothing
                yield f"{name} {kind}: {told} ({seconds:.1f} s)"
            shutil.rmtree(copied)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with every small file that is read."""
    import transformers

    root = tmp_path_factory.mktemp("small") / "hf"
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(root)
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(root / "tokenizer.json"))
    for name in ("tokenizer_config.json", "special_tokens_map.json", GENERATION):
        (root / name).write_text("{}")
    (root / "chat_template.jinja").write_text("{{ messages }}")
    return root


def test_every_small_file_of_a_hugging_face_folder(folder: Path, tmp_path: Path) -> None:
    def imported(copied: Path) -> None:
        import_hf(copied, tmp_path / copied.name, show_progress=False)

    assert not list(refusals(folder, (CONFIG, GENERATION, *TOKENIZER_FILES), imported))


def test_every_file_of_a_tokenizer(folder: Path) -> None:
    def built(copied: Path) -> None:
        build_tokenizer("HuggingFaceTokenizer", copied)

    (folder / TOOL_TEMPLATE).parent.mkdir()
    (folder / TOOL_TEMPLATE).write_text("{{ tools }}")
    assert not list(refusals(folder, ("tokenizer.json", *SIDE_FILES), built))
    shutil.rmtree((folder / TOOL_TEMPLATE).parent)
    assert not list(refusals(folder, ("chat_template.jinja",), lambda copied: read_template(str(copied))))
    (folder / "vocab.json").write_text('{"a": 0}')
    (folder / "merges.txt").write_text("")
    assert not list(
        refusals(
            folder, ("vocab.json", "merges.txt"), lambda copied: build_tokenizer("GPT2BPETokenizer", copied)
        )
    )
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()


def test_an_index_and_an_adapter_config(folder: Path, tmp_path: Path) -> None:
    index = Path(shutil.copytree(folder, tmp_path / "index"))
    (index / "model.safetensors.index.json").write_text("{}")
    assert not list(refusals(index, ("model.safetensors.index.json",), SourceFolder))


def test_a_manifest_and_the_files_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = import_hf(folder, run, show_progress=False)

    def opened(copied: Path) -> None:
        save_number(copied)
        open_checkpoint(copied, ("model",))

    assert not list(refusals(step, ("manifest.json",), opened))
    names = tuple(f"tokenizer/{path.name}" for path in (step / "tokenizer").iterdir())
    assert len(names) > 5 and not list(refusals(step, names, opened))


def test_the_metrics_of_a_run_are_bounded_and_no_link_out_of_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    file = run / "metrics.jsonl"
    for kind in ("link", "sparse"):
        spoil(file, kind)
        with little_memory(), pytest.raises(DataError, match=r"metrics\.jsonl cannot be read: it"):
            read_records(file)
    for kind in ("pipe", "device", "folder"):
        shutil.rmtree(run)
        run.mkdir()
        spoil(file, kind)
        assert read_records(file) == []


def test_a_metrics_file_reserves_no_more_memory_than_it_has(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    with little_memory():
        assert read_records(file) == [{"step": 1}]
    assert b"Name" in read_bounded(Path("/proc/self/status"))  # which has the size 0


def test_no_file_of_a_run_hangs_its_report_or_shows_the_user_s_own_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    write_report([str(run)], tmp_path / "report.html")
    secrets = {name: json.dumps({"step": 1, **dict.fromkeys(("event", "text", "time", "prompt"), SECRET)})
               for name in ("events.jsonl", "starts.jsonl", "completions.jsonl")} | {
        "config.yaml": f"train: {{secret: {SECRET}}}",
        "experts.jsonl": json.dumps({"step": 1, "tokens": {SECRET[:20]: [1, 2]}}),
        "measured_step.json": json.dumps({"ranks": [{"peak": 1.0}]}),
        "pipeline.json": json.dumps({"ranks": [[["F", 0, 0, 0.0, 1.0]]]}),
    }  # fmt: skip
    for name, secret in secrets.items():
        for kind in KINDS:
            spoil(run / name, kind)
            if kind == "link":
                (run / name).resolve().write_text(f"{secret}\n")
            with little_memory():
                page = write_report([str(run)], tmp_path / "report.html").read_text()
            assert SECRET[:20] not in page, (name, kind)
            assert "peak of each rank" not in page and "a measured step, " not in page, (name, kind)
            (run / name).rmdir() if kind == "folder" else (run / name).unlink()


def test_what_zstd_unpacks_to_is_bounded() -> None:
    content = zstandard.compress(bytes(2**25))
    assert decompress_zstd(content, 2**25) == bytes(2**25)
    with pytest.raises(DataError, match="unpacks to more than 33,554,431 bytes"):
        decompress_zstd(content, 2**25 - 1)


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_the_pickles_of_a_megatron_folder(ckpt_format: str, folder: Path, tmp_path: Path) -> None:
    def imported(copied: Path) -> None:
        import_megatron(copied, tmp_path / "again", trust=True, show_progress=False)

    export_megatron(folder, tmp_path / "megatron", ckpt_format=ckpt_format, show_progress=False)
    names = {"torch_dist": (".metadata", "common.pt"), "torch": ("mp_rank_00/model_optim_rng.pt",)}[
        ckpt_format
    ]
    iteration = tmp_path / "megatron/release"
    assert not list(refusals(iteration, names, imported))
    assert not (tmp_path / "again").exists()
    for name in names:  # a file that would be read is refused where it is a link out of the folder
        (iteration / name).rename(tmp_path / "outside")
        (iteration / name).symlink_to(tmp_path / "outside")
        with pytest.raises(
            MegalithError, match=f"{name} cannot be read: it is a symbolic link that leads out"
        ):
            imported(iteration)
        (iteration / name).unlink()
        (tmp_path / "outside").rename(iteration / name)
    imported(iteration)


def test_a_pipe_in_the_place_of_a_manifest_does_not_hang_the_list(tmp_path: Path, capsys) -> None:
    with StepWriter(tmp_path / "checkpoints", RunRecord(step=1, consumed_samples=0, config={})) as writer:
        writer.add("model", "b", torch.ones(2))
    spoil(writer.folder / "manifest.json", "pipe")
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert "it is a pipe, a socket or a device, not a file" in capsys.readouterr().out


def test_a_link_into_the_user_s_own_files_reaches_no_export(folder: Path, tmp_path: Path) -> None:
    """Neither from an imported folder, nor from a checkpoint in which someone has put it."""
    step = import_hf(folder, tmp_path / "run", show_progress=False)
    (tmp_path / "secret").write_text(SECRET)
    for name in ("vocab.txt", "added_tokens.json", "chat_template.json"):
        (step / "tokenizer" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(MegalithError, match="a symbolic link that leads out of its folder"):
        export_hf(tmp_path / "run", tmp_path / "out", show_progress=False)
    assert not (tmp_path / "out").exists()


def test_a_snapshot_of_the_hub_s_cache_is_read_through_its_links(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    import_hf(snapshot, tmp_path / "run", show_progress=False)
    (tmp_path / "secret").write_text(json.dumps({"secret": SECRET}))
    (snapshot / CONFIG).unlink()
    for target in ("../../../secret", "../../blobs/../../secret", str(tmp_path / "secret")):
        (snapshot / CONFIG).symlink_to(target)
        with pytest.raises(MegalithError, match="leads out of its folder"):
            import_hf(snapshot, tmp_path / "again", show_progress=False)
        (snapshot / CONFIG).unlink()


def test_a_link_within_the_folder_and_one_to_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "real.json").write_text("{}")
    (tmp_path / "a" / "link.json").symlink_to("real.json")
    (tmp_path / "b").symlink_to("a")
    assert read_small_file(tmp_path / "b" / "link.json", tmp_path / "b") == b"{}"


def test_a_file_as_large_as_allowed_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.touch()
    os.truncate(file, 100)
    assert len(read_small_file(file, tmp_path, 100)) == 100
    with pytest.raises(OSError, match="it has 101 bytes, and such a file at most 100"):
        os.truncate(file, 101)
        read_small_file(file, tmp_path, 100)
    assert LARGEST < 2**30

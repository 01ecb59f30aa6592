"""What a stranger's file is named, or says, neither acts on the terminal nor forges a line of what is printed."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import megalith.generation.sampling
import megalith.training.loading
from megalith.checkpoint import RunRecord, StepWriter, open_checkpoint
from megalith.cli.main import main
from megalith.data.indexed import IndexedWriter
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import LINES, CheckpointError, printable
from megalith.generation.requests import Completion
from megalith.launch import failure

HOSTILE = "a\x1b]0;owned\x07\x9b2J\r\nerror:forged\x7f\u202e\u2028\udcff"
SHOWN = r"a\x1b]0;owned\x07\x9b2J\x0d\x0aerror:forged\x7f\u202e\u2028\udcff"
UNICODE, SHOWN_UNICODE = HOSTILE.removesuffix("\udcff"), SHOWN.removesuffix("\\udcff")


@pytest.fixture
def checkpoint(tmp_path):
    """A step with a tensor of a hostile name, in a folder of one."""
    record = RunRecord(step=1, consumed_samples=0, config={})
    with StepWriter(tmp_path / UNICODE / "checkpoints", record) as writer:
        writer.add("model", UNICODE, torch.ones(2))
    return tmp_path / UNICODE


def said(capsys, *words) -> tuple[int, str]:
    """Exit code and output of a command, which is safe to print and has no forged line."""
    with warnings.catch_warnings(record=True):
        code = main([str(word) for word in words])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert printable(text, LINES) == text, text
    assert not any(line.startswith("error:forged") for line in text.splitlines()), text
    text.encode()
    return code, text


def test_escapes_are_idempotent_and_leave_every_other_character():
    assert printable(HOSTILE) == SHOWN == printable(SHOWN)
    text = "naïve 漢字 👩‍👩‍👧 \\x1b C:\\dir"
    assert printable(text) == text
    assert printable("one\n\ttwo\r", LINES) == "one\n\ttwo\\x0d"


def test_an_error_has_a_line_a_sentence_whatever_it_quotes():
    assert str(CheckpointError(f"{HOSTILE} is damaged", "b")) == f"{SHOWN} is damaged\nb"
    assert str(CheckpointError("a", "b").within("c\n")) == "c\\x0a: a\nc\\x0a: b"


def test_commands_on_checkpoints(capsys, checkpoint, tmp_path):
    code, text = said(capsys, "checkpoint", "hash", checkpoint)
    assert code == 0 and f"  {SHOWN_UNICODE}\n" in text, text
    other = tmp_path / "other"
    with StepWriter(other / "checkpoints", RunRecord(step=1, consumed_samples=0, config={})) as writer:
        writer.add("model", "b", torch.ones(2))
    code, text = said(capsys, "checkpoint", "diff", checkpoint, other)
    assert code == 1 and f"{SHOWN_UNICODE}: only in the first\n" in text
    code, text = said(capsys, "checkpoint", "reshard", checkpoint, other / HOSTILE, "--files", 1)
    assert code == 0 and SHOWN in text
    (step,) = (checkpoint / "checkpoints").glob("step_*")
    (step / "model-00000-000.safetensors").unlink()
    for name in ("list", "verify", "hash"):
        code, text = said(capsys, "checkpoint", name, checkpoint)
        assert code == (0 if name == "list" else 4), text
    (step / "manifest.json").write_bytes(b"{")
    code, text = said(capsys, "checkpoint", "list", checkpoint)
    assert code == 0 and f"unreadable: {tmp_path}/{SHOWN_UNICODE}" in text


def test_a_hugging_face_folder(capsys, tmp_path):
    config = {"architectures": [HOSTILE]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({UNICODE: torch.ones(1)}, tmp_path / "model.safetensors")
    code, text = said(capsys, "import-hf", tmp_path, tmp_path / "out")
    assert code == 2 and SHOWN in text


def test_data_show_and_bad_lines(capsys, tmp_path):
    tokenizer = build_tokenizer("ByteTokenizer")
    prefix = tmp_path / "a\x1b]0;\x07\x9b2J\udcff"  # a data path is cut at white space
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document(np.array(tokenizer.encode("\x1b[2Jtext\nof\ttwo lines\x9b") * 4))
    words = ["--seq-length", 24, "--num-samples", 1, "--split", "1", "--tokenizer-type", "ByteTokenizer"]
    code, text = said(capsys, "data", "show", prefix, *words)
    assert code == 0 and "\\x1b[2Jtext\nof\ttwo lines\\x9b" in text
    code, text = said(capsys, "data", "show", f"{prefix}.bin", *words)
    assert code == 3 and r"a\x1b]0;\x07\x9b2J\udcff" in text
    (tmp_path / HOSTILE).write_text(
        json.dumps({HOSTILE: "x"}) + "\n[1\x1b]\n" + json.dumps({"text": "x"}) + "\n"
    )
    code, text = said(
        capsys, "preprocess", "--input", tmp_path / HOSTILE, "--output-prefix", tmp_path / HOSTILE, "--workers", 0,
        "--tokenizer-type", "ByteTokenizer", "--on-error", "skip",
    )  # fmt: skip
    assert code == 0 and text.count("skipped ") == 2 + 1  # two lines of the file, and their number
    assert f"wrote {tmp_path}/{SHOWN}_text_document" in text


def test_generate(capsys, monkeypatch):
    tokenizer = build_tokenizer("ByteTokenizer")
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=257, encoder_layers=0))
    monkeypatch.setattr(
        megalith.training.loading, "load_with_tokenizer", lambda *args, **options: (model, tokenizer)
    )
    done = Completion(0, 0, tokenizer.encode("]52;c;cm0=\x07two\nlines"), [], truncated=True)
    monkeypatch.setattr(megalith.generation.sampling, "complete", lambda *args, **options: [done])
    code, text = said(capsys, "generate", "x", "--prompt", "\x1b")
    assert code == 0 and text == "\\x1b]52;c;cm0=\\x07two\nlines\n"


def test_an_error_that_nobody_expected(capsys):
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError as error:
        assert failure.report(error) == 1
    text = capsys.readouterr().err
    assert printable(text, LINES) == text and text.startswith("Traceback")


def test_a_warning_of_a_damaged_step(checkpoint, tmp_path):
    with StepWriter(checkpoint / "checkpoints", RunRecord(step=2, consumed_samples=0, config={})) as writer:
        writer.add("model", "b", torch.ones(2))
    (checkpoint / "checkpoints" / "step_00000002" / "manifest.json").write_bytes(b"{")
    with pytest.warns(UserWarning, match="using .*the newest intact checkpoint") as told:
        open_checkpoint(checkpoint, ("model",))
    text = str(told[0].message)
    assert printable(text) == text and SHOWN_UNICODE in text

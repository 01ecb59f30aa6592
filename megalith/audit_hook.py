"""Record a training job for `megalith audit`. Copy this file into the job: it needs only torch and safetensors.

audit = AuditHook(model, "dump", mesh={"dp": dp_rank})            # on every rank, after the model is wrapped
audit.batch(input_ids=input_ids, labels=labels, loss=loss)        # every micro-batch
audit.step()       # every step: after the backward passes and the gradient reduction, before clipping
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

BUCKETS, PIECE = 256, 2**22
FIELDS = ("input_ids", "labels", "loss_mask", "attention_mask", "position_ids", "loss")


def sketch(tensor):
    """Return a sketch of a tensor, float32 [257]: the sums of 256 runs of consecutive elements, each with a
    pseudo-random sign, and the norm.
    """
    flat = tensor.detach().reshape(-1).float()
    width = max(1, -(-len(flat) // BUCKETS))
    rows, sums = width * max(1, PIECE // width), flat.new_zeros(BUCKETS + 1)
    for start in range(0, len(flat), rows):
        part = flat[start : start + rows]
        hashed = torch.arange(start, start + len(part), device=flat.device) * 2654435761 & 0xFFFFFFFF
        hashed = (hashed ^ hashed >> 15) * 1540483477 >> 13 & 1
        signed = torch.nn.functional.pad(part * (1 - 2 * hashed), (0, -len(part) % width)).view(-1, width)
        sums[start // width : start // width + len(signed)] = signed.sum(1)
    sums[-1] = flat.norm()
    return sums.cpu()


class AuditHook:
    """Writes a safetensors file per step and rank.

    Args:
        model: the wrapped model; its parameters may be DTensors.
        folder: shared by all ranks.
        mesh: this rank's index along each axis of parallelism: dp (ranks with different data), tp, pp, cp. Default:
            every rank is data parallel.
        steps: number of steps to record.
        max_norm: norm to which gradients are already clipped when `step` is called. 0 if they are not clipped.
        gradient: function of a parameter that returns its gradient. Default: `main_grad`, else `grad`.
        weight: function of a parameter that returns its value. Default: the parameter.
    """

    def __init__(self, model, folder, mesh=None, steps=2, max_norm=0.0, gradient=None, weight=None):
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.ranks = torch.distributed.get_world_size() if distributed else 1
        self.model, self.folder, self.mesh = model, Path(folder), mesh or {"dp": self.rank}
        self.steps, self.max_norm, self.number, self.batches = steps, max_norm, 0, []
        self.gradient, self.weight, self.precision = gradient or _gradient, weight or (lambda p: p), None
        owners = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))] or [model]
        # FSDP1's parameters are flat before the first forward pass
        first = next((m for m in owners if any(p.ndim > 1 for p in m.parameters(recurse=False))), owners[0])
        self.watch = first.register_forward_pre_hook(self._note_precision)

    def _note_precision(self, module, inputs):
        weight = next(module.parameters())
        device, self.precision = weight.device.type, str(weight.dtype)
        if torch.is_autocast_enabled(device):
            self.precision = str(torch.get_autocast_dtype(device))
        self.watch.remove()

    def batch(self, **tensors):
        """Record a micro-batch: input_ids [batch, seq] and its loss; labels, masks and position_ids as in the job."""
        if self.number < self.steps:
            tensors = {name: t for name, t in tensors.items() if name in FIELDS and t is not None}
            self.batches.append({name: _copy(t) for name, t in tensors.items()})

    def step(self):
        """Write the step's micro-batches, weights and gradients."""
        if self.number >= self.steps:
            return
        tensors = {
            f"batch.{i}.{name}": t for i, batch in enumerate(self.batches) for name, t in batch.items()
        }
        parameters, has_copies = {}, any(self.mesh.get(axis, 0) for axis in ("dp", "cp"))
        for name, p in self.model.named_parameters():
            weight, gradient = self.weight(p), self.gradient(p)
            parameters[name] = layout = {**_layout(weight), "trained": p.requires_grad}
            tensors[f"sketch.{name}"] = sketch(_local(weight))
            if not layout.get("copy", has_copies):
                tensors[f"weight.{name}"] = _copy(weight)
            if gradient is not None:
                if layout["shards"] and gradient.placements != p.placements:
                    gradient = gradient.redistribute(p.device_mesh, p.placements)
                tensors[f"gradient.{name}"] = sketch(_local(gradient))
        header = dict(
            rank=self.rank, ranks=self.ranks, step=self.number, mesh=self.mesh, parameters=parameters
        )
        padding_idx = [
            m.padding_idx for m in self.model.modules() if getattr(m, "padding_idx", None) is not None
        ]
        header |= dict(padding_idx=padding_idx[:1])
        header |= dict(precision=self.precision, max_norm=self.max_norm, dropout=_active_dropout(self.model))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{self.number:05d}_rank_{self.rank:05d}.safetensors"
        save_file(tensors, path, metadata={"audit": json.dumps(header)})
        self.number, self.batches = self.number + 1, []


def _gradient(p):
    return p.grad if getattr(p, "main_grad", None) is None else p.main_grad


def _local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _copy(tensor):
    return _local(tensor).cpu().clone(memory_format=torch.contiguous_format)


def _layout(tensor):
    """Return the whole tensor's shape, and for each mesh dimension its size, this rank's index, the sharded tensor
    dimension and the split factor.
    """
    if not hasattr(tensor, "placements"):
        return {"shape": list(tensor.shape), "shards": []}
    index, shards = tensor.device_mesh.get_coordinate(), []
    for size, at, placement in zip(tensor.device_mesh.shape, index, tensor.placements):
        shards.append([size, at, getattr(placement, "dim", None), getattr(placement, "split_factor", 1)])
    is_copy = any(at for _, at, dim, _ in shards if dim is None)
    return {"shape": list(tensor.shape), "shards": shards, "copy": is_copy}


def _active_dropout(model):
    """Return the names of dropout rates above 0, such as `layers.0.dropout.p`, of modules in training mode."""
    rates = [
        (f"{name}.{key}", key, m, rate) for name, m in model.named_modules() for key, rate in vars(m).items()
    ]
    is_rate = lambda key, m: "dropout" in key or (key == "p" and "Dropout" in type(m).__name__)  # noqa: E731
    return [
        name
        for name, key, m, rate in rates
        if m.training and isinstance(rate, float) and rate and is_rate(key, m)
    ]

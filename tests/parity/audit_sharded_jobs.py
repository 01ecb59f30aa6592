"""Jobs for `megalith audit` whose engine shards parameters or optimizer states by itself: FSDP1 and DeepSpeed's ZeRO.

Every rank of a process group calls them. DeepSpeed is not among the test requirements.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from audit_jobs import CONFIGS, Decoder, Job, Layer, call, divide, fault_loss, micro_batch, valid_tokens

from megalith.audit_hook import AuditHook


def batches_of_step(job: Job, step: int) -> tuple[list[dict[str, torch.Tensor]], int, int]:
    """Return this rank's micro-batches and the numbers of valid tokens: on this rank, and in the step."""
    batches = [micro_batch(job, step, dist.get_rank(), number) for number in range(job.micro_batches)]
    local = sum(map(valid_tokens, batches))
    total = torch.tensor(local)
    dist.all_reduce(total)
    return batches, local, int(total)


def train_fsdp1(job: Job, folder: Path) -> None:
    """Train two steps with FullyShardedDataParallel, a unit per layer."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(job.seed)
    ranks, fault, model = dist.get_world_size(), job.fault, Decoder(CONFIGS[job.model])
    ignored = [layer.input_layernorm for layer in model.model.layers] if fault == "ignored-norms" else []
    precision = MixedPrecision(torch.bfloat16, torch.float32) if job.precision == "bf16" else None
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True, mixed_precision=precision,
        ignored_modules=ignored, device_id=torch.device("cpu"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    audit = AuditHook(model, folder)
    for step in range(2):
        batches, local, total = batches_of_step(job, step)
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else model.no_sync():
                loss = fault_loss(fault, call(model, batch, fault), batch)
                loss = divide(fault, loss, batch, local, total, job.micro_batches, ranks)
                audit.batch(**batch, loss=loss.detach())
                loss.backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            audit.step()
        optimizer.step()
        optimizer.zero_grad()


def train_deepspeed(job: Job, folder: Path) -> None:
    """Train two steps with DeepSpeed's ZeRO, whose engine divides the loss by the number of micro-batches."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    torch.manual_seed(job.seed)
    ranks, fault = dist.get_world_size(), job.fault
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": job.micro_batches,
        "zero_optimization": {"stage": job.options["stage"], "overlap_comm": False},
        "bf16": {"enabled": job.precision == "bf16"},
    }
    model = Decoder(CONFIGS[job.model])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    audit = AuditHook(engine.module, folder, gradient=safe_get_full_grad, weight=safe_get_full_fp32_param)
    for step in range(2):
        batches, local, total = batches_of_step(job, step)
        for batch in batches:
            loss = fault_loss(fault, call(engine, batch, fault), batch)
            loss = divide(fault, loss, batch, local, total, job.micro_batches, ranks)
            audit.batch(**batch, loss=loss.detach())
            engine.backward(loss if fault == "divided-again" else loss * job.micro_batches)
            if engine.is_gradient_accumulation_boundary():
                audit.step()
            engine.step()

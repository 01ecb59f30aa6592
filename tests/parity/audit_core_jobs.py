"""Megatron core's GPT on CPUs as a job for `megalith audit`; needs Megatron core (`make megatron-core` installs it)."""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from audit_jobs import CONFIGS, SEQ, Job, micro_batch
from torch import Tensor

from megalith.audit_hook import AuditHook

sys.path.append(str(Path(__file__).parents[1] / "bridge"))
from against_megatron_core import SPELLINGS, core_model
from from_megatron_core import LLAMA
from megatron.core import parallel_state

NEGATIVE = -100


def build(job: Job) -> torch.nn.Module:
    """Return the model of the job's configuration, for this rank's layout."""
    sizes = CONFIGS[job.model]
    args = dict(LLAMA, num_layers=sizes["num_hidden_layers"], hidden_size=sizes["hidden_size"],
                ffn_hidden_size=sizes["intermediate_size"], num_attention_heads=sizes["num_attention_heads"],
                num_query_groups=sizes["num_key_value_heads"], kv_channels=sizes["head_dim"], rotary_base=5000,
                padded_vocab_size=128, qk_layernorm=job.model == "qwen3", add_qkv_bias=job.model == "qwen2",
                untie_embeddings_and_output_weights=not sizes["tie_word_embeddings"], epsilon=1e-6,
                params_dtype=torch.bfloat16 if job.precision == "pure-bf16" else torch.float32)  # fmt: skip
    args |= dict(zip(SPELLINGS, (args.pop("epsilon"), args.pop("zero_centered"))))
    args |= dict(
        sequence_parallel=bool(job.options.get("sequence_parallel")), bf16=job.precision == "pure-bf16"
    )
    torch.manual_seed(job.seed)
    model = core_model(argparse.Namespace(**args)).train()
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    return model


def train_core(job: Job, folder: Path) -> None:
    """Train two steps: sums over tokens, all-reduced and divided by the number of valid tokens of the step."""
    fault, model = job.fault, build(job)
    dp, tp = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    dp_group, tp_group = (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    )
    hidden = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).tril().logical_not()
    if fault == "no-causal-mask":
        hidden = torch.zeros_like(hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    audit = AuditHook(model, folder, mesh={"dp": dp, "tp": tp})
    for step in range(2):
        total = torch.zeros(())
        for number in range(job.micro_batches):
            ids, labels, loss_mask = core_batch(micro_batch(job, step, dp, number))
            position_ids = torch.arange(SEQ).expand(2, SEQ)
            losses = model(
                ids, position_ids, hidden.expand(2, -1, -1, -1), labels=wrong_labels(fault, ids, labels)
            )
            weights = torch.ones_like(loss_mask) if fault == "no-loss-mask" else loss_mask
            loss = (losses.float() * weights).sum()
            audit.batch(
                input_ids=ids,
                labels=labels,
                loss_mask=loss_mask,
                position_ids=position_ids,
                loss=loss.detach(),
            )
            count = weights.sum()
            if fault == "micro-batch-mean":
                loss, count = loss / count, torch.ones(())
            loss.backward()
            total += count
        dist.all_reduce(total, group=dp_group)
        for name, parameter in model.named_parameters():
            sequence = (
                getattr(parameter, "sequence_parallel", False)
                or "q_layernorm" in name
                or "k_layernorm" in name
            )
            if sequence and fault != "no-norm-reduction" and dist.get_world_size(tp_group) > 1:
                dist.all_reduce(parameter.grad, group=tp_group)
            if fault != "no-dp-reduction":
                dist.all_reduce(parameter.grad, group=dp_group)
            parameter.grad /= total
        audit.step()
        optimizer.step()
        optimizer.zero_grad()


def core_batch(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return Megatron's tokens, shifted labels and loss mask."""
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=NEGATIVE)
    next_tokens = batch["input_ids"].roll(-1, 1)
    return batch["input_ids"], next_tokens, (labels != NEGATIVE).float()


def wrong_labels(fault: str, ids: Tensor, labels: Tensor) -> Tensor:
    return ids if fault == "no-shift" else labels


def run_core(jobs: list[Job], folder: Path) -> None:
    """Run the jobs in two processes, as tensor-parallel or as data-parallel ranks."""
    for tp in (1, 2):
        chosen = [job for job in jobs if job.options.get("tp", 1) == tp]
        if chosen:
            torch.multiprocessing.start_processes(_begin, (chosen, tp, folder), nprocs=2, start_method="fork")


def _begin(rank: int, jobs: list[Job], tp: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{tp}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tp)
    for job in jobs:
        train_core(job, folder / job.name)
    dist.destroy_process_group()

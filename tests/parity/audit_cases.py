"""Score of `megalith audit` on jobs with planted faults and on right ones: python tests/parity/audit_cases.py [NAME …]

Right jobs must give no finding; a faulty job's first cause must be the expected one. Jobs of Megatron core and of
DeepSpeed run if they can be imported: PYTHONPATH=.megatron-core-newest python tests/parity/audit_cases.py, after
`make megatron-core` and `pip install deepspeed`.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import audit_jobs
import audit_sharded_jobs
from audit_jobs import CONFIGS, Job

from megalith.launch.pool import Pool
from megalith.parity.audit.audit import AuditReport, audit

SEQUENCE = {"sequence_parallel": True}
TP = {"tp": 2}
LEFT, RIGHT = {"padding": "left"}, {"padding": "right"}

# The number of processes and the jobs. Each faulty job has its expected cause.
RIGHT_JOBS: dict[str, list[tuple[int, Job]]] = {
    "FSDP2": [
        (2, Job("fsdp2")),
        (2, Job("fsdp2", model="qwen3", precision="bf16", micro_batches=3, seed=1)),
        (2, Job("fsdp2", model="tied", precision="pure-bf16", seed=2, options={"clip": 0.05})),
        (2, Job("fsdp2", model="qwen2", packed=True, seed=3)),
        (2, Job("fsdp2", model="llama", precision="bf16", micro_batches=1, packed=True, seed=4)),
        (4, Job("fsdp2", model="qwen3", seed=5, options={"hybrid": True})),
    ],
    "FSDP1": [
        (2, Job("fsdp1", seed=22)),
        (2, Job("fsdp1", model="qwen3", precision="bf16", micro_batches=3, seed=23)),
        (2, Job("fsdp1", model="tied", seed=24)),
    ],
    "DTensor TP": [
        (2, Job("tp", micro_batches=3, seed=6)),
        (2, Job("tp", seed=7, options=SEQUENCE)),
        (2, Job("tp", model="qwen3", precision="pure-bf16", seed=8)),
        (4, Job("tp", model="qwen2", seed=9)),
    ],
    "Trainer": [
        (0, Job("trainer", model="qwen3", seed=10, options={"clip": 0.1})),
        (0, Job("trainer", model="qwen2", micro_batches=3, seed=11, options=RIGHT)),
        (0, Job("trainer", model="gemma2", precision="bf16", seed=12)),
        (0, Job("trainer", packed=True, seed=13)),
    ],
    "plain loop": [
        (0, Job("plain", model="gpt2", precision="pure-bf16", seed=14)),
        (0, Job("plain", model="gemma2", seed=15)),
        (0, Job("plain", model="mixtral", seed=16)),
        (0, Job("plain", model="llama", seed=17, options=LEFT)),
    ],
    "Megatron core": [
        (2, Job("core", seed=18)),
        (2, Job("core", model="qwen3", seed=19, options=TP)),
        (2, Job("core", model="tied", precision="pure-bf16", micro_batches=3, seed=20, options=TP)),
        (2, Job("core", model="qwen2", seed=21)),
    ],
    "DeepSpeed": [
        (2, Job("deepspeed", seed=25, options={"stage": 1})),
        (
            2,
            Job("deepspeed", model="qwen3", precision="bf16", micro_batches=3, seed=26, options={"stage": 2}),
        ),
        (2, Job("deepspeed", seed=27, options={"stage": 3})),
    ],
}
FAULTY_JOBS: dict[str, list[tuple[int, Job, str]]] = {
    "FSDP2": [
        (2, Job("fsdp2", "sum", micro_batches=3), "not-divided"),
        (2, Job("fsdp2", "twice", micro_batches=3), "divided-twice"),
        (2, Job("fsdp2", "no-accumulation-divisor", micro_batches=3), "accumulation-not-divided"),
        (2, Job("fsdp2", "rank-mean", precision="bf16"), "rank-mean"),
        (2, Job("fsdp2", "ignored-norms"), "missing-reduction"),
        (2, Job("fsdp2", "clip-shards", model="qwen3"), "clipped-per-rank"),
        (2, Job("fsdp2", "same-data"), "same-data"),
        (2, Job("fsdp2", "no-position-ids", packed=True), "documents-ignored"),
        (2, Job("fsdp2", "no-loss-mask", precision="bf16"), "loss-mask-ignored"),
        (2, Job("fsdp2", "no-zero-grad"), "not-zeroed"),
        (2, Job("fsdp2", "dropout"), "dropout"),
        (2, Job("fsdp2", "untied", model="tied"), "tied-weights"),
        (2, Job("fsdp2", "rows-lost"), "token-weights"),
        (2, Job("fsdp2", "no-shift"), "labels-not-shifted"),
    ],
    "FSDP1": [
        (2, Job("fsdp1", "ignored-norms"), "missing-reduction"),
        (2, Job("fsdp1", "twice", micro_batches=3), "divided-twice"),
        (2, Job("fsdp1", "rank-mean", precision="bf16"), "rank-mean"),
        (2, Job("fsdp1", "no-loss-mask", model="tied"), "loss-mask-ignored"),
    ],
    "DTensor TP": [
        (2, Job("tp", "plain-norms", options=SEQUENCE), "missing-reduction"),
        (2, Job("tp", "head-norms-not-reduced", model="qwen3", precision="pure-bf16"), "missing-reduction"),
        (2, Job("tp", "norms-summed"), "reduced-twice"),
        (2, Job("tp", "row-not-reduced"), "forward-reduction"),
        (2, Job("tp", "column-not-reduced"), "backward-reduction"),
    ],
    "Trainer": [
        (0, Job("trainer", "micro-batch-mean"), "micro-batch-mean"),
        (0, Job("trainer", "no-accumulation-divisor", micro_batches=3), "accumulation-not-divided"),
        (0, Job("trainer", "two-shifts"), "labels-shifted-twice"),
        (0, Job("trainer", "padding-labels", options=RIGHT), "padding-in-loss"),
        (0, Job("trainer", "no-attention-mask", options=LEFT), "attention-mask-ignored"),
        (0, Job("trainer", "dropout"), "dropout"),
        # transformers 5.24 itself: its Trainer counts GPT-2's labels before the shift
        (0, Job("trainer", "count", model="gpt2", micro_batches=3, seed=11), "unshifted-count"),
        (0, Job("trainer", "clip"), "clipped"),
    ],
    "plain loop": [
        (0, Job("plain", "router-loss", model="mixtral"), "router-loss"),
        (0, Job("plain", "rope-theta"), "model-setting"),
        (0, Job("plain", "detached"), "backward"),
        (0, Job("plain", "frozen"), "no-gradient"),
        (0, Job("plain", "last-micro-batch"), "last-micro-batch"),
    ],
    "Megatron core": [
        (2, Job("core", "no-norm-reduction", model="qwen3", options=TP), "missing-reduction"),
        (2, Job("core", "no-dp-reduction"), "missing-dp-reduction"),
        (2, Job("core", "no-loss-mask"), "loss-mask-ignored"),
        (2, Job("core", "no-causal-mask"), "attends-to-future"),
        (2, Job("core", "micro-batch-mean"), "micro-batch-mean"),
        (2, Job("core", "no-shift", options=TP), "labels-not-shifted"),
    ],
    "DeepSpeed": [
        (
            2,
            Job("deepspeed", "divided-again", micro_batches=3, options={"stage": 1}),
            "accumulation-divided-twice",
        ),
        (2, Job("deepspeed", "rank-mean", options={"stage": 2}), "rank-mean"),
        (2, Job("deepspeed", "no-loss-mask", options={"stage": 3}), "loss-mask-ignored"),
    ],
}
MODULES = {"Megatron core": "megatron", "DeepSpeed": "deepspeed"}
"""Modules that a system's jobs need and that the test environment does not have."""
SCRIPTS = {
    name.removeprefix("train_"): function
    for module in (audit_jobs, audit_sharded_jobs)
    for name, function in vars(module).items()
    if name.startswith("train_")
}


def run_jobs(jobs: Sequence[tuple[int, Job]], folder: Path, pool: Pool) -> dict[str, AuditReport]:
    """Run jobs of one system and audit them; return the reports by the jobs' names."""
    for processes in sorted({processes for processes, _ in jobs}):
        chosen = [job for count, job in jobs if count == processes]
        if chosen[0].script == "core":
            from audit_core_jobs import run_core

            run_core(chosen, folder)
        elif processes:
            pool.run(run_each, chosen, folder, size=processes)
        else:
            run_each(chosen, folder)
    return {job.name: audit(folder / job.name, CONFIGS[job.model]) for _, job in jobs}


def run_each(jobs: Sequence[Job], folder: Path) -> None:
    """Run jobs one after the other. Every rank of a process group calls it."""
    for job in jobs:
        SCRIPTS[job.script](job, folder / job.name)


def main(words: Sequence[str]) -> int:
    """Run the jobs whose names contain one of the words, print a line for each and the score.

    Return 1 if a right job has a finding.
    """
    counts = {"right": [0, 0], "faulty": [0, 0]}
    pool = Pool(4, timeout=600)
    for system, faulty in FAULTY_JOBS.items():
        if system in MODULES and importlib.util.find_spec(MODULES[system]) is None:
            print(f"{system}: cannot be imported, not run")
            continue
        expected = {job.name: "" for _, job in RIGHT_JOBS[system]} | {
            job.name: cause for _, job, cause in faulty
        }
        jobs = [*RIGHT_JOBS[system], *((processes, job) for processes, job, _ in faulty)]
        jobs = [(processes, job) for processes, job in jobs if any(word in job.name for word in words)]
        expected = {job.name: expected[job.name] for _, job in jobs}
        with tempfile.TemporaryDirectory() as folder:
            reports = run_jobs(jobs, Path(folder), pool)
        for name, cause in expected.items():
            causes = reports[name].causes
            named = causes[:1] == [cause] if cause else not causes
            count = counts["faulty" if cause else "right"]
            count[0], count[1] = count[0] + named, count[1] + 1
            print(f"{'ok' if named else 'WRONG':6}{name}: {', '.join(causes) or 'equal'}", flush=True)
    pool.close()
    (quiet, right), (named, faulty_count) = counts["right"], counts["faulty"]
    print(
        f"{named} of {faulty_count} planted faults named, {right - quiet} false alarms in {right} right jobs"
    )
    return int(quiet < right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [""]))

"""The stored tensors of a run are the same in every layout (tests/parity and tests/faults load them and go on)."""

import pytest
import torch
from data_job import LLAMA, Job, Trained
from safetensors import safe_open

from megalith.checkpoint import RunRecord, load_model, load_optimizer, open_checkpoint, save_checkpoint
from megalith.checkpoint.fingerprint import tensor_digests
from megalith.config import ParallelConfig
from megalith.errors import CheckpointError
from megalith.parallel.data.data_parallel import reshard_parameters

PARTS = ("model", "optimizer")
ROWS = {"embedding.word_embeddings.weight": 67, "output_layer.weight": 67}


def rows(job: Job) -> dict[str, int]:
    names = list(ROWS)
    return {name: ROWS[name] for name in names[: 2 if job.model.untie_embeddings_and_output_weights else 1]}


def save(job: Job, folder, steps: int = 2) -> None:
    run = Trained(job)
    for _ in range(steps):
        run.train_step()
    record = RunRecord(step=steps, consumed_samples=steps * job.samples, config={})
    saved = save_checkpoint(
        folder / "checkpoints",
        record,
        [run.model],
        run.optimizer,
        unpadded_rows=rows(job),
        world=run.mesh.world,
    )
    assert (saved / "manifest.json").exists()  # on every rank, when it returns


def resumed(job: Job, folder, evaluate_first: bool = False) -> Trained:
    run = Trained(job)
    if evaluate_first:
        with torch.no_grad():
            run.model(**run.micro_batches()[0])
    checkpoint = open_checkpoint(folder)
    load_model(checkpoint, [run.model], rows(job), run.mesh.world)
    load_optimizer(checkpoint, run.optimizer, rows(job), [run.model], run.mesh.world)
    run.step = checkpoint.manifest.step
    return run


def go_on(job: Job, folder, evaluate_first: bool = False) -> list[float]:
    run = resumed(job, folder, evaluate_first)
    return [run.train_step()[0] for _ in range(2)]


def job(model, strategy: str, **layout) -> Job:
    return Job(model, parallel=ParallelConfig(data_parallel_sharding_strategy=strategy, **layout))


LAYOUTS = [
    ("one process", 1, "no_shard", {}),
    ("dp2", 2, "no_shard", {}),
    ("zero1 on 4", 4, "optim", {}),
    ("zero3 on 4", 4, "optim_grads_params", {}),
    ("hybrid", 4, "optim_grads", {"num_distributed_optimizer_instances": 2}),
    ("tp2 zero3", 4, "optim_grads_params", {"tensor_model_parallel_size": 2}),
]


def test_the_stored_tensors_do_not_depend_on_the_layout(pool, tmp_path):
    """The same run before its first step has the same global tensors, each written once, whoever writes them."""
    digests = []
    for size in (1, 2, 4):
        cases = {
            name: (job(LLAMA, s, **more), tmp_path / name, 0) for name, n, s, more in LAYOUTS if n == size
        }
        pool.run_cases(save, cases, size)
    for name, size, *_ in LAYOUTS:
        checkpoint = open_checkpoint(tmp_path / name)
        digests.append([list(tensor_digests(checkpoint, part)) for part in ("model", "optimizer")])
        written = sum(tensor_bytes(checkpoint.folder / file) for file in checkpoint.manifest.files)
        assert written == sum(tensor.nbytes for part in PARTS for _, tensor in checkpoint.tensors(part))
        assert len(checkpoint.manifest.files_of("model")) == size  # every rank writes
    assert all(digest == digests[0] for digest in digests)
    stored = checkpoint.read("model", "embedding.word_embeddings.weight")
    assert len(stored) == 67  # padding is not stored


def tensor_bytes(path) -> int:
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(key).nbytes for key in list(file.keys()))


def test_a_forward_before_loading_leaves_no_stale_parameters(pool, tmp_path):
    trained = job(LLAMA, "optim")
    pool.run(save, trained, tmp_path, size=2)
    assert pool.run(go_on, trained, tmp_path, True, size=2) == pool.run(go_on, trained, tmp_path, size=2)


def losses_of_changed_weights(job: Job, evaluates: bool) -> list[float]:
    run = Trained(job)
    if evaluates:
        with torch.no_grad():
            run.model(**run.micro_batches()[0])
        reshard_parameters([run.model])
    for _, parameter in run.local.named:
        parameter.data.mul_(1.5)
    return [run.train_step()[0] for _ in range(2)]


def test_weights_that_change_after_an_evaluation_are_those_of_the_next_step(pool):
    changed = job(LLAMA, "optim")
    evaluated, trained = (
        pool.run(losses_of_changed_weights, changed, each, size=2) for each in (True, False)
    )
    assert evaluated == trained


def refusal(job: Job, folder) -> str:
    with pytest.raises(CheckpointError) as error:
        resumed(job, folder)
    return str(error.value)


def test_another_model_is_refused_alike_on_every_rank(pool, tmp_path):
    pool.run(save, job(LLAMA, "optim"), tmp_path, size=2)
    deeper = LLAMA.model_copy(update={"num_layers": 3})
    sentences = pool.run(refusal, job(deeper, "optim"), tmp_path, size=2)
    assert sentences[0] == sentences[1] and "missing: layers.2" in sentences[0]

"""A run saved in one layout is the same run, to the bit, in any other."""

import pytest
import torch
from data_job import GPT2, LLAMA, Job, Trained, assemble
from safetensors import safe_open

from megalith.checkpoint import RunRecord, load_model, load_optimizer, open_checkpoint, save_checkpoint
from megalith.checkpoint.fingerprint import tensor_digests
from megalith.config import ParallelConfig
from megalith.errors import CheckpointError

PARTS = ("model", "optimizer")
ROWS = {"embedding.word_embeddings.weight": 67, "output_layer.weight": 67}


def rows(job: Job) -> dict[str, int]:
    names = list(ROWS)
    return {name: ROWS[name] for name in names[: 2 if job.model.untie_embeddings_and_output_weights else 1]}


def state(run: Trained) -> dict[str, tuple]:
    """The boxes that this rank owns of parameters and optimizer state."""
    boxes = run.owned("data")
    for group in run.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"]):
            if run.local.boxes[name].owned:
                offset, shape, _ = boxes[name]
                for key in ("exp_avg", "exp_avg_sq"):
                    boxes[f"{name}.{key}"] = (offset, shape, run.optimizer.state[parameter][key])
    return boxes


def save(job: Job, folder, steps: int = 2) -> dict[str, tuple]:
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
    return state(run)


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


def load(job: Job, folder) -> dict[str, tuple]:
    return state(resumed(job, folder))


def go_on(job: Job, folder, evaluate_first: bool = False) -> list[float]:
    run = resumed(job, folder, evaluate_first)
    return [run.train_step()[0] for _ in range(2)]


def straight_on(job: Job) -> list[float]:
    run = Trained(job)
    return [run.train_step()[0] for _ in range(4)][2:]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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


def run_in(pool, size, function, *args):
    return [function(*args)] if size == 1 else pool.run(function, *args, size=size)


@pytest.mark.parametrize(
    ("model", "layouts"), [(LLAMA, LAYOUTS), (GPT2, [LAYOUTS[0], LAYOUTS[-1]])], ids=["llama", "gpt2"]
)
def test_any_layout_loads_what_any_other_saved(pool, tmp_path, model, layouts):
    for source, target in zip(layouts, layouts[1:] + layouts[:1]):
        name, size, strategy, layout = source
        saved = run_in(pool, size, save, job(model, strategy, **layout), tmp_path / name, 1)
        _, size, strategy, layout = target
        loaded = run_in(pool, size, load, job(model, strategy, **layout), tmp_path / name)
        assert equal(assemble(loaded), assemble(saved)), f"{name} to {target[0]}"


def test_the_stored_tensors_do_not_depend_on_the_layout(pool, tmp_path):
    """The same run before its first step has the same global tensors, each written once, whoever writes them."""
    digests = []
    for name, size, strategy, layout in LAYOUTS:
        run_in(pool, size, save, job(LLAMA, strategy, **layout), tmp_path / name, 0)
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


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_going_on_in_the_same_layout_is_bitwise_going_straight_on(pool, tmp_path, strategy):
    trained = job(GPT2, strategy)
    pool.run(save, trained, tmp_path, size=2)
    expected = pool.run(straight_on, trained, size=2)
    assert pool.run(go_on, trained, tmp_path, size=2) == expected


def test_a_forward_before_loading_leaves_no_stale_parameters(pool, tmp_path):
    trained = job(LLAMA, "optim")
    pool.run(save, trained, tmp_path, size=2)
    assert pool.run(go_on, trained, tmp_path, True, size=2) == pool.run(go_on, trained, tmp_path, size=2)


def refusal(job: Job, folder) -> str:
    with pytest.raises(CheckpointError) as error:
        resumed(job, folder)
    return str(error.value)


def test_another_model_is_refused_alike_on_every_rank(pool, tmp_path):
    pool.run(save, job(LLAMA, "optim"), tmp_path, size=2)
    deeper = LLAMA.model_copy(update={"num_layers": 3})
    sentences = pool.run(refusal, job(deeper, "optim"), tmp_path, size=2)
    assert sentences[0] == sentences[1] and "missing: layers.2" in sentences[0]

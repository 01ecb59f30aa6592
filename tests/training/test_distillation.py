"""Learning from a teacher's predictions: transformers' logits give the same loss and norm, in every layout."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from default_cases import in_full
from models.reference import LLAMA, random_reference

from megalith.config import RunConfig
from megalith.data.stored_logits import StoredLogits
from megalith.errors import ConfigError, DataError
from megalith.parallel.mesh import build_mesh
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job, start
from megalith.rl.distill import DistillationTask, store_logits, write_logits
from megalith.training.build import prepare
from megalith.training.training_job import train

ROOT = Path(__file__).parents[2]
SEQ = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A tiny Llama, and a wider and deeper one with other weights."""
    folder, found = tmp_path_factory.mktemp("distill"), {}
    for name, more in (("student", {}), ("teacher", {"hidden_size": 96, "num_hidden_layers": 4})):
        model = random_reference(transformers.LlamaConfig(**LLAMA | more))
        if name == "teacher":
            model.lm_head.weight.data.mul_(10)  # it has opinions
        model.save_pretrained(folder / name)
        found[name] = model
    return found | {"folder": folder}


def config_of(models: dict, **sections) -> RunConfig:
    folder = models["folder"]
    tree = {
        "model": {"init_from": str(folder / "student"), "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "data": {"mock": True, "seq_length": SEQ, "num_workers": 0},
        "distill": {"teacher": str(folder / "teacher"), "kd_ratio": 0.7, "temperature": 2.0},
        "optim": {"lr": 1e-3, "lr_warmup_iters": 0},
        "train": {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 4, "output_dir": str(folder / "run")},
    }  # fmt: skip
    return RunConfig.from_tree(tree | {name: tree.get(name, {}) | more for name, more in sections.items()})


def job(config: RunConfig) -> Outcome:
    return run_job(config, task=DistillationTask())


def writes(config: RunConfig) -> None:
    """The teacher's predictions, by the ranks of the pool."""
    mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
    write_logits(prepare(config, dist.get_world_size())[0], None, mesh, torch.device("cpu"))


def stored(models: dict, k: int, **sections) -> RunConfig:
    """A run whose teacher's predictions are those of this folder."""
    settings = {"distill": {"logits_dir": str(models["folder"] / f"logits{k}"), "logits_top_k": k}}
    return config_of(models, **settings | sections)


@pytest.fixture(scope="module")
def predictions(models) -> dict:
    """Of every entry of the vocabulary, and of 6."""
    for k in (6, LLAMA["vocab_size"]):
        store_logits(stored(models, k))
    return models


def by_transformers(models: dict, batch, distill) -> tuple[float, float, float]:
    """Loss, cross-entropy and divergence of a batch, and the norm of the loss's gradient, over whole logits."""
    student, labels = models["student"], batch.labels.flatten()
    student.zero_grad()
    z = student(batch.input_ids).logits.float().flatten(0, 1)
    with torch.no_grad():
        t = models["teacher"](batch.input_ids).logits.float().flatten(0, 1)
    q, p = (F.log_softmax(x / distill.temperature, -1) for x in (z, t))
    into, of = (q, p) if distill.divergence == "forward_kl" else (p, q)
    divergence = F.kl_div(into, of, log_target=True, reduction="batchmean")
    entropy = F.cross_entropy(z, labels)
    loss = (1 - distill.kd_ratio) * entropy + distill.kd_ratio * distill.temperature**2 * divergence
    loss.backward()
    norm = torch.stack([x.grad.norm() for x in student.parameters()]).norm()
    return tuple(x.item() for x in (loss, entropy, divergence, norm))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_loss_and_gradient_are_those_of_transformers(models, divergence):
    config = config_of(models, distill={"divergence": divergence})
    run = start(config, DistillationTask())
    with run.data.train_loader(0, 0, run.device) as batches:
        taken = [next(batches) for _ in range(2)]
        step = run.train_step(iter(taken), lambda loss, _: loss)
    whole = type(taken[0])(*(torch.cat([getattr(one, name) for one in taken])
                             for name in ("input_ids", "labels", "loss_mask", "position_ids")), None, None)  # fmt: skip
    loss, entropy, divergence, norm = by_transformers(models, whole, config.distill)
    assert step.loss.item() == pytest.approx(loss, rel=1e-5)
    assert step.grad_norm.item() == pytest.approx(norm, rel=1e-4)
    figures = step.extra_metrics()
    assert (figures["lm_loss"], figures["divergence"]) == pytest.approx((entropy, divergence), rel=1e-5)


def parallel(name: str) -> dict:
    """A layout's settings; the student has 3 layers, the teacher 4."""
    return LAYOUTS[name].parallel | ({"decoder_first_pipeline_num_layers": 1} if name == "pp2" else {})


# By default adapters show tensor parallelism with a teacher that is there.
@pytest.mark.parametrize(
    ("online", "stored"),
    [(("dp2-zero3",), ("pp2",)), in_full(("tp2-sp", "pp2", "cp2"), ("tp2-sp", "cp2"))],
    ids=["some", "more"],
)
def test_every_layout_equals_one_process(pool, predictions, online, stored):
    models = predictions
    cases, ones, by_kind = {}, {"": job(config_of(models))}, {}
    for name in online:
        cases[name] = (config_of(models, parallel=parallel(name)),)
    for name in stored:
        kinds = "forward_kl" if name == "pp2" else "reverse_kl"
        how = {"distill": {"logits_dir": str(models["folder"] / "logits6"), "divergence": kinds}}
        cases[f"stored, {name}"] = (config_of(models, parallel=parallel(name), **how),)
        if kinds not in by_kind:
            by_kind[kinds] = job(config_of(models, **how))
        ones[f"stored, {name}"] = by_kind[kinds]
    lora = {"lora": {"rank": 2, "alpha": 64}, "distill": {"divergence": "reverse_kl"}}
    if len(online) > 1:
        cases["lora, tp2-sp"] = (config_of(models, parallel=LAYOUTS["tp2-sp"].parallel, **lora),)
        ones["lora, tp2-sp"] = job(config_of(models, **lora))
    for name, ranks in pool.run_cases(job, cases, size=2).items():
        errors = compare(ranks, ones.get(name, ones[""]))
        assert errors.within(), (name, errors)
        assert "lora" not in name or all("lora" in key for key in ones[name].gradients)


def test_all_of_a_teachers_predictions_are_as_good_as_the_teacher(predictions):
    online, offline = job(config_of(predictions)), job(stored(predictions, LLAMA["vocab_size"]))
    errors = compare([offline], online)
    assert errors.within(), errors


def test_predictions_are_the_same_from_every_layout_and_go_on_where_they_ended(pool, predictions, tmp_path):
    one = StoredLogits(predictions["folder"] / "logits6")
    first = "samples_000000000000.safetensors"  # of the first of two steps
    (tmp_path / "cp2").mkdir()
    for name in ("logits.json", first):
        shutil.copy(one.folder / name, tmp_path / "cp2")
    written = (tmp_path / "cp2" / first).stat().st_mtime_ns
    cases = {}
    for name in ("tp2-sp", "pp2", "cp2", "dp2"):
        how = {"distill": {"logits_dir": str(tmp_path / name), "logits_top_k": 6}}
        cases[name] = (config_of(predictions, parallel=parallel(name), **how),)
    pool.run_cases(writes, cases, size=2)
    assert (tmp_path / "cp2" / first).stat().st_mtime_ns == written
    for name in cases:
        found = StoredLogits(tmp_path / name)
        assert (found.samples, found.record) == (one.samples, one.record) == (8, one.record)
        for sample in range(8):
            for a, b in zip(found._row(sample), one._row(sample)):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_predictions_of_other_samples_or_settings_are_refused(predictions, tmp_path):
    with pytest.raises(DataError, match="sample 0 of this run differs from the sample"):
        job(stored(predictions, 6, train={"seed": 5}))
    short = tmp_path / "short"
    shutil.copytree(
        predictions["folder"] / "logits6", short, ignore=lambda *_: ["samples_000000000004.safetensors"]
    )
    with pytest.raises(DataError, match="has predictions of 4 samples, but the run has reached sample 4"):
        job(stored(predictions, 6).with_settings({"distill.logits_dir": str(short)}))
    settings = stored(predictions, 6).with_settings({"distill.temperature": 1.0})
    with pytest.raises(
        ConfigError, match=r"was written with temperature 2\.0, but distill\.temperature is 1\.0"
    ):
        job(settings)
    with pytest.raises(
        DataError, match=r"was started with temperature 2\.0, not 1\.0; choose another folder"
    ):
        store_logits(settings)
    with pytest.raises(ConfigError, match="set both"):
        store_logits(config_of(predictions))
    damaged = tmp_path / "damaged"
    shutil.copytree(predictions["folder"] / "logits6", damaged)
    file = damaged / "samples_000000000004.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"samples_000000000004\.safetensors cannot be read"):
        StoredLogits(damaged)
    (damaged / "logits.json").write_text("{}")
    with pytest.raises(DataError, match="is not a folder of a teacher's predictions"):
        StoredLogits(damaged)


def test_what_cannot_be_learned_from_is_refused(models, tmp_path):
    with pytest.raises(ConfigError, match="megalith distill"):
        train(config_of(models, train={"output_dir": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"distill\.teacher and dpo\.enabled are both set"):
        start(
            config_of(models, dpo={"enabled": True}, data={"mock": False, "train_data_path": "x"}),
            DistillationTask(),
        )
    random_reference(transformers.LlamaConfig(**LLAMA | {"vocab_size": 97})).save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(ConfigError, match="vocabulary of 97 and the student one of 151"):
        start(config_of(models, distill={"teacher": str(tmp_path / "other")}), DistillationTask())
    sizes = dict(vocab_size=LLAMA["vocab_size"], hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
                 intermediate_size=64)  # fmt: skip
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="has model_type bert, but the student predicts next tokens"):
        start(config_of(models, distill={"teacher": str(tmp_path / "bert")}), DistillationTask())
    with pytest.raises(ConfigError, match=r"distill\.teacher .*nowhere"):
        start(config_of(models, distill={"teacher": str(tmp_path / "nowhere")}), DistillationTask())

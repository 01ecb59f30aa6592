"""Learning from a teacher's predictions: transformers' logits give the same loss and norm, in every layout."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from models.reference import LLAMA, random_reference

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job, start
from megalith.rl.distill import DistillationTask
from megalith.training.trainer import train

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
    figures = step.figures()
    assert (figures["lm_loss"], figures["divergence"]) == pytest.approx((entropy, divergence), rel=1e-5)


def test_every_layout_equals_one_process(pool, models):
    cases, ones = {}, {"": job(config_of(models))}
    for name in ("tp2-sp", "pp2", "cp2", "dp2-zero3"):
        parallel = dict(LAYOUTS[name].parallel)
        if name == "pp2":
            parallel["decoder_first_pipeline_num_layers"] = 1  # the student's: it has 3 layers, the teacher 4
        cases[name] = (config_of(models, parallel=parallel),)
    lora = {"lora": {"rank": 2, "alpha": 64}, "distill": {"divergence": "reverse_kl"}}
    cases["lora, tp2-sp"] = (config_of(models, parallel=LAYOUTS["tp2-sp"].parallel, **lora),)
    ones["lora, tp2-sp"] = job(config_of(models, **lora))
    for name, ranks in pool.run_cases(job, cases, size=2).items():
        errors = compare(ranks, ones.get(name, ones[""]))
        assert errors.within(), (name, errors)
    assert all("lora" in name for name in ones["lora, tp2-sp"].gradients)


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
    with pytest.raises(ConfigError, match="has model_type bert, which does not predict the next token"):
        start(config_of(models, distill={"teacher": str(tmp_path / "bert")}), DistillationTask())
    with pytest.raises(ConfigError, match=r"distill\.teacher .*nowhere"):
        start(config_of(models, distill={"teacher": str(tmp_path / "nowhere")}), DistillationTask())

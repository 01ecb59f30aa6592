"""On-policy distillation: the student answers, and every kind of teacher gives TRL's loss and gradients on its answers,
in every layout."""

import json
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
import transformers
from default_cases import in_full
from engine_stand_ins import SglangStandIn, VllmStandIn, served
from models.reference import LLAMA, random_reference
from test_distillation import config_of, job, models, parallel  # noqa: F401 (a fixture)

from megalith.bridge.families import family_for
from megalith.config import RunConfig
from megalith.config.rules.distill_rules import check_distillation
from megalith.data.batch import Batch
from megalith.errors import ConfigError, TrainingError
from megalith.parity.differences import compare
from megalith.parity.job import start
from megalith.rl.distill import DistillationTask
from megalith.rl.sampling.on_policy import prompt_length, replace_rows
from megalith.rl.teachers.several_teachers import owner_of
from megalith.training.build import prepare

ON_POLICY = {"kd_ratio": 1.0, "temperature": 1.0, "on_policy_fraction": 0.5, "max_completion_length": 6}


@pytest.fixture(scope="module")
def conversations(models) -> dict:  # noqa: F811
    """Two files of prompts with answers, as token ids."""
    noise = torch.Generator().manual_seed(0)
    for name, first in (("a", 0), ("b", 70)):
        lines = []
        for length in (3, 5, 9, 12):
            ids = (first + torch.randint(1, 70, (length + 5,), generator=noise)).tolist()
            lines.append({"input_ids": ids, "labels": [-100] * length + ids[length:]})
        (models["folder"] / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return models


def chat_config(models: dict, **sections) -> RunConfig:  # noqa: F811
    tree = {
        "data": {
            "mock": False,
            "train_data_path": [str(models["folder"] / f"{name}.jsonl") for name in "ab"],
        },
        "sft": {"enabled": True, "packing": False},
        "distill": ON_POLICY,
    }
    return config_of(
        models, **{name: tree.get(name, {}) | sections.get(name, {}) for name in tree | sections}
    )


def first_step(config: RunConfig) -> tuple[list[Batch], float, dict, dict]:
    """The micro-batches of a run's first step, its loss, gradients and metrics."""
    run = start(config, DistillationTask())
    with run.data.train_loader(0, 0, run.device) as batches:
        taken = [next(batches) for _ in range(2)]
    loss = run.gradients(taken).item()
    metrics = run.task.step_metrics(run)()
    return taken, loss, {name: plain.grad for name, plain in run.model.parameters.named}, metrics


def generalized_jsd_loss(student, teacher, labels, beta):
    """TRL 1.16's GKDTrainer.generalized_jsd_loss, with its mean over the tokens."""
    q, p = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    if beta == 0:
        jsd = F.kl_div(q, p, reduction="none", log_target=True)
    elif beta == 1:
        jsd = F.kl_div(p, q, reduction="none", log_target=True)
    else:
        share = torch.tensor(beta)
        m = torch.logsumexp(torch.stack([q + torch.log1p(-share), p + torch.log(share)]), dim=0)
        jsd = share * F.kl_div(m, p, reduction="none", log_target=True)
        jsd = jsd + (1 - share) * F.kl_div(m, q, reduction="none", log_target=True)
    mask = labels != -100
    return jsd[mask].sum() / mask.sum()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_students_answers_have_trls_loss_and_gradients(conversations, beta):
    kinds = {0.0: {"divergence": "forward_kl"}, 1.0: {"divergence": "reverse_kl"}}
    divergence = kinds.get(beta, {"divergence": "generalized_jsd", "beta": beta})
    batches, loss, gradients, metrics = first_step(
        chat_config(conversations, distill=divergence | {"on_policy_fraction": 1.0})
    )
    student, teacher = conversations["student"], conversations["teacher"]
    student.zero_grad()
    total, count = 0.0, sum(batch.loss_mask.sum() for batch in batches)
    for batch in batches:
        labels = torch.where(batch.loss_mask > 0, batch.labels, -100)
        with torch.no_grad():
            t = teacher(batch.input_ids).logits
        mine = generalized_jsd_loss(student(batch.input_ids).logits, t, labels, beta)
        (mine * batch.loss_mask.sum() / count).backward()
        total += mine.item() * batch.loss_mask.sum().item() / count.item()
    assert loss == pytest.approx(total, rel=1e-5)
    assert metrics["on_policy"] == 1.0 and metrics["completion_length"] == 6.0
    norm = torch.stack([x.grad.norm() for x in student.parameters()]).norm()
    mine = torch.stack([x.norm() for x in gradients.values()]).norm()
    assert mine.item() == pytest.approx(norm.item(), rel=1e-5)
    assert gradients["embedding.word_embeddings.weight"][:151] == pytest.approx(
        student.model.embed_tokens.weight.grad, rel=1e-4, abs=1e-6
    )


def test_a_fraction_of_the_answers_is_the_students_and_follows_its_prompts(conversations):
    plain, *_ = first_step(chat_config(conversations, distill={"on_policy_fraction": 0.0}))
    mixed, _, _, metrics = first_step(chat_config(conversations))
    changed = 0
    for old, new in zip(plain, mixed):
        for row in range(len(old.labels)):
            length = prompt_length(old.loss_mask[row].numpy())
            assert torch.equal(old.input_ids[row, :length], new.input_ids[row, :length])
            if torch.equal(old.labels[row], new.labels[row]):
                continue
            changed += 1
            assert new.loss_mask[row].nonzero().flatten().tolist() == list(range(length - 1, length + 5))
            following = new.labels[row, length - 1 : length + 5]
            assert torch.equal(new.input_ids[row, length : length + 6], following)
            assert new.all_padding[row].logical_not().sum() == length + 6
    assert changed / 4 == metrics["on_policy"] and 0 < changed < 4
    again, *_ = first_step(chat_config(conversations))
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(mixed, again))


@pytest.mark.parametrize("kind", ["vllm 0.24", "sglang"])
def test_servers_answer_with_the_students_weights(conversations, kind):
    """So close to temperature 0, every engine chooses the most likely token."""
    cold = {"on_policy_fraction": 1.0, "sampling_temperature": 1e-6}
    own, loss, *_ = first_step(chat_config(conversations, distill=cold))
    model = prepare(chat_config(conversations), 1)[0].model
    tree = family_for(model).write_config(model)
    with served(kind, tree) as server:
        cold |= {"engine": kind.split()[0], "engine_url": server.url, "weight_sync_method": "gloo"}
        answers, served_loss, _, metrics = first_step(chat_config(conversations, distill=cold))
        weights = conversations["student"].state_dict()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in server.received.items())
    assert len(server.received) > 20 and metrics["on_policy"] == 1.0
    for mine, theirs in zip(own, answers):
        assert torch.equal(mine.labels, theirs.labels) and torch.equal(mine.loss_mask, theirs.loss_mask)
    assert served_loss == pytest.approx(loss, rel=1e-6)


def test_a_row_ends_at_its_length_and_a_prompt_before_the_last_answer():
    assert prompt_length(torch.tensor([0, 1, 1, 0, 0, 1, 0.0]).numpy()) == 6
    assert prompt_length(torch.zeros(4).numpy()) == 0
    ids = torch.arange(5)[None]
    batch = Batch(ids, ids + 1, torch.ones(1, 5), ids, None, ids[:, 0], all_padding=torch.zeros(1, 5) > 0)
    full = replace_rows(batch, {0: (2, [7, 8, 9, 10])})
    assert full.input_ids.tolist() == [[0, 1, 7, 8, 9]] and full.labels.tolist() == [[1, 7, 8, 9, 10]]
    assert full.loss_mask.tolist() == [[0, 1, 1, 1, 1]] and not full.all_padding.any()
    short = replace_rows(batch, {0: (2, [7])})
    assert short.input_ids.tolist() == [[0, 1, 7, 0, 0]] and short.loss_mask.tolist() == [[0, 1, 0, 0, 0]]
    assert short.all_padding.tolist() == [[False, False, False, True, True]]
    assert all(short[field.name] is not None for field in fields(Batch) if "padding" not in field.name[:7]
               and field.name not in ("document_ends", "routes", "cp_size"))  # fmt: skip


# The teacher's top entries go another way through the layouts than its hidden states do.
@pytest.mark.parametrize(
    ("layouts", "sparse"),
    [(("dp2",), "tp2-sp"), in_full(("tp2-sp", "pp2", "cp2"), "pp2")],
    ids=["some", "more"],
)
def test_every_layout_samples_and_learns_like_one_process(pool, conversations, layouts, sparse):
    top = {"top_k": 5, "divergence": "reverse_kl"}
    ones = {
        "": job(chat_config(conversations)),
        "top-k": job(chat_config(conversations, distill=top)),
    }
    cases = {name: (chat_config(conversations, parallel=parallel(name)),) for name in layouts}
    cases["top-k"] = (chat_config(conversations, parallel=parallel(sparse), distill=top),)
    for name, ranks in pool.run_cases(job, cases, size=2).items():
        errors = compare(ranks, ones.get(name, ones[""]))
        assert errors.within(), (name, errors)


def test_the_teachers_most_likely_entries_are_compared_with_the_rest_as_one(conversations):
    """TRL's sparse divergence with loss_add_tail (ServerDistillationTrainer), for the forward KL."""
    batches, loss, *_ = first_step(chat_config(conversations, distill={"top_k": 4}))
    student, teacher, terms = conversations["student"], conversations["teacher"], []
    with torch.no_grad():
        for batch in batches:
            q, p = (F.log_softmax(one(batch.input_ids).logits, -1) for one in (student, teacher))
            top = p.topk(4, dim=-1)
            both = []
            for logprobs in (q.gather(-1, top.indices), top.values):
                tail = torch.log(-torch.expm1(torch.logsumexp(logprobs, -1, keepdim=True).clamp(max=-1e-7)))
                both.append(torch.cat([logprobs, tail], -1))
            terms.append(F.kl_div(*both, reduction="none", log_target=True).sum(-1)[batch.loss_mask > 0])
    assert loss == pytest.approx(torch.cat(terms).mean().item(), rel=1e-5)
    full = chat_config(conversations, distill={"top_k": LLAMA["vocab_size"]})
    errors = compare([job(full)], job(chat_config(conversations)))
    assert errors.within(), errors


def test_the_model_without_its_adapters_teaches_like_its_initial_weights(conversations):
    lora = {"rank": 2, "alpha": 64}
    of_folder = {"teacher": str(conversations["folder"] / "student")}
    for more in ({}, {"top_k": 4}):
        own = chat_config(conversations, lora=lora, distill={"teacher": "without_adapters"} | more)
        errors = compare([job(own)], job(chat_config(conversations, lora=lora, distill=of_folder | more)))
        assert errors.within(), errors


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_teaches_like_the_model_in_memory(conversations, kind, pool):
    server = (VllmStandIn if kind == "vllm" else SglangStandIn)(conversations["teacher"].config.to_dict())
    server.model.load_state_dict(conversations["teacher"].state_dict())
    try:
        url = f"http://127.0.0.1:{server._server.server_port}"
        served = chat_config(conversations, distill={"teacher": url, "teacher_engine": kind, "top_k": 4})
        one = job(chat_config(conversations, distill={"top_k": 4}))
        assert compare([job(served)], one).within()
        if kind == "vllm":
            cases = {"cp2": (served.with_settings({"parallel.context_parallel_size": 2}),)}
            cases["pp2"] = (chat_config(conversations, parallel=parallel("pp2"), distill=dict(
                teacher=url, teacher_engine=kind, top_k=4)),)  # fmt: skip
            for name, ranks in pool.run_cases(job, cases, size=2).items():
                assert compare(ranks, one).within(), name
        with pytest.raises(
            TrainingError, match=r"log-probabilities for a token, but top_k is 9; lower top_k"
        ):
            server.most = 4
            job(served.with_settings({"distill.top_k": 9}))
    finally:
        server.close()
    with pytest.raises(TrainingError, match=r"cannot be reached .* or correct distill\.teacher"):
        job(served)


def test_each_file_has_its_own_teacher(conversations, tmp_path):
    other = random_reference(transformers.LlamaConfig(**LLAMA))
    other.save_pretrained(tmp_path / "other")
    names = [str(conversations["folder"] / "teacher"), str(tmp_path / "other")]
    several = chat_config(conversations, distill={
        "teacher": names, "teacher_data": ["a.jsonl", str(conversations["folder"] / "b.jsonl")], "top_k": 4,
    })  # fmt: skip
    run = start(several, DistillationTask())
    with run.data.train_loader(0, 0, run.device) as batches:
        taken = [next(batches) for _ in range(2)]
    seen = set()
    for batch in taken:
        for row in range(2):
            owner = int(batch.input_ids[row, 0] > 70)
            seen.add(owner)
            model = (conversations["teacher"], other)[owner]
            with torch.no_grad():
                top = model(batch.input_ids[row : row + 1]).logits.log_softmax(-1).topk(4)
            learned = batch.loss_mask[row] > 0
            torch.testing.assert_close(
                batch.logprobs[row, learned, :4], top.values[0, learned], rtol=1e-4, atol=1e-5
            )
            assert torch.equal(batch.indices[row, learned], top.indices[0, learned])
    assert seen == {0, 1}
    with pytest.raises(ConfigError, match=r"the sample of data/c\.jsonl line 1 has no teacher"):
        owner_of("data/c.jsonl line 1", ["a.jsonl"])


REFUSED = [
    ({"distill": {"kd_ratio": 0.5}}, r"distill\.kd_ratio is 0\.5, but the student learns nothing"),
    (
        {"sft": {"packing": True}},
        r"but sft\.packing is on; on-policy distillation needs unpacked conversations",
    ),
    (
        {"distill": {"logits_dir": "x"}},
        r"but distill\.logits_dir only has predictions for the data, not for answers",
    ),
    ({"distill": {"teacher": "http://h:1"}}, r"top_k is not set, but a served teacher can only"),
    (
        {"distill": {"teacher": "http://h:1", "top_k": 4, "temperature": 2.0}},
        "log-probabilities at temperature 1",
    ),
    (
        {"distill": {"teacher": ["a", "b"], "top_k": 4}},
        "has 2 teachers, but distill.teacher_data has 0 files",
    ),
    ({"distill": {"teacher": "without_adapters"}}, "the run trains no adapters; set lora.rank"),
]


@pytest.mark.parametrize(("sections", "sentence"), REFUSED)
def test_settings_that_contradict_each_other_are_refused(conversations, sections, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_distillation(chat_config(conversations, **sections))

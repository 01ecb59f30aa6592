"""`megalith audit`: planted faults are named, right jobs are quiet, damaged and hostile dumps are refused."""

import json
import shutil
import struct

import pytest
import torch
from audit_cases import FAULTY_JOBS, MODULES, RIGHT_JOBS, run_jobs
from audit_jobs import CONFIGS, Decoder, Job, micro_batch, token_losses, valid_tokens
from default_cases import in_full
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalith.audit_hook import BUCKETS, AuditHook, sketch
from megalith.cli.main import main
from megalith.errors import CheckpointError
from megalith.parity.audit.audit import audit
from megalith.parity.audit.causes import CAUSES
from megalith.parity.audit.tokens import label_offset

DEFAULT = {
    "FSDP2": ("rank-mean", "ignored-norms"),
    "DTensor TP": ("plain-norms",),
    "plain loop": (),
    "Trainer": (),
}


def script(folder, fault="", steps=1):
    """Record a plain loop of the scripts' decoder in one process."""
    job = Job("plain")
    torch.manual_seed(0)
    model = Decoder(CONFIGS["llama"])
    hook = AuditHook(model, folder, steps=steps)
    for step in range(steps):
        batches = [micro_batch(job, step, 0, number) for number in range(2)]
        for batch in batches:
            logits = model(batch["input_ids"])
            divisor = valid_tokens(batch) * 2 if fault == "mean" else sum(map(valid_tokens, batches))
            hook.batch(**batch, loss=token_losses(logits, batch["labels"]).detach() / divisor)
            (token_losses(logits, batch["labels"]) / divisor).backward()
        hook.step()
        model.zero_grad()
    return folder


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return script(tmp_path_factory.mktemp("audit") / "dump")


@pytest.fixture
def damaged(dump, tmp_path):
    """A copy of the dump, and a function that rewrites its header and tensors."""
    folder = tmp_path / "dump"
    shutil.copytree(dump, folder)
    [path] = folder.iterdir()

    def rewrite(header=lambda header: header, tensors=lambda tensors: tensors):
        with safe_open(path, framework="pt") as file:
            content = header(json.loads(file.metadata()["audit"]))
        save_file(tensors(load_file(path)), path, metadata={"audit": json.dumps(content)})
        return folder

    return rewrite


def test_a_sketch_is_linear_and_estimates_norms():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 100, 256, 257, 5000, 2**17 + 3):
        a, b = (torch.randn(size, generator=generator) for _ in range(2))
        left, right = sketch(a + 2 * b)[:BUCKETS], (sketch(a) + 2 * sketch(b))[:BUCKETS]
        assert (left - right).norm() <= 1e-5 * left.norm()
        assert sketch(a)[BUCKETS] == pytest.approx(a.norm().item())
        assert left.norm().item() == pytest.approx((a + 2 * b).norm().item(), rel=0.3)
        if size <= BUCKETS:
            assert sketch(a)[:size].abs().equal(a.abs())
    low_rank = torch.outer(torch.randn(300, generator=generator), torch.randn(300, generator=generator))
    assert sketch(low_rank)[:BUCKETS].norm().item() == pytest.approx(low_rank.norm().item(), rel=0.3)


def test_a_right_job_is_quiet_and_a_faulty_one_is_named(dump, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    assert main(["audit", str(dump), "--model", str(tmp_path)]) == 0
    assert "step 0: equal (1 rank, fp32)" in capsys.readouterr().out
    faulty = script(tmp_path / "faulty", "mean")
    assert main(["audit", str(faulty), "--model", str(tmp_path / "config.json"), "--json"]) == 5
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["causes"] == ["micro-batch-mean"] and "micro-batch-mean" in printed.err
    [step] = report["steps"]
    assert step["departing"] == step["gradients"] == 21 and len(step["worst"]) == 10
    assert {"parameter", "layer", "rank", "error", "bound"} == step["worst"][0].keys()
    assert "valid tokens: 30, 26" in step["findings"][0]["text"]


def cases(table, faulty):
    """Return the jobs of a system as one case each: those that run by default, and all."""
    for system, rows in table.items():
        if system in MODULES:
            continue
        jobs = rows if faulty else [(processes, job, "") for processes, job in rows]
        yield in_full(jobs, id=system)
    chosen = [
        row for system, faults in DEFAULT.items() for row in FAULTY_JOBS[system] if row[1].fault in faults
    ]
    rights = [(processes, job, "") for processes, job in (*RIGHT_JOBS["FSDP2"][:2], RIGHT_JOBS["FSDP1"][1])]
    yield pytest.param(chosen if faulty else rights, id="some")


@pytest.mark.parametrize("jobs", [*cases(FAULTY_JOBS, faulty=True)])
def test_planted_faults_are_named(jobs, pool, tmp_path):
    reports = run_jobs([(processes, job) for processes, job, _ in jobs], tmp_path, pool)
    assert {name: report.causes[:1] for name, report in reports.items()} == {
        job.name: [cause] for _, job, cause in jobs
    }
    for name in [job.name for _, job, _ in jobs if job.fault == "ignored-norms"]:
        finding = reports[name].findings[0]
        assert finding.parameters == [f"model.layers.{n}.input_layernorm.weight" for n in (0, 1)]
        assert (finding.step, finding.ranks) == (0, [0, 1]) and "axis dp of 2 ranks" in finding.text


@pytest.mark.parametrize("jobs", [*cases(RIGHT_JOBS, faulty=False)])
def test_right_jobs_are_quiet(jobs, pool, tmp_path):
    reports = run_jobs([(processes, job) for processes, job, _ in jobs], tmp_path, pool)
    assert {name: report.causes for name, report in reports.items() if report.findings} == {}


def test_torchtitan_names_and_interleaved_rotary_rows(tmp_path):
    """By Meta's published permutation of the rows of wq and wk."""
    torch.manual_seed(0)
    model, titan = Decoder(CONFIGS["llama"]), torch.nn.Module()
    batch = micro_batch(Job("plain"), 0, 0, 0)
    (token_losses(model(batch["input_ids"]), batch["labels"]) / valid_tokens(batch)).backward()
    names = {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    }  # fmt: skip
    parameters = {}
    for name, parameter in model.named_parameters():
        heads = 4 if "q_proj" in name else 2
        for theirs, titans in names.items():
            name = name.replace(theirs, titans)

        def interleave(rows, name=name, heads=heads):
            if ".wq." not in name and ".wk." not in name:
                return rows
            return rows.view(heads, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)

        parameters[name] = torch.nn.Parameter(interleave(parameter.detach()).clone())
        parameters[name].grad = interleave(parameter.grad).clone()
    titan.named_parameters = lambda **options: parameters.items()
    hook = AuditHook(titan, tmp_path / "dump")
    hook.batch(**batch)
    hook.step()
    assert audit(tmp_path / "dump", CONFIGS["llama"]).findings == []


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_labels_tell_by_how_much_they_are_shifted(offset):
    ids = torch.arange(5, 45).view(2, 20)
    labels = torch.cat([ids[:, offset:], torch.full((2, offset), -100)], 1)
    assert label_offset({"input_ids": ids, "labels": labels}) == offset


def test_every_cause_is_on_the_page(request):
    page = (request.config.rootpath / "docs" / "audit.md").read_text(encoding="utf-8")
    assert [cause for cause in CAUSES if f"`{cause}`" not in page] == []


def refuse(folder, words, config=None):
    with pytest.raises(CheckpointError) as error:
        audit(folder, config or CONFIGS["llama"])
    assert words in str(error.value), error.value
    assert "\n" not in str(error.value)


def test_missing_and_damaged_files_are_refused(dump, damaged, tmp_path):
    refuse(tmp_path / "nothing", "is not a folder")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "has no step_NNNNN_rank_NNNNN.safetensors")
    folder = damaged(lambda header: header | {"ranks": 2})
    refuse(folder, "has 1 of 2 ranks of step 0")
    [path] = folder.iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    refuse(folder, "cannot be read as safetensors")
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    refuse(folder, "cannot be read as safetensors")
    path.unlink()
    path.symlink_to("/dev/zero")
    refuse(folder, "cannot be read")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: [], "is not a file of audit_hook.py"),
        (lambda header: header | {"rank": 7}, "but others in its name"),
        (lambda header: header | {"extra": 1}, "is not a file of audit_hook.py"),
        (lambda header: header | {"mesh": {"dp": 10**6}}, "has mesh {'dp': 1000000}, but the job has 1 rank"),
        (lambda header: with_layout(header, shape=[2**31, 2**31]), "of the"),
        (lambda header: with_layout(header, shards=[[2, 5, 0, 1]]), "that do not fit its shape"),
        (lambda header: with_layout(header, shards=[[2, 0, 7, 1]]), "that do not fit its shape"),
        (lambda header: with_layout(header, shards=[[2, 0, 0, 1]]), "of the 3,104 elements"),
    ],
)  # fmt: skip
def test_impossible_headers_are_refused(damaged, change, words):
    refuse(damaged(change), words)


def with_layout(header, **changes):
    name = "model.embed_tokens.weight"
    return header | {"parameters": header["parameters"] | {name: header["parameters"][name] | changes}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch.0.input_ids": torch.full((2, 16), 97)}, "the vocabulary of --model has 97"),
        ({"batch.0.input_ids": torch.ones(2, 16)}, "has no integer input_ids"),
        ({"gradient.lm_head.weight": torch.ones(4)}, "has sketches that are not float32 [257]"),
        ({"weight.lm_head.weight": torch.ones(97, 31)}, "of the"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_refused(damaged, change, words):
    refuse(damaged(tensors=lambda tensors: tensors | change), words)


def test_another_model_is_refused(dump):
    refuse(dump, "pass the config.json of the recorded model", dict(CONFIGS["llama"], num_hidden_layers=3))
    refuse(dump, "pass the config.json of the recorded model", dict(CONFIGS["llama"], intermediate_size=64))


def test_nan_is_reported_as_such(damaged, tmp_path, capsys):
    broken = {"gradient.lm_head.weight": torch.full((257,), torch.nan)}
    folder = damaged(tensors=lambda tensors: tensors | broken)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    assert main(["audit", str(folder), "--model", str(tmp_path), "--json"]) == 5
    report = json.loads(capsys.readouterr().out)
    assert report["causes"] == ["not-finite"] and report["steps"][0]["worst"][0]["error"] is None
    assert report["steps"][0]["findings"][0]["parameters"] == ["lm_head.weight"]
    weights = {"weight.lm_head.weight": torch.full((97, 32), torch.nan)}
    assert audit(damaged(tensors=lambda tensors: tensors | weights), CONFIGS["llama"]).causes == [
        "not-finite"
    ]


def test_a_wrong_reported_loss_is_not_hidden_by_right_gradients(damaged):
    wrong = {"batch.0.loss": torch.tensor(123.0)}
    assert audit(damaged(tensors=lambda tensors: tensors | wrong), CONFIGS["llama"]).causes == [
        "loss-reported"
    ]

"""Fine-tuning on chat data is one run, whichever way its samples are laid out and over however many processes."""

import runpy
from pathlib import Path

import pytest
import torch
from default_cases import in_full
from models.reference import CASES, random_reference
from trained_runs import comparable, losses
from tuning_runs import config_of, token_samples, tuning_tree

from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.errors import ConfigError, DataError
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare, gradient_errors
from megalith.parity.job import Outcome, gradients_by_name, run_job, start
from megalith.training.precheck import check_job

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sft"
SEQ = 32


def samples(count: int) -> list[dict]:
    """Tokens of 2 to 32: the first has one token that is learned, the second fills a row."""
    return token_samples(count, 3, lambda number, rng: {0: 9, 1: SEQ}.get(number, rng.randrange(2, SEQ)))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run of two steps from a tiny Llama of transformers, over 24 samples of tokens."""
    folder = tmp_path_factory.mktemp("sft")
    files = {"train_data_path": samples(24), "valid_data_path": samples(5)}
    return tuning_tree(folder, files, seq=SEQ, micro=2, batch=8) | {"sft": {"enabled": True}}


@pytest.fixture(scope="module")
def alone(tree: dict) -> Outcome:
    return run_job(config_of(tree))


# By default adapters show tensor parallelism and interleaved stages show pipelines.
@pytest.mark.parametrize(
    "plain", [("cp2",), in_full(("cp2-a2a", "dp2-zero2", "tp2-sp", "pp2"))], ids="+".join
)
def test_packed_rows_in_every_layout_equal_one_process(
    pool, tree: dict, alone: Outcome, plain: tuple[str, ...]
):
    """Rows hold samples that context parallelism cuts, and one with a single token to learn."""
    cases = {}
    for name in plain:
        parallel = dict(LAYOUTS[name].parallel)
        if name == "pp2":
            parallel["decoder_first_pipeline_num_layers"] = 1  # the model has 3 layers
        cases[name] = (config_of(tree, parallel=parallel),)
    interleaved = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|L"}
    cases["pp2-interleaved"] = (config_of(tree, parallel=interleaved),)
    if len(plain) > 1:
        cases["padded, cp2"] = (config_of(tree, parallel=LAYOUTS["cp2"].parallel, sft={"packing": False}),)
    adapted = config_of(tree, lora={"rank": 2})
    cases["lora, tp2-sp"] = (config_of(tree, lora={"rank": 2}, parallel=LAYOUTS["tp2-sp"].parallel),)
    found = pool.run_cases(run_job, cases, size=2)
    ones = {"lora, tp2-sp": run_job(adapted)}
    if "padded, cp2" in cases:
        ones["padded, cp2"] = run_job(config_of(tree, sft={"packing": False}))
    assert all("lora" in name for name in ones["lora, tp2-sp"].gradients)
    for name, ranks in found.items():
        errors = compare(ranks, ones.get(name, alone))
        assert errors.within(), (name, errors)


def whole_step(config: RunConfig):
    """The loss and gradients of all rows in one step."""
    run = start(config)
    with run.data.train_loader(0, 0, run.device) as batches:
        loss = run.gradients([next(batches) for _ in range(run.batch_sizes.micro_batches(0))])
    return run, loss.item(), gradients_by_name(run)


def test_packed_equals_padded_and_the_loss_of_transformers(tree: dict):
    _, loss, gradients = whole_step(config_of(tree, sft={"packing": False}, train={"global_batch_size": 24}))
    rows = len(start(config_of(tree)).data.train)
    assert rows < 16
    packed = config_of(tree, train={"global_batch_size": rows, "micro_batch_size": 1})
    _, packed_loss, packed_gradients = whole_step(packed)
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert max(gradient_errors(packed_gradients, gradients).values()) < 1e-5

    theirs = random_reference(CASES["llama"][0]())
    records = samples(24)
    ids = torch.zeros(24, SEQ, dtype=torch.long)
    labels, attended = torch.full((24, SEQ), -100), torch.zeros(24, SEQ, dtype=torch.long)
    for row, record in enumerate(records):
        count = len(record["input_ids"])
        ids[row, :count], attended[row, :count] = torch.tensor(record["input_ids"]), 1
        learned = torch.tensor(record["completion_mask"], dtype=torch.bool)
        labels[row, :count] = torch.where(learned, ids[row, :count], -100)
    expected = theirs(input_ids=ids, attention_mask=attended, labels=labels).loss
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    norm = sum(p.grad.double().square().sum() for p in theirs.parameters()).sqrt().item()
    ours = sum(g.double().square().sum() for g in gradients.values()).sqrt().item()
    assert ours == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("plain", [("cp2", "tp2-sp"), in_full(("dp2-zero2",))], ids="+".join)
def test_dynamic_fine_tuning_is_trls_in_every_layout(pool, tree: dict, plain: tuple[str, ...]):
    """Of trl/trainer/sft_trainer.py 1.16.0, compute_loss: −log_probs · exp(log_probs).detach() over the tokens."""
    dft = {"sft": {"loss_type": "dft"}}
    padded = {"sft": {"packing": False, "loss_type": "dft"}, "train": {"global_batch_size": 24}}
    _, loss, gradients = whole_step(config_of(tree, **padded))
    theirs, total, count = random_reference(CASES["llama"][0]()), 0.0, 0
    for record in samples(24):
        ids = torch.tensor([record["input_ids"]])
        logprobs = theirs(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        taken = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        learned = torch.tensor(record["completion_mask"][1:])
        total = total + (-taken * taken.exp().detach() * learned).sum()
        count += int(learned.sum())
    (total / count).backward()
    assert loss == pytest.approx(total.item() / count, rel=1e-5)
    norm = sum(p.grad.double().square().sum() for p in theirs.parameters()).sqrt().item()
    ours = sum(g.double().square().sum() for g in gradients.values()).sqrt().item()
    assert ours == pytest.approx(norm, rel=1e-5)
    interleaved = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|L"}
    layouts = {name: LAYOUTS[name].parallel for name in plain} | {"pp2": interleaved}
    cases = {name: (config_of(tree, parallel=parallel, **dft),) for name, parallel in layouts.items()}
    one = run_job(config_of(tree, **dft))
    for name, ranks in pool.run_cases(run_job, cases, size=2).items():
        errors = compare(ranks, one)
        assert errors.within(), (name, errors)


def test_an_evaluation_takes_each_row_once(tree: dict, alone: Outcome):
    run = start(config_of(tree))
    assert run.config.train.eval_iters == 1 and len(run.data.valid) == 8 > run.data.valid.num_rows
    first = run.mean_loss(run.data.valid)
    other = start(config_of(tree, train={"global_batch_size": 2}, sft={"packing": False}))
    assert other.config.train.eval_iters == 3 and len(other.data.valid) == 6
    assert other.mean_loss(other.data.valid) == pytest.approx(first, rel=1e-5)


def test_epochs_say_the_length_and_nothing_else_may(tree: dict):
    endless = {"train_iters": None, "global_batch_size": 4}
    run = start(config_of(tree, sft={"num_train_epochs": 2.5, "packing": False}, train=endless))
    assert run.total_steps == 15 and RunConfig.from_tree(run.config.to_tree()).train.train_iters == 15
    check_job(config_of(tree), [2], 2, one_machine=False)
    with pytest.raises(DataError, match="no file matches"):
        check_job(config_of(tree, data={"valid_data_path": "nowhere.jsonl"}), [2], 2, one_machine=False)
    with pytest.raises(ConfigError, match="train_iters is 2, but both set the length"):
        start(config_of(tree, sft={"num_train_epochs": 1}))
    with pytest.raises(ConfigError, match="reset_attention_mask is on"):
        start(config_of(tree, data={"reset_attention_mask": True}))
    with pytest.raises(ConfigError, match="has weights"):
        start(config_of(tree, data={"train_data_path": "0.5 a 0.5 b"}))


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> list[str]:
    """The example's data and tokenizer, as docs/sft.md makes them; the command that trains on them, shortened."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr("sys.argv", ["make_chat.py", "data", "60"])
    runpy.run_path(str(EXAMPLE / "make_chat.py"), run_name="__main__")
    trained = ["tokenizer", "train", "--input", "data/chat_text.jsonl", "--vocab-size", "300", "--output"]
    assert main([*trained, "data/sft_tokenizer"]) == 0
    small = ["--model.num_layers", "1", "--model.hidden_size", "32", "--data.num_workers", "0",
             "--sft.num_train_epochs", "3", "--optim.lr_warmup_iters", "1", "--train.eval_interval", "4"]  # fmt: skip
    return ["sft", "examples/sft/run.yaml", *small]


def test_the_example_trains_evaluates_resumes_and_exports(prepared, capsys):
    deterministic = [*prepared, "--train.deterministic", "true", "--checkpoint.save_interval", "3"]
    assert main([*deterministic, "--train.output_dir", "whole", "--checkpoint.export_hf", "true"]) == 0
    out = capsys.readouterr().out
    assert "train: 57 samples in " in out and "% of tokens, " in out and "sequences per row" in out
    found = losses(Path("whole"))
    assert found[-1] < found[0]
    assert "validation loss at iteration 4" in out
    assert "{% generation %}" in Path("whole/hf_model/chat_template.jinja").read_text()

    assert main([*deterministic, "--train.output_dir", "parts", "--train.exit_interval", "3"]) == 20
    assert main([*deterministic, "--train.output_dir", "parts", "--checkpoint.load", "parts"]) == 0
    assert comparable(Path("parts")) == comparable(Path("whole"))
    torch.use_deterministic_algorithms(False)


def test_a_bad_line_ends_the_command_with_its_name(prepared, capsys):
    with open("data/chat.jsonl", "a") as file:
        file.write('{"messages": [{"role": "user", "content": ""}]}\n')
    assert main(prepared) == 3
    assert (
        "data/chat.jsonl line 61 (sample 61) is unusable: message 1 (user) is empty"
        in capsys.readouterr().err
    )

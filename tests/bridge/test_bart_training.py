"""BART and its kin in training: layouts, adapters, a run's loss, and the plan's counts."""

from pathlib import Path

import pytest
import torch
from bart_reference import CLASSES, SIZES, VOCAB, reference
from default_cases import by_default
from peft_formula import adapt
from torch.utils.flop_counter import FlopCounterMode

import megalith
from megalith.bridge.adapters.adapter_folder import export_adapters
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import FAMILIES
from megalith.config import ParallelConfig, RunConfig
from megalith.launch.pool import Pool
from megalith.models.model_types import make_model
from megalith.parallel.pipeline.stages import assign_layers, split_stages
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import run_job
from megalith.planner.counts import MetaModel, count_parameters, layers_of
from megalith.planner.flops import flops_per_token

TRIED = ["tp2", "tp2-sp-pp2", "cp2-a2a", "tp2-sp-dp2-zero3", "pp2-zero_bubble", "pp2-interleaved"]
# The encoder has two of the five layers.
STAGES = {
    "tp2-sp-pp2": "Ettt|ttL",
    "pp2-zero_bubble": "Ettt|ttL",
    "pp2-interleaved": "Et|t|tt|tL",
}
IDS = torch.randint(8, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))


def run_config(source: Path, layout: str | None, **settings: object) -> RunConfig:
    cut = {"pipeline_model_parallel_layout": STAGES[layout]} if layout in STAGES else {}
    return RunConfig.from_tree(
        {
            "model": {"init_from": str(source), "hidden_dropout": 0.1, "attention_dropout": 0.1},
            "parallel": LAYOUTS[layout].parallel | cut if layout else {},
            "data": {"mock": True, "seq_length": 16, "decoder_seq_length": 12, "num_workers": 0},
            "optim": {"lr": 3e-3, "clip_grad": 0.5},
            "train": {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 4, "eval_iters": 1},
            "runtime": {"device": "cpu", "compile": False},
        }
    ).with_settings(settings)


@pytest.mark.parametrize(
    ("kind", "layout"),
    by_default(
        [(kind, layout) for kind in CLASSES for layout in TRIED],
        ("Bart", "tp2-sp-pp2"), ("M2M100", "cp2-a2a"),
    ),
)  # fmt: skip
def test_a_layout_equals_one_process(pool: Pool, tmp_path: Path, kind: str, layout: str) -> None:
    reference(kind, tmp_path, std=0.25)  # attention has to matter: its gradients are not rounding
    config = run_config(tmp_path, layout)
    errors = compare(
        pool.run(run_job, config, size=LAYOUTS[layout].processes), run_job(run_config(tmp_path, None))
    )
    assert errors.within(), errors


@pytest.mark.parametrize("kind", by_default(CLASSES, "Bart"))
def test_adapters_are_those_of_peft_and_merge_into_the_model_that_transformers_runs(
    tmp_path: Path, kind: str
) -> None:
    model = reference(kind, tmp_path / "base")
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "cross_attention"]
    config = run_config(
        tmp_path / "base", None, **{"lora.rank": 2, "lora.targets": targets, "optim.lr": 3e-2, "train.eval_iters": 0,
                                    "train.output_dir": str(tmp_path / "run")}
    )  # fmt: skip
    step = megalith.train(config).checkpoint
    export_adapters(step, tmp_path / "peft")
    merge(tmp_path / "run", tmp_path / "merged", show_progress=False)
    out = export_hf(tmp_path / "merged", tmp_path / "hf", show_progress=False).path
    merged = CLASSES[kind].from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        before = model(IDS, decoder_input_ids=IDS).logits
        adapt(model, tmp_path / "peft")
        expected = model(IDS, decoder_input_ids=IDS).logits
        assert (expected - before).abs().max() > 1e-3 * expected.abs().max()
        for found in (megalith.load(step)(IDS), merged(IDS, decoder_input_ids=IDS).logits):
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_run_leaves_the_constant_bias_and_the_unused_rows_of_positions(tmp_path: Path) -> None:
    """transformers reads no position below 2, and its final_logits_bias is a buffer."""
    before = reference("Bart", tmp_path / "base").state_dict()
    config = run_config(
        tmp_path / "base", None, **{"optim.weight_decay": 0.0, "train.output_dir": str(tmp_path / "run")}
    )
    step = megalith.train(config).checkpoint
    after = CLASSES["Bart"].from_pretrained(export_hf(step, tmp_path / "hf").path).state_dict()
    assert torch.equal(after["final_logits_bias"], before["final_logits_bias"])
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        assert torch.equal(after[name][:2], before[name][:2])
        assert not torch.equal(after[name][2:6], before[name][2:6])


@pytest.mark.parametrize("kind", ["Bart", "BlenderbotSmall", "Marian", "M2M100"])
def test_the_plan_counts_what_transformers_has(kind: str) -> None:
    model = reference(kind)
    config = FAMILIES[CLASSES[kind].__name__].read_config(model.config.to_dict())
    config = config.model_copy(update={"make_vocab_size_divisible_by": 1})
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    constant = SIZES["vocab_size"] if config.add_output_bias else 0
    assert count_parameters(config).total == trained + constant
    batch, encoder_seq, seq = 2, 24, 16
    ids, labels = (torch.zeros(batch, length, dtype=torch.long) for length in (encoder_seq, seq))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=labels).loss.backward()
    cost = flops_per_token(config, encoder_seq, decoder_length=seq)
    assert counter.get_total_flops() == pytest.approx(batch * encoder_seq * cost.full, rel=1e-6)


@pytest.mark.parametrize("stages", ["E|tt|tttL", "Et|tttt|L", "Ett|t|ttL", "Ettt|t|tL"])
def test_a_stage_has_what_is_counted(stages: str) -> None:
    config = FAMILIES["BartForConditionalGeneration"].read_config(reference("Bart").config.to_dict())
    parallel = ParallelConfig(pipeline_model_parallel_size=3, pipeline_model_parallel_layout=stages)
    assignment, meta = assign_layers(config, parallel), MetaModel(config)
    for rank, chunks in enumerate(assignment):
        counted = meta.in_layers(layers_of(config, chunks)) + meta.outside(chunks)
        (held,) = split_stages(make_model(config, device="meta"), assignment, rank)
        assert counted.total() == sum(p.numel() for p in held.parameters())

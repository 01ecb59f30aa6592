"""TRL's SFTTrainer, DPOTrainer, ORPOTrainer, KTOTrainer, RewardTrainer and GKDTrainer: what differs from the default is
a setting, has no effect for a reason, or is refused by name; and they train. The classes are TRL's where TRL is
installed, else transformers' with the fields that TRL 1.16 adds."""

import dataclasses
import json
from dataclasses import field
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bos_tokenizer import bos_tokenizer
from models.reference import CASES, random_reference
from test_trl_arguments import another
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megalith.errors import ConfigError, DataError
from megalith.rl import (
    DPOTrainer,
    GKDTrainer,
    GRPOTrainer,
    KTOTrainer,
    ORPOTrainer,
    RewardTrainer,
    SFTTrainer,
)
from megalith.rl.from_trl.tuning_settings import no_effect_notes, tuning_settings

COMMON = dict(
    logging_steps=10, gradient_checkpointing=True, model_init_kwargs=None, trust_remote_code=False,
    dataset_num_proc=None, max_length=1024, pad_to_multiple_of="auto", activation_offloading=False,
)  # fmt: skip
REFERENCE = dict(
    disable_dropout=True, router_aux_loss_coef=None, precompute_ref_log_probs=False, precompute_ref_batch_size=None,
    sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512, beta=0.1, learning_rate=1e-6,
)  # fmt: skip
OF_TRL: dict[str, dict[str, Any]] = {
    "SFTConfig": COMMON | dict(
        learning_rate=2e-5, router_aux_loss_coef=None, chat_template_path=None, dataset_text_field="text",
        dataset_kwargs=None, eos_token=None, truncation_mode="keep_start", shuffle_dataset=False, packing=False,
        packing_strategy="bfd", padding_free=False, eval_packing=None, completion_only_loss=None,
        assistant_only_loss=False, loss_type="nll", pad_token=None),
    "DPOConfig": COMMON | REFERENCE | dict(
        truncation_mode="keep_start", padding_free=False, loss_type="sigmoid", loss_weights=None, ld_alpha=None,
        f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5, label_smoothing=0.0, use_weighting=False,
        discopop_tau=0.05, pad_token=None),
    "ORPOConfig": dict(
        learning_rate=1e-6, logging_steps=10, gradient_checkpointing=True, max_length=1024, max_completion_length=None,
        beta=0.1, disable_dropout=True, padding_value=None, generate_during_eval=False, is_encoder_decoder=None,
        model_init_kwargs=None, trust_remote_code=False, dataset_num_proc=None),
    "KTOConfig": COMMON | REFERENCE | dict(
        train_sampling_strategy="sequential", loss_type="kto", desirable_weight=1.0, undesirable_weight=1.0),
    "RewardConfig": COMMON | dict(
        learning_rate=1e-4, chat_template_path=None, disable_dropout=True, eos_token=None,
        center_rewards_coefficient=None, pad_token=None),
}  # fmt: skip
OF_TRL["GKDConfig"] = OF_TRL["SFTConfig"] | dict(
    temperature=0.9, lmbda=0.5, beta=0.5, max_new_tokens=128, teacher_model_name_or_path=None,
    teacher_model_init_kwargs=None, disable_dropout=True, seq_kd=False,
)  # fmt: skip
OTHER = {"packing_strategy": "wrapped", "truncation_mode": "keep_end", "max_length": 64, "max_steps": 7, "beta": 0.3,
         "f_alpha_divergence_coef": 0.7, "lmbda": 0.25, "teacher_model_init_kwargs": {"dtype": "bfloat16"}}  # fmt: skip
LOSSES = {"sft": "dft", "gkd": "dft", "dpo": "ipo", "kto": "apo_zero_unpaired"}


def config_class(name: str) -> type:
    try:
        import trl

        if name in ("GKDConfig", "ORPOConfig"):
            return getattr(import_module(f"trl.experimental.{name.removesuffix('Config').lower()}"), name)
        return getattr(trl, name)
    except ImportError:
        made = [(key, Any, field(default=value)) for key, value in OF_TRL[name].items()]
        return dataclasses.make_dataclass(name, made, bases=(TrainingArguments,))


@pytest.mark.parametrize("section", ["sft", "dpo", "orpo", "kto", "reward", "gkd"])
def test_every_argument_is_honoured_or_explained_or_refused_by_name(section: str):
    """The value is set on a finished object, whose class does not check it."""
    kind = config_class(f"{section.upper()}Config".replace("REWARD", "Reward"))
    make = lambda: kind(output_dir="o", use_cpu=True, bf16=False)  # noqa: E731
    plain = make()
    expected = tuning_settings(section, plain, 20, 1)
    assert no_effect_notes(section, plain) == []
    dropped = []
    for name in sorted({one.name for one in dataclasses.fields(kind)} - {"use_cpu", "bf16", "eval_strategy"}):
        args, value = make(), getattr(plain, name)
        other = LOSSES[section] if name == "loss_type" else OTHER.get(name, another(name, value))
        object.__setattr__(args, name, other)
        try:
            settings = tuning_settings(section, args, 20, 1)
        except ConfigError as error:
            assert name in str(error)
            continue
        notes = [
            one for one in no_effect_notes(section, args) if one.startswith(f"args.{name} has no effect: ")
        ]
        if settings == expected and not notes:
            dropped.append(name)
    assert dropped == []


def made_by_gkd(**args) -> dict:
    """The distillation's settings that differ from those of GKDConfig's defaults."""
    usual, other = tuning_settings("gkd", {}, 16, 1), tuning_settings("gkd", args, 16, 1)
    assert usual.items() >= {"distill.kd_ratio": 1.0, "distill.divergence": "generalized_jsd", "distill.beta": 0.5,
                             "distill.sampling_temperature": 0.9, "distill.on_policy_fraction": 0.5,
                             "distill.max_completion_length": 128, "model.hidden_dropout": 0.0}.items()  # fmt: skip
    return {path: value for path, value in other.items() if value != usual.get(path)}


def test_what_they_mean():
    made = tuning_settings(
        "dpo", dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], max_length=64, num_train_epochs=2,
                    per_device_train_batch_size=2, gradient_accumulation_steps=2, warmup_ratio=0.25), 16, 2,
    )  # fmt: skip
    expected = {"dpo.enabled": True, "dpo.loss_type": ["sigmoid", "sft"], "dpo.loss_weights": [1.0, 0.5],
                "data.seq_length": 64, "dpo.truncation_mode": "keep_start", "train.global_batch_size": 8,
                "train.train_iters": 4, "optim.lr_warmup_iters": 1, "optim.lr": 1e-6}  # fmt: skip
    assert {path: made[path] for path in expected} == expected
    with pytest.raises(
        ConfigError, match=r"packing_strategy is 'bfd_split', .* it splits samples; choose bfd"
    ):
        tuning_settings("sft", dict(packing=True, packing_strategy="bfd_split"), 16, 1)
    with pytest.raises(ConfigError, match="the dataset has 7 samples, less than a batch of 8"):
        tuning_settings("sft", dict(dataloader_drop_last=True), 7, 1)
    with pytest.raises(
        ConfigError, match=r"train_sampling_strategy is 'sequential', .* shuffled every epoch"
    ):
        tuning_settings("sft", dict(train_sampling_strategy="sequential"), 16, 1)
    made = tuning_settings("orpo", dict(beta=0.2), 16, 1)
    assert (made["dpo.loss_type"], made["dpo.beta"], made["optim.lr"]) == ("orpo", 0.2, 1e-6)
    with pytest.raises(ConfigError, match="ORPOConfig has no loss_type"):
        tuning_settings("orpo", dict(loss_type="sigmoid"), 16, 1)
    assert tuning_settings("reward", {}, 16, 1)["reward.truncation_mode"] == "drop"
    assert made_by_gkd(beta=0.0) == {"distill.divergence": "forward_kl"}
    assert made_by_gkd(beta=1, lmbda=1.0, seq_kd=True) == {
        "distill.divergence": "reverse_kl",
        "distill.on_policy_fraction": 1.0,
    }
    assert made_by_gkd(temperature=0.7) == {"distill.sampling_temperature": 0.7}
    with pytest.raises(ConfigError, match=r"args\.seq_kd is True, .* sampled before the run"):
        made_by_gkd(seq_kd=True)
    with pytest.raises(ConfigError, match="TRL ignores it with loss_type sigmoid"):
        tuning_settings("dpo", dict(label_smoothing=0.1), 16, 1)
    with pytest.raises(ConfigError, match="DPOTrainer has no argument 'betta'; did you mean 'beta'"):
        tuning_settings("dpo", dict(betta=0.1), 16, 1)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "accumulation"), [(7, 1), (8, 1), (30, 3), (5, 1), (27, 2)])
def test_an_epoch_has_the_steps_of_transformers(samples: int, accumulation: int, drop_last: bool):
    args = config_class("SFTConfig")(
        output_dir="o", use_cpu=True, bf16=False, per_device_train_batch_size=4, num_train_epochs=1.5,
        gradient_accumulation_steps=accumulation, dataloader_drop_last=drop_last, save_strategy="epoch",
    )  # fmt: skip
    loader = DataLoader(range(samples), batch_size=4, drop_last=drop_last)
    trainer = SimpleNamespace(
        get_sp_size=lambda: 1, num_examples=lambda _: samples, get_total_train_batch_size=lambda _: 4
    )
    _, epoch, *_, steps = Trainer.set_initial_training_values(trainer, args, loader)
    made = tuning_settings("sft", args, samples, 1)
    assert (made["checkpoint.save_interval"], made["train.train_iters"]) == (epoch, steps)


def test_epochs_and_warm_up_count_the_rows_after_packing_and_pairs_of_kto_twice(base: Path, tmp_path: Path):
    args = dict(num_train_epochs=2, per_device_train_batch_size=2, max_length=16, output_dir=str(tmp_path),
                warmup_ratio=0.5, save_strategy="epoch", eval_strategy="epoch")  # fmt: skip
    records = [{"input_ids": [1, k, 3, 4]} for k in range(24)]  # four in a row
    config = SFTTrainer(base, args | {"packing": True}, records, records).config
    assert (config.train.train_iters, config.optim.lr_warmup_iters) == (6, 3)
    assert (config.train.eval_interval, config.checkpoint.save_interval) == (3, 3)
    pairs = [{"prompt_ids": [1, k], "chosen_ids": [3, 4, k], "rejected_ids": [5]} for k in range(5)]
    assert KTOTrainer(base, args, pairs).config.train.train_iters == 10
    long = [pair | {"chosen_ids": [3] * 16} for pair in pairs]  # TRL's RewardTrainer leaves them out
    assert RewardTrainer(base, args, [*pairs[:2], *long]).config.train.train_iters == 2


def test_they_train(tmp_path: Path, monkeypatch):
    random_reference(CASES["llama"][0]()).save_pretrained(tmp_path / "base")
    pairs = [{"prompt_ids": [1, k], "chosen_ids": [3, 4, k], "rejected_ids": [5]} for k in range(4)]
    marked = [{"prompt_ids": [1, k], "completion_ids": [3, k], "label": k % 2 == 0} for k in range(4)]
    learned = [{"input_ids": [1, k, 3], "labels": [-100, k, 3]} for k in range(4)]
    settings = {
        "data.num_workers": 0, "runtime.device": "cpu", "runtime.compile": False, "log.layout_report": False,
        "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0,
    }  # fmt: skip
    trainers = {
        SFTTrainer: learned,
        DPOTrainer: pairs,
        ORPOTrainer: pairs,
        KTOTrainer: marked,
        RewardTrainer: pairs,
    }
    losses = {}
    for trainer, records in trainers.items():
        output = str(tmp_path / trainer.section)
        args = dict(max_steps=2, per_device_train_batch_size=2, max_length=16, output_dir=output)
        result = trainer(tmp_path / "base", args, records, records, settings=settings).train()
        losses[trainer.section] = result.loss
        assert result.step == 2 and result.validation_loss is not None
    output = str(tmp_path / "gkd")
    args = dict(
        max_steps=2, per_device_train_batch_size=2, max_length=16, output_dir=output, max_new_tokens=4
    )
    result = GKDTrainer(tmp_path / "base", tmp_path / "base", args, learned, settings=settings).train()
    assert result.step == 2 and abs(result.loss) < 1e-3
    with pytest.raises(ConfigError, match=r"distill\.teacher is not set"):
        GKDTrainer(tmp_path / "base", None, args, learned, settings=settings)
    assert losses["dpo"] == pytest.approx(0.693, abs=0.01) and losses["reward"] == pytest.approx(
        0.693, abs=0.2
    )
    with pytest.raises(ConfigError, match="KTOTrainer takes no compute_metrics"):
        KTOTrainer(tmp_path / "base", {}, marked, compute_metrics=print)


def test_train_resumes_from_a_checkpoint_as_transformers_trainer_does(tmp_path: Path):
    random_reference(CASES["llama"][0]()).save_pretrained(tmp_path / "base")
    records = [{"input_ids": [1, k, 3], "labels": [-100, k, 3]} for k in range(8)]
    settings = {
        "data.num_workers": 0,
        "runtime.device": "cpu",
        "runtime.compile": False,
        "log.layout_report": False,
    }

    def trainer(output: str, **others: Any) -> SFTTrainer:
        args = dict(max_steps=4, per_device_train_batch_size=2, max_length=16, save_steps=2, save_strategy="steps",
                    lr_scheduler_type="constant", output_dir=str(tmp_path / output))  # fmt: skip
        return SFTTrainer(tmp_path / "base", args | others, records, settings=settings)

    whole = trainer("whole").train(resume_from_checkpoint=None)
    assert trainer("halves", max_steps=2).train(resume_from_checkpoint=False).step == 2
    second = trainer("halves").train(resume_from_checkpoint=True)
    assert (second.step, second.loss) == (4, whole.loss)
    step = tmp_path / "halves/checkpoints/step_00000002"
    assert trainer("again").train(resume_from_checkpoint=str(step)).loss == whole.loss
    for value in (True, str(tmp_path / "base"), str(tmp_path / "halves/checkpoint-2")):
        with pytest.raises(ConfigError, match="has no checkpoint of a Megalith run"):
            trainer("empty").train(resume_from_checkpoint=value)
    with pytest.raises(AttributeError, match="SFTTrainer has no save_model: megalith export-hf"):
        trainer("empty").save_model(tmp_path / "out")
    assert not hasattr(trainer("empty"), "anything")


def test_the_shuffled_order_of_kto_is_named(tmp_path: Path):
    random_reference(CASES["llama"][0]()).save_pretrained(tmp_path / "base")
    marked = [{"prompt_ids": [1, k], "completion_ids": [3, k], "label": k % 2 == 0} for k in range(4)]
    args = dict(max_steps=2, per_device_train_batch_size=2, max_length=16, output_dir=str(tmp_path / "out"))
    for order, count in (("cyclic", 1), ("single", 0)):
        trainer = KTOTrainer(tmp_path / "base", args, marked, settings={"data.dataloader_type": order})
        assert sum("train_sampling_strategy is sequential" in note for note in trainer.config.notes) == count


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Folder of a small Llama with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("base")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            max_position_embeddings=64, bos_token_id=256, eos_token_id=257,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    template = "{% for m in messages %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"
    bos_tokenizer(folder, template)
    return folder


def test_plain_text_is_learned_whole_with_an_end_as_in_trl(base: Path, tmp_path: Path):
    args = dict(max_steps=1, per_device_train_batch_size=1, max_length=16, output_dir=str(tmp_path))
    settings = {"runtime.device": "cpu", "runtime.compile": False, "log.layout_report": False}
    loss = SFTTrainer(base, args, [{"text": "hello", "id": 3}], settings=settings).train().loss
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = torch.tensor([[*tokenizer("hello").input_ids, tokenizer.eos_token_id]])
    expected = LlamaForCausalLM.from_pretrained(base)(ids, labels=ids).loss.detach()
    assert ids.shape == (1, 7) and loss == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"train": [], "test": []}, "train_dataset is a dict of datasets ('train', 'test')"),
        ("data.jsonl", "train_dataset is 'data.jsonl', not records; load it first"),
        (7, "train_dataset is 7, not records"),
        (["text"], "record 1 of train_dataset is a str, but records are dicts"),
        (
            [{"prompt": "a"}, {"prompt": "b", "images": ["x.png"]}],
            "record 2 of train_dataset is unusable: it has images",
        ),
        ([{"prompt": "a", "image": object()}], "record 1 of train_dataset is unusable: it has image"),
    ],
)
@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer, GRPOTrainer])
def test_what_is_no_dataset_of_text_is_refused(base: Path, trainer: type, dataset: Any, message: str):
    with pytest.raises(ConfigError) as raised:
        trainer(base, args={"max_steps": 1}, train_dataset=dataset)
    assert message in str(raised.value)
    with pytest.raises(ConfigError, match="eval_dataset is a dict of datasets"):
        trainer(
            base, args={"max_steps": 1}, train_dataset=[{"messages": [USER, ANSWER]}], eval_dataset={"a": []}
        )


def test_a_value_that_json_does_not_have_is_never_learned_as_text(base: Path, tmp_path: Path):
    args = {"max_steps": 1, "max_length": 16, "output_dir": str(tmp_path)}
    for record in (
        {"messages": [USER, {"role": "assistant", "content": b"x"}]},
        {"prompt": "a", "completion": b"x"},
        {"text": b"x"},
    ):
        with pytest.raises((ConfigError, DataError)):
            SFTTrainer(base, args, [record]).train()


def test_columns_that_json_does_not_have_are_kept_as_far_as_they_can_be(base: Path, tmp_path: Path):
    record = {"messages": [USER, ANSWER], "at": datetime(2026, 1, 2), "score": np.float32(0.5), "images": [],
              "pixels": np.arange(2), "of": b"x"}  # fmt: skip
    SFTTrainer(base, {"max_steps": 1, "max_length": 16, "output_dir": str(tmp_path)}, [record])
    (path,) = (tmp_path / "records").iterdir()
    others = {key: value for key, value in json.loads(path.read_text()).items() if key != "messages"}
    assert others == {
        "at": "2026-01-02T00:00:00",
        "score": 0.5,
        "images": [],
        "pixels": [0, 1],
        "of": {"unsupported_value": "bytes"},
    }

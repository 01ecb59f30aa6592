"""Several adapters in one batch: each sequence gets the tokens of the model with its adapter merged."""

from pathlib import Path

import pytest
import torch
from bridge.peft_formula import random_adapters, save
from default_cases import by_default, in_full
from generation.engine_job import live_tokens, over_tensor_ranks
from models.reference import CASES, random_reference

import megalith
from megalith.bridge.adapters.adapter_folder import load_adapter_pairs, slot_ranks
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.adapters.open_adapters import fingerprint_of
from megalith.errors import CheckpointError, ConfigError
from megalith.generation.engine import Engine
from megalith.generation.engine_model import SlotSizes
from megalith.generation.live_request import LiveRequest
from megalith.generation.requests import MAX_GENERATIONS, Completion, Sampling
from megalith.generation.speculation import Speculation
from megalith.models import adapter_slots
from megalith.models.transformer import Transformer

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {  # by case, and True with the experts' parameters
    "llama": (ALL, False),
    "qwen3": (["k_proj", "up_proj"], False),
    "phi3, window": (["qkv_proj", "o_proj", "gate_up_proj"], False),
    "gpt2": (["c_attn", "mlp.c_proj", "c_fc"], False),
    "mixtral": (["q_proj"], True),
    "gpt-oss": (["o_proj"], True),
    "deepseek-v2, a latent for queries, groups": (
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "up_proj", "down_proj"],
        True,
    ),
    "qwen3-next, two heads of values to one of keys": (
        ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "gate_proj", "down_proj"],
        True,
    ),
}
PROMPTS = [[5, 9, 2], [7, 1, 4, 4, 11, 80], [3], [5, 9, 2], [5, 9, 2], [8, 8]]
SLOTS = [1, 2, 0, 0, 2, 1]
SAMPLING = Sampling(max_new_tokens=16, seed=3)
ROOM = dict(max_rows=4, max_tokens=64)


class Family:
    """A base, two PEFT folders of different rank, and their tokens if merged, by slot."""

    def __init__(self, folder: Path, name: str):
        targets, experts = TARGETS[name]
        reference = random_reference(CASES[name][0]())
        reference.save_pretrained(folder / "base")
        self.base = folder / "base"
        self.model = megalith.load(self.base)
        self.pairs = {}
        self.merged: dict[int, Transformer] = {0: self.model}
        for slot, rank in ((1, 3), (2, 5)):
            torch.manual_seed(slot)
            given = save(
                random_adapters(reference, targets, rank, experts=experts), folder / f"peft{slot}", 4.0
            )
            self.pairs[slot] = load_adapter_pairs(given, self.base, self.model.config, None)
            merge(given, folder / f"merged{slot}", base=str(self.base), show_progress=False)
            self.merged[slot] = megalith.load(folder / f"merged{slot}")
        ranks = {
            name: max(pairs[name][0].shape[-2] for pairs in self.pairs.values()) for name in self.pairs[1]
        }
        self.sizes = SlotSizes(2, ranks)

    def engine(self) -> Engine:
        engine = Engine(self.model.config, "cpu", torch.float32, adapter_slots=self.sizes, **ROOM)
        engine.load(self.model.state_dict().items())
        for slot, pairs in self.pairs.items():
            engine.set_adapter(slot, pairs)
        return engine

    def alone(self, slot: int) -> list[Completion]:
        """Tokens of every prompt by the model with this adapter merged."""
        model = self.merged[slot]
        return Engine(model.config, "cpu", torch.float32, model=model, **ROOM).generate(PROMPTS, SAMPLING)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Family] = {}

    def family(name: str) -> Family:
        if name not in made:
            made[name] = Family(tmp_path_factory.mktemp("family"), name)
        return made[name]

    return family


def assert_same(ours: list[Completion], family: Family, slots: list[int]) -> None:
    expected = {slot: family.alone(slot) for slot in set(slots)}
    for number, slot in enumerate(slots):
        assert ours[number].ids == expected[slot][number].ids
        assert ours[number].logprobs == pytest.approx(expected[slot][number].logprobs, abs=1e-5)


@pytest.mark.parametrize("name", by_default(TARGETS, "llama", "mixtral", *list(TARGETS)[6:7]))
def test_each_sequence_has_the_tokens_of_its_adapter_merged_alone(families, name: str) -> None:
    family = families(name)
    done = family.engine().generate(PROMPTS, SAMPLING, adapters=SLOTS)
    assert_same(done, family, SLOTS)
    assert len({tuple(done[number].ids) for number in (0, 3, 4)}) == 3  # one prompt, three models


def test_experts_in_a_large_pass_are_computed_slot_by_slot_alike(families, monkeypatch) -> None:
    family = families("mixtral")
    monkeypatch.setattr(adapter_slots, "MAX_GATHERED_ROWS", 1)
    assert_same(family.engine().generate(PROMPTS, SAMPLING, adapters=SLOTS), family, SLOTS)


def test_tokens_do_not_depend_on_the_other_sequences(families) -> None:
    engine = families("llama").engine()
    done = engine.generate(PROMPTS, SAMPLING, adapters=SLOTS)
    for number, (prompt, slot) in enumerate(zip(PROMPTS, SLOTS)):
        (alone,) = engine.generate([prompt], SAMPLING, keys=[number], adapters=[slot])
        assert alone.ids == done[number].ids
    assert engine.generate(PROMPTS, SAMPLING)[2].ids == done[2].ids


def test_a_slot_that_is_filled_again_has_the_other_adapter_alone(families) -> None:
    family = families("llama")
    engine = family.engine()
    engine.set_adapter(1, family.pairs[2])
    assert_same(engine.generate(PROMPTS, SAMPLING, adapters=[1] * 6)[:], family, [2] * 6)
    engine.set_adapter(1, {})
    assert_same(engine.generate(PROMPTS, SAMPLING, adapters=[1] * 6)[:], family, [0] * 6)


def test_a_known_prefix_is_reused_by_its_own_adapter_alone(families) -> None:
    family = families("llama")
    engine, prompt = family.engine(), [number % 90 for number in range(5, 45)]
    expected = []
    for slot in range(3):
        model = family.merged[slot]
        alone = Engine(model.config, "cpu", torch.float32, model=model, **ROOM)
        expected.append(alone.generate([prompt], SAMPLING)[0].ids)
    for slot in (1, 2, 0, 1, 0):
        assert engine.generate([prompt], SAMPLING, adapters=[slot])[0].ids == expected[slot]
    assert engine.take_prefill_tokens()[1] >= len(prompt) - 1
    engine.set_adapter(1, family.pairs[2])
    assert engine.generate([prompt], SAMPLING, adapters=[1])[0].ids == expected[2]


def test_drafts_are_verified_with_the_adapter_of_their_sequence(families) -> None:
    family = families("llama")
    options = dict(adapter_slots=family.sizes, speculation=Speculation("ngram", 3))
    engine = Engine(family.model.config, "cpu", torch.float32, **options, **ROOM)
    engine.load(family.model.state_dict().items())
    for slot, pairs in family.pairs.items():
        engine.set_adapter(slot, pairs)
    assert_same(engine.generate(PROMPTS, SAMPLING, adapters=SLOTS), family, SLOTS)


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama", 4), ("mixtral", 2), in_full("llama", 2), in_full("gpt2", 2)]
)
def test_tensor_parallel_ranks_have_the_same_tokens(pool, families, name: str, ranks: int) -> None:
    """Four ranks share the two KV groups of the Llama."""
    family = families(name)
    weights = family.model.state_dict()
    slots = family.sizes, family.pairs, SLOTS
    for done in pool.run(
        over_tensor_ranks, family.model.config, weights, PROMPTS, SAMPLING, slots, size=ranks
    ):
        assert_same(done, family, SLOTS)


def test_requests_at_any_time_to_replicas_have_the_tokens_of_their_adapters(pool, families) -> None:
    family = families("llama")
    expected = {slot: family.alone(slot) for slot in set(SLOTS)}
    requests = [
        LiveRequest(prompt, 16, seed=3, key=number * MAX_GENERATIONS, adapter=slot, ignores_stop=True)
        for number, (prompt, slot) in enumerate(zip(PROMPTS, SLOTS))
    ]
    slots = family.sizes, family.pairs
    arguments = family.model.config, family.model.state_dict(), requests, 2, slots
    results, *_ = pool.run(live_tokens, *arguments, size=4)
    assert [ids for ids, _ in results] == [expected[slot][number].ids for number, slot in enumerate(SLOTS)]


def test_room_for_later_adapters_is_that_of_all_matrices(families) -> None:
    family = families("llama")
    ranks = slot_ranks(family.model.config, 5)
    assert ranks == family.sizes.ranks
    with pytest.raises(
        ConfigError, match=r"has a total rank of 15 over its parts, but the engine has room for rank 12"
    ):
        sizes = SlotSizes(1, slot_ranks(family.model.config, 4))
        Engine(family.model.config, "cpu", torch.float32, adapter_slots=sizes, **ROOM).set_adapter(
            1, family.pairs[2]
        )
    with pytest.raises(ConfigError, match="slot is 3, but the engine has 2 slots for adapters"):
        family.engine().set_adapter(3, {})
    with pytest.raises(ConfigError, match="cannot have slots for adapters"):
        Engine(
            family.model.config, "cpu", torch.float32, model=family.model, adapter_slots=family.sizes, **ROOM
        )


def test_adapters_of_another_base_and_more_than_lora_are_refused(families, tmp_path: Path) -> None:
    family, other = families("llama"), families("qwen3")
    with pytest.raises(CheckpointError, match="use adapters of the same base"):
        load_adapter_pairs(other.base.parent / "peft1", family.base, family.model.config, None)
    lora = {"rank": 2, "targets": ["q_proj"]}
    tree = {
        "model": {"init_from": str(family.base)},
        "lora": lora | {"use_dora": True},
        "data": {"mock": True, "seq_length": 16},
        "optim": {"lr": 1e-3},
        "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1, "eval_iters": 0},
    }
    for kind, settings, message in (
        ("dora", {}, "was trained with DoRA"),
        ("int8", {"lora.use_dora": False, "lora.quantize_base": "int8"}, "on a base quantized to int8"),
        ("plain", {"lora.use_dora": False}, "were not trained on the weights"),
    ):
        config = megalith.RunConfig.from_tree(tree).with_settings(
            {"train.output_dir": str(tmp_path / kind), **settings}
        )
        megalith.train(config)
        fingerprint = "0" * 64 if kind == "plain" else fingerprint_of(family.model)
        with pytest.raises((ConfigError, CheckpointError), match=message):
            load_adapter_pairs(tmp_path / kind, family.base, family.model.config, fingerprint)

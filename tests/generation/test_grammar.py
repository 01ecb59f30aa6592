"""JSON by a grammar: every completion is an instance of its schema, in any batch."""

import json
import sys

import jsonschema
import pytest

from megalith.config import ModelConfig
from megalith.data.tokenizers.plain import ByteTokenizer, NullTokenizer
from megalith.errors import ConfigError
from megalith.generation.engine import Engine
from megalith.generation.grammar import GrammarCompiler, call_grammar, json_grammar
from megalith.generation.logits_processing import LogitsProcessing
from megalith.generation.requests import Sampling
from megalith.models.init import initialize
from megalith.models.model_types import make_model

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 60},
        "sky": {"enum": ["clear", "cloudy"]},
    },
    "required": ["city", "degrees", "sky"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PROMPTS = [list(text.encode()) for text in ("weather: ", "and now? ", "x")]


def test_without_llguidance_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"llguidance package, which is not installed; run: .*\[grammar\]"):
        json_grammar(SCHEMA)


@pytest.fixture
def compiler() -> GrammarCompiler:
    pytest.importorskip("llguidance", reason="pip install 'megalith[grammar]'")
    return GrammarCompiler(ByteTokenizer())


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=257, init_method_std=0.4,
        make_vocab_size_divisible_by=64, max_position_embeddings=256, position_embedding_type="rope",
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = make_model(config)
    initialize(model, config, seed=1)
    return model.eval()


def complete(model, processing: LogitsProcessing, rows: int, **settings) -> list:
    engine = Engine(model.config, "cpu", model.compute_dtype, max_rows=rows, max_tokens=200, model=model)
    sampling = Sampling(120, seed=2, stop=(256,), vocab_size=257, processing=processing, **settings)
    return engine.generate(PROMPTS, sampling, num_generations=3)


def test_completions_are_instances_of_the_schema_in_any_batch(compiler, model):
    processing = LogitsProcessing(grammar=compiler.compile(json_grammar(SCHEMA)))
    done = complete(model, processing, rows=9)
    texts = [ByteTokenizer().decode(one.content) for one in done]
    for one, text in zip(done, texts):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert not one.truncated and len(one.logprobs) == len(one.ids)
    assert len(set(texts)) == 9
    assert [one.ids for one in complete(model, processing, rows=2)] == [one.ids for one in done]
    banned = LogitsProcessing(repetition_penalty=1.3, bad_words=(tuple(b"cle"),), grammar=processing.grammar)
    for one in complete(model, banned, rows=4, temperature=0.7, top_k=5):
        assert json.loads(ByteTokenizer().decode(one.content))["sky"] == "cloudy"


def test_a_completion_without_an_allowed_token_ends_truncated(compiler, model):
    grammar = compiler.compile(json_grammar(SCHEMA))
    done = complete(model, LogitsProcessing(bad_words=(tuple(b"clear"),), grammar=grammar), rows=4)
    cut = [bytes(one.ids).endswith(b"clea") for one in done]
    assert {True, False} == set(cut) and cut == [one.truncated for one in done]


def test_forced_bytes_have_probability_one(compiler, model):
    """`{"city":"` is the only beginning."""
    processing = LogitsProcessing(grammar=compiler.compile(json_grammar(SCHEMA)))
    for one in complete(model, processing, rows=3):
        assert bytes(one.ids[:9]) == b'{"city":"' and one.logprobs[:9] == [0.0] * 9


def test_a_completion_at_its_limit_is_truncated(compiler, model):
    processing = LogitsProcessing(grammar=compiler.compile(json_grammar(SCHEMA)))
    engine = Engine(model.config, "cpu", model.compute_dtype, max_rows=2, max_tokens=200, model=model)
    sampling = Sampling(5, stop=(256,), vocab_size=257, processing=processing)
    assert all(one.truncated and len(one.ids) == 5 for one in engine.generate(PROMPTS, sampling))


def test_a_call_is_between_its_markers(compiler, model):
    source = call_grammar('"<call>"', SCHEMA, '"</call>"')
    for one in complete(model, LogitsProcessing(grammar=compiler.compile(source)), rows=3):
        text = ByteTokenizer().decode(one.content)
        jsonschema.validate(json.loads(text.removeprefix("<call>").removesuffix("</call>")), SCHEMA)
        assert text.startswith("<call>") and text.endswith("</call>")


def test_what_llguidance_does_not_support_is_refused_by_name(compiler):
    for schema, message in (
        ({"type": "object", "not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
        ({"type": "matrix"}, "Invalid type: matrix"),
    ):
        with pytest.raises(ConfigError, match=message):
            compiler.compile(json_grammar(schema))
    with pytest.raises(ConfigError, match="grammars do not support NullTokenizer"):
        GrammarCompiler(NullTokenizer(vocab_size=8)).compile(json_grammar(SCHEMA))

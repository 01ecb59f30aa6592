"""GRPO, `rollout` and `generate` with speculative decoding: what they sample without it, and its metrics."""

import json

import pytest
from small_policy import configuration, metrics, tuned, write_prompts

from megalith.cli.main import main
from megalith.errors import ConfigError
from megalith.rl.grpo import train_grpo
from megalith.training.build import prepare


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Run folders of a policy that repeats its prompt, and of a smaller one."""
    folders = [tmp_path_factory.mktemp(name) for name in ("policy", "draft")]
    copies = lambda numbers, rng: " ".join(map(str, [*numbers, *numbers]))  # noqa: E731
    return tuned(folders[0], copies), tuned(folders[1], copies, steps=40, hidden_size=32, num_layers=1)


@pytest.mark.parametrize("exact", [False, True])
def test_grpo_trains_on_the_same_completions(policies, tmp_path, exact):
    policy, draft = policies
    steps = {}
    for method in ("none", "ngram", "draft_model"):
        rl = dict(speculative_method=method, exact=exact, temperature=0.7, max_completion_length=12)
        if method == "draft_model":
            rl |= dict(draft_model=draft, num_speculative_tokens=2)
        config = configuration(
            tmp_path,
            model=dict(init_from=policy),
            rl=rl,
            optim=dict(lr=1e-4),
            train=dict(output_dir=str(tmp_path / method), train_iters=3),
        )
        train_grpo(config)
        steps[method] = metrics(tmp_path / method)
    for method in ("ngram", "draft_model"):
        for one, other in zip(steps["none"], steps[method], strict=True):
            assert (
                one["completion_length"] == other["completion_length"]
                and one["rewards_mean"] == other["rewards_mean"]
            )
            assert other["loss"] == (one["loss"] if exact else pytest.approx(one["loss"], rel=1e-4, abs=1e-6))
            assert 0 < other["draft_acceptance"] < 1 < other["tokens_per_step"] <= 5
    assert "tokens_per_step" not in steps["none"][0]


def test_generate_and_rollout_print_the_rates(policies, tmp_path, capsys):
    policy, draft = policies
    prompts = write_prompts(tmp_path, 6)
    outputs = []
    for options in (
        [],
        ["--speculative-method", "ngram"],
        ["--speculative-method", "draft_model", "--draft-model", draft],
    ):
        words = [
            "generate",
            policy,
            "--prompt",
            "3 4 5 15",
            "--max-new-tokens",
            "8",
            "--json",
            "--device",
            "cpu",
        ]
        assert main([*words, *options]) == 0
        out, err = capsys.readouterr()
        assert ("tokens per step" in err) == bool(options)
        words = ["rollout", policy, str(prompts), "--reward", "length", "--num-generations", "2"]
        assert main([*words, "--max-completion-length", "8", "--json", "--device", "cpu", *options]) == 0
        rates = json.loads(capsys.readouterr().out.splitlines()[-1])
        found = {name: rates.pop(name, 0) for name in ("draft_acceptance", "tokens_per_step")}
        assert all(found.values()) == bool(options)
        outputs.append((json.loads(out)["ids"], rates))
    assert outputs[0] == outputs[1] == outputs[2]


def test_mtp_layers_draft_in_generate_and_grpo(tmp_path, capsys):
    copies = lambda numbers, rng: " ".join(map(str, [*numbers, *numbers]))  # noqa: E731
    policy, outputs, steps = tuned(tmp_path, copies, mtp_num_layers=1), [], []
    for method in ("none", "mtp"):
        words = ["generate", policy, "--prompt", "3 4 5 15", "--max-new-tokens", "8", "--json"]
        assert main([*words, "--device", "cpu", "--speculative-method", method]) == 0
        out, err = capsys.readouterr()
        assert ("tokens per step" in err) == (method == "mtp")
        outputs.append(json.loads(out.splitlines()[-1])["ids"])
        config = configuration(
            tmp_path,
            model=dict(init_from=policy, mtp_num_layers=1),
            rl=dict(speculative_method=method, temperature=0.7, max_completion_length=12),
            optim=dict(lr=1e-4),
            train=dict(output_dir=str(tmp_path / method), train_iters=3),
        )
        train_grpo(config)
        steps.append(metrics(tmp_path / method))
    assert outputs[0] == outputs[1]
    for one, other in zip(*steps, strict=True):
        assert one["completion_length"] == other["completion_length"]
        assert one["rewards_mean"] == other["rewards_mean"]
        assert other["draft_acceptance"] > 0 and 1 < other["tokens_per_step"] <= 5


@pytest.mark.parametrize(("rl", "match"), [
    (dict(speculative_method="mtp"), "speculative_method is mtp, but model.mtp_num_layers is not set"),
    (dict(speculative_method="draft_model"), "rl.draft_model is not set"),
    (dict(draft_model="x"), "rl.draft_model"),
    (dict(speculative_method="ngram", prompt_lookup_min=5), "prompt_lookup_min is 5 and prompt_lookup_max 4"),
    (dict(speculative_method="ngram", engine="vllm", engine_url="http://127.0.0.1:1"), "rl.engine"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(tmp_path, rl, match):
    with pytest.raises(ConfigError, match=match):
        prepare(configuration(tmp_path, rl=rl), 1)


def test_a_draft_model_with_another_tokenizer_is_refused(policies, tmp_path):
    other = tuned(tmp_path, lambda numbers, rng: "1", steps=8, vocab_size=18)
    rl = dict(speculative_method="draft_model", draft_model=other)
    with pytest.raises(ConfigError, match=r"draft_model .* has a different tokenizer than the model"):
        train_grpo(configuration(tmp_path, model=dict(init_from=policies[0]), rl=rl))

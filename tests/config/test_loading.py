"""From YAML and the command line to a configuration: what is taken, and what is refused in which words."""

import itertools
import re

import pytest
import yaml
from default_cases import by_default

from megalith.config import RunConfig
from megalith.config.other_systems import OTHER_FORMATS, OTHER_NAMES
from megalith.config.presets import PRESETS
from megalith.config.run import known_keys
from megalith.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return RunConfig.load(path, overrides)

    return load


def test_nothing_gives_the_defaults(load):
    assert RunConfig.load() == load("") == load("# only a comment") == load("model:\ntrain:") == RunConfig()


def test_two_configurations_share_nothing():
    first, second = RunConfig(), RunConfig()
    first.parallel.recompute_modules.append("mlp")
    assert first != second == RunConfig()
    windowed = RunConfig.from_tree({"model": {"preset": "mistral-7b"}})
    windowed.model.window_size.append(1)
    assert PRESETS["mistral-7b"]["window_size"] == [4095, 0]


def test_nothing_is_assigned_and_other_settings_make_another_configuration(load):
    config = load(
        "train: {attention_softmax_in_fp32: true, micro_batch_size: 4}\nmodel: {preset: tiny-llama}"
    )
    for section, name, value in ((config.train, "seed", 7), (config, "train", config.train)):
        with pytest.raises(ConfigError, match=f"{name} cannot be assigned"):
            setattr(section, name, value)
    other = config.with_settings({"train.seed": 7, "model.num_layers": 3})
    assert (config.train.seed, config.model.num_layers) == (1234, 2)
    assert (other.train.seed, other.model.num_layers) == (7, 3)
    assert other.to_tree() == load(config.to_yaml(), "--train.seed", "7", "--model.num_layers", "3").to_tree()
    assert other.train.model_fields_set == {"micro_batch_size", "seed"}, "what was left to rules still is"
    assert other.notes == config.notes and len(other.notes) == 1
    with pytest.raises(ConfigError, match=r"^train\.seed is 'x': it must be a whole number$"):
        config.with_settings({"train.seed": "x"})
    with pytest.raises(ConfigError, match=r"unknown section .nowhere"):
        config.with_settings({"nowhere.seed": 1})


def test_other_settings_have_megatrons_spellings_and_nearest_names_as_a_file_has():
    config = RunConfig.from_tree({"model": {"preset": "gpt2"}})
    sharded = config.with_settings({"parallel.use_distributed_optimizer": True})
    assert sharded.parallel.data_parallel_sharding_strategy == "optim"
    again = sharded.with_settings({"parallel.use_distributed_optimizer": False, "train.bf16": True})
    assert again.parallel.data_parallel_sharding_strategy == "no_shard" and again.train.precision == "bf16"
    assert "overlap_grad_reduce" in config.with_settings({"parallel.overlap_grad_reduce": True}).notes[0]
    scaled = config.with_settings({"model.rope_scaling": {"type": "linear", "factor": 2}})
    assert scaled.with_settings({"model.rope_scaling.factor": 4}).model.rope_scaling.factor == 4
    with pytest.raises(ConfigError, match=r"optim\.lrr; did you mean optim\.lr"):
        config.with_settings({"optim.lrr": 1e-3})


def test_the_command_line_wins_over_the_file_and_the_file_over_the_preset(load):
    config = load(
        "model: {preset: gpt2, num_layers: 3, hidden_dropout: 0.2}",
        "--model.num_layers",
        "5",
        "model.vocab_size=99",
    )
    model = config.model
    assert (model.num_layers, model.hidden_dropout, model.vocab_size, model.hidden_size) == (5, 0.2, 99, 768)


@pytest.mark.parametrize(
    ("text", "words", "path", "value"),
    [
        ("train: {bf16: true}", ["--train.precision", "fp32"], "train.precision", "fp32"),
        ("train: {precision: fp32}", ["--train.bf16"], "train.precision", "bf16"),
        ("train: {bf16: true}", ["--train.fp16"], "train.precision", "fp16"),
        ("train: {precision: bf16}", ["--train.bf16", "false"], "train.precision", "fp32"),
        ("train: {precision: fp16}", ["--train.bf16", "false"], "train.precision", "fp16"),
        ("train: {output_dir: a}", ["--checkpoint.save", "b"], "train.output_dir", "b"),
        ("train: {save: a}", ["--train.output_dir", "b"], "train.output_dir", "b"),
        ("train: {lr: 1}", ["--optim.lr", "2"], "optim.lr", 2.0),
        (
            "parallel: {recompute_granularity: full}",
            ["--parallel.recompute_activations", "false"],
            "parallel.recompute_granularity",
            None,
        ),
        (
            "parallel: {data_parallel_sharding_strategy: optim_grads}",
            ["--optim.use_distributed_optimizer"],
            "parallel.data_parallel_sharding_strategy",
            "optim",
        ),
        (
            "model: {preset: llama3-8b}",
            ["--model.disable_bias_linear", "false"],
            "model.add_bias_linear",
            True,
        ),
    ],
)
def test_the_command_line_wins_over_another_spelling_in_the_file(load, text, words, path, value):
    section, name = path.split(".")
    assert getattr(getattr(load(text, *words), section), name) == value


def test_two_spellings_in_one_place_that_disagree_are_refused(load):
    with pytest.raises(ConfigError, match=r"train\.bf16 sets train\.precision to 'bf16', but"):
        load("", "--train.bf16", "--train.precision", "fp32")
    with pytest.raises(
        ConfigError, match=r"checkpoint\.no_save_optim sets checkpoint\.save_optim to True, but"
    ):
        load("checkpoint: {no_save_optim: false, save_optim: false}")


def test_megatrons_spellings_of_activation_and_norm_are_ours():
    model = {"squared_relu": True, "apply_layernorm_1p": True}
    config = RunConfig.from_tree({"model": model, "parallel": {"grad_reduce_in_bf16": True}})
    assert (config.model.activation, config.model.layernorm_zero_centered_gamma) == ("squared_relu", True)


RESOLVED = [*((name, False) for name in list(PRESETS)[::8]), *((name, True) for name in list(PRESETS)[::20])]


@pytest.mark.parametrize("name, reduced", by_default(itertools.product(PRESETS, [False, True]), *RESOLVED))
def test_the_resolved_configuration_loads_to_itself(load, name, reduced):
    words = [
        "--model.num_layers",
        "2",
        "--optim.lr",
        "1e-3",
        "--train.bf16",
        "--train.rampup_batch_size",
        "8",
        "8",
        "99",
    ]
    config = load(f"model: {{preset: {name}}}", *(words if reduced else []))
    text = config.to_yaml()
    again = load(text)
    assert again == config and again.to_yaml() == text
    assert yaml.safe_load(text) == config.to_tree()


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--train.train_iters", "100"], "train.train_iters", 100),
        (["--train.train_iters=100"], "train.train_iters", 100),
        (["train.train_iters=100"], "train.train_iters", 100),
        (["--train.train-iters", "100"], "train.train_iters", 100),
        (["--optim.lr", "3e-4"], "optim.lr", 3e-4),
        (["--optim.lr=.001"], "optim.lr", 1e-3),
        (["--parallel.sequence_parallel"], "parallel.sequence_parallel", True),
        (["--parallel.sequence_parallel", "false"], "parallel.sequence_parallel", False),
        (["--train.rampup_batch_size", "8", "8", "1000"], "train.rampup_batch_size", [8, 8, 1000]),
        (["--train.rampup_batch_size", "[8, 8, 1000]"], "train.rampup_batch_size", [8, 8, 1000]),
        (["--parallel.recompute_modules", "mlp"], "parallel.recompute_modules", ["mlp"]),
        (["--parallel.recompute_modules", "[mlp]"], "parallel.recompute_modules", ["mlp"]),
        (
            ["--parallel.recompute_modules", "core_attn", "mlp"],
            "parallel.recompute_modules",
            ["core_attn", "mlp"],
        ),
        (["--model.window_size", "null"], "model.window_size", None),
        (["--model.window_attn_skip_freq", "6"], "model.window_attn_skip_freq", 6),
        (["--data.data_path", "a"], "data.data_path", "a"),
        (["--data.data_path", "0.7", "a", "0.3", "b"], "data.data_path", [0.7, "a", 0.3, "b"]),
        (["--data.data_path", "0.7 a 0.3 b"], "data.data_path", "0.7 a 0.3 b"),
        (["--data.data_path", "[{path: a, weight: 2}]"], "data.data_path", [{"path": "a", "weight": 2}]),
        (["--data.split", "100"], "data.split", "100"),
        (["--train.split", "1"], "data.split", "1"),
        (["--train.output_dir", "2024-01-01"], "train.output_dir", "2024-01-01"),
        (["--log.wandb_name", "0x10"], "log.wandb_name", "0x10"),
        (["--log.wandb_name", "on"], "log.wandb_name", "on"),
        (["--log.wandb_name", "a: b"], "log.wandb_name", "a: b"),
        (["--log.wandb_name", "'a"], "log.wandb_name", "'a"),
        (["--log.wandb_name", "a=b"], "log.wandb_name", "a=b"),
        (["--checkpoint.load", "null"], "checkpoint.load", None),
        (["--runtime.compile", "true"], "runtime.compile", True),
        (["--runtime.compile", "auto"], "runtime.compile", "auto"),
        (
            ["--model.rope_scaling.factor", "4", "--model.rope_scaling.type", "yarn"],
            "model.rope_scaling.factor",
            4.0,
        ),
        (["--model.rope_scaling", "{type: linear, factor: 2}"], "model.rope_scaling.type", "linear"),
    ],
)
def test_words_of_the_command_line(words, path, value):
    found = RunConfig.load(None, words)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


REFUSED = [
    # unknown keys, with the nearest known one
    ("modle: {num_layers: 2}", r"unknown section 'modle'; did you mean 'model'\?"),
    ("model: {num_layer: 2}", r"unknown setting model.num_layer; did you mean model.num_layers"),
    ("model: {hidden_sise: 2}", r"model.hidden_sise; did you mean model.hidden_size"),
    ("optim: {learning_rate: 1}", r"unknown setting optim.learning_rate; in Megalith, it is optim.lr$"),
    ("train: {tp_degree: 2}", r"train.tp_degree; in Megalith, it is parallel.tensor_model_parallel_size$"),
    ("train: {gradient_accumulation_steps: 2}", r"train.micro_batch_size × data parallel × accumulation$"),
    ("model: {global_batch_size: 2}", r"model.global_batch_size; did you mean train.global_batch_size\?"),
    ("train: {tensor_model_parallel_size: 2}", r"did you mean parallel.tensor_model_parallel_size"),
    ("train: {zzz: 2}", r"unknown setting train.zzz; `megalith train --help` lists them all"),
    ("model: {rope_scaling: {factr: 2}}", r"model.rope_scaling.factr is 2: there is no such setting"),
    ("model: {preset: gpt5}", r"unknown preset 'gpt5'; did you mean .*\? \(known: tiny-gpt, tiny-llama"),
    ("model: {preset: llama3-7b}", r"unknown preset 'llama3-7b'; did you mean 'llama3-70b' or 'llama3-8b'"),
    ("model: {preset: [gpt2]}", r"unknown preset \['gpt2'\]"),
    # wrong types and values
    ("train: {train_iters: many}", "train.train_iters is 'many': it must be a whole number"),
    ("train: {train_iters: 2.5}", "train.train_iters is 2.5: it must be a whole number"),
    ("train: {train_iters: true}", "train_iters is True: .*; on the command line, a name without a value means true"),
    ("train: {train_iters: 0}", "train.train_iters is 0: input should be greater than 0"),
    ("train: {train_iters: -5}", "greater than 0"),
    ("train: {train_iters: [5]}", "it must be a whole number"),
    ("optim: {lr: fast}", "optim.lr is 'fast': it must be a number"),
    ("optim: {lr: true}", "optim.lr is True"),
    ("optim: {lr: .nan}", "optim.lr is nan: input should be a finite number"),
    ("optim: {lr: .inf}", "finite"),
    ("optim: {lr: -1}", "greater than or equal to 0"),
    ("optim: {adam_beta1: 1.0}", "adam_beta1 is 1.0: input should be less than 1"),
    ("optim: {adam_beta2: 1.0}", "less than 1"),
    ("model: {hidden_dropout: 1.0}", "less than 1"),
    ("model: {swiglu: 3}", "model.swiglu is 3: it must be true or false"),
    ("model: {normalization: BatchNorm}", "'BatchNorm': input should be 'LayerNorm' or 'RMSNorm'"),
    ("model: {rope_scaling: llama3}", "model.rope_scaling is 'llama3': it must be a mapping of keys to values"),
    ("model: {rotary_base: 1}", "greater than 1"),
    ("train: {precision: bf32}", "train.precision is 'bf32': input should be 'fp32', 'bf16' or 'fp16'"),
    ("train: {seed: 4294967296}", "train.seed is 4294967296: input should be less than 4294967296"),
    ("train: {seed: -1}", "train.seed is -1"),
    ("train: {rampup_batch_size: [8, 8]}", "at least 3 items"),
    ("train: {rampup_batch_size: 8 8 100}", "it must be a list"),
    ("train: {output_dir: 2024}", "train.output_dir is 2024: it must be text"),
    ("data: {split: 100}", "data.split is 100: it must be text"),
    ("data: {data_path: {a: 1}}", "data.data_path is {'a': 1}"),
    ("parallel: {recompute_modules: [mpl]}", "recompute_modules.0 is 'mpl': input should be 'core_attn', 'mlp'"),
    # shapes that are no tree of settings
    ("- 1\n- 2", "contains a list; it needs sections: model, parallel,"),
    ("just text", "contains a str"),
    ("model: 5", "section 'model' contains 5; it needs keys with values"),
    ("model: [1]", "section 'model' contains"),
    ("1: {a: 2}", "unknown section 1"),
    ("null: {a: 2}", "unknown section None"),
    ("model: {1: 2}", "model has the key 1, but settings' names are strings"),
    ("model: {null: 2}", "model has the key None"),
    ("model.num_layers: 2", "unknown section 'model.num_layers'"),
    # YAML that is broken or hostile
    ("model: {num_layers: 2", r"not valid YAML: while parsing a flow mapping at line 1, column 8: .* at line 1, col"),
    ("model: {num_layers: 2}\nmodel: {hidden_size: 4}", "the key 'model' appears twice"),
    ("model: {num_layers: 2, num_layers: 4}", "the key 'num_layers' appears twice"),
    ("train: !!python/object/apply:os.system ['touch PWNED']", "not valid YAML.*python/object/apply"),
    ("train: !!python/object/new:os.system ['touch PWNED']", "not valid YAML.*python/object"),
    ("train: {seed: !!python/name:os.system }", "not valid YAML.*python/name"),
    ("a: &a [*a]", "an alias refers to a node that contains it"),
    ("a: " + "[" * 5000, "not valid YAML: it is nested more than 100 levels deep"),
    ("a: " + "[" * 100 + "]" * 100, "nested more than 100 levels deep"),
    ("data: {shuffle: " + "[" * 97 + "]" * 97 + "}", "data.shuffle"),
    ("\x00", "not valid YAML"),
    ("%TAG ! tag:x,2024:\n--- !y {}", "not valid YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED, ids=[text[:40] for text, _ in REFUSED])
@pytest.mark.fault(24)
def test_what_is_wrong_is_refused_in_one_sentence_a_mistake(load, tmp_path, monkeypatch, text, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(text)
    assert len(str(caught.value)) < 2000
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", [BOMB, MERGE_BOMB])
@pytest.mark.fault(24)
def test_a_file_that_expands_without_end_is_refused_at_once(load, text):
    with pytest.raises(ConfigError, match="more than 100000 values after alias expansion"):
        load(text)


def test_anchors_and_merges_of_a_sane_size_are_taken(load):
    config = load(
        "optim: &o {lr: 0.5}\nmodel: {<<: {num_layers: 2}, hidden_size: 8}\ntrain: {seed: &s 3, eval_iters: *s}"
    )
    assert (config.optim.lr, config.model.num_layers, config.model.hidden_size) == (0.5, 2, 8)
    assert (config.train.seed, config.train.eval_iters) == (3, 3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--train.train_iters"], "train.train_iters is True: it needs a value"),
        (["--train.train_iter", "5"], "unknown setting train.train_iter; did you mean train.train_iters"),
        (["--num_layers", "5"], r"unknown setting --num_layers; did you mean model.num_layers\?"),
        (["--lr", "5"], "did you mean optim.lr"),
        (["--tensorboard-dir", "x"], r"unknown setting --tensorboard-dir; did you mean log.tensorboard"),
        (["--zzz", "x"], "unknown setting --zzz; `megalith train --help` lists them all, by section"),
        (["--modle.num_layers", "5"], "did you mean model.num_layers"),
        (["stray"], "unexpected argument 'stray'; overrides are written --section.key value"),
        (["a=b"], "unexpected argument 'a=b'; overrides are written"),
        (["lr=3"], r"unexpected argument 'lr=3'; did you mean optim.lr\?"),
        (["-x"], "unexpected argument '-x'"),
        (["--"], "unknown setting"),
        (
            ["--train.train_iters", "5", "--train.train_iters.x", "1"],
            "train.train_iters is 5, not a mapping",
        ),
        (["--train.train_iters.x", "1"], "train.train_iters is {'x': 1}"),
        (["--train.seed", "!!python/object/apply:os.system ['true']"], "train.seed is"),
    ],
)
def test_words_that_mean_nothing_are_refused(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RunConfig.load(None, words)


def test_several_mistakes_are_told_at_once(load):
    with pytest.raises(ConfigError) as caught:
        load("train: {train_iters: x, precision: y}\noptim: {lr: z}")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("tree", [{"modle": {}}, {"model": 5}, {"model": {1: 2}}, {3: {}}])
def test_a_tree_from_python_is_checked_as_a_file_is(tree):
    with pytest.raises(ConfigError):
        RunConfig.from_tree(tree)


def test_a_tree_from_python_is_not_changed():
    tree = {"model": {"preset": "llama3.1-8b", "disable_bias_linear": True}, "train": {"bf16": True}}
    before = {section: dict(values) for section, values in tree.items()}
    RunConfig.from_tree(tree)
    assert tree == before


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no run file .*nowhere.yaml"):
        RunConfig.load(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: .*directory"):
        RunConfig.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"log: {wandb_name: caf\xe9}")
    with pytest.raises(ConfigError, match=r"latin.yaml cannot be read: .*utf-8"):
        RunConfig.load(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "oumi.yaml",
            "model: {model_name: m}\ntraining: {max_steps: 2}",
            "of Oumi; run megalith oumi train -c {file}",
        ),
        (
            "accelerate.yaml",
            "compute_environment: LOCAL_MACHINE",
            "megalith accelerate launch --config_file {file}",
        ),
        ("verl.yaml", "actor_rollout_ref: {}\ndata: {}", "of verl; .* megalith grpo"),
        ("skyrl.yaml", "data: {}\ntrainer: {}\ngenerator: {}\nenvironment: {}", "of SkyRL; .* megalith grpo"),
        ("areal.yaml", "experiment_name: a\ntrial_name: b\nactor: {}", "of AReaL; .* megalith grpo"),
        ("roll.yaml", "actor_train: {}\nactor_infer: {}", "of ROLL; .* megalith grpo"),
        ("nemo_rl.yaml", "grpo: {}\npolicy: {}\ncluster: {}", "of NeMo-RL; .* megalith grpo"),
        ("nemo_rl_dpo.yaml", "dpo: {}\npolicy: {}\ncluster: {}", "of NeMo-RL; .* megalith dpo"),
        ("nemo_rl_child.yaml", "defaults: base.yaml\npolicy: {}", "of NeMo-RL; .* files that defaults names"),
        ("axolotl.yaml", "base_model: m\ndatasets: []\nmicro_batch_size: 2", "of Axolotl; .* megalith sft"),
        ("trl.yaml", "model_name_or_path: m\nmax_steps: 2", "of TRL's .* model.init_from"),
        ("nemo.yaml", "trainer: {devices: 8}\nmodel: {}", "of NeMo; .* megalith train"),
        ("megatron.yaml", "MODEL_ARGS: {--num-layers: 2}", "of Megatron-LM; .* megalith pretrain-gpt"),
        ("titan.toml", "[job]", "torchtitan's configurations are"),
        ("train.sh", "torchrun pretrain_gpt.py", "megalith megatron run {file}"),
        ("train.py", "import torch", "megalith accelerate launch {file}"),
    ],
)
def test_a_file_of_another_system_is_told_what_takes_it(tmp_path, name, text, sentence):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence.replace("{file}", str(file))):
        RunConfig.load(file)


def test_no_run_file_is_taken_for_another_systems():
    assert all(set(keys.split()) - RunConfig.model_fields.keys() for _, keys, _ in OTHER_FORMATS)


def test_names_of_other_systems_are_none_of_ours_and_lead_to_ours():
    ours = {f"{section}.{key}" for section in RunConfig.model_fields for key in known_keys(section)}
    for name, here in OTHER_NAMES.items():
        assert not any(setting.endswith(f".{name}") for setting in ours), name
        named = re.findall(r"\b[a-z]+\.[a-z_]+\b", here)
        sections = {setting.partition(".")[0] for setting in ours}
        assert {n for n in named if n.partition(".")[0] in sections} <= ours, name
    with pytest.raises(
        ConfigError, match=r"unknown setting --hf-checkpoint; in Megalith, it is model.init_from"
    ):
        RunConfig.load(None, ["--hf-checkpoint", "m"])
    with pytest.raises(ConfigError, match=r"rollout.n=8; overrides as in Hydra .* --rl.num_generations 8"):
        RunConfig.load("actor_rollout_ref.rollout.n=8")
    with pytest.raises(ConfigError, match=r"unknown setting --num-processes; in Megalith, it is --nproc"):
        RunConfig.load(None, ["--num-processes", "8"])

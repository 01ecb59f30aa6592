"""The house stands: floors import downwards only, and what must not be known below a floor is not known there."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megalith"
BELOW_LAUNCH = ["parallel", "models", "config", "ops", "comm", "hardware.py", "errors.py"]


def files(*names: str) -> Iterator[Path]:
    for name in names:
        path = PACKAGE / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file."""
    return list(ast.walk(parsed(path)))


@functools.cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@functools.cache
def names_in(path: Path) -> set[str]:
    """Every dotted name that a file uses, like os.environ.get."""
    return {dotted(node) for node in nodes_of(path) if isinstance(node, ast.Attribute | ast.Name)}


def dotted(node: ast.expr) -> str:
    """Return the source of a name or attribute, as ast.unparse in a tenth of its time."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
        return f"{dotted(node.value)}.{node.attr}"
    return ast.unparse(node)


def calls_of(function: str, path: Path) -> list[ast.Call]:
    """Every call of a function; it may not be named otherwise."""
    if function not in names_in(path):
        return []
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call) and dotted(node.func) == function]
    named = [node for node in nodes_of(path) if isinstance(node, ast.Attribute) and dotted(node) == function]
    assert len(named) == len(calls), path
    return calls


def constants_given(call: ast.Call) -> dict[str | None, object]:
    """The keyword arguments of a call that are written as constants."""
    return {given.arg: given.value.value for given in call.keywords if isinstance(given.value, ast.Constant)}


def test_every_file_imports_only_from_the_floors_below_its_own(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = lint_imports(cache_dir=None, no_cache=True)
    assert code == 0, capsys.readouterr().out


def test_the_model_knows_nothing_of_processes():
    for path in files("models", "ops"):
        distributed = {name for name in imported(path) if name.startswith("torch.distributed")}
        assert not distributed and "torch.distributed" not in names_in(path), path
    for path in files("models"):
        assert not {name for name in imported(path) if name.startswith("megalith.comm")}, path


def test_no_environment_variable_is_read_below_launch():
    for path in files(*BELOW_LAUNCH):
        assert names_in(path).isdisjoint({"os.environ", "os.getenv", "os.environb"}), path


@pytest.mark.fault(21)
def test_nothing_that_is_read_can_run():
    """The pool of processes apart, which pickles what its own workers say to it; and Megatron's pickles, which are
    read by an allow-list of names (tests/bridge/test_megatron.py)."""
    running = {
        "pickle.load",
        "pickle.loads",
        "yaml.unsafe_load",
        "yaml.full_load",
        "eval",
        "exec",
    }
    apart = (PACKAGE / "launch" / "pool.py", PACKAGE / "bridge" / "megatron" / "unpickle.py")
    for path in files("."):
        if path in apart:
            continue
        assert names_in(path).isdisjoint(running), path
        for call in calls_of("torch.load", path):
            assert {"weights_only": True}.items() <= constants_given(call).items(), path


def test_what_a_run_writes_into_its_folder_goes_through_the_helpers_that_follow_no_link():
    apart = {
        "agent.py",
        "failure.py",
        "launcher.py",
        "stops.py",
        "pool.py",
    }  # they write where the launcher has said
    for path in files("launch", "report", "doctor", "training", "planner", "parallel"):
        if path.name in apart:
            continue
        for node in nodes_of(path):
            called = dotted(node.func) if isinstance(node, ast.Call) else ""
            is_open = called in ("open", "os.open", "tempfile.mkstemp") and "os.devnull" not in ast.unparse(
                node
            )
            assert not is_open, (path, ast.unparse(node))
            assert not called.endswith((".write_text", ".write_bytes", ".touch")), (path, ast.unparse(node))


def test_ranks_pickle_nothing_for_each_other():
    pickling = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
    pickling |= {"send_object_list", "recv_object_list"}
    for path in files("."):
        assert {name.rpartition(".")[2] for name in names_in(path)}.isdisjoint(pickling), path


def test_every_module_says_what_it_is():
    for path in files("."):
        assert not path.read_text(encoding="utf-8").strip() or ast.get_docstring(parsed(path)), path


# All that parallel/ sets on something that is not its own: none of these is a module of a model.
SET_IN_PARALLEL = {
    "data/ordered_sums.py": {"parameter.grad"},  # sums of the rows that have run
    "data/replicas.py": {"bucket.parameters", "bucket.pending", "options.asyncOp"},
    "gather.py": {"tensor.shard"},
    "pipeline/tied_parameters.py": {"parameter.grad"},  # zeros, where a copy is not read
    "memory/activation_offload.py": {"stored.uses"},
    "overlap/cuda_driver.py": {  # of structures that CUDA's driver takes
        "step.operation",
        "value.address",
        "value.flags",
        "value.value",
    },
    "local_losses.py": {"micro_batch.mtp_targets", "micro_batch.logged_weight"},
    "parallel_model.py": {
        "micro_batch.balance_scale",
        "micro_batch.mtp_targets.weights",
        "micro_batch.mtp_targets.sums",
        "micro_batch.loss_scale",
        "micro_batch.logged",
        "micro_batch.z_loss_sum",
    },
    "pipeline/executor.py": {"run.forward", "self.pipeline.timeline"},
    "replication.py": {"chunk.replication"},  # a record, which no pass reads
    "shards.py": {
        "plain.grad",
        "parameter.grad",
        "self.named[at][1].data",
        "parameter.dtensor",
        "replaced[parameter].dtensor",
    },  # of parameters
}


def attributes_set(path: Path) -> set[str]:
    """Every attribute that a file sets or deletes but on `self` and on autograd's `ctx`, and calls that do so."""
    changed = (ast.Store, ast.Del)
    nodes = [
        node for node in nodes_of(path) if isinstance(node, ast.Attribute) and isinstance(node.ctx, changed)
    ]
    calls = {
        name for name in names_in(path) if name.rpartition(".")[2] in ("setattr", "delattr", "__setattr__")
    }
    return calls | {dotted(node) for node in nodes if dotted(node.value) not in ("self", "ctx")}


def test_parallelism_sets_nothing_on_a_module_but_by_its_seams():
    for path in files("parallel"):
        name = path.relative_to(PACKAGE / "parallel").as_posix()
        if name != "seams.py":
            assert attributes_set(path) == SET_IN_PARALLEL.get(name, set()), name


def test_no_class_is_changed_and_no_hook_changes_what_a_module_does():
    """nonfinite_gradients.py hooks parameters for a while; step_casts.py casts weights that FSDP2 has just gathered;
    mup_check.py only reads outputs, and audit_hook.py the precision of another system's model."""
    allowed = ("nonfinite_gradients.py", "step_casts.py", "mup_check.py", "audit_hook.py")
    hooks = {"register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"}
    for path in files("."):
        names = {name.rpartition(".")[2] for name in names_in(path)}
        assert "__class__" not in names, path
        assert names.isdisjoint(hooks) or path.name in allowed, path


def test_linears_and_experts_write_no_matmul():
    """The Gemms of ops/ do; what an adapter adds to a weight is merged by one, outside of any pass."""
    matmuls = {"mm", "bmm", "addmm", "matmul", "einsum", "baddbmm"}
    for path in files("models", "parallel"):
        called = {dotted(node.func) for node in nodes_of(path) if isinstance(node, ast.Call)}
        assert {name.rpartition(".")[2] for name in called}.isdisjoint(matmuls), path
        assert called.isdisjoint({"F.linear", "nn.functional.linear", "functional.linear"}), path
        assert "torch.nn.functional.linear" not in imported(path), path
        written = [node for node in nodes_of(path) if isinstance(node, ast.MatMult)]
        assert len(written) == (path.name == "adapters.py"), path


def test_the_model_names_no_kernel():
    for path in files("models"):
        assert not [name for name in imported(path) if "ops.kernels" in name or "ops.compiled" in name], path


def test_a_name_stands_for_one_file_and_one_class():
    paths = [path for path in files(".") if not path.name.startswith("__")]
    nodes = [node for path in files(".") for node in nodes_of(path)]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    for names in ([path.name for path in paths], classes):
        assert [name for name, count in Counter(names).items() if count > 1] == []


# From a step to a collective of tensor parallelism, file by file: each function, or method, and what it calls next.
HOPS = {
    "training/run_state.py": [("train_step", "gradients"), ("gradients", "backward")],
    "parallel/parallel_model.py": [
        ("backward", "_run_passes"),
        ("_run_passes", "_forward"),
        ("_forward", "forward"),
    ],
    "parallel/model_spec.py": [("forward", "chunk")],
    "models/transformer.py": [("forward", "forward"), ("run_layers", "layer")],
    "models/layer.py": [("forward", "mlp_branch"), ("mlp_branch", "mlp")],
    "models/linear.py": [("forward", "linear_fc2"), ("forward", "style")],
    "parallel/tensor/tensor_parallel.py": [("row", "reduce"), ("reduce", "all_reduce")],
    "comm/collectives.py": [("all_reduce", "apply")],
}


def test_eight_files_lead_from_a_step_to_a_collective():
    assert len(HOPS) <= 8
    for name, hops in HOPS.items():
        calls = set()
        for node in nodes_of(PACKAGE / name):
            if isinstance(node, ast.FunctionDef):
                calls |= {
                    (node.name, ast.unparse(call.func).rpartition(".")[2])
                    for call in ast.walk(node)
                    if isinstance(call, ast.Call)
                }
        assert set(hops) <= calls, (name, set(hops) - calls)


# Private names that the package uses of others, none of them torch's.
PRIVATE_OF_OTHERS = {
    "_SubParsersAction": "argparse",
    "_actions": "argparse",
    "_current_frames": "sys",
    "_exit": "os",
    "_max_workers": "concurrent.futures",
    "_fields": "namedtuple",
    "_FIELD": "dataclasses",
    **dict.fromkeys(("_name_", "_value_", "_member_map_", "_member_names_", "_value2member_map_"), "enum"),
    "_field_type": "dataclasses",
    "_from_config": "transformers",
    "_shared_state": "accelerate",
}
DOCUMENTED = "_foreach_"  # torch's documentation lists these operators


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_in(path: Path) -> set[str]:
    """Private names of functions, classes, fields and attributes that a file defines."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node.value) in ("self", "cls")
        ):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def private_names_of_others(path: Path) -> set[str]:
    """Private attributes that a file reads or sets on anything but `self`, by name or by getattr and its like."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and dotted(node.value) not in ("self", "cls", "super()"):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
            names |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return {name for name in names if is_private(name) and not name.startswith(DOCUMENTED)}


def test_private_names_of_torch_are_used_in_compat_only():
    paths = [path for path in files(".") if path.parent != PACKAGE / "compat"]
    defined = set().union(*map(defined_in, paths)) | set(PRIVATE_OF_OTHERS)
    for path in paths:
        modules = {name for name in imported(path) if name.partition(".")[0] == "torch"}
        assert not {name for name in modules if any(map(is_private, name.split(".")))}, path
        assert private_names_of_others(path) <= defined, (path, private_names_of_others(path) - defined)

"""The job files of clusters: what they run is what was asked for, whatever names are in them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megalith.cli.main import main
from megalith.launch.cluster.cluster_job import grace_seconds, job_name

ROOT = Path(__file__).parents[2]
RUN = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, vocab_size: 64}
data: {mock: true, seq_length: 16}
optim: {lr: 1.0e-3}
train: {micro_batch_size: 1, global_batch_size: 16, train_iters: 6, eval_iters: 0, output_dir: /data/out}
checkpoint: {save_interval: 2}
"""
POD = ["--image", "m:1", "--volume", "claim:/data"]


@pytest.fixture(autouse=True)
def run_file(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)


def written(capsys, *words: str) -> str:
    assert main(["launch", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    assert main(["launch", *words]) == 2
    return capsys.readouterr().err


def slurm(capsys, *words: str) -> str:
    return written(capsys, "slurm", "run.yaml", "--nodes", "2", *words)


def executed(folder: Path, script: str, **environment: str) -> tuple[int, dict]:
    """The script by bash with stand-ins for what Slurm and megalith are: its exit code, and what each was given."""
    stand_ins, notes = folder / "bin", folder / "notes"
    for path in (stand_ins, notes):
        path.mkdir(exist_ok=True)
    note = '#!/bin/bash\nprintf "%s\\0" "$@" > "$NOTES/$(basename "$0")"\n'
    bodies = {
        "srun": note + 'while [ "${1:0:2}" = -- ]; do shift; done\nexec "$@"\n',
        "megalith": note + 'exit "${MEGALITH_EXIT:-0}"\n',
        "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo node7; echo node8; else '
        + note[12:]
        + "fi\n",
    }
    for name, body in bodies.items():
        (stand_ins / name).write_text(body)
        (stand_ins / name).chmod(0o755)
    given = {"SLURM_JOB_ID": "71234", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    path = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "NOTES": str(notes)}
    done = subprocess.run(["bash"], input=script, text=True, env=os.environ | given | path | environment)
    return done.returncode, {file.name: file.read_text().split("\0")[:-1] for file in notes.iterdir()}


def test_files_in_deploy_are_what_its_script_writes(tmp_path, monkeypatch, capsys):
    script = (ROOT / "deploy" / "generate.sh").read_text().replace("\\\n", " ")
    commands = [line.strip() for line in script.splitlines() if line.strip().startswith("megalith launch")]
    kinds = ("trainjob", "pytorchjob", "jobset")
    commands = [
        each.replace("$kind", kind) for each in commands for kind in (kinds if "$kind" in each else kinds[:1])
    ]
    monkeypatch.chdir(ROOT)
    for command in commands:
        words = shlex.split(command)[2:]
        folder = Path(words[-1])
        written(capsys, *words[:-1], str(tmp_path / folder))
        names = {path.name for path in folder.iterdir()}
        assert names == {path.name for path in (tmp_path / folder).iterdir()}
        for name in names:
            assert (folder / name).read_text() == (tmp_path / folder / name).read_text(), folder / name
    assert len(commands) == 4


def test_scripts_are_bash(capsys):
    scripts = [*(ROOT / "deploy").glob("**/*.sh"), *(ROOT / "deploy").glob("**/*.sbatch")]
    assert len(scripts) == 4
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_every_node_runs_the_same_command_and_meets_at_the_first(tmp_path, capsys):
    code, given = executed(tmp_path, slurm(capsys))
    assert code == 0 and given["megalith"] == [
        "train", "run.yaml", "--nproc", "8", "--max-restarts", "3", "--checkpoint.load", "/data/out",
        "--nnodes", "2", "--rdzv-endpoint", "node7:31234", "--rdzv-id", "71234",
    ]  # fmt: skip
    assert "scontrol" not in given


@pytest.mark.parametrize(
    ("ended", "again"), [("23", True), ("0", False), ("1", False), ("22", False), ("2", False)]
)
def test_a_job_whose_time_is_up_goes_back_into_the_queue_and_no_other(tmp_path, capsys, ended, again):
    code, given = executed(tmp_path, slurm(capsys), MEGALITH_EXIT=ended)
    assert code == int(ended) and given.get("scontrol") == (["requeue", "71234"] if again else None)


HOSTILE = 'a\'b "c" $(touch stolen) `touch stolen` \\ ;&|\n*'


def test_names_run_as_they_are_whatever_is_in_them(tmp_path, capsys):
    words = ["--train.output_dir", f"/data/{HOSTILE}", "--log.wandb_name", HOSTILE]
    words += [
        "--env",
        f"TOKEN={HOSTILE}",
        "--image",
        HOSTILE,
        "--before",
        shlex.join(["corpus", "--output", HOSTILE]),
    ]
    words += ["--volume", f"{tmp_path}:/data/{HOSTILE}", "--volume", f"{tmp_path}/out:/data"]
    assert main(["launch", "slurm", "run.yaml", "--nodes", "2", *words, "--write", "files"]) == 0
    code, given = executed(tmp_path, Path("files/run.sbatch").read_text())
    assert (
        code == 0
        and given["megalith"][6:10] == words[:4]
        and given["megalith"][1] == f"/data/{HOSTILE}/run.yaml"
    )
    assert f"--container-image={HOSTILE}" in given["srun"]
    code, given = executed(tmp_path, Path("files/run-before-1.sbatch").read_text())
    assert code == 0 and given["megalith"] == ["corpus", "--output", HOSTILE]
    assert not list(tmp_path.rglob("stolen"))
    text = written(capsys, "kubernetes", "run.yaml", "--nodes", "2", *POD, *words[:4], *words[4:6])
    *_, job = yaml.safe_load_all(text[text.index("apiVersion") :])
    assert job["spec"]["trainer"]["command"][7:11] == words[:4]
    assert {"name": "TOKEN", "value": HOSTILE} in job["spec"]["trainer"]["env"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partition", "gpu\n#SBATCH --wrap=x"], "'gpu\\n#SBATCH --wrap=x' cannot be used in the line `#SBATCH --"),
        (["--name", "Run 1"], "--name is 'Run 1', but jobs, pods and hosts get this name"),
        (["--env", "1X=2"], "--env is '1X=2'; write NAME=VALUE"),
        (["--env", "X=1", "--env", "X=2", "--env", "Y"], "--env is 'Y'; write NAME=VALUE"),
        (["--volume", "claim"], "--volume is 'claim'; write CLAIM:/PATH"),
        (["--volume", "a:/data", "--volume", "b:/data/"], "--volume a:/data and --volume b:/data/ have the same path"),
        (["--env", "PET_NNODES=7"], "which the scheduler sets on each node"),
        (["--program", "sft"], "data.mock is on, but sft.enabled reads chat data"),
        (["--program", "grpo"], "neither rl.prompts nor rl.rollouts is set"),
        (["--program", "distill"], "distill.teacher"),
        (["--image", "m:1"], "the run file run.yaml is not in a folder of --volume"),
        (["--image", "m:1", "--volume", ".:/mnt"], "/data/out, which is not on a volume of the cont"),
        (["--before", "preprocess 'x"], "preprocess 'x\", which is not a command of megalith: No closing quotation"),
        (["--after", "export-hff a b"], "did you mean 'export-hf'"),
        (["--before", ""], "--before is ''"),
        (["--before", "export-hf --help"], "only prints a help"),
        (["--before", "export-hf a b --form bin"], "takes no '--form bin'"),
        (["--time", "2"], "--time is 2, and Slurm signals the job to save 120 s before"),
        (["--time", "0-0:2"], "--time is 0-0:2, and Slurm signals the job to save 120 s"),
        (["--time", "tomorrow"], "--time is 'tomorrow'; write minutes"),
        (["--grace", "70000"], "the grace period is 70,000 s"),
        (["--grace", "-1"], "--grace is -1, but must be at least 1"),
        (["--max-restarts", "-1"], "--max-restarts is -1, but must be at least 0"),
        (["--cpus", "0"], "--cpus is 0, but must be at least 1"),
        (["--array", "train.output_dir=a,b"], "--array sets train.output_dir"),
        (["--train.global_batch_size", "24"], "24"),  # the trainer's own sentence
        (["--parallel.tensor_model_parallel_size", "16"], "does not divide --gpus-per-node 8"),
        (["--parallel.pipeline_model_parallel_size", "3"], "pipeline_model_parallel_size"),
        (["--checkpoint.save_interval", "null"], "checkpoint.save_interval is not set"),
        (["--checkpoint.load", "/data/other"], "would start from /data/other again; set model.init_from"),
        (["--array", "lr"], "--array is 'lr'; write a setting and its values"),
        (["--array", "optim.lr=1e-3,fast"], "optim.lr"),
        (["--gpus-per-node", "0"], "--gpus-per-node 0, but both must be at least 1"),
    ],
)  # fmt: skip
def test_what_could_not_run_is_refused_before_a_file_is_printed(capsys, words, said):
    assert main(["launch", "slurm", "run.yaml", "--nodes", "2", *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and out == ""


def test_a_time_of_0_is_no_limit_as_slurm_has_it(capsys):
    assert "#SBATCH --time=0\n" in slurm(capsys, "--time", "0")


def test_each_task_of_an_array_is_a_run_of_its_own(tmp_path, capsys):
    script = slurm(capsys, "--array", "optim.lr=1e-3,3e-4,1e-4")
    assert "#SBATCH --array=0-2\n" in script
    _, given = executed(tmp_path, script, SLURM_ARRAY_TASK_ID="1")
    assert given["megalith"][6:12] == [
        "--optim.lr", "3e-4", "--train.output_dir", "/data/out/1", "--checkpoint.load", "/data/out/1",
    ]  # fmt: skip


def test_files_are_submitted_each_after_the_one_before(tmp_path, capsys, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sbatch", "kubectl"):
        (tools / name).write_text(
            '#!/bin/bash\ncat > /dev/null\n[[ "$*" == *=${NEVER:-Failed}\\ * ]] && exec tail -f /dev/null\n'
            f'echo "$@" >> {tools}/{name}.log\necho $((100 + $(wc -l < {tools}/{name}.log)))\n'
        )
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    steps = ["--before", "corpus --output a", "--after", "export-hf a b", "--submit"]
    assert slurm(capsys, *steps) == "101\n102\n103\n"
    assert (tools / "sbatch.log").read_text().splitlines() == [
        "--parsable", "--parsable --dependency=afterok:101 --kill-on-invalid-dep=yes",
        "--parsable --dependency=afterok:102 --kill-on-invalid-dep=yes",
    ]  # fmt: skip
    written(capsys, "kubernetes", "run.yaml", "--nodes", "2", *POD, *steps, "--namespace", "ml")
    wait = "wait --namespace ml --for=condition={} --timeout=-1s {}"
    apply = "apply --namespace ml --filename -"
    assert (tools / "kubectl.log").read_text().splitlines() == [
        apply, wait.format("complete", "job/run-before-1"), apply, wait.format("Complete", "trainjob/run"), apply,
    ]  # fmt: skip
    monkeypatch.setenv("NEVER", "complete")
    words = ["kubernetes", "run.yaml", "--nodes", "2", *POD, *steps]
    assert "job/run-before-1 has failed, so run.yaml was not submitted" in refused(capsys, *words)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert "sbatch cannot be run (No such file" in refused(
        capsys, "slurm", "run.yaml", "--nodes", "2", "--submit"
    )


def documents(capsys, kind: str, *words: str) -> dict[str, dict]:
    text = written(capsys, "kubernetes", "run.yaml", "--nodes", "4", "--kind", kind, *POD, *words)
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def pods_of(found: dict[str, dict]) -> list[dict]:
    if "PyTorchJob" in found:
        return [each["template"] for each in found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()]
    job_set = found["JobSet"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]
    return [each["template"]["spec"]["template"] for each in job_set["spec"]["replicatedJobs"]]


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "jobset"])
def test_pods_have_what_training_needs(capsys, kind):
    found = documents(capsys, kind, "--grace", "300", "--topology", "rack", "--train.global_batch_size", "32")
    assert yaml.safe_load(found["ConfigMap"]["data"]["run.yaml"]) == yaml.safe_load(RUN)
    for pod in pods_of(found):
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in map(dict, spec["volumes"])}
        assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory"}}
        assert volumes[mounts["/data"]] == {"persistentVolumeClaim": {"claimName": "claim"}}
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
        assert spec["terminationGracePeriodSeconds"] == 300 and spec["securityContext"]["runAsNonRoot"]
        near = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]
        assert near["podAffinityTerm"]["topologyKey"] == "rack"
    if kind == "pytorchjob":
        replicas = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
        assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 3}
    if kind == "jobset":
        node = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        command = node["template"]["spec"]["containers"][0]["command"]
        assert node["completions"] == node["parallelism"] == 4
        assert command[-4:] == ["--nnodes", "4", "--rdzv-endpoint", "run-node-0-0.run:29500"]


def test_manifests_of_steps_before_and_after_are_documents_of_their_own(capsys):
    steps = ["--before", "corpus --output /data/a", "--after", "export-hf /data/out /data/b"]
    text = written(capsys, "kubernetes", "run.yaml", "--nodes", "2", *POD, *steps)
    kinds = [each["kind"] for each in yaml.safe_load_all(text)]
    assert kinds == ["Job", "ConfigMap", "TrainingRuntime", "TrainJob", "Job"]


def test_efa_and_a_queue_are_asked_for_where_they_are_wanted(capsys):
    found = documents(
        capsys,
        "jobset",
        "--efa",
        "32",
        "--queue",
        "q",
        "--topology",
        "rack",
        "--train.global_batch_size",
        "32",
    )
    (pod,) = pods_of(found)
    container = pod["spec"]["containers"][0]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert {"name": "FI_PROVIDER", "value": "efa"} in container["env"]
    assert found["JobSet"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    assert pod["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-required-topology": "rack"}
    assert "affinity" not in pod["spec"]


def test_paths_of_pods_are_on_their_volumes(capsys):
    run = ["kubernetes", "run.yaml", "--nodes", "2"]
    assert "--image is missing" in refused(capsys, *run, "--volume", "claim:/data")
    assert "train.output_dir is /data/out, which is not on a volume of the pods (/mnt)" in refused(
        capsys, *run, "--image", "m:1", "--volume", "claim:/mnt"
    )
    hub = ["--data.tokenizer_type", "HuggingFaceTokenizer", "--data.tokenizer_model"]
    assert "./models/gpt2, which is not on a volume" in refused(capsys, *run, *POD, *hub, "./models/gpt2")
    assert main(["launch", *run, *POD, *hub, "openai/gpt2"]) == 0
    assert "openai/gpt2 is a name on the Hugging Face hub" in capsys.readouterr().err
    assert "the claim 'My Claim'" in refused(capsys, *run, "--image", "m", "--volume", "My Claim:/data")
    assert "/data/../out, which is not on a volume" in refused(
        capsys, *run, *POD, "--train.output_dir", "/data/../out"
    )
    for path in ("/dev/shm", "/dev", "/etc", "/proc/1", "/"):
        assert f"would hide the container's own files in {path}" in refused(
            capsys, *run, *POD, "--volume", f"a:{path}"
        )
    for path in ("/mnt/../etc", "/mnt/./a", "/mnt//a", "//etc", "/mnt/.."):
        assert f"--volume is 'a:{path}', a path with" in refused(capsys, *run, *POD, "--volume", f"a:{path}")
    for option, name in (("namespace", "My NS"), ("queue", "a_b"), ("topology", "a b"), ("memory", "900 GB")):
        assert f"--{option} is {name!r}, which Kubernetes rejects" in refused(
            capsys, *run, *POD, f"--{option}", name
        )


def test_the_grace_is_longer_than_a_save_of_the_model():
    assert grace_seconds(124_000_000, 1) == 120
    assert grace_seconds(405_000_000_000, 16) == 60 + round(2 * 12 * 405 / 16)


def test_a_job_is_named_after_its_run_file():
    names = {"runs/Llama_3 8B.yaml": "llama-3-8b", "3d.yaml": "run-3d", f"{'x' * 60}.yaml": "x" * 40}
    assert {path: job_name(path) for path in names} == names


def test_the_models_of_kubernetes_know_what_is_checked_here():
    """against_cluster_models.py proves the manifests by them; here each document's own kind and version."""
    versions = {
        "TrainJob": "trainer.kubeflow.org/v1alpha1", "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
        "PyTorchJob": "kubeflow.org/v1", "JobSet": "jobset.x-k8s.io/v1alpha2", "Job": "batch/v1", "ConfigMap": "v1",
    }  # fmt: skip
    for path in (ROOT / "deploy").glob("*/*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text()):
            assert manifest["apiVersion"] == versions[manifest["kind"]], path
            assert json.dumps(manifest)


SRUN = r"""#!/bin/bash
# Starts a task for each node, as srun does, and ends with the highest exit code. SIGUSR1 comes to the tasks alone.
while [ "${1:0:2}" = -- ]; do shift; done
echo start >> "$NOTES/starts"
for node in 0 1; do
    SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_PROCID=$node SLURM_NODEID=$node "$@" &
    pids+=($!)
done
echo "${pids[@]}" > "$NOTES/pids.tmp" && mv "$NOTES/pids.tmp" "$NOTES/pids"
worst=0
for pid in "${pids[@]}"; do wait "$pid"; code=$?; [ "$code" -gt "$worst" ] && worst=$code; done
exit "$worst"
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_rehearsal_one_node_is_killed_the_time_is_up_and_the_run_ends(tmp_path):
    """The generated script with a stand-in for srun: a killed node's job is requeued (by Slurm, here by the test), the
    next one is stopped by SIGUSR1 and requeues itself, and the third comes to the end of what the first began."""
    (tmp_path / "run.yaml").write_text(
        RUN.replace("/data/out", "out").replace("train_iters: 6", "train_iters: 4000")
    )
    assert main(["launch", "slurm", "run.yaml", "--nodes", "2", "--gpus-per-node", "1", "--max-restarts", "0",
                 "--write", "."]) == 0  # fmt: skip
    script, notes, tools = Path("run.sbatch").read_text(), tmp_path / "notes", tmp_path / "bin"
    for folder in (notes, tools):
        folder.mkdir()
    bodies = {
        "srun": SRUN,
        "megalith": f'#!/bin/bash\nexec "{sys.executable}" -m megalith "$@"\n',
        "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "$2" >> "$NOTES/requeued"; fi\n',
    }
    for name, body in bodies.items():
        (tools / name).write_text(body)
        (tools / name).chmod(0o755)
    given = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": "2"}
    given |= {"PATH": f"{tools}:{os.environ['PATH']}", "NOTES": str(notes)}

    def start() -> subprocess.Popen:
        (notes / "pids").unlink(missing_ok=True)
        return subprocess.Popen(["bash", "run.sbatch"], env=os.environ | given)

    def steps() -> int:
        return len(list(Path("out/checkpoints").glob("step_*"))) if Path("out/checkpoints").exists() else 0

    def awaited(more: int) -> list[int]:
        deadline = time.monotonic() + 120
        while steps() < more and time.monotonic() < deadline:
            time.sleep(0.05)
        assert steps() >= more
        return [int(pid) for pid in (notes / "pids").read_text().split()]

    first = start()
    _, second_node = awaited(2)
    os.kill(second_node, signal.SIGKILL)
    assert first.wait(120) not in (0, 23) and not (notes / "requeued").exists()
    before = steps()
    again = start()
    for pid in awaited(before + 2):
        os.kill(pid, signal.SIGUSR1)
    assert again.wait(120) == 23 and (notes / "requeued").read_text() == f"{os.getpid()}\n"
    last = int(max(path.name for path in Path("out/checkpoints").glob("step_*"))[5:])
    text = script.replace(
        "megalith train run.yaml", f"megalith train run.yaml --train.train_iters {last + 3}"
    )
    Path("run.sbatch").write_text(text)
    assert start().wait(120) == 0
    lines = [json.loads(line)["step"] for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, last + 4))

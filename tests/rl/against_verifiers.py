"""Tasks of verifiers by rl.agent: its harness asks the policy through the endpoint, and its rewards are used.

    python tests/rl/against_verifiers.py ENVIRONMENT

makes the virtual environment where it is not there yet, with verifiers 0.4 and uv from the package index. The harness
`null` runs a conversation in a process that uv prepares, on this machine: neither an account nor a sandbox is needed. A
scripted policy answers two tasks rightly and one wrongly. No part of any suite.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from test_agent_endpoint import sessions

SUMS = [(12, 3), (4, 5), (7, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path)
    folder = parser.parse_args().environment
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", "verifiers==0.4.0", "uv"], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    sys.path.append(str(packages))  # after our own, which it does not replace
    os.environ["PATH"] = f"{(folder / 'bin').resolve()}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as temporary:
        sums_by_the_null_harness(Path(temporary))


def sums_by_the_null_harness(folder: Path) -> None:
    import verifiers.v1 as vf

    class Sum(vf.TaskData):
        answer: int

    class SumTask(vf.Task[Sum]):
        @vf.reward(weight=1.0)
        async def right(self, trace: vf.Trace) -> float:
            return float(trace.last_reply.strip() == str(self.data.answer))

    async def solve(client, row) -> float:
        os.environ["POLICY_KEY"] = client.api_key
        config = vf.AgentConfig(
            model="policy",
            client=vf.EvalClientConfig(base_url=str(client.base_url), api_key_var="POLICY_KEY"),
            harness={"id": "null"},
            runtime=vf.SubprocessConfig(),
        )
        trace = await vf.Agent(config).run(SumTask(Sum(prompt=row["question"], answer=row["answer"])))
        if not trace.ok:
            raise RuntimeError(f"the rollout of verifiers failed: {trace.errors}")
        return trace.reward

    def script(text: str) -> str:
        return next((str(a + b) for a, b in SUMS[:2] if f"{a} + {b}?" in text), "I do not know.")

    prompts = [{"prompt": f"{a} + {b}?", "question": f"{a} + {b}?", "answer": a + b} for a, b in SUMS]
    made = sessions(folder, solve, script, prompts=prompts, agent_timeout=300)
    rewards = [float(group.completions[0].rewards[0]) for group in made.groups]
    texts = [made.tokenizer.decode(group.completions[0].ids) for group in made.groups]
    assert rewards == [1.0, 1.0, 0.0], rewards
    assert texts == [f"{one}<|im_end|>" for one in ("15", "9", "I do not know.")], texts
    print(f"verifiers, harness null: rewards {rewards}, completions {texts}")


if __name__ == "__main__":
    main()

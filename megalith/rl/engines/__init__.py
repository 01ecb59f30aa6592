"""Rollout engines (Megalith's own, vLLM and SGLang), and the weight transfer to them (docs/engines.md)."""

from collections.abc import Sequence

from megalith.rl.engines.colocated_vllm import ColocatedVllm
from megalith.rl.engines.rollout_engine import OwnEngine, RolloutEngine
from megalith.rl.engines.server_engine import ServerEngine
from megalith.rl.engines.sglang_server import SglangServer
from megalith.rl.engines.vllm_server import VllmServer
from megalith.rl.rollouts.prompts import Prompt
from megalith.training.run_state import Run

SERVERS = {"vllm": VllmServer, "sglang": SglangServer}


def engine_of(run: Run, prompts: Sequence[Prompt]) -> RolloutEngine:
    """Return the engine that `rl.engine` selects. Sends no request."""
    rl = run.config.rl
    if rl.engine == "own":
        return OwnEngine(run, prompts)
    if rl.is_colocated:
        return ColocatedVllm(run, prompts)
    return ServerEngine(run, [SERVERS[rl.engine](url) for url in rl.engine_urls])


def student_servers(run: Run) -> ServerEngine:
    """Return an engine that uses the servers in `distill.engine_url`. Sends no request."""
    distill = run.config.distill
    servers = [SERVERS[distill.engine](url) for url in distill.engine_urls]
    return ServerEngine(run, servers, distill)

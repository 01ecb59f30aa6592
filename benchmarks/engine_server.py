"""Our own engine as a server that speaks SGLang's protocol, for benchmarks of `rl.engine: sglang` without SGLang.

    python -m benchmarks.engine_server runs/policy --port 30000 --rows 512 --tokens 64 --device cuda

Requests that wait together are generated together; weights come by a group (`nccl` on a GPU, `gloo` on a CPU) under
their Hugging Face names and are put into the engine's when generation goes on. Loopback only. `--least` has 1,000
completions take so many seconds at least, for trying on a CPU what a server on a device of its own would give: what it
waits for takes no core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

import megalith
from megalith.bridge.families import family_for
from megalith.bridge.transfer import to_ours
from megalith.generation.engine import Engine
from megalith.generation.requests import Completion, Sampling
from megalith.generation.sync import engine_for

TOGETHER = 0.005  # seconds that a request is waited for which goes with those before it
PATIENCE = timedelta(seconds=600)


@dataclass
class Request:
    ids: list[int]
    sampling: Sampling
    count: int
    answer: SimpleQueue = field(default_factory=SimpleQueue)


class Batcher:
    """Generates for all requests that wait, at a time."""

    def __init__(self, engine: Engine, least: float):
        self._engine, self._least, self._waiting, self._asked = engine, least, SimpleQueue(), 0
        Thread(target=self._work, daemon=True).start()

    def ask(self, ids: list[int], sampling: Sampling, count: int) -> list[Completion]:
        request = Request(ids, sampling, count)
        self._waiting.put(request)
        result = request.answer.get()
        if isinstance(result, Exception):
            raise result
        return result

    def _work(self) -> None:
        while True:
            requests = [self._waiting.get()]
            began = time.monotonic()
            try:
                while True:
                    requests.append(self._waiting.get(timeout=TOGETHER))
            except Empty:
                pass
            by_sampling: dict[Sampling, list[Request]] = {}
            for request in requests:
                by_sampling.setdefault(request.sampling, []).append(request)
            for sampling, some in by_sampling.items():
                self._generate(sampling, some, began)

    def _generate(self, sampling: Sampling, requests: Sequence[Request], began: float) -> None:
        prompts = [request.ids for request in requests for _ in range(request.count)]
        keys = range(self._asked, self._asked + len(prompts))
        self._asked += len(prompts)
        try:
            result = iter(self._engine.generate(prompts, sampling, keys=keys))
        except Exception as error:
            for request in requests:
                request.answer.put(error)
            return
        time.sleep(max(0.0, began + self._least * len(prompts) / 1000 - time.monotonic()))
        for request in requests:
            request.answer.put([next(result) for _ in range(request.count)])


class EngineService:
    """The handler of each path."""

    def __init__(self, engine: Engine, least: float):
        self.engine, self.batcher, self.version = engine, Batcher(engine, least), "default"
        self.received: dict[str, Tensor] = {}
        self.groups = family_for(engine.config).groups(engine.config)

    def routes(self) -> dict[tuple[str, str], Any]:
        done = {"success": True}
        return {
            ("GET", "/health"): lambda body: {},
            ("GET", "/server_info"): lambda body: {"tp_size": 1, "pp_size": 1, "dp_size": 1},
            ("GET", "/model_info"): lambda body: {"weight_version": self.version},
            ("POST", "/generate"): self.generate,
            ("POST", "/pause_generation"): lambda body: done,
            ("POST", "/continue_generation"): lambda body: self.go_on() or done,
            ("POST", "/init_weights_update_group"): lambda body: self.join(**body) or done,
            ("POST", "/update_weights_from_distributed"): lambda body: self.receive(**body) or done,
        }

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        how = body["sampling_params"]
        stop = tuple(how["stop_token_ids"])
        sampling = Sampling(how["max_new_tokens"], how["temperature"], stop=stop)
        answers = []
        for one in self.batcher.ask(body["input_ids"], sampling, how["n"]):
            tokens = [[value, token, None] for value, token in zip(one.logprobs, one.ids)]
            meta = {"finish_reason": {"type": "length" if one.truncated else "stop"}}
            meta |= {"output_token_logprobs": tokens, "weight_version": self.version}
            answers.append({"output_ids": one.ids, "meta_info": meta})
        return answers

    def join(self, master_address, master_port, rank_offset, world_size, group_name, backend) -> None:
        """The names of the keys are those that torch's own init_process_group gives them."""
        store = TCPStore(master_address, master_port, world_size, False, PATIENCE, multi_tenant=True)
        kind = self.engine.device.type
        keys = PrefixStore(f"{kind}/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))
        self.store = store
        if backend == "gloo":
            self.group = ProcessGroupGloo(keys, rank_offset, world_size, timeout=PATIENCE)
        else:
            from torch.distributed import ProcessGroupNCCL

            self.group = ProcessGroupNCCL(keys, rank_offset, world_size, ProcessGroupNCCL.Options())

    def receive(self, names, dtypes, shapes, group_name, flush_cache, weight_version) -> None:
        device = self.engine.device
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self.group.broadcast(tensor, 0).wait()
            self.received[name] = tensor
        self.version = weight_version

    def go_on(self) -> None:
        if self.received:
            with torch.device(self.engine.device):
                self.engine.load(self._ours())
            self.received.clear()

    def _ours(self):
        for group in self.groups:
            tensor, shape = to_ours(group, self.received.__getitem__), self.engine.shards[group.name].shape
            if shape and len(tensor) < shape[0]:  # rows that pad the vocabulary
                tensor = torch.cat([tensor, tensor.new_zeros(shape[0] - len(tensor), *shape[1:])])
            yield group.name, tensor


def handler(service: EngineService) -> type[BaseHTTPRequestHandler]:
    routes = service.routes()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def answer(self, method: str) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            act = routes.get((method, self.path.partition("?")[0]))
            try:
                status, said = (404, {}) if act is None else (200, act(body))
            except Exception as error:
                status, said = 500, {"success": False, "message": repr(error)}
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer("GET")

        def do_POST(self):
            self.answer("POST")

    return Handler


class Listener(ThreadingHTTPServer):
    request_queue_size, daemon_threads = 1024, True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run, or a Hugging Face folder")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--rows", type=int, default=512, help="completions under way at a time")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt with its completion, at most")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--least", type=float, default=0.0, help="seconds that 1,000 completions take at least"
    )
    args = parser.parse_args()
    model = megalith.load(args.model, args.device)
    service = EngineService(engine_for(model, max_rows=args.rows, max_tokens=args.tokens), args.least)
    Listener(("127.0.0.1", args.port), handler(service)).serve_forever()


if __name__ == "__main__":
    main()

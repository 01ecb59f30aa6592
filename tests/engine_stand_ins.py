"""Servers that speak vLLM's and SGLang's protocols, with a model of transformers behind them.

What they take and refuse is written from those systems' interfaces and not from our client: keys that one release does
not know, an update without its beginning, sampling while paused. A fault is planted by path: what stands in `plant` is
called with the request's handler and body, and gives the answer in the usual one's place.
"""

import base64
import json
import pickle
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from bridge.peft_formula import adapt
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

PATIENCE = timedelta(seconds=120)


def vllm_fields(body):
    """The fields of both systems' requests: lora_name and, to load, lora_path."""
    return {name.removeprefix("lora_"): value for name, value in body.items()}


class Refusal(Exception):
    """Answered with 400 and these words."""


class Listener(ThreadingHTTPServer):
    request_queue_size = 128  # several batches are asked for at once


class StandIn:
    """A server on loopback, until `close`."""

    device = torch.device("cpu")  # on which it takes broadcast tensors

    def __init__(self, config: dict, seed: int = 7):
        """`config`: that of config.json. Its weights are random, so nothing is right before an update."""
        torch.manual_seed(seed)
        tree = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **tree)
        ).eval()
        self._first = deepcopy(self.model.state_dict())
        self._begin()
        self.calls: list[str] = []
        self.bodies: list[dict] = []  # of requests for completions
        self.buckets = 0
        self.plant = {}
        self.end = Event()
        self._lock = Lock()
        self._listen(0)

    def _begin(self):
        """As it is at its start."""
        self.model.load_state_dict(self._first)
        self.received: dict[str, torch.Tensor] = {}
        self.version, self.paused, self.updating, self.group = None, False, False, None
        self.adapted: dict[str, torch.nn.Module] = {}  # by the name of the adapter

    def _listen(self, port):
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                stand_in._serve(self, "GET")

            def do_POST(self):
                stand_in._serve(self, "POST")

        self._server = Listener(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *request: None  # the client may have left
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self):
        self.end.set()
        self.die()
        self._thread.join()

    def die(self):
        """Nothing listens from now on, and its group ends as with the process that it would be of."""
        self._server.shutdown()
        self._server.server_close()
        self.leave_group()

    def leave_group(self):
        self.group = None

    def restart(self):
        """At the address that it had, with the weights that it had at first."""
        self._begin()
        self._listen(self._server.server_port)

    def _serve(self, handler, method):
        parts = urlsplit(handler.path)
        size = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(size)) if size else None
        with self._lock:
            self.calls.append(parts.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            if parts.path in self.plant:
                status, answer = self.plant[parts.path](handler, body)
            else:
                act = self.routes().get((method, parts.path))
                status, answer = (404, {"detail": "Not Found"}) if act is None else (200, act(body, query))
        except Refusal as refusal:
            status, answer = 400, self.refused(str(refusal))
        if status is None:  # the connection ends without an answer
            handler.close_connection = True
            handler.connection.close()
            return
        data = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def refused(self, words):
        return {"error": words}

    def need(self, holds, words):
        if not holds:
            raise Refusal(words)

    @torch.no_grad()
    def sample(self, prompt, count, tokens, temperature, stop, seed, adapter=None):
        """Ids and processed log-probabilities of `count` completions."""
        model = self.model if adapter is None else self.adapted[adapter]
        self.need(not self.paused, "generation is paused")
        noise = torch.Generator().manual_seed(seed)
        rows = torch.tensor([prompt] * count)
        found = [([], []) for _ in range(count)]
        going = [True] * count
        with self._lock:
            for _ in range(tokens):
                logits = model(rows).logits[:, -1].float() / temperature
                logprobs = logits.log_softmax(-1)
                new = torch.multinomial(logprobs.exp(), 1, generator=noise)
                for row, (ids, values) in enumerate(found):
                    if going[row]:
                        ids.append(int(new[row]))
                        values.append(float(logprobs[row, new[row]]))
                        going[row] = ids[-1] not in stop
                if not any(going):
                    break
                rows = torch.cat([rows, new], 1)
        return found

    most = None  # entries that it returns per token at most

    @torch.no_grad()
    def scored(self, ids, k):
        """Each token's log-probability and those of the k most likely ones in its place; None for the first token."""
        with self._lock:
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        k = k if self.most is None else min(k, self.most)
        found = [None]
        for position, token in enumerate(ids[1:]):
            top = logprobs[position].topk(k)
            pairs = list(zip(top.indices.tolist(), top.values.tolist()))
            found.append((logprobs[position, token].item(), pairs))
        return found

    def load(self, tensors):
        """By the names of the checkpoint, as the engine's load_weights does."""
        own = self.model.state_dict()
        for name, tensor in tensors:
            self.need(name in own, f"there is no parameter named {name}")
            self.need(own[name].shape == tensor.shape, f"{name} has another shape")
            own[name].copy_(tensor)
            self.received[name] = tensor

    def load_adapter(self, name, path):
        """On the base; a name is taken once."""
        self.need(name not in self.adapted, f"the adapter {name} is already loaded")
        model = deepcopy(self.model)
        adapt(model, Path(path))
        self.adapted[name] = model

    def unload_adapter(self, name):
        self.need(name in self.adapted, f"the adapter {name} is not loaded")
        del self.adapted[name]

    def broadcast_into(self, names, dtypes, shapes):
        self.need(self.group is not None, "weight transfer is not initialized")
        self.need(not any("torch." in name for name in dtypes), "dtypes are bare names")
        self.buckets += 1
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.group.broadcast(tensor, 0).wait()
            self.load([(name, tensor.cpu())])


class VllmStandIn(StandIn):
    """`release` decides which shape its transfer has."""

    workers = 1
    logprobs_mode = "processed_logprobs"
    transfer = {"backend": "gloo"}  # registered with it; vLLM's own are nccl and ipc

    def __init__(self, config, release="0.24.0", **more):
        self.release = release
        self.minor = int(release.split(".")[1])
        super().__init__(config, **more)

    def routes(self):
        found = {
            ("GET", "/health"): lambda body, query: {},
            ("GET", "/v1/models"): lambda body, query: {
                "object": "list",
                "data": [{"id": name} for name in ("policy", *self.adapted)],
            },
            ("POST", "/v1/load_lora_adapter"): lambda body, query: self.load_adapter(**vllm_fields(body)),
            ("POST", "/v1/unload_lora_adapter"): lambda body, query: self.unload_adapter(**vllm_fields(body)),
            ("GET", "/server_info"): self.info,
            ("GET", "/get_world_size"): lambda body, query: {"world_size": self.workers},
            ("POST", "/v1/completions"): self.complete,
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("POST", "/reset_prefix_cache"): lambda body, query: {},
            ("POST", "/init_weight_transfer_engine"): self.init,
            ("POST", "/update_weights"): self.update,
            ("POST", "/collective_rpc"): self.rpc,
        }
        if self.minor >= 21:
            found["POST", "/start_weight_update"] = self.start
            found["POST", "/finish_weight_update"] = self.finish
        if self.minor >= 27:
            found["GET", "/weight_info"] = lambda body, query: {"weight_version": self.version or "default"}
            found["POST", "/update_weight_version"] = self.named
        return found

    def info(self, body, query):
        self.need(query == {"config_format": "json"}, "config_format is text")
        model = {"logprobs_mode": self.logprobs_mode, "dtype": "float32"}
        return {"vllm_config": {"model_config": model, "weight_transfer_config": self.transfer}}

    def pause(self, body, query):
        self.need(query.get("mode") in ("abort", "wait", "keep"), "mode")
        self.paused = True

    def resume(self, body, query):
        self.need(not self.updating, "resumed in the middle of an update")
        self.paused = False

    def init(self, body, query):
        info = dict(body["init_info"])
        if self.minor >= (28 if "world_size" in info else 27):
            self.need(info.pop("packed", False) is False, "packed")
        if not info:  # its backend is ipc
            return
        where = info["master_address"], info["master_port"]
        self.need(set(info) == {"master_address", "master_port", "rank_offset", "world_size"}, f"{info}")
        store = dist.PrefixStore(
            "cpu/weights/", dist.TCPStore(*where, timeout=PATIENCE, wait_for_workers=False)
        )
        store = dist.PrefixStore("weights", store.underlying_store)
        store = dist.PrefixStore("cpu/", dist.PrefixStore("weights/", store))
        self.group = dist.ProcessGroupGloo(store, info["rank_offset"], info["world_size"], timeout=PATIENCE)

    def start(self, body, query):
        self.need(self.paused and not self.updating, "an update has begun, or nothing is paused")
        self.need(body.get("is_checkpoint_format", True) is True, "kernel format")
        self.updating = True

    def update(self, body, query):
        self.need(self.updating, "no update has begun")
        info = dict(body["update_info"])
        if self.minor < (27 if "ipc_handles_pickled" in info else 28):
            self.need(info.pop("packed", False) is False, "packed")
        handles = info.pop("ipc_handles_pickled", None)
        self.need(set(info) == {"names", "dtype_names", "shapes"}, f"update_info takes no {sorted(info)}")
        if handles is not None:
            opened = pickle.loads(base64.b64decode(handles))
            kinds = [getattr(torch, name) for name in info["dtype_names"]]
            tensors = [
                torch.tensor(one["GPU-0"], dtype=kind) for one, kind in zip(opened, kinds, strict=True)
            ]
            self.need([list(tensor.shape) for tensor in tensors] == info["shapes"], "shapes")
            self.load(zip(info["names"], tensors, strict=True))
            return
        self.broadcast_into(info["names"], info["dtype_names"], info["shapes"])

    def finish(self, body, query):
        self.need(self.updating, "no update has begun")
        self.updating = False
        if self.minor >= 27 and body.get("weight_version") is not None:
            self.version = body["weight_version"]

    def named(self, body, query):
        self.version = body["new_version"]

    def rpc(self, body, query):
        self.need(body["method"] == "reload_weights" and self.paused, "collective_rpc")
        self.load(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors").items())

    def complete(self, body, query):
        if "prompt_logprobs" in body:
            return self.prompt_logprobs(body)
        self.bodies.append(body)
        self.need(body["model"] in ("policy", *self.adapted), f"The model `{body['model']}` does not exist.")
        self.need(isinstance(body["prompt"][0], int), "prompt")
        adapter = None if body["model"] == "policy" else body["model"]
        found = self.sample(
            body["prompt"], body["n"], body["max_tokens"], body["temperature"], body["stop_token_ids"], body["seed"],
            adapter,
        )  # fmt: skip
        choices = []
        for index, (ids, logprobs) in enumerate(found):
            why = "stop" if ids[-1] in body["stop_token_ids"] else "length"
            said = {"tokens": [f"token_id:{one}" for one in ids], "token_logprobs": logprobs}
            choice = {"index": index, "text": "", "finish_reason": why, "logprobs": said}
            choices.append(choice | ({"token_ids": ids} if body.get("return_token_ids") else {}))
        return {"choices": choices[::-1]}  # in the order in which they ended

    def prompt_logprobs(self, body):
        """A token that is not among the most likely ones is returned with them."""
        positions = [None]
        for token, found in zip(body["prompt"][1:], self.scored(body["prompt"], body["prompt_logprobs"])[1:]):
            values = {token: found[0]} | dict(found[1])
            positions.append({str(name): {"logprob": value, "rank": 1} for name, value in values.items()})
        return {"choices": [{"index": 0, "text": "", "prompt_logprobs": positions}]}


class SglangStandIn(StandIn):
    """Its groups are made by torch's own function, as SGLang makes them."""

    sizes = {"tp_size": 1, "dp_size": 1}
    release = "sglang"
    made = ()
    is_second = False  # of its process, in which torch makes one group of a name

    def leave_group(self):
        for group in self.made:
            dist.destroy_process_group(group)
        self.made, self.group = (), None

    def refused(self, words):
        return {"success": False, "message": words}

    def routes(self):
        done = {"success": True, "message": "Succeeded"}
        return {
            ("GET", "/health"): lambda body, query: {},
            ("GET", "/get_server_info"): lambda body, query: self.sizes | {"version": "0.5.20"},
            ("GET", "/get_model_info"): lambda body, query: {"weight_version": self.version or "default"},
            ("POST", "/generate"): self.generate,
            ("POST", "/pause_generation"): lambda body, query: setattr(self, "paused", True),
            ("POST", "/continue_generation"): lambda body, query: setattr(self, "paused", False),
            ("POST", "/init_weights_update_group"): lambda body, query: self.init(**body) or done,
            ("POST", "/update_weights_from_distributed"): lambda body, query: self.update(**body) or done,
            ("POST", "/update_weights_from_disk"): lambda body, query: self.disk(**body) or done,
            ("POST", "/load_lora_adapter"): lambda body, query: (
                self.load_adapter(**vllm_fields(body)) or done
            ),
            ("POST", "/unload_lora_adapter"): lambda body, query: (
                self.unload_adapter(**vllm_fields(body)) or done
            ),
        }

    def init(self, master_address, master_port, rank_offset, world_size, group_name, backend):
        from torch.distributed import distributed_c10d as c10d

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = dist.TCPStore(master_address, master_port, world_size, False, PATIENCE, multi_tenant=True)
        store = dist.PrefixStore(group_name, store)
        self.group_name = group_name
        if self.is_second:
            keys = dist.PrefixStore("cpu/", dist.PrefixStore(f"{group_name}/", store))
            self.group = dist.ProcessGroupGloo(keys, rank_offset, world_size, timeout=PATIENCE)
            return
        how = dict(group_name=group_name, timeout=PATIENCE)
        made, _ = c10d._new_process_group_helper(world_size, rank_offset, [], backend, store, **how)
        c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(world_size)}
        self.group, self.made = made._get_backend(self.device), (*self.made, made)

    def update(self, names, dtypes, shapes, group_name, flush_cache, weight_version):
        self.need(self.paused and group_name == self.group_name and flush_cache, "update")
        self.broadcast_into(names, dtypes, shapes)
        self.version = weight_version

    def disk(self, model_path, weight_version, flush_cache):
        self.need(self.paused, "update")
        self.load(load_file(Path(model_path) / "model.safetensors").items())
        self.version = weight_version

    def generate(self, body, query):
        self.bodies.append(body)
        self.need(body["return_logprob"] is True, "no log-probabilities are asked for")
        if "logprob_start_len" in body:
            return self.input_logprobs(body)
        how = body["sampling_params"]
        stop = how["stop_token_ids"]
        adapter = body.get("lora_path")
        self.need(adapter is None or adapter in self.adapted, f"the adapter {adapter} is not loaded")
        found = self.sample(
            body["input_ids"],
            how["n"],
            how["max_new_tokens"],
            how["temperature"],
            stop,
            len(self.bodies),
            adapter,
        )
        answers = []
        for ids, logprobs in found:
            why = {"type": "stop", "matched": ids[-1]} if ids[-1] in stop else {"type": "length"}
            tokens = [[value, one, None] for one, value in zip(ids, logprobs)]
            meta = {"finish_reason": why, "output_token_logprobs": tokens, "completion_tokens": len(ids)}
            answers.append(
                {"output_ids": ids, "meta_info": meta | {"weight_version": self.version or "default"}}
            )
        return answers if len(answers) > 1 else answers[0]

    def input_logprobs(self, body):
        ids = body["input_ids"]
        found = self.scored(ids, body["top_logprobs_num"])[1:]
        tokens = [[None, ids[0], None], *([one[0], token, None] for one, token in zip(found, ids[1:]))]
        top = [None, *([[value, token, None] for token, value in one[1]] for one in found)]
        return {"text": "", "meta_info": {"input_token_logprobs": tokens, "input_top_logprobs": top}}


KINDS = ("vllm 0.24", "vllm 0.29", "sglang")


@contextmanager
def served(kind, config):
    """Of KINDS, or another release of vLLM."""
    server = (
        SglangStandIn(config) if kind == "sglang" else VllmStandIn(config, f"{kind.removeprefix('vllm ')}.0")
    )
    try:
        yield server
    finally:
        server.close()

"""Client of vLLM's server: OpenAI's completions with token ids, and vLLM's weight transfer (vLLM 0.21 and newer).

Start it as in docs/engines.md: VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs, and --weight-transfer-config
for a group. The flag for packed tensors is a field of the update request up to 0.27, and of the group request from 0.28
on (`ipc`: from 0.27 on); each version rejects the other field. The default is unpacked, so this client sends neither.
From 0.27 on, the server reports the version of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from megalith.errors import ConfigError, TrainingError
from megalith.generation.requests import Sampling
from megalith.launch.tcp_store import serve_store
from megalith.rl.engines.deadline import Deadline
from megalith.rl.engines.engine_server import EngineServer
from megalith.rl.engines.json_http import RequestRefused
from megalith.rl.engines.rollout_engine import Answer
from megalith.rl.engines.transfer_group import TorchGroup, VllmNcclGroup, free_port
from megalith.rl.engines.weight_stream import WeightBucket

START = "VLLM_SERVER_DEV_MODE=1 vllm serve … --logprobs-mode processed_logprobs"
GROUP = "weights"  # with gloo; each group has its own store


class VllmServer(EngineServer):
    name = "vLLM"

    def check(self, deadline: Deadline, method: str) -> dict[str, Any]:
        model = at_path(self.http.get("/v1/models", deadline), "data", 0, "id")
        if not isinstance(model, str):
            raise TrainingError(f"{self.http} returns no model at /v1/models; check that it is a vLLM server")
        info = self._server_info(deadline)
        modes = sorted(set(map(str, _values(info, "logprobs_mode"))))
        if modes not in ([], ["processed_logprobs"]):
            raise TrainingError(
                f"{self.http} has logprobs_mode {' and '.join(modes):.60}, but the ratio needs log-probabilities "
                f"after the temperature; start it with: {START}"
            )
        if info is not None:
            self._require_backend(info, method)
        workers = at_path(self._request_dev_mode("GET", "/get_world_size", None, deadline), "world_size")
        if type(workers) is not int or workers < 1:
            raise TrainingError(
                f"{self.http} returns a world size of {workers!r:.60}; check that it is a vLLM server"
            )
        return {
            "model": model,
            "workers": workers,
            "version": self._has_version(deadline),
        }

    def _has_version(self, deadline: Deadline) -> bool:
        try:
            self.http.get("/weight_info", deadline)
        except RequestRefused:
            return False
        return True

    def _server_info(self, deadline: Deadline) -> Any:
        """Return the server's settings, or None if it does not report them.

        In that case, only the canary shows whether log-probabilities are computed after temperature scaling.
        """
        try:
            return self._request_dev_mode("GET", "/server_info?config_format=json", None, deadline)
        except RequestRefused as error:
            if error.status < 500:
                raise
            return None

    def _require_backend(self, info: Any, method: str) -> None:
        """Raise TrainingError unless the weight transfer backend in the server's settings `info` is `method`.

        Any backend supports `checkpoint` and `lora`. Settings without a backend are accepted for nccl and ipc, which
        are part of vLLM; plugins register other backends.
        """
        configs = _values(info, "weight_transfer_config")
        backends = {backend for one in configs if isinstance(backend := at_path(one, "backend"), str)}
        if (
            method in ("checkpoint", "lora")
            or backends == {method}
            or (not backends and method in ("nccl", "ipc"))
        ):
            return
        names = f"{' and '.join(sorted(backends)):.60}" if backends else "none"
        raise TrainingError(
            f"rl.weight_sync_method is {method}, but the weight transfer backend of {self.http} is {names}; set "
            "rl.weight_sync_method to the backend that the server was started with (--weight-transfer-config nccl "
            "or ipc), or to checkpoint"
        )

    def _request_dev_mode(self, method: str, path: str, body: Any, deadline: Deadline) -> Any:
        """Send a request to an endpoint that vLLM serves only in development mode."""
        try:
            return self.http.get(path, deadline) if method == "GET" else self.http.post(path, body, deadline)
        except RequestRefused as error:
            if error.status in (404, 405):
                raise TrainingError(
                    f"{self.http} has no {path.partition('?')[0]}: it is not in development mode, "
                    "or older than 0.21 (0.20 is enough for rl.weight_sync_method checkpoint); "
                    f"start it with: {START}"
                ) from None
            raise

    # Completions

    def complete(
        self, prompt: Sequence[int], sampling: Sampling, count: int, seed: int, deadline: Deadline
    ) -> list[Answer]:
        # The server takes omitted parameters from the model's generation_config.json.
        body = {
            "model": self.adapter or self.facts["model"], "prompt": list(prompt), "n": count, "seed": seed,
            "stream": False, "echo": False, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": list(sampling.stop),
            "ignore_eos": True, "add_special_tokens": False, "skip_special_tokens": False, "logprobs": 0,
            "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        size = self.completion_bytes(prompt, sampling, count)
        response = self.http.post("/v1/completions", body, deadline, size)
        choices = at_path(response, "choices")
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise TrainingError(
                f"{self.http} answered /v1/completions without choices; check that it is a vLLM server"
            )
        aborted = [one for one in choices if at_path(one, "finish_reason") not in ("stop", "length")]
        if aborted:
            raise TrainingError(
                f"{self.http} ended a completion with finish_reason {at_path(aborted[0], 'finish_reason')!r:.60}, so "
                "another client paused or aborted it; let only one run use a server"
            )
        indices = [at_path(one, "index") for one in choices]
        if not all(type(index) is int for index in indices):
            raise TrainingError(
                f"{self.http} returns completions with the indices {indices!r:.60}; check that it is a vLLM "
                "server"
            )
        order = sorted(choices, key=lambda one: one["index"])
        return [
            Answer(
                at_path(one, "token_ids"),
                at_path(one, "logprobs", "token_logprobs"),
                at_path(one, "finish_reason") == "length",
                routes=[at_path(response, "prompt_routed_experts"), at_path(one, "routed_experts")],
            )
            for one in order
        ]

    def weight_version(self, deadline: Deadline) -> str | None:
        if self.adapter is not None:
            models = at_path(self.http.get("/v1/models", deadline), "data")
            names = [at_path(one, "id") for one in models] if isinstance(models, list) else []
            return self.adapter.rpartition("-")[2] if self.adapter in names else "without the adapter"
        if not self.facts["version"]:
            return None
        return str(at_path(self.http.get("/weight_info", deadline), "weight_version"))

    # Weights

    def new_group(self, backend: str, address: str, size: int, timeout: float) -> tuple[Any, Callable]:
        if backend == "nccl":
            port = free_port(address)
            return (address, port), lambda: VllmNcclGroup(address, port, size)
        store = serve_store(address, 0, timedelta(seconds=timeout))
        return (address, store.port), lambda: TorchGroup(backend, store, GROUP, size, timeout)

    def open_memory(self, deadline: Deadline) -> None:
        if (workers := self.facts["workers"]) > 1:
            raise ConfigError(
                f"rl.weight_sync_method is ipc, but {self.http} has {workers} workers on different GPUs, and the "
                "tensors are in the memory of one GPU; start the server on the trainer's GPU only, or choose nccl"
            )
        self._request_dev_mode("POST", "/init_weight_transfer_engine", {"init_info": {}}, deadline)

    def join(self, meeting: Any, first_rank: int, size: int, deadline: Deadline) -> None:
        address, port = meeting
        info = dict(master_address=address, master_port=port, rank_offset=first_rank, world_size=size)
        self._request_dev_mode("POST", "/init_weight_transfer_engine", {"init_info": info}, deadline)

    def begin(self, deadline: Deadline) -> None:
        self._request_dev_mode("POST", "/pause?mode=wait", None, deadline)
        self._request_dev_mode("POST", "/start_weight_update", None, deadline)

    def receive(
        self, bucket: WeightBucket, version: int, deadline: Deadline, handles: str | None = None
    ) -> None:
        dtypes = [str(bucket.dtype).removeprefix("torch.")] * len(bucket.names)
        info = dict(names=bucket.names, dtype_names=dtypes, shapes=bucket.shapes)
        if handles is not None:
            info["ipc_handles_pickled"] = handles
        self._request_dev_mode("POST", "/update_weights", {"update_info": info}, deadline)

    def finish(self, version: int, deadline: Deadline) -> None:
        body = {"weight_version": str(version)} if self.facts["version"] else {}
        self._request_dev_mode("POST", "/finish_weight_update", body, deadline)
        self._resume(deadline)

    def load_folder(self, path: Path, version: int, deadline: Deadline) -> None:
        self._request_dev_mode("POST", "/pause?mode=wait", None, deadline)
        body = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(path)},
            "timeout": deadline.left(),
        }
        self._request_dev_mode("POST", "/collective_rpc", body, deadline)
        if self.facts["version"]:
            self._request_dev_mode("POST", "/update_weight_version", {"new_version": str(version)}, deadline)
        self._resume(deadline)

    def load_adapter(self, path: Path, name: str, deadline: Deadline) -> None:
        self._request_dev_mode("POST", "/pause?mode=wait", None, deadline)
        for old in {name, self.adapter or name}:
            with suppress(RequestRefused):  # it is not loaded
                self.http.post("/v1/unload_lora_adapter", {"lora_name": old}, deadline)
        try:
            self.http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, deadline)
        except RequestRefused as error:
            if error.status not in (404, 405):
                raise
            raise TrainingError(
                f"{self.http} has no /v1/load_lora_adapter; start it with: VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
                f"{START} --enable-lora --max-lora-rank R"
            ) from None
        self._resume(deadline)

    def _resume(self, deadline: Deadline) -> None:
        self._request_dev_mode("POST", "/reset_prefix_cache", None, deadline)
        self._request_dev_mode("POST", "/resume", None, deadline)

    def give_up(self, deadline: Deadline) -> None:
        try:
            self.http.post("/finish_weight_update", None, deadline)
        finally:
            self.http.post("/resume", None, deadline)


def at_path(value: Any, *path: str | int) -> Any:
    """Return the value at a path in a JSON value, or None if the path does not exist."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _values(value: Any, key: str) -> Iterator[Any]:
    """Yield all values of a key, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            else:
                yield from _values(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, key)

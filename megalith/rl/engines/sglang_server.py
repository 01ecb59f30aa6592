"""Client of SGLang's server: its /generate endpoint with token ids, and its weight update endpoints.

The server computes log-probabilities after the temperature and before top-p, unless it was started with
SGLANG_RETURN_ORIGINAL_LOGPROB. The canary detects that case. Each completion carries the version of the weights that
sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from megalith.rl.engines.transfer_group import TorchGroup
from megalith.rl.engines.vllm_server import at_path
from megalith.rl.engines.weight_stream import WeightBucket


class SglangServer(EngineServer):
    name = "SGLang"

    def check(self, deadline: Deadline, method: str) -> dict[str, Any]:
        info = self._newest(("/server_info", "/get_server_info"), deadline)
        sizes = [at_path(info, name) or 1 for name in ("tp_size", "pp_size", "dp_size")]
        if at_path(info, "enable_dp_attention"):
            sizes[2] = 1  # its replicas are tensor-parallel ranks
        if not all(type(size) is int for size in sizes):
            raise TrainingError(
                f"{self.http} returns the sizes {sizes!r:.60} at /server_info; check that it is an SGLang "
                "server"
            )
        return {"workers": sizes[0] * sizes[1] * sizes[2], "sizes": sizes}

    def _newest(self, paths: Sequence[str], deadline: Deadline) -> Any:
        """Request the paths in order until the server has one. Returns its response."""
        for number, path in enumerate(paths):
            try:
                return self.http.get(path, deadline)
            except RequestRefused as error:
                if error.status not in (404, 405) or number + 1 == len(paths):
                    raise

    # Completions

    def complete(
        self, prompt: Sequence[int], sampling: Sampling, count: int, seed: int, deadline: Deadline
    ) -> list[Answer]:
        """Return `count` completions. `seed` is not used: SGLang uses seeds only in deterministic mode."""
        params = {
            "n": count, "max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": sampling.min_p,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling.stop), "skip_special_tokens": False, "no_stop_trim": True,
        }  # fmt: skip
        body = {"input_ids": list(prompt), "sampling_params": params, "return_logprob": True, "stream": False}
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        if self.route_bytes:
            body["return_routed_experts"] = True
        answers = self.http.post("/generate", body, deadline, self.completion_bytes(prompt, sampling, count))
        return [self._answer(one) for one in (answers if isinstance(answers, list) else [answers])]

    def _answer(self, answer: Any) -> Answer:
        meta = at_path(answer, "meta_info")
        if not isinstance(meta, dict):
            raise TrainingError(
                f"{self.http} answered /generate without completions; check that it is an SGLang server"
            )
        finish_reason = at_path(meta, "finish_reason", "type")
        if finish_reason not in ("stop", "length"):
            raise TrainingError(
                f"{self.http} ended a completion with finish_reason {finish_reason!r:.60}, so another client paused "
                "or aborted it; let only one run use a server"
            )
        ids, tokens = at_path(answer, "output_ids"), at_path(meta, "output_token_logprobs")
        logprobs = None
        if isinstance(tokens, list) and tokens:
            logprobs = [at_path(one, 0) for one in tokens]
            sampled = [at_path(one, 1) for one in tokens]
            # output_ids may lack the stop token, which was sampled too.
            if not isinstance(ids, list) or (sampled[: len(ids)] == ids and len(sampled) - len(ids) <= 1):
                ids = sampled
        version = at_path(meta, "weight_version") if self.adapter is None else None  # that of the base
        return Answer(
            ids,
            logprobs,
            finish_reason == "length",
            None if version is None else str(version),
            [at_path(meta, "routed_experts")],
        )

    def weight_version(self, deadline: Deadline) -> str | None:
        if self.adapter is not None:  # a server without the adapter refuses requests that name it
            return None
        version = at_path(self._newest(("/model_info", "/get_model_info"), deadline), "weight_version")
        return None if version is None else str(version)

    # Weights

    def _post(self, path: str, body: Any, deadline: Deadline) -> None:
        answer = self.http.post(path, body, deadline)
        if at_path(answer, "success") is False:
            raise TrainingError(f"{self.http} failed at POST {path}: {at_path(answer, 'message')!s:.300}")

    def new_group(self, backend: str, address: str, size: int, timeout: float) -> tuple[Any, Callable]:
        store = serve_store(address, 0, timedelta(seconds=timeout))
        name = self.group_name()
        meeting = address, store.port, backend, name
        return meeting, lambda: TorchGroup(backend, store, name, size, timeout)

    def join(self, meeting: Any, first_rank: int, size: int, deadline: Deadline) -> None:
        _, pp, dp = self.facts["sizes"]
        if pp > 1 or dp > 1:
            raise ConfigError(
                f"{self.http} has pp_size {pp} and dp_size {dp}, but SGLang numbers the workers of a weight group "
                "by tensor-parallel rank only; start one server per replica, without pipeline stages (rl.engine_url "
                "takes several), or set rl.weight_sync_method to checkpoint"
            )
        address, port, backend, self._group = meeting
        body = {
            "master_address": address, "master_port": port, "rank_offset": first_rank, "world_size": size,
            "group_name": self._group, "backend": backend,
        }  # fmt: skip
        self._post("/init_weights_update_group", body, deadline)

    def begin(self, deadline: Deadline) -> None:
        self._post("/pause_generation", {"mode": "abort"}, deadline)  # no request is running

    def receive(
        self, bucket: WeightBucket, version: int, deadline: Deadline, handles: str | None = None
    ) -> None:
        dtypes = [str(bucket.dtype).removeprefix("torch.")] * len(bucket.names)
        body = {
            "names": bucket.names, "dtypes": dtypes, "shapes": bucket.shapes, "group_name": self._group,
            "flush_cache": True, "weight_version": str(version),
        }  # fmt: skip
        self._post("/update_weights_from_distributed", body, deadline)

    def finish(self, version: int, deadline: Deadline) -> None:
        self._post("/continue_generation", {}, deadline)

    def load_folder(self, path: Path, version: int, deadline: Deadline) -> None:
        self._post("/pause_generation", {"mode": "abort"}, deadline)
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
        self._post("/update_weights_from_disk", body, deadline)
        self._post("/continue_generation", {}, deadline)

    def load_adapter(self, path: Path, name: str, deadline: Deadline) -> None:
        self._post("/pause_generation", {"mode": "abort"}, deadline)
        for old in {name, self.adapter or name}:
            with suppress(RequestRefused):  # it is not loaded
                self.http.post("/unload_lora_adapter", {"lora_name": old}, deadline)
        body = {"lora_name": name, "lora_path": str(path)}
        try:
            answer = self.http.post("/load_lora_adapter", body, deadline)
        except RequestRefused as error:
            raise TrainingError(
                f"{error}; SGLang needs --enable-lora, --max-lora-rank and --lora-target-modules"
            ) from None
        if at_path(answer, "success") is False:
            raise TrainingError(
                f"{self.http} cannot load the adapters: {at_path(answer, 'error_message')!s:.300}; SGLang needs "
                "--enable-lora, --max-lora-rank and --lora-target-modules"
            )
        self._post("/continue_generation", {}, deadline)

    def give_up(self, deadline: Deadline) -> None:
        self.http.post("/continue_generation", {}, deadline)

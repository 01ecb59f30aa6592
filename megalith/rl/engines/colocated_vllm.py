"""vLLM in the trainer's processes, sharing its devices (rl.engine vllm without rl.engine_url).

Every rank creates an LLM. The ranks of a tensor-parallel axis form one engine: vLLM's external launcher numbers
workers by the job's ranks, and the tensor-parallel axis is the fastest-varying one in both. The engine sleeps during
training. A weight sync is

    wake_up weights ─▶ reload_weights: every tensor, broadcast by rank 0 ─▶ wake_up kv_cache ─▶ reset_prefix_cache

so that the KV cache and a second copy of the weights do not exist at the same time. Tensors have their Hugging Face
names, and vLLM takes each worker's shard. Needs the Python interface of vLLM 0.20 or newer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.bridge.folder import CONFIG
from megalith.comm.collectives import gather_json
from megalith.errors import ConfigError, TrainingError
from megalith.generation.requests import Completion, Sampling
from megalith.generation.sync import SyncReport
from megalith.rl.engines.rollout_engine import Answer, engine_sizes, request_samplings, request_seed
from megalith.rl.engines.weight_stream import WeightStream
from megalith.rl.rollouts.prompts import Prompt
from megalith.training.run_state import Run

NAME = "vLLM in the trainer's processes"
FINISH_REASONS = ("stop", "length")


def imported_vllm() -> ModuleType:
    """Import and return vLLM. Raise ConfigError if it is not installed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # read during the import: run the engine in this process
    )
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            "rl.engine is vllm without rl.engine_url, so it samples in the trainer's processes, but vLLM cannot be "
            f"imported ({error}): pip install a vLLM for torch {torch.__version__} (0.20 to 0.26 for 2.11, 0.27 to "
            "0.31 for 2.13); or name a server by rl.engine_url, or set rl.engine own"
        ) from None
    return vllm


class ColocatedVllm:
    """RolloutEngine that runs vLLM inside the trainer's processes."""

    shared = False

    def __init__(self, run: Run, prompts: Sequence[Prompt]):
        """Create the LLM with dummy weights, which the first update replaces. Every rank creates one."""
        self.version = -1
        self._run, self._world, self._vllm = run, run.mesh.world, imported_vllm()
        self._stream = WeightStream(run.model, run.config)
        self._folder = (Path(run.output) / "engine_config").absolute()
        self._write_config()
        has_sleep = self._vllm.platforms.current_platform.is_sleep_mode_available()
        self._level = run.config.rl.vllm_sleep_level if has_sleep else 0
        with self._vllm_errors("starting"):
            self._llm = self._vllm.LLM(**self._arguments(prompts))

    def _write_config(self) -> None:
        if self._world.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / CONFIG).write_text(json.dumps(self._stream.config_json), encoding="utf-8")
        gather_json(None, self._world)  # barrier: the file exists

    def _arguments(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        run, tp = self._run, self._run.mesh.tp.size
        rows, tokens = engine_sizes(run.config, prompts, self._world.size // tp)
        arguments = dict(
            model=str(self._folder), load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
            dtype=str(self._stream.dtype).removeprefix("torch."), logprobs_mode="processed_logprobs",
            tensor_parallel_size=tp, max_num_seqs=rows, max_model_len=tokens, seed=run.config.train.seed,
            gpu_memory_utilization=run.config.rl.vllm_gpu_memory_utilization, enable_sleep_mode=self._level > 0,
        )  # fmt: skip
        if self._world.size > 1:
            os.environ.setdefault("LOCAL_RANK", str(run.device.index or 0))
            arguments["distributed_executor_backend"] = "external_launcher"
        return arguments

    # Completions

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
        num_generations: int = 1,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Return completions; see RolloutEngine.generate. Raise TrainingError for vLLM's errors and invalid
        completions."""
        if not prompts:
            return []
        keys = range(len(prompts)) if keys is None else keys
        samplings = request_samplings(sampling, len(prompts), max_new_tokens)
        params = [self._params(one, num_generations, key) for one, key in zip(samplings, keys)]
        ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with self._vllm_errors("sampling"):
            outputs = self._llm.generate(ids, params, use_tqdm=False)
        return [
            self._completion(number, generation, one, samplings[number])
            for number, output in enumerate(outputs)
            for generation, one in enumerate(output.outputs)
        ]

    def _params(self, sampling: Sampling, count: int, key: int) -> Any:
        return self._vllm.SamplingParams(
            n=count, seed=request_seed(sampling.seed, key), max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop), ignore_eos=True, logprobs=0, detokenize=False,
        )  # fmt: skip

    def _completion(self, number: int, generation: int, one: Any, sampling: Sampling) -> Completion:
        name = f"{NAME}, completion {generation} of prompt {number}"
        if one.finish_reason not in FINISH_REASONS:
            raise TrainingError(
                f"{name} has finish_reason {one.finish_reason!r}, which is neither stop nor length; see vLLM's log"
            )
        ids = list(one.token_ids)
        logprobs = one.logprobs and [step[token].logprob for token, step in zip(ids, one.logprobs)]
        answer = Answer(ids, logprobs, one.finish_reason == "length")
        return answer.completion(
            name, number, generation, sampling, self._stream.config.vocab_size, self.version
        )

    # Weights

    def update(self, version: int) -> SyncReport:
        """Load the weights; see RolloutEngine.update. Raises TrainingError on every rank."""
        start, tensors = time.perf_counter(), self._tensors()
        self._sent = 0
        message = None
        try:
            self._wake("weights")
            with self._vllm_errors("taking weights"):
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            self._wake("kv_cache")
            self._llm.reset_prefix_cache()
        except TrainingError as error:
            message = str(error)
        for _ in tensors:  # if this rank's engine has failed, still take part in the broadcasts
            pass
        for failed in filter(None, gather_json(message, self._world)):
            raise TrainingError(failed)
        self.version = version
        sent = self._sent if self._world.size > 1 else 0
        return SyncReport(self._sent, time.perf_counter() - start, 0, sent)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, gathered on rank 0 and broadcast. Every rank iterates to the end."""
        device, rank = self._run.device, self._world.rank
        for bucket in self._stream.buckets(device):
            for number, (name, shape) in enumerate(zip(bucket.names, bucket.shapes)):
                tensor = (
                    torch.empty(shape, dtype=bucket.dtype, device=device) if rank else bucket.tensors[number]
                )
                if self._world.size > 1:
                    dist.broadcast(tensor, 0, group=self._world.group)
                self._sent += tensor.nbytes
                yield name, tensor

    def _wake(self, tag: str) -> None:
        if self._level and self._is_asleep:
            with self._vllm_errors(f"waking up its {tag}"):
                self._llm.wake_up(tags=[tag])
        if tag == "kv_cache":
            self._is_asleep = False

    _is_asleep = False

    @contextmanager
    def _vllm_errors(self, phase: str) -> Iterator[None]:
        """Convert vLLM's errors to TrainingError, except out-of-memory, for which the trainer reports memory use."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
            raise TrainingError(
                f"{NAME} failed at {phase} ({type(error).__name__}: {error}); see docs/engines.md for the supported "
                "versions; if memory ran out, change rl.vllm_gpu_memory_utilization, vLLM's fraction of a GPU"
            ) from error

    # The rest of RolloutEngine

    def weights_to_compare(self) -> None:
        return None

    def take_prefill_tokens(self) -> None:
        return None

    def memory(self) -> int:
        """Return the number of bytes that vLLM may use: its fraction of the device memory."""
        if self._run.device.type != "cuda":
            return 0
        total = torch.cuda.get_device_properties(self._run.device).total_memory
        return int(total * self._run.config.rl.vllm_gpu_memory_utilization)

    def release(self) -> None:
        if self._level and not self._is_asleep:
            self._llm.sleep(level=self._level)
            self._is_asleep = True

    def close(self) -> None:
        self._llm = None

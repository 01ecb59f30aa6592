"""vLLM in the trainer's own processes, on devices that both use in turn (rl.engine vllm without rl.engine_url).

Every rank makes an LLM; those of a tensor-parallel axis are one engine, for vLLM numbers its workers by the job's ranks
(its external launcher), and its axis is the fastest one as ours is. While the trainer trains, the engine sleeps. Then

    wake_up weights ─▶ reload_weights: every tensor, as rank 0 broadcasts it ─▶ wake_up kv_cache ─▶ reset_prefix_cache

so its KV cache never stands beside two copies of weights. Tensors go under their Hugging Face names, and vLLM cuts out
what a worker has of them. It is the Python interface of vLLM 0.20 and newer.
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
from megalith.rl.engines.rollout_engine import Answer, engine_sizes, request_seed
from megalith.rl.engines.weight_stream import WeightStream
from megalith.rl.prompts import Prompt
from megalith.training.run_state import Run

NAME = "vLLM in the trainer's processes"
ENDS = ("stop", "length")


def imported_vllm() -> ModuleType:
    """Raises ConfigError where it is not installed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read at the import: the engine lives in this process
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
    """The engine of a run that samples where it trains."""

    shared = False

    def __init__(self, run: Run, prompts: Sequence[Prompt]):
        """With weights that are nobody's, until the first update. Every rank makes one."""
        self.version = -1
        self._run, self._world, self._vllm = run, run.mesh.world, imported_vllm()
        self._stream = WeightStream(run.model, run.config)
        self._folder = (Path(run.output) / "engine_config").absolute()
        self._write_config()
        has_sleep = self._vllm.platforms.current_platform.is_sleep_mode_available()
        self._level = run.config.rl.vllm_sleep_level if has_sleep else 0
        with self._sentences("starting"):
            self._llm = self._vllm.LLM(**self._arguments(prompts))

    def _write_config(self) -> None:
        if self._world.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / CONFIG).write_text(json.dumps(self._stream.config_json), encoding="utf-8")
        gather_json(None, self._world)  # it is there

    def _arguments(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        run, tp = self._run, self._run.mesh.tp.size
        rows, tokens = engine_sizes(run.config, prompts, self._world.size // tp)
        found = dict(
            model=str(self._folder), load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
            dtype=str(self._stream.dtype).removeprefix("torch."), logprobs_mode="processed_logprobs",
            tensor_parallel_size=tp, max_num_seqs=rows, max_model_len=tokens, seed=run.config.train.seed,
            gpu_memory_utilization=run.config.rl.vllm_gpu_memory_utilization, enable_sleep_mode=self._level > 0,
        )  # fmt: skip
        if self._world.size > 1:
            os.environ.setdefault("LOCAL_RANK", str(run.device.index or 0))
            found["distributed_executor_backend"] = "external_launcher"
        return found

    # Completions

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
        num_generations: int = 1,
    ) -> list[Completion]:
        """As RolloutEngine.generate; raises TrainingError for what vLLM raises, or gives besides completions."""
        if not prompts:
            return []
        keys = range(len(prompts)) if keys is None else keys
        asked = [self._params(sampling, num_generations, key) for key in keys]
        ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with self._sentences("sampling"):
            found = self._llm.generate(ids, asked, use_tqdm=False)
        return [
            self._completion(number, generation, one, sampling)
            for number, given in enumerate(found)
            for generation, one in enumerate(given.outputs)
        ]

    def _params(self, sampling: Sampling, count: int, key: int) -> Any:
        return self._vllm.SamplingParams(
            n=count, seed=request_seed(sampling.seed, key), max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop), ignore_eos=True, logprobs=0, detokenize=False,
        )  # fmt: skip

    def _completion(self, number: int, generation: int, one: Any, sampling: Sampling) -> Completion:
        of = f"{NAME}, completion {generation} of prompt {number}"
        if one.finish_reason not in ENDS:
            raise TrainingError(f"{of} ended for {one.finish_reason!r}, neither a stop token nor its length")
        ids = list(one.token_ids)
        logprobs = one.logprobs and [step[token].logprob for token, step in zip(ids, one.logprobs)]
        answer = Answer(ids, logprobs, one.finish_reason == "length")
        return answer.completion(
            of, number, generation, sampling, self._stream.config.vocab_size, self.version
        )

    # Weights

    def update(self, version: int) -> SyncReport:
        """As RolloutEngine.update; raises TrainingError, on every rank."""
        began, tensors = time.perf_counter(), self._tensors()
        self._sent = 0
        said = None
        try:
            self._wake("weights")
            with self._sentences("taking weights"):
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            self._wake("kv_cache")
            self._llm.reset_prefix_cache()
        except TrainingError as error:
            said = str(error)
        for _ in tensors:  # where this rank's engine has failed, the others' get them all the same
            pass
        for failed in filter(None, gather_json(said, self._world)):
            raise TrainingError(failed)
        self.version = version
        return SyncReport(self._sent, time.perf_counter() - began, 0)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its name, put together on rank 0 and broadcast: every rank iterates to the end."""
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
            with self._sentences(f"waking up its {tag}"):
                self._llm.wake_up(tags=[tag])
        if tag == "kv_cache":
            self._is_asleep = False

    _is_asleep = False

    @contextmanager
    def _sentences(self, phase: str) -> Iterator[None]:
        """What vLLM raises meanwhile, as TrainingError; where memory is short the trainer says what it is used for."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
            raise TrainingError(
                f"{NAME} failed at {phase} ({type(error).__name__}: {error}); docs/engines.md says which vLLM it has "
                "to be, and rl.vllm_gpu_memory_utilization is its share of a device"
            ) from error

    # What it is to the loop besides

    def weights_to_compare(self) -> None:
        return None

    def memory(self) -> int:
        """Its share of the device, as vLLM takes it."""
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

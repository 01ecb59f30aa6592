"""A module that speaks vLLM's Python interface, with a model of transformers behind it, in the place of the true one.

Written from vLLM's interface (0.20 to 0.29) and not from our use of it: arguments that it does not have are TypeErrors,
what is asleep cannot be used, and level 2 forgets weights.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

POOLS = ("weights", "kv_cache")


@dataclass
class SamplingParams:
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True


class LLM:
    """Every one that was made stands in `made`; what stands in `plant` under a method's name is called in its place."""

    made: list["LLM"] = []
    plant: dict = {}

    def __init__(
        self, model, *, load_format="auto", skip_tokenizer_init=False, generation_config="auto", dtype="auto",
        logprobs_mode="raw_logprobs", tensor_parallel_size=1, max_num_seqs=256, max_model_len=None, seed=0,
        gpu_memory_utilization=0.9, enable_sleep_mode=False, distributed_executor_backend=None,
    ):  # fmt: skip
        self.arguments = {name: value for name, value in locals().items() if name != "self"}
        tree = json.loads((Path(model) / "config.json").read_text())
        config = AutoConfig.for_model(
            tree.pop("model_type"), **{k: v for k, v in tree.items() if k != "architectures"}
        )
        assert load_format == "dummy" and skip_tokenizer_init, (
            "the folder has neither weights nor a tokenizer"
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # its dummy weights depend on nothing else
            self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.calls, self.received, self.awake = [], {}, set(POOLS)
        self.made.append(self)

    def _planted(self, name, *given):
        self.calls.append(name)
        if name in self.plant:
            self.plant[name](self, *given)

    def sleep(self, level=1):
        self._planted("sleep", level)
        assert self.arguments["enable_sleep_mode"] and level in (1, 2)
        self.awake.clear()
        if level == 2:
            self._forget()

    @torch.no_grad()
    def _forget(self):
        for parameter in self.model.parameters():
            parameter.fill_(float("nan"))

    def wake_up(self, tags=None):
        self._planted(f"wake_up {' '.join(tags or POOLS)}")
        self.awake |= set(tags or POOLS)

    def reset_prefix_cache(self):
        self._planted("reset_prefix_cache")
        return True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self._planted(method, *args, *(kwargs or {}).values())
        if "weights" not in self.awake:
            raise RuntimeError("weights are asleep")
        return [getattr(self, f"_{method}")(*args, **(kwargs or {}))]

    @torch.no_grad()
    def _reload_weights(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True):
        own = self.model.state_dict()
        for name, tensor in weights_iterator:
            own[name].copy_(tensor)
            self.received[name] = tensor.clone()

    @torch.no_grad()
    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        self._planted("generate", prompts)
        if self.awake != set(POOLS):
            raise RuntimeError(f"{set(POOLS) - self.awake} is asleep")
        return [
            self._one(prompt["prompt_token_ids"], how)
            for prompt, how in zip(prompts, sampling_params, strict=True)
        ]

    def _one(self, prompt, how):
        noise = torch.Generator().manual_seed(how.seed)
        return SimpleNamespace(
            outputs=[self._completion(prompt, how, index, noise) for index in range(how.n)]
        )

    def _completion(self, prompt, how, index, noise):
        ids, steps, why = [], [], "length"
        while len(ids) < how.max_tokens and why == "length":
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1].float()
            if self.arguments["logprobs_mode"] == "processed_logprobs":
                logits = logits / how.temperature
            logprobs = logits.log_softmax(-1)
            ids.append(int(torch.multinomial(logprobs.exp(), 1, generator=noise)))
            steps.append({ids[-1]: SimpleNamespace(logprob=float(logprobs[ids[-1]]))})
            why = "stop" if ids[-1] in how.stop_token_ids else "length"
        steps = None if how.logprobs is None else steps
        return SimpleNamespace(index=index, text="", token_ids=ids, logprobs=steps, finish_reason=why)


def install(monkeypatch, has_sleep=True):
    """`import vllm` gives the stand-in until the test is over."""
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    module.platforms = SimpleNamespace(
        current_platform=SimpleNamespace(is_sleep_mode_available=lambda: has_sleep)
    )
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "made", [])
    monkeypatch.setattr(LLM, "plant", {})
    return LLM

"""`megalith rollout`: sample and score completions without training. Also `megalith grpo --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import comb
from types import SimpleNamespace

import numpy as np
import torch

from megalith.cli.json_output import print_json, text_on_stderr
from megalith.cli.logits_options import with_logits_options
from megalith.cli.parser import Arguments
from megalith.cli.speculation_options import speculation_of
from megalith.config import RunConfig
from megalith.config.rl import RlConfig
from megalith.errors import ConfigError, printable
from megalith.generation.engine import Engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.requests import Sampling
from megalith.generation.static_cache import empty_cache
from megalith.generation.sync import engine_for
from megalith.hardware import local_device_info, pick_device
from megalith.planner.layout import Layout, build_layout
from megalith.planner.layout_text import layout_text
from megalith.progress import Progress
from megalith.report.summary import print_summary
from megalith.rl.engines.rollout_engine import engine_sizes
from megalith.rl.grpo import open_agent
from megalith.rl.rewards.rewards import Rewards
from megalith.rl.rollouts.prompts import Prompt, held_out_prompts, open_prompts, run_prompts
from megalith.rl.rollouts.rollout_metrics import absent_message, absent_rewards, prefill_metrics
from megalith.rl.rollouts.rollouts import Rollouts, save_rollouts
from megalith.rl.sampling.scored_groups import GroupRecord, sample_groups
from megalith.tables import counted, format_bytes
from megalith.training.build import COMPUTE_DTYPES, prepare
from megalith.training.loading import load_with_tokenizer


def run_rollout(args: Arguments) -> int:
    with text_on_stderr(args.json):
        metrics = _rollout(args)
    if args.json:
        print_json(metrics)
    return 0


def _rollout(args: Arguments) -> dict[str, float]:
    """Sample and score completions, print the results, and return them."""
    for option in ("limit", "num_generations", "rows"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise ConfigError(
                f"--{option.replace('_', '-')} is {getattr(args, option)}; it must be at least 1"
            )
    model, tokenizer = load_with_tokenizer(args.checkpoint, pick_device(args.device), show_progress=True)
    if tokenizer is None:
        raise ConfigError(
            f"{args.checkpoint} has no tokenizer, which scoring completions needs; "
            "pass --tokenizer-type and --tokenizer-model"
        )
    room, longest = model.config.max_position_embeddings, args.max_completion_length
    if longest >= room:
        raise ConfigError(
            f"--max-completion-length {longest} leaves no room for a prompt in {room} positions; lower "
            "--max-completion-length"
        )
    rl = _settings(args)
    agent = open_agent(rl, tokenizer)
    schemas = [] if agent is None else agent.schemas
    vocabulary = model.config.vocab_size
    opened = open_prompts(
        rl,
        tokenizer,
        max_tokens=room - longest,
        vocab_size=vocabulary,
        seed=0,
        show_progress=True,
        tools=schemas,
    )
    for note in [*opened.notes(), *([] if agent is None else agent.notes())]:
        print(printable(f"note: {note}"))
    prompts = opened.prompts[: args.limit]
    reward_name = None if agent is None else agent.reward_name
    rewards = Rewards(rl.rewards, prompts, max_tokens=longest, environment=reward_name)
    if agent is not None:
        agent.open(prompts)
    drawn = longest, args.temperature, args.top_k, args.top_p
    sampling = Sampling(*drawn, seed=args.seed, stop=tokenizer.stop_ids, vocab_size=tokenizer.vocab_size)
    sampling = with_logits_options(sampling, args, tokenizer)
    if args.output and not sampling.processing.is_off:
        raise ConfigError(
            "--output writes rollouts to train on, but the trainer computes probabilities "
            "without penalties and bad words; leave out --output, or the penalties and bad words"
        )
    if agent is not None and args.stop:
        raise ConfigError(
            "--stop applies to completions of one turn, but --tool, --environment and --agent make several; leave "
            "--stop out"
        )
    tokens = max(len(prompt.ids) for prompt in prompts) + longest
    if rl.environment or rl.agent:  # which may extend the prompts
        tokens = room
    sizes = dict(max_rows=min(args.rows, len(prompts) * args.num_generations), max_tokens=tokens)
    speculation = speculation_of(args, tokenizer)
    if model.has_adapters:
        engine = Engine(
            model.config, model.device, model.compute_dtype, model=model, **sizes, speculation=speculation
        )
    else:
        engine = engine_for(model, **sizes, speculation=speculation)
    requests = [GroupRecord(number, number) for number in range(len(prompts))]
    G = args.num_generations
    max_tokens = len(prompts) * G * longest  # an upper bound: completions may end early
    try:
        with Progress("rollout", max_tokens, "tokens") as progress:
            generate = partial(engine.generate, on_token=lambda *token: progress.add())
            sampler = SimpleNamespace(
                generate=generate,
                version=0,
                live_engine=lambda sampling: LiveEngine(engine, sampling.stop, sampling.vocab_size),
            )
            sampled = prompts, rewards, tokenizer, requests, sampling, G
            options = dict(agent=agent, max_prompt_tokens=room - longest)
            records, logged = sample_groups(sampler, *sampled, **options)
            logged |= prefill_metrics(*engine.take_prefill_tokens())
    finally:
        rewards.close()
        if agent is not None:
            agent.close()
    groups = [record.group(prompts) for record in records]
    for problem in () if agent is None else agent.take_problems():
        print(printable(f"warning: {problem}"))
    for name in absent_rewards(rewards.names, groups):
        print(printable(f"warning: {absent_message(name, groups)}"))
    if args.output:
        save_rollouts(args.output, Rollouts(groups, rewards.names, tokenizer.fingerprint))
        print(f"wrote {counted(len(groups), 'group')} to {args.output}")
    totals = np.array(
        [[np.nansum(one.rewards) for one in group.completions] for group in groups]
    )  # [prompts, G]
    each = [one for group in groups for one in group.completions]
    figures = {
        "prompts": len(groups),
        "reward": float(totals.mean()),
        "reward_std": float(totals.std()),
        "completion_length": float(np.mean([one.sampled_tokens for one in each])),
        "truncated": float(np.mean([one.truncated for one in each])),
    }
    figures |= {name: float(np.mean(values)) for name, values in logged.items() if agent is not None}
    if (drafts := engine.take_draft_metrics()) is not None:
        figures |= drafts.metrics
    passed = (totals >= args.pass_at - 1e-9).sum(1)
    k = 1
    while k <= args.num_generations:
        figures[f"pass@{k}"] = float(np.mean([_pass_at(k, args.num_generations, int(c)) for c in passed]))
        k *= 2
    first = tokenizer.decode(groups[0].completions[0].ids.tolist())
    print(printable(f"prompt {groups[0].id}: {prompts[0].text!r} → {first!r}"))
    for name, value in figures.items():
        print(f"{name:20} {value:,.4f}" if isinstance(value, float) else f"{name:20} {value:,}")
    return figures


def _settings(args: Arguments) -> RlConfig:
    """Return the section `rl` with the command's options applied."""
    settings = {
        "prompts": args.prompts,
        "prompt_column": args.prompt_column,
        "chat_prompts": args.chat_prompts,
        "reward_funcs": args.reward,
        "tools": args.tool,
        "temperature": args.temperature,
    }
    names = "environment", "agent", "max_turns", "max_tool_calls", "tool_call_format"
    settings |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.tool_timeout is not None:
        settings["agent_timeout" if args.agent else "tool_timeout"] = args.tool_timeout
    rl = RlConfig(**settings)
    if not rl.rewards and not rl.environment and not rl.agent:
        raise ConfigError(
            "--reward is not set; pass a reward function, or an --environment or --agent with rewards"
        )
    if rl.agent and rl.tools_or_environment:
        raise ConfigError("--agent runs its own tools and environments; leave out --tool and --environment")
    return rl


def _pass_at(k: int, of: int, passed: int) -> float:
    """Return the unbiased estimate of pass@k when `passed` of `of` completions have passed (Chen et al. 2021)."""
    return 1 - comb(of - passed, k) / comb(of, k)


def engine_text(config: RunConfig, layout: Layout, prompts: Sequence[Prompt]) -> str:
    """Return a description of the engine: its memory on a rank, or the server."""
    if config.rl.is_colocated:
        return f"vLLM in the trainer's processes, {config.rl.vllm_gpu_memory_utilization:.0%} of each device"
    if config.rl.engine != "own":
        return f"{config.rl.engine} at {', '.join(config.rl.engine_urls)}, weights by {config.rl.weight_sync_method}"
    tp, dtype = layout.size.tp, COMPUTE_DTYPES[config.train.precision]
    rows, tokens = engine_sizes(config, prompts, layout.world_size // tp)
    groups = -(-config.model.query_groups // tp)
    cache = empty_cache(config.model, rows, tokens, groups, torch.device("meta"), dtype).nbytes
    weights = sum(stage.parameters for stage in layout.stages) * dtype.itemsize / tp
    return (
        f"{rows:,} rows of {tokens:,} tokens on a rank: {format_bytes(cache)} of KV cache while generating, "
        + (f"{config.rl.prefix_cache_gb:g} GB for other prefixes, " if config.rl.prefix_cache_gb else "")
        + f"{format_bytes(weights)} of weights"
    )


def dry_run(config: RunConfig, processes: int) -> int:
    """Read the prompts, call the rewards once, and print layout and memory. Train and write nothing."""
    config, tokenizer, notes = prepare(config, processes)
    layout = build_layout(config, processes)
    print_summary(layout, local_device_info(pick_device(config.runtime.device)))
    if processes > 1:
        print(layout_text(layout, ["this machine"] * processes))
    for note in notes:
        print(f"note: {printable(note)}")
    rl = config.rl
    if not rl.prompts:
        print("rl.prompts is not set: rollouts come from files, which the run itself checks")
        return 0
    agent = open_agent(config.rl, tokenizer)
    schemas = [] if agent is None else agent.schemas
    opened_prompts = run_prompts(config, tokenizer, tools=schemas)
    lengths = [len(prompt.ids) for prompt in opened_prompts.prompts]
    print(
        f"prompts        {len(opened_prompts):,} of {min(lengths):,} to {max(lengths):,} tokens; "
        f"{opened_prompts.dropped:,} dropped"
    )
    for note in [*opened_prompts.notes(), *([] if agent is None else agent.notes())]:
        print(printable(f"note: {note}"))
    first = opened_prompts.prompts[0]
    print(printable(f"the first      {first.id} ({first.where}): {first.text!r}"))
    text = first.text  # any text works
    rewards = Rewards(
        rl.rewards,
        opened_prompts.prompts,
        max_tokens=rl.max_completion_length,
        workers=rl.reward_workers,
        timeout=rl.reward_timeout,
    )
    try:
        verdicts = rewards([(0, [text] * 2, [list(map(int, tokenizer.encode(text)))] * 2)])
    finally:
        rewards.close()
    for name, value in zip(rewards.names, verdicts.rewards[0][0]):
        print(f"reward         {name} of {text!r}: {value:g}")
    size = config.train.global_batch_size
    print(
        f"rollout batch  {size * rl.mini_batches // rl.num_generations:,} prompts × {rl.num_generations} completions, "
        f"{counted(rl.steps_per_batch, 'step')} of {counted(size, 'completion')} each"
    )
    if held_out := held_out_prompts(config, tokenizer, tools=schemas):
        print(
            f"evaluations    {len(held_out):,} held-out prompts × {rl.num_eval_generations} completions, every "
            f"{config.train.eval_interval:,} steps and at the end"
        )
    print(f"engine         {engine_text(config, layout, [*opened_prompts.prompts, *held_out])}")
    return 0

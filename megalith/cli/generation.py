"""`megalith generate`: generate text with a trained model in one or several processes. Options of `rollout`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.cli.json_output import add_json_option
from megalith.cli.logits_options import add_json_schema_option, add_logits_options, with_logits_options
from megalith.cli.parser import Arguments
from megalith.cli.sampling_options import add_model_arguments, add_sampling_options, add_tokenizer_options
from megalith.cli.speculation_options import add_speculation_arguments, speculation_of
from megalith.errors import LINES, ConfigError, DataError, printable

if TYPE_CHECKING:
    from megalith.data.tokenizers.open_tokenizer import Tokenizer
    from megalith.generation.engine import OnToken
    from megalith.generation.requests import Completion, Sampling
    from megalith.generation.speculation import DraftMetrics, Speculation
    from megalith.generation.stop_strings import StopStrings
    from megalith.models.transformer import Transformer

RULE = "-" * 80


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--prompt", action="append", help="prompt; repeat it for a batch")
    add("--prompt-file", help='file with one prompt per line; .jsonl: one {"prompt": "text"} per line')
    add("--max-new-tokens", type=int, default=128, metavar="N", help="maximum number of new tokens")
    add("--num-generations", type=int, default=1, metavar="N", help="completions per prompt")
    add_sampling_options(parser)
    add_logits_options(parser)
    add_json_schema_option(parser)
    add(
        "--forced-bos-token-id", type=int, metavar="ID",
        help="first token of an encoder-decoder's answer (mBART's target language); default: generation_config.json's",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="sampling seed")
    add("--stream", action="store_true", help="print the text of a single completion as it is generated")
    add("--json", action="store_true", help="print one object per completion: prompt, text, ids, logprobs")
    add("--nproc", type=int, metavar="N", help="start N processes; torchrun works too")
    add(
        "--tensor-model-parallel-size", type=int, default=1, metavar="N",
        help="tensor-parallel size; replicas share the prompts",
    )  # fmt: skip
    add_tokenizer_options(parser)
    add_speculation_arguments(parser)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="run folder, one of its step folders, or a Hugging Face folder")
    parser.add_argument("prompts", help="JSONL or parquet file, or a save_to_disk folder")
    parser.add_argument("--reward", action="append", metavar="NAME|FILE:FUNCTION",
                        help="reward function (rl.reward_funcs); repeatable, rewards are added up")  # fmt: skip
    parser.add_argument(
        "--tool",
        action="append",
        metavar="FILE:FUNCTION",
        help="function that the policy may call (rl.tools); repeatable",
    )
    parser.add_argument(
        "--environment", metavar="FILE:CLASS", help="environment that the policy acts in (rl.environment)"
    )
    parser.add_argument(
        "--agent", metavar="FILE:FUNCTION", help="function that writes each completion (rl.agent)"
    )
    parser.add_argument(
        "--max-turns", type=int, metavar="N", help="maximum sampled turns per completion (rl.max_turns)"
    )
    parser.add_argument(
        "--max-tool-calls",
        type=int,
        metavar="N",
        help="maximum tool calls per completion (rl.max_tool_calls)",
    )
    parser.add_argument(
        "--tool-call-format", metavar="NAME", help="format of tool calls (rl.tool_call_format)"
    )
    parser.add_argument(
        "--tool-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit of a tool call and of an agent (rl.tool_timeout, rl.agent_timeout)",
    )
    parser.add_argument("--num-generations", type=int, default=8, metavar="G", help="completions per prompt")
    parser.add_argument(
        "--max-completion-length", type=int, default=256, metavar="N", help="maximum number of tokens"
    )
    add_sampling_options(parser)
    add_logits_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="sampling seed")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument("--pass-at", type=float, default=1.0, metavar="R", help="minimum reward to pass")
    parser.add_argument(
        "--prompt-column", default="prompt", help="column with the prompts (rl.prompt_column)"
    )
    parser.add_argument(
        "--chat-prompts", action="store_true", help="treat a text prompt as a user message (rl.chat_prompts)"
    )
    parser.add_argument("--rows", type=int, default=256, help="completions generated at a time")
    add_speculation_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="write a rollout file for rl.rollouts")
    add_json_option(
        parser,
        "prompts, reward, reward_std, completion_length, truncated, pass@1, pass@2, … up to --num-generations",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def run_generate(args: Arguments) -> int:
    prompts = _prompts(args)
    if args.num_generations < 1:
        raise ConfigError(f"--num-generations is {args.num_generations}; it must be at least 1")
    if args.stream and (len(prompts), args.num_generations, args.json) != (1, 1, False):
        raise ConfigError(
            f"--stream prints a single completion, but there are {len(prompts) * args.num_generations}; use a "
            "single --prompt and no --json, or remove --stream"
        )
    if args.stream and args.stop:
        raise ConfigError(
            "--stream prints text at once, but with --stop the end of a completion is only known later; "
            "remove one of the two"
        )
    if args.nproc is not None:
        from megalith.launch.launcher import launch

        return launch(args.nproc, ["-m", "megalith", "generate", *without_nproc(args)])
    from megalith.generation.requests import Sampling
    from megalith.hardware import pick_device
    from megalith.launch.launcher import this_process
    from megalith.progress import Progress
    from megalith.training.loading import load_with_adapter

    process, split = this_process(), args.tensor_model_parallel_size
    if process.world_size == 1 != split:
        raise ConfigError(
            f"--tensor-model-parallel-size is {split}, but there is one process; start {split} processes with "
            f"--nproc {split}"
        )
    device = pick_device(args.device, process.local_rank)
    alone = process.world_size == 1
    model, tokenizer = load_with_adapter(
        args.checkpoint, args.adapter, device if alone else "cpu", show_progress=process.is_first
    )
    tokenizer = checkpoint_tokenizer(args, tokenizer, model.config.vocab_size)
    if model.config.encoder_layers and tokenizer.model_vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"{args.checkpoint} uses a WordPiece tokenizer with [BOS], [EOS] and sentinels appended: its decoder "
            "starts with [BOS], but `generate` starts with token 0, as T5's own tokenizer does; use "
            "model(decoder_ids, encoder_input_ids=…), which returns the logits at each position"
        )
    sampling = Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=tokenizer.stop_ids,
        vocab_size=tokenizer.vocab_size,
        forced_bos_token_id=_forced_bos(args, tokenizer, model),
    )
    sampling = with_logits_options(sampling, args, tokenizer)
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    # an encoder's text is not part of the decoder's output
    before = [[] if model.config.encoder_layers else tokenizer.encode(prompt) for prompt in prompts]
    max_tokens = (
        len(ids) * args.num_generations * args.max_new_tokens
    )  # an upper bound: completions may end early
    with Progress("generate", max_tokens, "tokens", show=process.is_first and not args.stream) as progress:
        shown = (
            TokenPrinter(tokenizer, before[0], process.is_first)
            if args.stream
            else lambda *token: progress.add()
        )
        done = _complete(args, model, ids, sampling, device, shown, speculation_of(args, tokenizer))
    if process.is_first:
        _print(args, tokenizer, prompts, before, done, sampling.stop_strings)
    return 0


def _forced_bos(args: Arguments, tokenizer: Tokenizer, model: Transformer) -> int | None:
    """Return the id that begins every answer: the option's value, or for an encoder-decoder the value in the
    tokenizer's files.
    """
    if args.forced_bos_token_id is not None or not model.config.encoder_layers:
        return args.forced_bos_token_id
    return tokenizer.forced_bos_token_id


def _prompts(args: Arguments) -> list[str]:
    prompts = list(args.prompt or [])
    if args.prompt_file:
        try:
            text = Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the prompts cannot be read: {error}; pass a text file in UTF-8") from None
        is_json = args.prompt_file.endswith(".jsonl")
        for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
            where = f"{args.prompt_file} line {number}"
            if not is_json and not line:
                raise DataError(f"{where} is empty; write a prompt there, or remove the line")
            if line.strip() or not is_json:
                prompts.append(_prompt_of(line, where) if is_json else line)
    if not prompts:
        raise ConfigError(
            "there is no prompt; pass --prompt TEXT, several times for a batch, or --prompt-file"
        )
    return prompts


def _prompt_of(line: str, where: str) -> str:
    from megalith.data.chat.conversations import unicode_text

    try:
        record = json.loads(line)
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if isinstance(prompt, str) and prompt:
            return unicode_text(prompt)
        error: object = f"the prompt is {prompt!r:.60}"
    except (ValueError, RecursionError) as reason:
        error = reason
    raise DataError(f'{where} is not an object with a text "prompt" ({error}); write {{"prompt": "text"}}')


def without_nproc(args: Arguments) -> list[str]:
    """Return the command's arguments without --nproc, for the processes that it starts."""
    words = [args.checkpoint]
    actions = {action.dest: action for action in args.parser._actions if action.option_strings}
    for name, action in actions.items():
        value = getattr(args, name, None)
        if name in ("nproc", "help") or value in (None, False, action.default):
            continue
        option = action.option_strings[-1]
        values = value if isinstance(value, list) else [value]
        words += [option] if value is True else [f"{option}={each}" for each in values]
    return words


def checkpoint_tokenizer(args: Arguments, tokenizer: Tokenizer | None, vocab_size: int) -> Tokenizer:
    if args.tokenizer_type:
        from megalith.data.tokenizers.open_tokenizer import build_tokenizer

        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
    if tokenizer is None:
        raise ConfigError(
            f"{args.checkpoint} has no tokenizer; pass the tokenizer that it was trained with: --tokenizer-type and "
            "--tokenizer-model"
        )
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size:,} entries and the model {vocab_size:,}; "
            "pass the tokenizer that the model was trained with"
        )
    return tokenizer


def _complete(
    args: Arguments,
    model: Transformer,
    ids: list[list[int]],
    sampling: Sampling,
    device,
    on_token: OnToken | None,
    speculation: Speculation | None,
) -> list[Completion]:
    """Return all completions. With several processes, only rank 0 gets them."""
    from megalith.generation.sampling import complete, complete_data_parallel
    from megalith.launch.launcher import end_distributed, init_distributed, this_process

    size = this_process().world_size
    if size == 1:
        drawn = dict(num_generations=args.num_generations, on_token=on_token)
        return complete(
            model, ids, sampling, **drawn, speculation=speculation, on_draft_metrics=_print_draft_metrics
        )
    from megalith.config import ParallelConfig
    from megalith.parallel.mesh import build_mesh

    init_distributed(device)
    try:
        parallel = ParallelConfig(tensor_model_parallel_size=args.tensor_model_parallel_size)
        mesh = build_mesh(parallel, size, device.type)
        return complete_data_parallel(
            model, ids, sampling, mesh, device, args.num_generations, on_token, speculation
        )
    finally:
        end_distributed()


def _print_draft_metrics(metrics: DraftMetrics) -> None:
    print(f"speculative decoding: {metrics}", file=sys.stderr)


def _print(
    args: Arguments,
    tokenizer: Tokenizer,
    prompts: list[str],
    ids: list[list[int]],
    done: list[Completion],
    stops: StopStrings | None,
) -> None:
    for number, each in enumerate(done):
        text = tokenizer.decode(each.content)
        text = text if stops is None else stops.cut(text)
        if args.json:
            fields = dict(prompt=prompts[each.prompt], generation=each.generation, text=text)
            print(json.dumps(fields | dict(ids=each.ids, logprobs=each.logprobs, truncated=each.truncated)))
        elif not args.stream:
            if number:
                print(RULE)
            whole = tokenizer.decode([*ids[each.prompt], *each.content])
            print(printable(whole if stops is None else tokenizer.decode(ids[each.prompt]) + text, LINES))
    if args.stream:
        print()


class TokenPrinter:
    """Print a prompt and its completion as tokens arrive, in complete characters."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], prints: bool):
        self._tokenizer, self._prints, self._ids, self._shown = tokenizer, prints, list(prompt), 0
        self._show()

    def __call__(self, prompt: int, generation: int, token: int) -> None:
        if token not in self._tokenizer.stop_ids:
            self._ids.append(token)
            self._show()

    def _show(self) -> None:
        text = self._tokenizer.decode(self._ids)
        if self._prints and not text.endswith("\ufffd"):  # half a character
            print(printable(text[self._shown :], LINES), end="", flush=True)
            self._shown = len(text)

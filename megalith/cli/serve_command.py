"""`megalith serve`: an OpenAI-compatible server, in one or several processes."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.generation import checkpoint_tokenizer, without_nproc
from megalith.cli.parser import Arguments
from megalith.cli.sampling_options import add_tokenizer_options
from megalith.cli.speculation_options import add_speculation_arguments, speculation_of
from megalith.errors import ConfigError, printable
from megalith.launch.signals import handled_stop_signals
from megalith.tables import counted

if TYPE_CHECKING:
    from megalith.data.tokenizers.tokenizer import Tokenizer
    from megalith.generation.engine import Engine
    from megalith.generation.engine_model import SlotSizes
    from megalith.generation.live_engine import LiveEngine
    from megalith.models.transformer import Transformer
    from megalith.serve.chat_format import ChatFormat
    from megalith.serve.http_process import HttpProcess

DEFAULT_RANK = 16
DEFAULT_LENGTH = 4096
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="run folder or one of its step folders, or a Hugging Face folder")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every network")
    add("--port", type=int, default=8000, help="port to listen on; 0: a free one")
    add("--api-key-file", metavar="FILE", help="file with the key that clients must send as a bearer token")
    add(
        "--served-model-name", metavar="NAME", help="name of the model in the API; default: the folder's name"
    )
    add(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER",
        help=("also serve these adapters, as model NAME: a PEFT folder, or a run with lora.rank; "
"repeat it for several"),
    )  # fmt: skip
    add(
        "--max-loras",
        type=int,
        metavar="N",
        help="maximum number of adapters loaded at the same time (default: the number of --adapter options)",
    )
    add(
        "--max-lora-rank",
        type=int,
        metavar="R",
        help="largest rank of adapters that are loaded later; default: 16",
    )
    add(
        "--allow-runtime-lora-updating", action="store_true",
        help="clients may load and unload adapters: POST /v1/load_lora_adapter, with paths on this machine",
    )  # fmt: skip
    add("--rows", type=int, default=64, metavar="N", help="completions sampled at a time, per replica")
    add(
        "--max-length", type=int, metavar="N",
        help=f"tokens of a prompt and its completion; default: the model's positions, at most {DEFAULT_LENGTH}",
    )  # fmt: skip
    add("--prefix-cache-gb", type=float, default=0.0, metavar="GB",
        help=("memory per rank for keys and values of earlier requests, which later requests with "
"the same prefix reuse"))  # fmt: skip
    add(
        "--max-requests",
        type=int,
        default=1024,
        metavar="N",
        help=("maximum number of completions in progress; further requests get status 429"),
    )
    add(
        "--tool-call-format",
        default="auto",
        metavar="NAME",
        help="format of tool calls (rl.tool_call_format)",
    )
    add("--nproc", type=int, metavar="N", help="start N processes; torchrun works too")
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N",
        help="tensor-parallel size; replicas share the requests")  # fmt: skip
    add_tokenizer_options(parser)
    add_speculation_arguments(parser)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def run_serve(args: Arguments) -> int:
    for option in ("rows", "max_requests"):
        if getattr(args, option) < 1:
            raise ConfigError(
                f"--{option.replace('_', '-')} is {getattr(args, option)}; it must be at least 1"
            )
    if not 0 <= args.prefix_cache_gb < float("inf"):
        raise ConfigError(f"--prefix-cache-gb is {args.prefix_cache_gb}; it must be at least 0")
    if args.nproc is not None:
        from megalith.launch.launcher import launch

        return launch(args.nproc, ["-m", "megalith", "serve", *without_nproc(args)])
    from megalith.launch.launcher import this_process
    from megalith.serve.http_process import HttpProcess

    process, split = this_process(), args.tensor_model_parallel_size
    if process.world_size == 1 != split:
        raise ConfigError(
            f"--tensor-model-parallel-size is {split}, but there is one process; start {split} processes with "
            f"--nproc {split}"
        )
    key = _read_key(args.api_key_file)
    if not process.is_first:
        return _serve_ranks(args, None, None)
    with HttpProcess() as server:
        return _serve_ranks(args, server, key)


def _serve_ranks(args: Arguments, server: HttpProcess | None, key: str | None) -> int:
    """Load the model, and run this rank's engine. The first rank has the process of the server."""
    from megalith.data.chat.chat_template import template_of
    from megalith.generation.grammar import GrammarCompiler
    from megalith.generation.live_engine import LiveEngine
    from megalith.hardware import pick_device
    from megalith.launch.launcher import end_distributed, init_distributed, this_process
    from megalith.serve.chat_format import ChatFormat
    from megalith.training.loading import load_with_tokenizer

    process, split = this_process(), args.tensor_model_parallel_size
    device, is_alone = pick_device(args.device, process.local_rank), process.world_size == 1
    model, tokenizer = load_with_tokenizer(
        args.checkpoint, device if is_alone else "cpu", show_progress=process.is_first
    )
    tokenizer = checkpoint_tokenizer(args, tokenizer, model.config.vocab_size)
    template = template_of(tokenizer)
    chat = None if template is None else ChatFormat(tokenizer, template, args.tool_call_format)
    positions = model.config.max_position_embeddings
    sizes = dict(max_rows=args.rows, max_tokens=args.max_length or min(positions, DEFAULT_LENGTH))
    sizes |= dict(prefix_cache_bytes=int(args.prefix_cache_gb * 1e9))
    if sizes["max_tokens"] > positions:
        raise ConfigError(
            f"--max-length is {args.max_length}, but the model has {positions} positions; lower --max-length"
        )
    sizes["speculation"] = speculation_of(args, tokenizer)
    stop = tokenizer.stop_ids
    grammars = GrammarCompiler(tokenizer)
    adapters = _Adapters(args, model)
    if is_alone:
        engine, options = _single_process_engine(model, sizes, adapters), dict(load_adapter=adapters.load)
        live = LiveEngine(engine, stop, tokenizer.vocab_size, grammars=grammars, **options)
        return _serve(args, server, live, tokenizer, chat, key)
    init_distributed(device)
    try:
        engine, group = _engine_of_ranks(model, sizes, device, split, adapters)
        live = LiveEngine(engine, stop, tokenizer.vocab_size, group, grammars, load_adapter=adapters.load)
        del model
        if process.is_first:
            return _serve(args, server, live, tokenizer, chat, key)
        for number in handled_stop_signals():  # the first rank ends the others
            signal.signal(number, signal.SIG_IGN)
        if device.type == "cuda":
            live.warm_up()
        live.follow()
        return 0
    finally:
        end_distributed()


def _read_key(path: str | None) -> str | None:
    """Return the API key in a file. Raises ConfigError if it has none."""
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file {path} cannot be read ({error}); pass a file with one line"
        ) from None
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(f"--api-key-file {path} has no key; write one line without spaces")
    return key


class _Adapters:
    """The adapters of --adapter, and the slots for adapters that are loaded later."""

    def __init__(self, args: Arguments, model: Transformer):
        """Read the adapters. Raise ConfigError if one does not fit the model."""
        from megalith.bridge.adapters.open_adapters import fingerprint_of

        self._args, self._config = args, model.config
        self._fingerprint = fingerprint_of(model) if args.adapter or args.max_loras else None
        self._pairs: list[dict] = []
        self.sources: dict[str, str] = {}
        for value in args.adapter:
            name, equals, folder = value.partition("=")
            if not (name and equals and folder):
                raise ConfigError(
                    f"--adapter is {value!r}; write NAME=FOLDER, such as --adapter sql=runs/sql"
                )
            if name in (*self.sources, _served_name(args)):
                raise ConfigError(f"--adapter {value} has the name of another model; choose a different one")
            self.sources[name] = folder
        self._check_options()
        if (self.sources or args.max_loras) and model.has_adapters:
            raise ConfigError(
                f"{args.checkpoint} is a run with adapters; serve its base model with --adapter "
                f"NAME={args.checkpoint}"
            )
        self._pairs = [self.load(folder) for folder in self.sources.values()]

    def _check_options(self) -> None:
        args = self._args
        if args.max_loras is not None and args.max_loras < max(1, len(self.sources)):
            raise ConfigError(
                f"--max-loras is {args.max_loras}, but there are {len(self.sources)} adapters; raise --max-loras to "
                f"{max(1, len(self.sources))} or more"
            )
        if args.max_lora_rank is not None and args.max_lora_rank < 1:
            raise ConfigError(f"--max-lora-rank is {args.max_lora_rank}; it must be at least 1")
        if args.allow_runtime_lora_updating and not args.max_loras:
            raise ConfigError("--allow-runtime-lora-updating needs room for adapters; set --max-loras")
        if args.max_lora_rank is not None and not args.allow_runtime_lora_updating:
            raise ConfigError(
                "--max-lora-rank is for adapters that are loaded later; add --allow-runtime-lora-updating, or leave "
                "--max-lora-rank out"
            )

    def load(self, folder: str) -> dict:
        """Load the adapter in a folder. Returns the matrices A and B, keyed by adapted matrix."""
        from megalith.bridge.adapters.adapter_folder import load_adapter_pairs

        return load_adapter_pairs(folder, self._args.checkpoint, self._config, self._fingerprint)

    def slots(self) -> SlotSizes | None:
        """Return the engine's adapter slots and their ranks, or None without adapters."""
        from megalith.bridge.adapters.adapter_folder import slot_ranks
        from megalith.generation.engine_model import SlotSizes

        args = self._args
        if not self.sources and not args.max_loras:
            return None
        ranks: dict[str, int] = {}
        if args.allow_runtime_lora_updating:
            ranks = slot_ranks(self._config, args.max_lora_rank or DEFAULT_RANK)
        for pairs in self._pairs:
            for name, (a, _) in pairs.items():
                ranks[name] = max(ranks.get(name, 0), a.shape[-2])
        return SlotSizes(args.max_loras or len(self.sources), ranks)

    def fill(self, engine: Engine) -> None:
        """Put the adapters into the engine's slots, in order from 1."""
        for slot, pairs in enumerate(self._pairs, 1):
            engine.set_adapter(slot, pairs)
        self._pairs = []


def _served_name(args: Arguments) -> str:
    return args.served_model_name or Path(args.checkpoint).resolve().name


def _single_process_engine(model: Transformer, sizes: dict[str, Any], adapters: _Adapters) -> Engine:
    from megalith.generation.engine import Engine
    from megalith.generation.sync import engine_for

    if model.has_adapters:
        return Engine(model.config, model.device, model.compute_dtype, model=model, **sizes)
    engine = engine_for(model, **sizes, adapter_slots=adapters.slots())
    adapters.fill(engine)
    return engine


def _engine_of_ranks(model: Transformer, sizes: dict[str, Any], device, split: int, adapters: _Adapters):
    """Return this rank's engine with the model's weights sharded over `split` ranks, and the axis of all ranks."""
    from megalith.config import ParallelConfig
    from megalith.generation.engine import Engine
    from megalith.launch.launcher import this_process
    from megalith.parallel.mesh import build_mesh

    if model.has_adapters:
        raise ConfigError(
            "models with adapters are served only by a single process; serve the base with --adapter NAME=FOLDER, "
            "or merge the adapters (megalith lora merge)"
        )
    parallel = ParallelConfig(tensor_model_parallel_size=split)
    mesh = build_mesh(parallel, this_process().world_size, device.type)
    options = dict(tp=mesh.tp, adapter_slots=adapters.slots())
    engine = Engine(model.config, device, model.compute_dtype, **options, **sizes)
    engine.load(model.state_dict().items())
    adapters.fill(engine)
    return engine, mesh.world


def _serve(
    args: Arguments,
    server: HttpProcess,
    live: LiveEngine,
    tokenizer: Tokenizer,
    chat: ChatFormat | None,
    key: str | None,
) -> int:
    """Listen for requests, and run the engine until a signal arrives."""
    from megalith.serve.http_process import ServerSettings
    from megalith.serve.openai_service import LOOPBACK, Access
    from megalith.serve.served_adapters import ServedAdapter

    is_local = args.host in LOOPBACK_HOSTS
    access = Access(key, LOOPBACK if is_local else None, args.max_requests)
    name = _served_name(args)
    loaded = [ServedAdapter(*value.partition("=")[::2], slot) for slot, value in enumerate(args.adapter, 1)]
    settings = ServerSettings(
        args.host, args.port, name, tokenizer, access, args.tool_call_format, loaded, args.allow_runtime_lora_updating
    )  # fmt: skip
    url = server.start(settings, live)
    handlers = {number: signal.signal(number, lambda *_: live.close()) for number in handled_stop_signals()}
    engine = live.engine
    if engine.device.type == "cuda":
        live.warm_up()
    print(
        f"serving {printable(name)} at {url}/v1: {counted(engine.max_rows, 'row')} of {engine.max_tokens:,} tokens"
        + ("" if chat is None else ", with chat" + (" and tools" if chat.supports_tools else "")),
        flush=True,
    )
    if loaded:
        print(f"adapters: {', '.join(printable(one.name) for one in loaded)}", flush=True)
    if not is_local and key is None:
        print("warning: anyone who can reach this address can use the model; set --api-key-file", flush=True)
    try:
        server.run(live)
    finally:
        if (metrics := engine.take_draft_metrics()) is not None:
            print(f"speculative decoding: {metrics}", flush=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0

"""`megalith serve` with several adapters: by the request's model, listed, loaded and unloaded, also by the command."""

import json
import os
import signal
import socket
from pathlib import Path
from threading import Thread

import pytest
from serve.http_client import Client
from serve.test_serve import is_up, wait_for

import megalith
from megalith.bridge.adapters.adapter_folder import export_adapters, load_adapter_pairs, slot_ranks
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.adapters.open_adapters import fingerprint_of
from megalith.cli.main import main
from megalith.data.tokenizers.plain import ByteTokenizer
from megalith.errors import ConfigError
from megalith.generation.engine_model import SlotSizes
from megalith.generation.live_engine import LiveEngine
from megalith.generation.sampling import generate
from megalith.generation.sync import engine_for
from megalith.serve.http_server import HttpServer
from megalith.serve.openai_service import Access, OpenAiService
from megalith.serve.served_adapters import ServedAdapter, ServedAdapters

BODY = {"prompt": "the cat", "max_tokens": 12, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def folders(run, tmp_path: Path) -> Path:
    """A run, two runs of adapters on it, the second one exported to PEFT's format, and both merged."""
    data = {"tokenizer_type": "ByteTokenizer", "seq_length": 64}
    train = {"train_iters": 4, "save_interval": 4, "eval_iters": 0}
    run("base", data=data, train=train)
    for name, rank in (("a", 2), ("b", 4)):
        lora = {"rank": rank, "alpha": 64.0, "targets": ["linear_qkv", "linear_fc2"]}
        step = tmp_path / "base/checkpoints/step_00000004"
        sections = dict(data=data, train=train | {"seed": rank}, model={"init_from": str(step)}, lora=lora)
        run(name, **sections, optim={"lr": 0.05})
        merge(tmp_path / name, tmp_path / f"{name}_merged", show_progress=False)
    export_adapters(tmp_path / "b", tmp_path / "b_peft")
    return tmp_path


def expected(folder: Path) -> list[int]:
    model = megalith.load(folder)
    (ids,) = generate(model, [ByteTokenizer().encode("the cat")], max_new_tokens=12, temperature=0)
    return ids[len("the cat") :]


def test_the_command_serves_each_adapter_under_its_name(folders: Path, capsys) -> None:
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    results, with_model = {}, lambda name: BODY if name is None else BODY | {"model": name}

    def use(port: int) -> None:
        client = Client(port)
        wait_for(lambda: is_up(client))
        clients = []
        for name in (None, "base", "one", "two", "three"):
            act = lambda name=name: results.update({name: client.post("/v1/completions", with_model(name))})  # noqa: E731
            clients.append(Thread(target=act))
            clients[-1].start()
        for thread in clients:
            thread.join()
        results["models"] = client.get("/v1/models")
        results["load"] = client.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"})
        os.kill(os.getpid(), signal.SIGUSR1)

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    thread = Thread(target=use, args=(port,))
    thread.start()
    options = ["--port", str(port), "--rows", "3", "--device", "cpu", "--tokenizer-type", "ByteTokenizer"]
    adapters = ["--adapter", f"one={folders / 'a'}", "--adapter", f"two={folders / 'b_peft'}"]
    assert main(["serve", str(folders / "base"), *options, *adapters]) == 0
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    merged = {"one": "a_merged", "two": "b_merged"}
    for name in (None, "base", "one", "two"):
        status, value = results[name]
        assert status == 200 and value["model"] == (name or "base")
        assert value["choices"][0]["token_ids"] == expected(folders / merged.get(name, "base"))
    assert (
        len({json.dumps(results[name][1]["choices"][0]["token_ids"]) for name in ("base", "one", "two")}) == 3
    )
    assert results["three"][0] == 404 and "the server has base, one, two" in str(results["three"][1])
    cards = results["models"][1]["data"]
    assert [(one["id"], one.get("parent")) for one in cards] == [
        ("base", None),
        ("one", "base"),
        ("two", "base"),
    ]
    assert results["load"][0] == 404
    assert "adapters: one, two" in capsys.readouterr().out


def test_adapters_are_loaded_replaced_and_unloaded_while_requests_run(folders: Path) -> None:
    model = megalith.load(folders / "base")
    fingerprint = fingerprint_of(model)
    load = lambda path: load_adapter_pairs(path, folders / "base", model.config, fingerprint)  # noqa: E731
    sizes = SlotSizes(2, slot_ranks(model.config, 4))
    engine = engine_for(model, max_rows=4, max_tokens=64, adapter_slots=sizes)
    engine.set_adapter(1, load(folders / "a"))
    live = LiveEngine(engine, load_adapter=load)
    adapters = ServedAdapters(live, "base", [ServedAdapter("one", "a", 1)], may_change=True)
    service = OpenAiService(live, ByteTokenizer(), None, "base", Access(), adapters=adapters)
    server, thread = HttpServer(service), Thread(target=live.run)
    server.start()
    thread.start()
    client = Client(server.port)

    def change(verb: str, **body: object) -> tuple[int, str]:
        status, value = client.post(f"/v1/{verb}_lora_adapter", body)
        return status, value if status == 200 else value["error"]["message"]

    def tokens(name: str) -> list[int]:
        return client.post("/v1/completions", BODY | {"model": name})[1]["choices"][0]["token_ids"]

    try:
        peft, other = str(folders / "b_peft"), str(folders / "a")
        status, message = change("load", lora_name="two", lora_path=peft)
        assert (status, message) == (200, "Success: LoRA adapter 'two' added successfully.")
        assert tokens("two") == expected(folders / "b_merged") and tokens("one") == expected(
            folders / "a_merged"
        )
        assert change("load", lora_name="two", lora_path=peft)[1].startswith(
            "the adapter 'two' is loaded already"
        )
        assert "all 2 slots are in use" in change("load", lora_name="three", lora_path=peft)[1]
        assert change("load", lora_name="two", lora_path=other, load_inplace=True)[0] == 200
        assert tokens("two") == expected(folders / "a_merged")
        assert change("unload", lora_name="one")[0] == 200
        assert client.post("/v1/completions", BODY | {"model": "one"})[0] == 404
        assert change("unload", lora_name="one") == (404, "there is no adapter 'one'; the server has two")
        for body, message in (
            ({"lora_name": "three", "lora_path": str(folders / "nowhere")}, "cannot be loaded"),
            ({"lora_name": "three"}, "a request must have both lora_name and lora_path"),
            ({"lora_name": "base", "lora_path": peft}, "is the name of the base model"),
            ({"lora_name": 3, "lora_path": peft}, "lora_name is 3; it must be text"),
            ({"lora_name": "x", "lora_path": peft, "pinned": True}, "'pinned' is not supported"),
        ):
            status, text = change("load", **body)
            assert status == 400 and message in text
        assert [one["id"] for one in client.get("/v1/models")[1]["data"]] == ["base", "two"]
        assert change("load", lora_name="one", lora_path=peft)[0] == 200
        assert tokens("one") == expected(folders / "b_merged")
    finally:
        live.close()
        thread.join()
        server.close()


def test_options_that_do_not_fit_each_other_are_refused(folders: Path, capsys) -> None:
    base = str(folders / "base")
    for options, message in (
        (["--adapter", "one"], "--adapter is 'one'; write NAME=FOLDER"),
        (["--adapter", f"base={base}"], "has the name of another model"),
        (
            ["--adapter", f"x={folders / 'a'}", "--adapter", f"x={folders / 'a'}"],
            "has the name of another model",
        ),
        (["--max-loras", "0"], "--max-loras is 0, but there are 0 adapters; raise --max-loras to 1 or more"),
        (["--allow-runtime-lora-updating"], "needs room for adapters; set --max-loras"),
        (["--max-lora-rank", "8"], "is for adapters that are loaded later"),
        (["--adapter", f"x={base}"], "is from a run without adapters"),
    ):
        assert main(["serve", base, "--device", "cpu", "--tokenizer-type", "ByteTokenizer", *options]) != 0
        assert message in " ".join(capsys.readouterr().err.split())
    run = str(folders / "a")
    assert (
        main(["serve", run, "--device", "cpu", "--tokenizer-type", "ByteTokenizer", "--max-loras", "1"]) != 0
    )
    assert "is a run with adapters; serve its base" in " ".join(capsys.readouterr().err.split())


def test_chat_and_generate_merge_an_adapter(folders: Path, capsys) -> None:
    words = [
        "--prompt",
        "the cat",
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
        "--device",
        "cpu",
        "--json",
    ]
    for folder, merged in (("a", "a_merged"), ("b_peft", "b_merged")):
        options = ["--tokenizer-type", "ByteTokenizer", "--adapter", str(folders / folder)]
        assert main(["generate", str(folders / "base"), *options, *words]) == 0
        out = capsys.readouterr().out.strip().splitlines()[-1]
        assert json.loads(out)["ids"] == expected(folders / merged)
    with pytest.raises(ConfigError, match="already has adapters; pass its base"):
        from megalith.training.loading import load_with_adapter

        load_with_adapter(folders / "a", folders / "b", "cpu", False)

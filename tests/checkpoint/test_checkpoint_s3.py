"""Over S3's own protocol, from a server of this machine: saved by TP2, gone on with by PP2; and what goes wrong."""

import socket

import pytest
from s3_job import read_again_behind_a_fork, s3_config, train_and_save
from s3_store import s3_store

from megalith.checkpoint import list_steps, open_checkpoint, open_existing
from megalith.errors import CheckpointError
from megalith.remote import _store, open_location

pytest.importorskip("s3fs", reason="pip install 'megalith[test]'")


@pytest.fixture(scope="module")
def environment():
    """Environment of the server's clients."""
    with s3_store(AWS_MAX_ATTEMPTS="1") as values:
        yield values


@pytest.mark.full
def test_saved_by_two_ranks_of_tp_and_gone_on_with_by_two_of_pp(environment, pool, corpus, tmp_path):
    url, here = "s3://bucket/runs/gpt", tmp_path / "here"
    for ending in (".bin", ".idx"):
        open_location(f"s3://bucket/corpus{ending}").send(open_location(corpus + ending))
    tp, pp = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}

    def job(layout: dict, until: int, **checkpoint: object) -> tuple[list[float], list[str], str]:
        config = s3_config("s3://bucket/corpus", layout, str(here), 4, **checkpoint)
        return pool.run(train_and_save, environment, config, until, size=2)[0]

    straight, _, _ = train_and_save({}, s3_config(corpus, {}, str(tmp_path / "straight"), 4), 4)
    losses, told, failure = job(tp, 2, save=url, async_save=True)
    assert failure == "" and len(told) == 2 and f"saved {url}/checkpoints/step_00000002" in told[-1]
    more, told, failure = job(pp, 4, save=url, load=url, keep_last=1)
    assert failure == "" and losses + more == pytest.approx(straight, rel=1e-5)
    assert list(list_steps(open_location(url) / "checkpoints")) == [4]
    assert (open_location(url) / "checkpoints" / "latest").read_bytes() == b"step_00000004\n"
    ours = open_existing(url)
    (model,) = [name for name in ours.folder.sizes() if "model-00000" in name]
    content = (ours.folder / model).read_bytes()
    (ours.folder / model).write(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        CheckpointError, match=r"s3://bucket/.*model-00000-000.safetensors is damaged: .* the SHA-256"
    ):
        open_checkpoint(f"{url}/checkpoints/step_00000004")


def test_a_dataset_that_was_read_before_a_fork_is_read_behind_it(environment, pool, corpus):
    """As torch's DataLoader does it: the child has the parent's object, and none of its connections' threads."""
    for ending in (".bin", ".idx"):
        open_location(f"s3://bucket/forked{ending}").send(open_location(corpus + ending))
    assert pool.run(read_again_behind_a_fork, environment, "s3://bucket/forked", corpus, size=1) == [0]


def test_credentials_a_bucket_or_a_server_that_are_not_there_are_a_sentence(
    environment, tiny_run, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    run = tiny_run().train(1)
    for url, changed, told in (
        ("s3://none/run", {}, "The specified bucket does not exist"),
        (
            "s3://bucket/run",
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
            "NoCredentialsError: Unable",
        ),
        ("s3://bucket/run", {"AWS_ENDPOINT_URL": nobody}, "EndpointConnectionError: Could not connect"),
    ):
        with monkeypatch.context() as patch:
            for name, value in changed.items():
                patch.setenv(name, value) if value else patch.delenv(name)
            _store.cache_clear()
            with pytest.raises(
                CheckpointError, match=rf"could not be saved: {told}.*Check the bucket, its cred"
            ):
                run.save(open_location(url))
            if changed:
                with pytest.raises(CheckpointError, match=rf"{url} cannot be fetched: {told}"):
                    open_checkpoint(url)
    _store.cache_clear()

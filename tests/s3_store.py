"""An S3 server on this machine, with one bucket, for tests of object stores."""

import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from megalith.remote import _store


@contextmanager
def s3_store(
    bucket: str = "bucket", in_front: Callable[[str, int], str] | None = None, **more: str
) -> Iterator[dict[str, str]]:
    """Start the server, set the environment of its clients, and create a bucket. Skip the test without moto or s3fs.

    Servers of a process share their objects, so those of an earlier one are removed.

    Args:
        bucket: its name.
        in_front: starts a proxy in front of the server's host and port, and returns the proxy's URL.
        more: further environment variables.

    Yields:
        The environment.
    """
    pytest.importorskip("s3fs", reason="pip install 'megalith[test]'")
    server = pytest.importorskip("moto.server", reason="pip install 'megalith[test]'")
    s3 = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    host, port = s3.get_host_and_port()
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"", timeout=60).close()
    values = {
        "AWS_ENDPOINT_URL": in_front(host, port) if in_front else f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true", **more,
    }  # fmt: skip
    _store.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        _store("s3", os.getpid()).mkdir(bucket)
        yield values
    _store.cache_clear()
    s3.stop()

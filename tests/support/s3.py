"""A real server for S3's protocol."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def serving_s3() -> Iterator[str]:
    """The URL of a bucket's folder there; meanwhile the environment names server and keys."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        bucket = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        urllib.request.urlopen(bucket, timeout=30).close()
        yield "s3://bucket/leanq"
    server.stop()

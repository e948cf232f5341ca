"""Clients that stop reading, over real sockets and real workers.

A reader who stalls is felt through the kernel's and the protocol's own buffers first, so the
tests make every event large (HTTP) or those buffers small (gRPC). While the socket is still open
and still unread, the request must be over, its pages back, and everybody else served as before.
"""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from clients.grpc_by_reflection import ReflectedClient
from serving import Serving, serving, small_config, wait_until
from tiny import tiny_llama

STREAM_BUFFER = 32  # tokens
PROMPTS = 8
MAX_TOKENS = 1500
# Repeated in every event: the kernel takes 3 MB for a reader who never reads.
LONG_NAME = "tiny-" + "x" * 4000
GROWTH_BYTES = 16 << 20  # the whole stream has 48 MB
STALL_S = 60
# Otherwise grpc's client takes a megabyte of 12-byte messages before it has to wait.
NO_READ_AHEAD = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Serving]:
    folder = tiny_llama(tmp_path_factory.mktemp("slow") / "tiny", max_position_embeddings=2048)
    config = small_config(
        folder,
        model={"served_name": LONG_NAME},
        router={"limits": {"stream_buffer": STREAM_BUFFER}},
    )
    with serving(config, app=True) as cluster:
        yield cluster


def slow_readers(cluster: Serving) -> float:
    """How many requests ended because nobody read them."""
    text = httpx.get(f"http://{cluster.endpoints.http}/metrics", trust_env=False).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if "slow_reader" in line.lower() and not line.startswith("#")
    )


def whole_answer(cluster: Serving) -> str:
    """What a client who reads gets."""
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"http://{cluster.endpoints.http}/v1/completions", json=body, timeout=60, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 40
    return answer.json()["choices"][0]["text"]


def resident_bytes() -> int:
    """This process's memory: the router runs in it."""
    pages = int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def stalled_http(address: str) -> socket.socket:
    """A connection that has asked for a long stream and reads nothing of it."""
    host, port = address.split(":")
    body = json.dumps(
        {
            "prompt": [f"prompt {i}" for i in range(PROMPTS)],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
    )
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.connect((host, int(port)))
    stalled.sendall(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    return stalled


def check_over_while_stalled(cluster: Serving, seen: float, expected: str) -> None:
    """The stalled requests end by themselves, and others are served as if they were not there."""
    assert whole_answer(cluster) == expected
    wait_until(lambda: slow_readers(cluster) > seen, STALL_S, what="the slow reader's end")
    cluster.check_all_returned()
    load = httpx.get(f"http://{cluster.endpoints.http}/load", trust_env=False).json()
    assert (load["running"], load["queued"]) == (0, 0)
    assert all(w["in_flight"] == w["reserved_pages"] == 0 for w in load["workers"])
    assert whole_answer(cluster) == expected


def test_a_stalled_http_socket_loses_its_request_and_harms_nobody(cluster: Serving) -> None:
    expected = whole_answer(cluster)
    seen, before = slow_readers(cluster), resident_bytes()
    with stalled_http(cluster.endpoints.http) as stalled:
        check_over_while_stalled(cluster, seen, expected)
        assert resident_bytes() - before < GROWTH_BYTES
        stalled.settimeout(STALL_S)
        received = b"".join(iter(lambda: stalled.recv(1 << 20), b""))
    assert b"[DONE]" not in received
    assert received.count(b'"text":') < PROMPTS * MAX_TOKENS / 2


def test_a_stalled_grpc_stream_loses_its_request_and_harms_nobody(cluster: Serving) -> None:
    expected = whole_answer(cluster)
    seen = slow_readers(cluster)
    client = ReflectedClient(cluster.endpoints.grpc, *NO_READ_AHEAD)
    try:
        fields = {"text": "hi", "max_tokens": MAX_TOKENS, "ignore_eos": True}
        stalled = client.call("tandem.v1.Inference", "Generate", fields, timeout=STALL_S)
        assert next(stalled).chunk.token_ids
        check_over_while_stalled(cluster, seen, expected)
        n_read = 1
        with pytest.raises(grpc.RpcError) as caught:
            for _ in stalled:
                n_read += 1
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert n_read < MAX_TOKENS / 2
    finally:
        client.close()

"""One router over a fake dispatcher for the whole folder, or any server named by environment.

``TANDEM_TEST_HTTP`` (``http://host:port``) and ``TANDEM_TEST_GRPC`` (``host:port``) put a running
server in the fake's place; tests that steer the fake are skipped then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from clients.fake_core import MODEL, ByteCodec, FakeCore

from protocol.config import TandemConfig
from router.app import RouterApp, RouterEndpoints

SECRET = "a secret of the tests"


@dataclass(frozen=True)
class Served:
    """A started router and the fake behind it."""

    app: RouterApp
    core: FakeCore
    endpoints: RouterEndpoints


def make_app(core: FakeCore, codec: ByteCodec, **more) -> RouterApp:
    """A router on free ports over ``core``."""
    config = TandemConfig.model_validate(
        {"model": {"path": "unused", "served_name": "tiny"}, "timing": {"heartbeat_s": 0.05}}
        | {"router": {"limits": {"max_request_bytes": 100_000}}}
    )
    options = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "keepalive_s": 0.2} | more
    return RouterApp(
        config,
        router_id="router-0",
        model=MODEL,
        secret=SECRET,
        codec=codec,
        build_core=lambda: core,
        **options,
    )


@pytest.fixture(scope="session")
def _fake() -> Iterator[Served]:
    codec = ByteCodec()
    core = FakeCore(codec)
    app = make_app(core, codec)
    endpoints = app.start()
    yield Served(app, core, endpoints)
    app.stop()


@pytest.fixture
def served(_fake: Served) -> Served:
    """The fake, with nothing noted and nothing released."""
    if "TANDEM_TEST_HTTP" in os.environ or "TANDEM_TEST_GRPC" in os.environ:
        pytest.skip("needs the fake dispatcher; a real server is under test")
    _fake.core.reset()
    return _fake


@pytest.fixture
def base_url(request: pytest.FixtureRequest) -> str:
    """Where HTTP clients connect."""
    given = os.environ.get("TANDEM_TEST_HTTP")
    if given is None:
        return f"http://{request.getfixturevalue('served').endpoints.http}"
    return given


@pytest.fixture
def grpc_address(request: pytest.FixtureRequest) -> str:
    """Where gRPC clients connect."""
    given = os.environ.get("TANDEM_TEST_GRPC")
    return given or request.getfixturevalue("served").endpoints.grpc


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    # verify=False: loading certificates, which plain HTTP never uses, takes most of a test's time.
    with httpx.Client(base_url=base_url, timeout=60, trust_env=False, verify=False) as client:
        yield client


@pytest.fixture
def sdk(base_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client. It repeats nothing, so that a test sees every answer."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0)
    with client:
        yield client


@pytest.fixture
def model(http: httpx.Client) -> str:
    """The served model's name."""
    return http.get("/v1/models").json()["data"][0]["id"]

"""The servers that this folder's tests talk to.

``fake`` is a router over a fake dispatcher, which tests that ask for ``served`` can steer.
Every other test runs twice: against the fake, and against real workers with a tiny random model
(``workers``), whose pages must all be back when the last test is over. ``TANDEM_TEST_HTTP``
(``http://host:port``) and ``TANDEM_TEST_GRPC`` (``host:port``) put any running server in their
place; what needs the fake is skipped then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
        | {"router": {"limits": {"max_request_bytes": 100_000, "request_body_s": 1.0}}}
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


@dataclass(frozen=True)
class Server:
    """Where clients connect, and the fake behind it where there is one."""

    http: str
    grpc: str
    served: Served | None = None


@contextmanager
def _fake() -> Iterator[Server]:
    codec = ByteCodec()
    core = FakeCore(codec)
    app = make_app(core, codec)
    endpoints = app.start()
    try:
        yield Server(f"http://{endpoints.http}", endpoints.grpc, Served(app, core, endpoints))
    finally:
        app.stop()


@contextmanager
def _workers(folder) -> Iterator[Server]:
    from serving import serving, small_config
    from tiny import tiny_llama

    with serving(small_config(tiny_llama(folder)), app=True) as cluster:
        endpoints = cluster.endpoints
        yield Server(f"http://{endpoints.http}", endpoints.grpc)
        cluster.check_all_returned()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that steer the fake run against it alone, the others against every server."""
    if "server" not in metafunc.fixturenames:
        return
    if "TANDEM_TEST_HTTP" in os.environ:
        kinds = ["named"]
    else:
        kinds = ["fake"] if "served" in metafunc.fixturenames else ["fake", "workers"]
    metafunc.parametrize("server", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Server]:
    """The server of this kind, started once."""
    if request.param == "named":
        yield Server(os.environ["TANDEM_TEST_HTTP"], os.environ.get("TANDEM_TEST_GRPC", ""))
    elif request.param == "fake":
        with _fake() as fake:
            yield fake
    else:
        with _workers(tmp_path_factory.mktemp("model") / "tiny") as workers:
            yield workers


@pytest.fixture
def served(server: Server) -> Served:
    """The fake, with nothing noted and nothing released."""
    if server.served is None:
        pytest.skip("needs the fake dispatcher; another server is under test")
    server.served.core.reset()
    return server.served


@pytest.fixture
def base_url(server: Server) -> str:
    """Where HTTP clients connect."""
    return server.http


@pytest.fixture
def grpc_address(server: Server) -> str:
    """Where gRPC clients connect."""
    if not server.grpc:
        pytest.skip("TANDEM_TEST_GRPC is not set")
    return server.grpc


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

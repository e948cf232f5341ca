"""A worker as a plain process: how it starts, how it ends, and how many threads compute."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from serving import WAIT_S, Core, RemoteWorker, options_of, small_config
from tiny import tiny_llama

from protocol.errors import InvalidArgument


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def test_two_threads_compute_and_sigterm_ends_the_worker_after_its_requests(
    model: Path, tmp_path: Path
) -> None:
    config = small_config(model, mode="colocated", pools={"decode": {"threads": 2}})
    (options,) = options_of(config)
    worker = RemoteWorker(options, tmp_path / "log")
    try:
        assert worker.info.threads == 2
        assert worker.report()["compute_threads"] == 2
        with pytest.raises(InvalidArgument, match="no command is called 'dance'"):
            worker._ask({"do": "dance"})
        with Core(config, worker.info.model) as core:
            core.set_workers([worker.info])
            answer = core.submit(range(4, 200), 60)
            assert answer.first.wait(WAIT_S)
            worker.process.send_signal(signal.SIGTERM)
            assert len(answer.result()) == 60  # drained, not cut off
        assert worker.process.wait(WAIT_S) == 0
    finally:
        worker.stop()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_port_in_use_is_one_sentence_and_exit_2(model: Path, tmp_path: Path) -> None:
    (options,) = options_of(small_config(model, mode="colocated"))
    first = RemoteWorker(options, tmp_path / "first")
    second = None
    try:
        second = RemoteWorker(replace(options, listen=first.info.endpoint), tmp_path / "second")
        with pytest.raises(AssertionError, match="exit 2"):
            _ = second.info
    finally:
        first.stop()
        if second is not None:
            second.stop()
    said = (tmp_path / "second").read_text()
    assert first.info.endpoint in said.splitlines()[-1]
    assert "Traceback" not in said

"""Host pages of a worker's engine: how many, for whom, and that a page comes back as it left."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from cluster.worker.engine import load_engine
from cluster.worker.options import WorkerOptions
from protocol.errors import ConfigError
from protocol.step import CopyKind, PageCopy, StepPlan
from protocol.types import Role


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path: Path = tiny.tiny_llama(tmp_path_factory.mktemp("host") / "tiny")
    return str(path)


def made(folder: str, host_memory: str, role: Role = Role.DECODE) -> WorkerOptions:
    return WorkerOptions(
        f"{role}-0", role, folder, max_model_len=64, kv_memory="4MiB", host_memory=host_memory
    )


def test_a_page_comes_back_from_host_memory_as_it_left(folder: str) -> None:
    engine = load_engine(made(folder, "1MiB"))
    assert engine.host_pages == (1 << 20) // engine.pool.geometry.page_bytes > 1
    page = torch.rand_like(engine.pool.tensor[3])
    engine.pool.tensor[3] = page
    out = PageCopy(CopyKind.TO_HOST, 3, engine.host_pages - 1)
    engine.run(StepPlan({}, (), copies=(out,)))
    engine.pool.tensor[3] = 0
    back = PageCopy(CopyKind.FROM_HOST, engine.host_pages - 1, 5)
    engine.run(StepPlan({}, (), copies=(back,)))
    assert torch.equal(engine.pool.tensor[5], page)


def test_a_cpu_has_none_by_itself_and_a_prefill_worker_needs_none(folder: str) -> None:
    assert load_engine(made(folder, "auto")).host_pages == 0
    assert load_engine(made(folder, "0")).host_pages == 0
    assert load_engine(made(folder, "1MiB", Role.PREFILL)).host_pages == 0


def test_a_wrong_size_names_its_own_field(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"kv\.host_memory 'lots' is none of") as caught:
        load_engine(made(folder, "lots"))
    assert caught.value.field == "kv.host_memory"

"""``tandem serve`` as a person meets it: it comes up, answers, says how it is, and leaves nothing.

One cluster for the module; the test that ends it comes last.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
from served import Served, processes_of, tandem, write_config
from tiny import reference_generate

from cluster.control.processes import alive, identify

PROMPT = list(range(10, 50))  # two pages and a half


def complete(url: str, n: int = 12) -> dict:
    """One greedy completion of token ids."""
    answer = httpx.post(
        f"{url}/completions",
        json={"model": "tiny", "prompt": PROMPT, "max_tokens": n, "temperature": 0},
        timeout=30,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_completion_by_http_is_the_models_own(served: Served, model: Path) -> None:
    from tokenizers import Tokenizer

    answer = complete(served.where["url"])
    expected = reference_generate(model, PROMPT, 12, ignore_eos=False)
    text = Tokenizer.from_file(str(model / "tokenizer.json")).decode(expected)
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_what_each_worker_chose_at_its_start_is_said_with_the_reason(served: Served) -> None:
    for worker in served.where["workers"]:
        engine, budget = worker["notes"]
        assert "attention: " in engine and "passed over: " in engine
        assert budget == "max_num_batched_tokens 128, max_num_seqs 8: configured"


def test_status_json_shows_ready_workers_with_all_pages_back(served: Served) -> None:
    done = tandem(served.home, "status", "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    workers = {w["worker_id"]: w for w in status["workers"]}
    assert {(w["role"], w["state"]) for w in workers.values()} == {
        ("prefill", "ready"),
        ("decode", "ready"),
    }
    assert all(identify(w["pid"]) for w in workers.values())
    assert [r["http"] for r in status["routers"]] == [served.where["http"]]
    assert all(w["load"]["free_pages"] == w["load"]["total_pages"] for w in workers.values())


def test_status_for_people_names_every_worker(served: Served) -> None:
    done = tandem(served.home, "status", str(served.config))
    assert done.returncode == 0, done.stderr
    assert "prefill-0" in done.stdout and "decode-0" in done.stdout
    assert served.where["grpc"] in done.stdout


def test_admin_calls_without_the_clusters_token_are_refused(served: Served, tmp_path: Path) -> None:
    done = tandem(tmp_path, "status", "--grpc", served.where["grpc"])
    assert done.returncode == 1
    assert "token" in done.stderr


def test_a_second_cluster_of_the_same_name_is_refused(served: Served) -> None:
    done = tandem(served.home, "serve", str(served.config))
    assert done.returncode == 2
    assert "runs already" in done.stderr and f"down --name {served.name}" in done.stderr


def test_a_used_port_is_one_sentence(served: Served, model: Path) -> None:
    other = write_config(served.home, model, "other")
    done = tandem(served.home, "serve", str(other), "--set", f"router.http={served.where['http']}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"router.http: {served.where['http']} is in use" in done.stderr


def test_interrupt_ends_everything_that_was_started(served: Served) -> None:
    record = served.record()
    processes = processes_of(record)
    workers = {w["pid"] for w in served.where["workers"]}
    assert workers <= {p.pid for p in processes}
    assert served.end(signal.SIGINT) == 0
    assert not [p for p in processes if alive(p)]
    assert not processes_of(record)
    assert not Path(record["ray"]["folder"]).exists()
    assert not served.record_file().exists()
    done = tandem(served.home, "status")
    assert done.returncode == 1 and "no cluster runs" in done.stderr

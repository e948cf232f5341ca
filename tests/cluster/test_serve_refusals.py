"""What ``tandem serve`` refuses before it starts anything: one sentence, exit code 2."""

from __future__ import annotations

from pathlib import Path

from served import tandem, write_config


def refused(home: Path, *arguments: str) -> str:
    """The one line that the command says."""
    done = tandem(home, "serve", *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_missing_model(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "models" / "nothing", "absent")
    line = refused(tmp_path, str(config))
    assert "model.path" in line and "no such folder" in line
    assert "`tandem model fetch smollm2-135m` gets a small one" in line
    assert "fetch nothing" not in line


def test_a_model_without_weights(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((model / "config.json").read_text())
    config = write_config(tmp_path, tmp_path / "empty", "empty")
    assert "no .safetensors weights" in refused(tmp_path, str(config))


def test_longer_than_the_model(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, "long")
    line = refused(tmp_path, str(config), "--set", "model.max_model_len=9999999")
    assert "model.max_model_len: 9999999 is longer than the" in line


def test_damaged_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGML")
    line = refused(tmp_path, str(write_config(tmp_path, file, "gguf")))
    assert f"{file}: not a GGUF file" in line


def test_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "typo.yaml"
    file.write_text("model: {path: m}\nrouter:\n  htp: 127.0.0.1:1\n")
    line = refused(tmp_path, str(file))
    assert f"{file}:3:3" in line and "did you mean 'http'" in line


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path, str(tmp_path / "nowhere.yaml"))


def test_two_fronts_on_one_port(tmp_path: Path, model: Path) -> None:
    config = write_config(
        tmp_path, model, "twice", router={"http": "127.0.0.1:18431", "grpc": "127.0.0.1:18431"}
    )
    assert "is router.http already" in refused(tmp_path, str(config))


def test_a_transport_that_joins_no_processes(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, "looped", kv={"transport": "loopback"})
    assert "kv.transport" in refused(tmp_path, str(config))


def test_down_with_nothing_running_says_so(tmp_path: Path) -> None:
    done = tandem(tmp_path, "down", "--name", "ghost")
    assert done.returncode == 0
    assert "ghost: nothing runs" in done.stderr

"""The command line as a process: sources of options, unknown flags, the smoke script, the demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ServerProcess, free_port

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """That of a child process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


class BareServer(ServerProcess):
    """``python -m sglang_lite`` without a word: every option comes from the environment."""

    def __init__(self, port: int, settings: dict[str, str], log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang_lite"], stdout=output, stderr=output, env=environment(**settings)
            )


def server_info(server: ServerProcess) -> Any:
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=30) as response:
        return json.loads(response.read())


def test_options_of_every_source_reach_the_server(
    smoke_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C009, C010, C977: the command line wins over the environment, and that over the file."""
    file = tmp_path / "server.yaml"
    file.write_text("max-total-tokens: 1k\nmax-running-requests: 5\nfuture-setting: 7\n", encoding="utf-8")
    monkeypatch.setenv("SGLANG_LITE_PORT", "1")
    monkeypatch.setenv("SGLANG_LITE_MAX_RUNNING_REQUESTS", "6")
    arguments = [
        "--page-size=8",
        f"--model-path={smoke_model}",
        "--some-future-flag",
        "3",
        "--attention-backend",
        "fa3",
        "--json-model-override-args",
        '{"max_position_embeddings": 24}',
    ]
    with ServerProcess([*arguments, "--config", str(file)], tmp_path / "log") as server:
        server.wait_ready()
        info = server_info(server)
    assert info["page_size"] == 8
    assert info["context_length"] == 24
    assert info["port"] == server.port
    assert info["max_running_requests"] == 6
    assert info["max_total_tokens"] == 1000
    assert info["unknown_flags"] == {"future-setting": "7", "some-future-flag": "3"}
    assert info["ignored_flags"] == {"attention-backend": "fa3"}
    assert server.output.count("--some-future-flag") == 1


def test_port_of_the_environment_alone(smoke_model: Path, tmp_path: Path) -> None:
    """C977, and C973: no sub-command serves."""
    port = free_port()
    settings = {
        "SGLANG_LITE_MODEL_PATH": str(smoke_model),
        "SGLANG_LITE_PORT": str(port),
        "SGLANG_LITE_DEVICE": "cpu",
        "SGLANG_LITE_MAX_TOTAL_TOKENS": "1024",
    }
    with BareServer(port, settings, tmp_path / "log") as server:
        server.wait_ready()
        assert server_info(server)["port"] == port
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(30) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["serve", "--model-path", "m", "--device", "toaster"], 2, "choose from 'auto', 'cpu', 'cuda'"),
        (["serve", "--model-path", "m", "--runtime-backend", "cuda"], 2, "use --device"),
        (["frobnicate", "--device", "cpu"], 2, "unknown sub-command 'frobnicate'"),
        (["serve", "--model-path", "/nonexistent", "--device", "cuda"], 1, "--device cuda"),
        (["serve", "--model-path", "m", "--device", "cpu", "--tp-size", "2"], 1, "only tp_size=1"),
    ],
)
def test_wrong_starts_end_with_one_line(arguments: list[str], code: int, expected: str) -> None:
    """C005, C007, C008, C012, C973"""
    command = [sys.executable, "-m", "sglang_lite", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=ROOT)
    assert result.returncode == code
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_smoke_script() -> None:
    """C001 by the script that operators run."""
    result = subprocess.run(
        [ROOT / "ops" / "smoke.sh"], capture_output=True, text=True, timeout=110, env=environment(PYTHON=sys.executable)
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "smoke: ok"


@pytest.mark.demo_model
@pytest.mark.timeout(400)
def test_demo_answers_and_stops(demo_model: Path) -> None:
    """What ``KEEP_RUNNING=0 make demo`` runs."""
    result = subprocess.run(
        [sys.executable, "-m", "sglang_lite.demo"],
        capture_output=True,
        text=True,
        env=environment(KEEP_RUNNING="0"),
        cwd=ROOT,
        timeout=380,
    )
    assert result.returncode == 0, result.stderr
    assert "Gravity is a fundamental" in result.stdout
    assert "curl http://127.0.0.1:" in result.stdout
    assert "from openai import OpenAI" in result.stdout


def test_demo_fails_when_the_server_does(tmp_path: Path) -> None:
    """The exit code is not 0 without text, and the server's own words are shown."""
    result = subprocess.run(
        [sys.executable, "-m", "sglang_lite.demo"],
        capture_output=True,
        text=True,
        env=environment(KEEP_RUNNING="0", SGLANG_LITE_TP_SIZE="2"),
        cwd=ROOT,
        timeout=100,
    )
    assert result.returncode == 1
    assert "only tp_size=1" in result.stderr

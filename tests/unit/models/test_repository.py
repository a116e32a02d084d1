"""Model names become directories: local path, Hugging Face cache layout, download."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from sglang_lite.models.repository import cache_directory, find_cached, resolve_model_path
from sglang_lite.types import StartupError


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that the environment points at; the network is never used."""
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return tmp_path / "hub"


def add_snapshot(hub: Path, repo_id: str, commit: str, branch: str | None) -> Path:
    folder = hub / ("models--" + repo_id.replace("/", "--"))
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    if branch is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / branch).write_text(commit)
    return snapshot


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(StartupError, match=r"model path is not a local directory: .*model\.gguf is a file"):
        resolve_model_path(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["/no/such/directory", "./nothing", "a/b/c", "", "../x", "a b"])
def test_a_missing_path_is_named(name: str) -> None:
    with pytest.raises(StartupError, match=f"model path is not a local directory: {name}"):
        resolve_model_path(name)


def test_a_cached_repository_needs_no_network(hub_cache: Path) -> None:
    main = add_snapshot(hub_cache, "Qwen/Qwen3-0.6B", "c0ffee", "main")
    other = add_snapshot(hub_cache, "Qwen/Qwen3-0.6B", "beef", "v1")
    assert resolve_model_path("Qwen/Qwen3-0.6B") == main
    assert resolve_model_path("Qwen/Qwen3-0.6B", revision="v1") == other
    assert resolve_model_path("Qwen/Qwen3-0.6B", revision="c0ffee") == main
    assert find_cached("Qwen/Qwen3-0.6B", "absent") is None


def test_an_interrupted_download_does_not_count_as_cached(hub_cache: Path) -> None:
    snapshot = add_snapshot(hub_cache, "org/name", "c0ffee", "main")
    index = {"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_cached("org/name") is None
    (snapshot / "second.safetensors").write_bytes(b"")
    assert find_cached("org/name") == snapshot
    (snapshot / "config.json").unlink()
    assert find_cached("org/name") is None


def test_the_cache_follows_the_hubs_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "hub"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / "hub"


def test_without_a_client_the_error_says_what_to_install(hub_cache: Path) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_model_path("org/name", revision="v2")
    message = str(caught.value)
    for part in ("org/name at revision v2", str(hub_cache), "pip install huggingface_hub"):
        assert part in message


def test_offline_mode_does_not_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartupError, match="downloads are off"):
        resolve_model_path("org/name")


def install_client(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> list[tuple[str, str | None]]:
    """A stand-in for huggingface_hub that records calls."""
    calls: list[tuple[str, str | None]] = []

    def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.safetensors" in allow_patterns
        assert "*.bin" not in allow_patterns
        calls.append((repo_id, revision))
        if isinstance(result, Exception):
            raise result
        return str(result)

    client = types.ModuleType("huggingface_hub")
    client.__dict__["snapshot_download"] = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    return calls


def test_a_repository_that_is_not_cached_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = install_client(monkeypatch, tmp_path)
    assert resolve_model_path("org/name", revision="v2") == tmp_path
    assert calls == [("org/name", "v2")]


def test_a_failed_download_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install_client(monkeypatch, ConnectionError("name resolution failed"))
    with pytest.raises(StartupError, match=r"org/name.*cannot be downloaded: ConnectionError: name resolution failed"):
        resolve_model_path("org/name")

"""From what the user calls a model to a local directory: a path, the Hugging Face cache, or a download.

The cache is read by its published layout, so a cached model needs no client library and no network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sglang_lite.models.checkpoint import weight_files
from sglang_lite.types import StartupError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DOWNLOADED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
DEFAULT_REVISION = "main"


def resolve_model_path(name_or_path: str, *, revision: str | None = None, download: bool = True) -> Path:
    """The local directory of a model.

    Args:
        name_or_path: a directory, or a repository id such as ``Qwen/Qwen3-0.6B``.
        revision: branch, tag or commit of the repository; ignored for a directory.
        download: fetch a repository that is not cached.

    Raises:
        StartupError: it is no directory, not cached, and cannot be fetched.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return path
    if path.is_file():
        raise StartupError(
            f"model path is not a local directory: {name_or_path} is a file; pass the directory it is in"
        )
    if not _REPO_ID.fullmatch(name_or_path):
        raise StartupError(
            f"model path is not a local directory: {name_or_path}; pass a directory with config.json and safetensors "
            f"weights, or a Hugging Face repository id (organisation/name)"
        )
    cached = find_cached(name_or_path, revision)
    if cached is not None:
        return cached
    if not download or _is_offline():
        raise _not_available(name_or_path, revision, "downloads are off")
    return _download(name_or_path, revision)


def cache_directory() -> Path:
    """Where the Hugging Face hub cache is: HF_HUB_CACHE, else HF_HOME/hub, else the user's cache directory."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "huggingface" / "hub"


def find_cached(repo_id: str, revision: str | None = None) -> Path | None:
    """The snapshot of a repository in the cache, or None when it is absent or incomplete.

    Layout: ``models--org--name/refs/<branch>`` holds a commit; ``snapshots/<commit>`` holds the files.
    """
    folder = cache_directory() / ("models--" + repo_id.replace("/", "--"))
    wanted = revision or DEFAULT_REVISION
    reference = folder / "refs" / wanted
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
    snapshot = folder / "snapshots" / commit
    return snapshot if _is_complete(snapshot) else None


def _is_complete(snapshot: Path) -> bool:
    """Whether the configuration and every weight file are there; an interrupted download leaves some out."""
    if not (snapshot / "config.json").is_file():
        return False
    try:
        return all(file.is_file() for file in weight_files(snapshot))
    except StartupError:
        return False


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def _not_available(repo_id: str, revision: str | None, reason: str) -> StartupError:
    version = f" at revision {revision}" if revision else ""
    return StartupError(
        f"model path is not a local directory: {repo_id}{version}, it is not in the Hugging Face cache "
        f"{cache_directory()} either, and it cannot be downloaded: {reason}"
    )


def _download(repo_id: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        reason = "huggingface_hub is not installed (pip install huggingface_hub)"
        raise _not_available(repo_id, revision, reason) from error
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=_DOWNLOADED_FILES))
    except Exception as error:
        # The client raises its own errors, those of its HTTP library, and OSError: whichever it is, there is no model.
        raise _not_available(repo_id, revision, f"{type(error).__name__}: {error}") from error

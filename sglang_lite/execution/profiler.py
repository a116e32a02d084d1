"""Profiling the steps of a running executor into a trace that chrome://tracing and Perfetto read."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sglang_lite.execution.base import WrongMomentError
from sglang_lite.types import ProfileOptions, StartupError

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records what the thread that runs the steps does. Every method is called in that thread."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._options = ProfileOptions(output_dir="")
        self._started = 0
        self._steps_left = 0

    @property
    def running(self) -> bool:
        """Whether steps are recorded."""
        return self._profile is not None

    def start(self, options: ProfileOptions) -> None:
        """Record from now on.

        Raises:
            WrongMomentError: it records already.
            StartupError: the directory cannot be written.
        """
        if self.running:
            raise WrongMomentError("profiling is already running; stop it first")
        directory = Path(options.output_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"output_dir {options.output_dir!r} cannot be made: {error}") from error
        if not os.access(directory, os.W_OK):
            raise StartupError(f"output_dir {options.output_dir!r} cannot be written")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities, with_stack=options.with_stack, record_shapes=options.record_shapes
        )
        self._profile.start()
        self._options, self._started = options, _now_ms()
        self._steps_left = options.num_steps

    def step_done(self) -> None:
        """A step ran; the last one that was asked for ends the recording."""
        if not self.running or not self._steps_left:
            return
        self._steps_left -= 1
        if not self._steps_left:
            try:
                self.stop()
            except StartupError as error:  # nobody waits for this end
                logger.error("%s", error)

    def stop(self) -> Path:
        """End the recording and write the trace; returns its file.

        Raises:
            WrongMomentError: nothing is recorded.
            StartupError: the file cannot be written.
        """
        if not self.running:
            raise WrongMomentError("profiling is not running; start it first")
        recorded, self._profile = self._profile, None
        stopped = _now_ms()
        about = {
            "transport": "http",
            "output_dir": self._options.output_dir,
            "started_unix_ms": self._started,
            "stopped_unix_ms": stopped,
            "duration_ms": stopped - self._started,
            "attributes": {"process_id": os.getpid(), "num_steps": self._options.num_steps},
        }
        recorded.add_metadata_json("profile", json.dumps(about))  # taken while it records
        recorded.stop()
        file = self._file(stopped)
        try:
            recorded.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            raise StartupError(f"the trace {file} cannot be written: {error}") from error
        return file

    def _file(self, stopped: int) -> Path:
        """A name that no other replica of this server takes in the same millisecond."""
        name = f"{self._options.prefix}sglang-profile-{self._started}-{stopped}"
        file = Path(self._options.output_dir) / f"{name}.json"
        return file.with_name(f"{name}-{os.getpid()}.json") if file.exists() else file


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

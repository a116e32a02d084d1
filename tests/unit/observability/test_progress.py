"""Lines about what takes seconds at a start."""

from __future__ import annotations

import errno
import io

from sglang_lite.observability.progress import ProgressLine


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_on_a_full_disk_does_not_end_the_start() -> None:
    done = []
    with ProgressLine("loading", FullDisk()) as line:
        for step in range(3):
            line.update(step, 2)
            done.append(step)
    assert done == [0, 1, 2]


def test_one_line_at_the_start_and_one_at_the_end() -> None:
    shown = io.StringIO()
    with ProgressLine("loading", shown) as line:
        for step in range(3):
            line.update(step, 2)
    assert shown.getvalue().splitlines()[0] == "loading ..."
    assert [line.split(" in ")[0] for line in shown.getvalue().splitlines()[1:]] == ["loading: done"]

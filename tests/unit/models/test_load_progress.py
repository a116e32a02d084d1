"""The progress of a load: a bar on terminals, a line now and then elsewhere, silence for short loads."""

from __future__ import annotations

import io

import pytest

from sglang_lite.models import load_progress
from sglang_lite.models.load_progress import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds returned by the clock, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(load_progress.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_gets_one_line_that_is_redrawn(clock: list[float]) -> None:
    stream = Terminal()
    bar = LoadProgress(1000, stream=stream)
    bar.advance(250)
    assert stream.getvalue() == ""
    clock[0] = 1.0
    bar.advance(250)
    assert stream.getvalue().startswith("\rLoading weights [###############               ]  50%")
    assert "\n" not in stream.getvalue()
    bar.advance(500)
    assert stream.getvalue().endswith("\n")
    assert "100%" in stream.getvalue()


def test_elsewhere_long_loads_print_lines(clock: list[float]) -> None:
    stream = io.StringIO()
    bar = LoadProgress(4_000_000_000, stream=stream)
    for second in range(1, 9):
        clock[0] = float(second)
        bar.advance(500_000_000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2  # after five seconds, and at the end
    assert "2.50/4.00 GB" in lines[0]
    assert "100%" in lines[1]


@pytest.mark.parametrize(
    ("stream", "total", "enabled"),
    [(io.StringIO(), 1000, True), (Terminal(), 4_000_000_000, False), (io.StringIO(), 4_000_000_000, False)],
)
def test_silence(stream: io.StringIO, total: int, enabled: bool) -> None:
    LoadProgress(total, enabled=enabled, stream=stream).advance(total)
    assert stream.getvalue() == ""

"""What every benchmark shares: the machine's description, timing of one call, a table, a JSON file.

A benchmark prints one table under the machine it ran on and writes the same numbers as JSON, to
``benchmarks/results/NAME.json`` or to the path given with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine a benchmark ran on: ``cores`` are those this process may use."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    numpy: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, {self.system}, "
            f"Python {self.python}, NumPy {self.numpy}"
        )


def describe_machine() -> Machine:
    """Describe this machine from what the operating system says about it."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available is not None else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=cpu,
        cores=cores,
        memory_gib=round(memory / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        numpy=np.__version__,
    )


@dataclass(frozen=True, slots=True)
class Timing:
    """Distribution of the duration of one call, in microseconds."""

    median_us: float
    p90_us: float
    count: int


def summarize(durations_ns: Sequence[int]) -> Timing:
    """Median and 90th percentile of durations given in nanoseconds; at least one is needed."""
    ordered = sorted(durations_ns)
    return Timing(
        median_us=round(statistics.median(ordered) / 1e3, 2),
        p90_us=round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))] / 1e3, 2),
        count=len(ordered),
    )


def time_calls(function: Callable[[Any], object], arguments: Iterable[Any]) -> Timing:
    """Time ``function(argument)`` once for each argument."""
    clock = time.perf_counter_ns
    durations = []
    for argument in arguments:
        start = clock()
        function(argument)
        durations.append(clock() - start)
    return summarize(durations)


def format_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay out rows under headers; numbers are right-aligned, floats get two decimals."""
    cells = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    widths = [max([len(header), *(len(row[column]) for row in cells)]) for column, header in enumerate(headers)]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if cell[:1].isdigit() or cell[:1] == "-" else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *(line(row) for row in cells)])


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json PATH``."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the numbers (default: results/)")


def publish(
    name: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    json_path: Path | None = None,
    extra: Mapping[str, object] | None = None,
) -> Path:
    """Print the table of benchmark ``name`` under the machine's description and write it as JSON.

    The JSON object holds ``name``, ``machine``, ``rows`` (one object per row, keyed by header) and the items of
    ``extra``. Returns the path written.
    """
    machine = describe_machine()
    print(f"{name}: {machine}\n\n{format_table(headers, rows)}\n", flush=True)
    path = json_path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = {
        "name": name,
        "machine": asdict(machine),
        "rows": [dict(zip(headers, row, strict=True)) for row in rows],
        **(extra or {}),
    }
    path.write_text(json.dumps(payload, indent=2) + "\n")
    return path

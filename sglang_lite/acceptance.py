"""``sglang-lite check-env --verify``: every operation of a device against the host's, as a pass table.

This is the acceptance of a CUDA machine. It runs there and nowhere else: without a device it says why it did not run
and fails, and no other device stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sglang_lite.adapters.device_facts import DeviceFacts
from sglang_lite.adapters.kernel_lines import InstalledKernels
from sglang_lite.adapters.verification import FAMILIES, Outcome, Subject, host_subject, verify
from sglang_lite.adapters.verification.report import print_table
from sglang_lite.environment import Environment, problems_of

MakeSubject = Callable[[DeviceFacts, InstalledKernels, torch.dtype], Subject]

DTYPES = (torch.bfloat16, torch.float16)
SEEDS = (0, 1, 2)


def why_not_run(environment: Environment | None = None) -> str | None:
    """Why the acceptance cannot run on this machine, None when it can."""
    environment = environment or Environment()
    problems = problems_of(environment)
    if not problems:
        return None
    return "; ".join(problems)


def outcomes(
    environment: Environment | None = None, make_subject: MakeSubject | None = None, ordinal: int = 0
) -> Iterator[Outcome]:
    """Compare everything on one device.

    Args:
        environment: where facts come from.
        make_subject: from a device's facts to its operations; by default those of the CUDA adapters.
        ordinal: of the device.
    """
    environment = environment or Environment()
    facts, kernels = environment.driver().devices[ordinal], environment.kernels()
    if make_subject is None:
        from sglang_lite.adapters.cuda.subject import cuda_subject

        make_subject = cuda_subject
    for dtype in DTYPES:
        yield from verify(make_subject(facts, kernels, dtype), host_subject(), FAMILIES, dtypes=(dtype,), seeds=SEEDS)


def run(environment: Environment | None = None, make_subject: MakeSubject | None = None) -> int:
    """Print the table. 0 when everything passed, 1 when something failed or nothing could run."""
    environment = environment or Environment()
    reason = why_not_run(environment)
    if reason is not None:
        print(f"verify: did not run: {reason}")
        return 1
    return 0 if print_table(outcomes(environment, make_subject)) else 1

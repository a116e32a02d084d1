"""Compare the operations of a device with the host's over random shapes: ``check-env --verify`` and ``tests/gpu``."""

from __future__ import annotations

from sglang_lite.adapters.verification.attention_cases import attention_cases
from sglang_lite.adapters.verification.case import Case, Source, Subject
from sglang_lite.adapters.verification.dense_cases import dense_cases
from sglang_lite.adapters.verification.expert_cases import expert_cases
from sglang_lite.adapters.verification.host import host_subject
from sglang_lite.adapters.verification.quantized_cases import quantized_cases
from sglang_lite.adapters.verification.recurrent_cases import recurrent_cases
from sglang_lite.adapters.verification.run import Outcome, Status, verify
from sglang_lite.adapters.verification.sampling_cases import sampling_cases
from sglang_lite.adapters.verification.token_cases import token_cases

FAMILIES = (dense_cases, attention_cases, expert_cases, quantized_cases, recurrent_cases, sampling_cases, token_cases)
"""Everything that is compared."""

__all__ = ["FAMILIES", "Case", "Outcome", "Source", "Status", "Subject", "host_subject", "verify"]

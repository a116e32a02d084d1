"""schemathesis over ``/openapi.json``: whatever fits the document is answered, and never with a fault of the server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.server import ServerProcess

schemathesis = pytest.importorskip("schemathesis", reason="needs the optional group `clients`")

EXAMPLES = 12
"""Calls of every operation."""


@pytest.mark.timeout(200)
def test_no_fault_of_the_server(server: ServerProcess) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        call_often(operation)
        assert server.process.poll() is None, f"{operation.label} ended the server:\n{server.output[-2000:]}"
        assert server.health() == 200, operation.label


def call_often(operation: Any) -> None:
    # Derandomized: what is found is found again.
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        response = case.call(timeout=30)
        # 501 names what the loaded model cannot do, 503 a full queue; anything else from 500 on is a fault.
        status = response.status_code
        assert status < 500 or status in (501, 503), f"{operation.label}: {status} {response.text[:500]}"

    check()

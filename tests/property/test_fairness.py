"""Fair scheduling: whatever the others send, a tenant gets its share."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.scheduler import SchedulerConfig
from sglang_lite.scheduler.fairness import OUTPUT_PRICE, PROMPT_PRICE
from sglang_lite.types import RequestExtras
from tests.support.null_executor import NullExecutor
from tests.support.scheduler_driver import Driver, request_columns

ROWS = 4
MOST_PROMPT, MOST_OUTPUT = 24, 12
MOST_SERVICE = PROMPT_PRICE * MOST_PROMPT + OUTPUT_PRICE * MOST_OUTPUT
"""Charge of the largest request."""


def fair_driver(**options: int) -> Driver:
    config = {"num_pages": 512, "page_size": 1, "context_length": 64, "max_running_requests": ROWS, **options}
    scheduler = SchedulerConfig(**config, fair=True, enable_radix_cache=False)  # type: ignore[arg-type]
    return Driver(scheduler, NullExecutor(scheduler.max_running_requests))


class Service:
    """Counts, from outside, what each tenant was served."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.served: defaultdict[str, float] = defaultdict(float)
        self.tenant_of: dict[int, str] = {}
        self.prompts: dict[int, int] = {}
        self.seen: Counter[int] = Counter()

    def admit(self, tenant: str, weight: float, prompts: list[int], outputs: list[int]) -> list[int]:
        keys = [len(self.tenant_of) + index + 1 for index in range(len(prompts))]
        extras = {index: RequestExtras(tenant=tenant, tenant_weight=weight) for index in range(len(prompts))}
        columns = request_columns(keys, [[7] * count for count in prompts], extras=extras, max_new_tokens=outputs)
        self.driver.scheduler.admit(columns, self.driver.now)
        self.driver.drain()
        self.tenant_of |= dict.fromkeys(keys, tenant)
        self.prompts |= dict(zip(keys, prompts, strict=True))
        return keys

    def step(self) -> None:
        self.driver.step()
        for key, received in self.driver.received.items():
            new = len(received.tokens) - self.seen[key]
            if new and not self.seen[key]:
                self.served[self.tenant_of[key]] += PROMPT_PRICE * self.prompts[key]
            self.served[self.tenant_of[key]] += OUTPUT_PRICE * new
            self.seen[key] += new

    def waits(self, tenant: str) -> bool:
        """Whether a request of the tenant has drawn nothing yet."""
        return any(owner == tenant and not self.seen[key] for key, owner in self.tenant_of.items())


sizes = st.tuples(st.integers(1, MOST_PROMPT), st.integers(1, MOST_OUTPUT))


@settings(max_examples=25, deadline=None)
@given(
    flood=st.lists(sizes, min_size=40, max_size=80),
    modest=st.lists(sizes, min_size=10, max_size=20),
    weights=st.tuples(st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([1.0, 2.0, 4.0])),
)
def test_service_of_tenants_that_wait_differs_by_a_bound(
    flood: list[tuple[int, int]], modest: list[tuple[int, int]], weights: tuple[float, float]
) -> None:
    service = Service(fair_driver())
    service.admit("flood", weights[0], [prompt for prompt, _ in flood], [output for _, output in flood])
    service.admit("modest", weights[1], [prompt for prompt, _ in modest], [output for _, output in modest])
    # What runs already, and the plans in flight, are the slack of both; nothing that grows with time.
    bound = 2 * (ROWS + 1) * MOST_SERVICE / min(weights)
    while service.waits("flood") and service.waits("modest"):
        service.step()
        gap = service.served["flood"] / weights[0] - service.served["modest"] / weights[1]
        assert abs(gap) <= bound


@settings(max_examples=25, deadline=None)
@given(flood=st.lists(sizes, min_size=100, max_size=150), lone=sizes, before=st.integers(0, 60))
def test_one_request_passes_a_flood(flood: list[tuple[int, int]], lone: tuple[int, int], before: int) -> None:
    """A request of a quiet tenant waits for no more than the requests that run when it comes."""
    service = Service(fair_driver())
    service.admit("flood", 1.0, [prompt for prompt, _ in flood], [output for _, output in flood])
    for _ in range(before):
        service.step()
    started = service.served["flood"]
    service.admit("lone", 1.0, [lone[0]], [lone[1]])
    while service.waits("lone"):
        service.step()
    assert service.served["flood"] - started <= (ROWS + 1) * MOST_SERVICE


def test_shares_follow_the_weights() -> None:
    service = Service(fair_driver())
    for tenant, weight in (("heavy", 3.0), ("light", 1.0)):
        service.admit(tenant, weight, [8] * 400, [8] * 400)
    for _ in range(400):
        service.step()
    assert service.waits("heavy") and service.waits("light")
    assert 2.6 < service.served["heavy"] / service.served["light"] < 3.4


def test_a_quiet_tenant_saves_nothing_up() -> None:
    service = Service(fair_driver())
    service.admit("busy", 1.0, [8] * 400, [8] * 400)
    for _ in range(200):
        service.step()
    service.admit("late", 1.0, [8] * 200, [8] * 200)
    begun = service.served["busy"]
    for _ in range(200):
        service.step()
    later = service.served["busy"] - begun
    assert 0.7 < later / service.served["late"] < 1.5


def test_a_flood_does_not_fill_the_queue_for_others() -> None:
    service = Service(fair_driver(max_queued_requests=8))
    flood = service.admit("flood", 1.0, [8] * 50, [8] * 50)
    lone = service.admit("lone", 1.0, [8], [8])
    refused = [key for key in flood if service.driver.received.get(key) and service.driver.received[key].finish]
    assert len(refused) == 50 - (8 + ROWS) + 1
    assert lone[0] not in service.driver.received
    while service.waits("lone"):
        service.step()


def test_many_tenants_leave_nothing_behind() -> None:
    driver = fair_driver()
    service = Service(driver)
    for number in range(300):
        service.admit(f"tenant {number}", 1.0, [2], [1])
        while service.waits(f"tenant {number}"):
            service.step()
    tenants = driver.scheduler._state.queue.tenants
    assert tenants is not None
    assert len(tenants) <= 16

"""Which request runs when: the request table, the planner and the state machine. NumPy only, no clock, no I/O."""

from sglang_lite.scheduler.config import PauseMode, Policy, SchedulerConfig
from sglang_lite.scheduler.plan import (
    FROM_DEVICE,
    LogprobRequest,
    SamplingColumns,
    ScoredPositions,
    StepOutput,
    StepPlan,
)
from sglang_lite.scheduler.scheduler import Scheduler
from sglang_lite.scheduler.stats import SchedulerStats

__all__ = [
    "FROM_DEVICE",
    "LogprobRequest",
    "PauseMode",
    "Policy",
    "SamplingColumns",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "ScoredPositions",
    "StepOutput",
    "StepPlan",
]

"""States of a session: a number that only rises, except to Failed, where it stays."""

from __future__ import annotations

import enum


class State(enum.IntEnum):
    """As it is on the wire.

    For the prefill side: waiting for the peer's pages; may compute; pages go out; all is sent. For the decode side:
    looking for the peer; it knows our pages; pages arrive; all is here.
    """

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4

    @property
    def is_over(self) -> bool:
        """Nothing follows."""
        return self in (State.FAILED, State.SUCCESS)


def advance(current: State, reported: State) -> State:
    """The state after a report: the higher one; Failed is final, and so is Success."""
    if current.is_over:
        return current
    return State.FAILED if reported is State.FAILED else max(current, reported)


def may_create(reported: State) -> bool:
    """Whether a message about a room that is not known may make one; all others come late and are ignored."""
    return reported in (State.BOOTSTRAPPING, State.WAITING_FOR_INPUT)


def combine(states: list[State]) -> State:
    """Of one request over its ranks: the least of them, so that one failed rank fails it."""
    return min(states)

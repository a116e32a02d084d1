"""Which peers are silent, and which of those are gone. Runs on the loop of a session worker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from sglang_lite.disaggregation.frames import Alive
from sglang_lite.disaggregation.links import Link, LinkTable, Presence, look
from sglang_lite.disaggregation.options import SessionOptions

_LATE_SECONDS = 1.0


class LinkWatch:
    """Tells peers that this worker lives, and notices those that do not.

    Args:
        instance: of this worker.
        spawn: runs a look at a silent peer.
        on_lost: called with a link, and whether the process behind it is gone; else it was silent for too long.
    """

    def __init__(
        self,
        links: LinkTable,
        instance: str,
        options: SessionOptions,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_lost: Callable[[Link, bool], None],
    ) -> None:
        self._links = links
        self._instance = instance
        self._options = options
        self._spawn = spawn
        self._on_lost = on_lost
        self._last_tick = 0.0

    def begin(self, now: float) -> None:
        """Ticks follow from now on."""
        self._last_tick = now

    def tick(self, now: float) -> None:
        """Look after all links that are used; called every ``alive_interval``."""
        # After this process itself was stopped, what peers said in the meantime is still to be read.
        was_late = now - self._last_tick > _LATE_SECONDS
        self._last_tick = now
        for link in self._links.used():
            if was_late:
                link.last_heard = now
            self._look_after(link, now)

    def link_to(self, ip: str, port: int, instance: str, now: float) -> Link:
        """The link to a peer. Whoever had its address before, and says nothing any more, is gone.

        Raises:
            OSError: there are too many, or the address is none.
        """
        link = self._links.get(ip, port, instance, now)
        if not link.users:
            self._bury_others_at(link, now)
        return link

    def bury(self, link: Link) -> None:
        """Its process is gone."""
        if not link.is_gone:
            link.is_gone = True
            self._on_lost(link, True)

    def _look_after(self, link: Link, now: float) -> None:
        link.send(Alive(self._instance).frames())
        silent = now - link.last_heard
        if silent > self._options.silence and not link.is_gone:
            heard_since = link.last_word + self._options.silence
            if any(other.last_word > heard_since for other in self._links.others_at(link)):
                self.bury(link)
            elif not link.is_probing:
                link.is_probing = True
                self._spawn(self._probe(link))
        too_long = self._options.heartbeat_interval * self._options.heartbeat_max_failure
        if silent > too_long and not link.is_lost and not link.is_gone:
            link.is_lost = True
            self._on_lost(link, False)

    def _bury_others_at(self, link: Link, now: float) -> None:
        """A port has one owner: a peer that is heard while others at its address are silent has taken it over.

        One that is not silent lives: then it is this one that somebody made up, or that was gone before its last words
        were read.
        """
        if now - self._last_tick > _LATE_SECONDS:
            return  # what the others said is still to be read
        for other in self._links.others_at(link):
            if now - other.last_heard > self._options.silence:
                self.bury(other)

    async def _probe(self, link: Link) -> None:
        try:
            if await look(link.ip, link.port) is Presence.GONE:
                self.bury(link)
        finally:
            link.is_probing = False

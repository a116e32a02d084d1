"""HTTPS: a context from the PEM files, and new certificates without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from sglang_lite.config import ServerConfig
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

WATCH_SECONDS = 5.0
"""Seconds between two looks at the files with ``--enable-ssl-refresh``."""


class Certificates:
    """The TLS context of a server. ``reload`` changes what new connections get; open ones go on as they are.

    Clients that present a certificate are checked against ``--ssl-ca-certs``; none has to.

    Attributes:
        context: for new connections. With authorities it is another one after a ``reload``: a context never forgets
            whom it trusts, nor the sessions of clients that it has checked.

    Raises:
        StartupError: a file is missing, or they do not belong together.
    """

    def __init__(self, certificate: Path, key: Path, authorities: Path | None, password: str | None) -> None:
        self._certificate = certificate
        self._key = key
        self._authorities = authorities
        self._password = password or ""
        self.context = self._load(self._new_context())
        self._renewals: list[Callable[[], None]] = []
        self._seen = self._stamps()

    @classmethod
    def of(cls, config: ServerConfig) -> Certificates | None:
        """Those of a configuration; None without TLS.

        Raises:
            StartupError: the options are incomplete, or the files cannot be used.
        """
        if config.ssl_certfile is None or config.ssl_keyfile is None:
            given = {
                "--ssl-certfile": config.ssl_certfile,
                "--ssl-keyfile": config.ssl_keyfile,
                "--ssl-ca-certs": config.ssl_ca_certs,
                "--ssl-keyfile-password": config.ssl_keyfile_password,
                "--enable-ssl-refresh": config.enable_ssl_refresh or None,
            }
            names = [name for name, value in given.items() if value is not None]
            if names:
                raise StartupError(f"{names[0]}: TLS needs both --ssl-certfile and --ssl-keyfile")
            return None
        for name, file in (
            ("--ssl-certfile", config.ssl_certfile),
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-ca-certs", config.ssl_ca_certs),
        ):
            if file is not None and not Path(file).is_file():
                raise StartupError(f"{name}: no such file: {file}")
        authorities = None if config.ssl_ca_certs is None else Path(config.ssl_ca_certs)
        return cls(Path(config.ssl_certfile), Path(config.ssl_keyfile), authorities, config.ssl_keyfile_password)

    def reload(self) -> bool:
        """Read the files again; False, with the old certificate kept, when they cannot be used."""
        try:
            # Tried on a context of its own first: a half-written file must not spoil the one in use.
            context = self._load(self._new_context())
            if self._authorities is None:
                self._load(self.context)
            else:
                self.context = context
        except StartupError as error:
            logger.error("kept the old TLS certificate: %s", error)
            return False
        for renew in self._renewals:
            renew()
        logger.info("read the TLS certificate %s again", self._certificate)
        return True

    def on_renewal(self, renew: Callable[[], None]) -> None:
        """Have ``renew`` called after every reload, when ``context`` may be another one."""
        self._renewals.append(renew)

    def contents(self) -> tuple[list[tuple[bytes, bytes]], bytes | None, bool]:
        """What gRPC takes: [(key, certificate)], the authorities' certificates, whether clients need one (never)."""
        authorities = None if self._authorities is None else self._authorities.read_bytes()
        return [(self._key.read_bytes(), self._certificate.read_bytes())], authorities, False

    async def watch(self) -> None:
        """Reload whenever one of the files has changed."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            stamps = self._stamps()
            if stamps != self._seen:
                self._seen = stamps
                self.reload()

    def reload_on_hangup(self) -> None:
        """Reload on SIGHUP, in the running event loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    @staticmethod
    def _new_context() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        try:
            # An empty password is no password; without one here, OpenSSL would ask the terminal.
            context.load_cert_chain(self._certificate, self._key, password=lambda: self._password)
            if self._authorities is not None:
                context.load_verify_locations(self._authorities)
                context.verify_mode = ssl.CERT_OPTIONAL
        except (OSError, ssl.SSLError, ValueError) as error:
            files = ", ".join(str(file) for file in (self._certificate, self._key, self._authorities) if file)
            raise StartupError(f"the TLS files {files} cannot be used together: {error}") from error
        return context

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        stamps = []
        for file in (self._certificate, self._key, self._authorities):
            try:
                status = os.stat(file) if file is not None else None
            except OSError:
                status = None  # being replaced
            stamps.append((0, 0) if status is None else (status.st_mtime_ns, status.st_ino))
        return tuple(stamps)


class _BoundSite(web.TCPSite):
    """Binds a port, and tells its sockets."""

    __slots__ = ()

    def descriptors(self) -> list[int]:
        """Of the listening sockets."""
        return [] if self._server is None else [bound.fileno() for bound in getattr(self._server, "sockets", ())]


class SecurePort:
    """A port with HTTPS. A new context takes over the listening sockets: no connection is refused meanwhile.

    Args:
        runner: set up.
    """

    def __init__(self, runner: web.AppRunner, certificates: Certificates, *, backlog: int) -> None:
        self._runner = runner
        self._certificates = certificates
        self._backlog = backlog
        self._served: ssl.SSLContext | None = None
        self._sites: list[web.BaseSite] = []
        self._descriptors: list[int] = []
        self._changing = asyncio.Lock()
        self._renewing: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int, *, reuse_port: bool | None) -> None:
        """Bind and listen.

        Raises:
            OSError: the port cannot be bound.
        """
        self._served = self._certificates.context
        site = _BoundSite(
            self._runner, host, port, backlog=self._backlog, ssl_context=self._served, reuse_port=reuse_port
        )
        await site.start()
        self._sites, self._descriptors = [site], site.descriptors()
        self._certificates.on_renewal(self._renew_soon)

    async def stop(self) -> None:
        """Listen no more; connections live on."""
        async with self._changing:
            await self._end(self._sites)
            self._sites, self._descriptors = [], []

    def _renew_soon(self) -> None:
        task = asyncio.create_task(self._renew())
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)

    async def _renew(self) -> None:
        async with self._changing:
            context = self._certificates.context
            if context is self._served or not self._sites:
                return
            sites: list[web.BaseSite] = []
            descriptors = []
            try:
                for descriptor in self._descriptors:
                    bound = socket.socket(fileno=os.dup(descriptor))
                    descriptors.append(bound.fileno())
                    site = web.SockSite(self._runner, bound, ssl_context=context, backlog=self._backlog)
                    await site.start()
                    sites.append(site)
            except OSError as error:
                logger.error("kept the old TLS context: %s", error)
                await self._end(sites)
                return
            await self._end(self._sites)
            self._sites, self._descriptors, self._served = sites, descriptors, context

    @staticmethod
    async def _end(sites: list[web.BaseSite]) -> None:
        for site in sites:
            await site.stop()

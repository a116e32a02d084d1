"""HTTPS: a context from the PEM files, and new certificates without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from pathlib import Path

from sglang_lite.config import ServerConfig
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

WATCH_SECONDS = 5.0
"""Seconds between two looks at the files with ``--enable-ssl-refresh``."""


class Certificates:
    """The TLS context of a server. ``reload`` changes what new connections get; open ones go on as they are.

    Clients that present a certificate are checked against ``--ssl-ca-certs``; none has to.

    Raises:
        StartupError: a file is missing, or they do not belong together.
    """

    def __init__(self, certificate: Path, key: Path, authorities: Path | None, password: str | None) -> None:
        self._certificate = certificate
        self._key = key
        self._authorities = authorities
        self._password = password or ""
        self.context = self._load(self._new_context())
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
            self._load(self._new_context())
            self._load(self.context)
        except StartupError as error:
            logger.error("kept the old TLS certificate: %s", error)
            return False
        logger.info("read the TLS certificate %s again", self._certificate)
        return True

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

"""Certificates: the router's own towards clients, and what it trusts and shows towards workers."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from sglang_lite.router.option_groups import AccessOptions
from sglang_lite.server.tls import Certificates
from sglang_lite.types import StartupError


def server_certificates(options: AccessOptions) -> Certificates | None:
    """What the router serves with; None without TLS. SIGHUP reads the files again (``reload_on_hangup``).

    Raises:
        StartupError: one option without the other, or files that cannot be used.
    """
    pair = _pair("--tls-cert-path", options.tls_cert_path, "--tls-key-path", options.tls_key_path)
    return None if pair is None else Certificates(*pair, None, None)


@dataclass(frozen=True, slots=True)
class WorkerTrust:
    """Towards workers with https:// or grpcs:// addresses.

    Attributes:
        authorities: files with certificates that are trusted beside the system's.
        client: certificate and key that are shown to workers that ask; None shows none.
    """

    authorities: tuple[Path, ...] = ()
    client: tuple[Path, Path] | None = None

    @classmethod
    def of(cls, options: AccessOptions) -> WorkerTrust:
        """That of the options.

        Raises:
            StartupError: a file is missing, or one of certificate and key is.
        """
        for file in options.ca_cert_paths:
            _existing("--ca-cert-paths", file)
        client = _pair("--client-cert-path", options.client_cert_path, "--client-key-path", options.client_key_path)
        return cls(tuple(Path(file) for file in options.ca_cert_paths), client)

    def context(self) -> ssl.SSLContext | bool:
        """For connections to workers, whose certificates must be valid for their names; True is aiohttp's own.

        Raises:
            StartupError: the files cannot be used.
        """
        if not self.authorities and self.client is None:
            return True
        context = ssl.create_default_context()
        try:
            for file in self.authorities:
                context.load_verify_locations(file)
            if self.client is not None:
                # An empty password is no password; without one here, OpenSSL would ask the terminal.
                context.load_cert_chain(*self.client, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(map(str, (*self.authorities, *(self.client or ()))))
            raise StartupError(f"the certificate files {names} cannot be used: {error}") from error
        return context


def _pair(first: str, certificate: str | None, second: str, key: str | None) -> tuple[Path, Path] | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise StartupError(f"{first} and {second} go together")
    return _existing(first, certificate), _existing(second, key)


def _existing(flag: str, file: str) -> Path:
    path = Path(file)
    if not path.is_file():
        raise StartupError(f"{flag}: no such file: {file}")
    return path

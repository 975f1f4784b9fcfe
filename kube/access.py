"""Reads address, trust and login of an API server: a pod's account, or a kubeconfig.

All of it is read again for each request, because kubelet rotates it. What an unchanged file gave is
used again, so that connections stay open.
"""

import base64
import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit.files
import kit.slips
from kube.settings import AccessSettings


class AccessError(ValueError):
    """The files do not say how to reach the API server. The text names the file and the cause."""


@dataclass(frozen=True)
class ApiAccess:
    """``token`` is empty where a certificate is the login."""

    server: str
    token: str = field(repr=False)
    tls: ssl.SSLContext


@dataclass(frozen=True)
class _Trust:
    """What a TLS context is made of. Secrets: never shown."""

    authority: bytes = field(repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.authority.decode("ascii"))
        if self.certificate:
            # load_cert_chain takes paths only; a key of a kubeconfig never goes to a disk.
            with _in_memory(self.certificate) as certificate, _in_memory(self.key) as key:
                context.load_cert_chain(certificate, key)
        return context


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """The path of a file in memory."""
    with kit.files.closing(os.memfd_create("kubeconfig")) as descriptor:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"


class Reader:
    """Reads for one API server. Blocks for the time of small files."""

    def __init__(self, asked: AccessSettings) -> None:
        self._asked = asked
        self._last: tuple[_Trust, ssl.SSLContext] | None = None

    def read(self) -> ApiAccess:
        """OSError for a file that cannot be read, AccessError for one that is not understood."""
        if self._asked.kubeconfig is not None:
            server, token, trust = _kubeconfig(self._asked.kubeconfig)
        else:
            server = self._asked.server or _in_cluster()
            token = kit.files.read_small(self._asked.token_file).decode("ascii").strip()
            trust = _Trust(kit.files.read_small(self._asked.ca_file))
        if self._last is None or self._last[0] != trust:
            try:
                self._last = trust, trust.context()
            except (ssl.SSLError, UnicodeDecodeError) as error:
                where = self._asked.kubeconfig or self._asked.ca_file
                raise AccessError(f"{where}: not certificates in PEM ({error})") from None
        return ApiAccess(server.rstrip("/"), token, self._last[1])


def _in_cluster() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _kubeconfig(file: Path) -> tuple[str, str, _Trust]:
    """Server, token and trust of the current context."""
    text = kit.files.read_small(file)
    try:
        whole = kit.slips.load_yaml(text)
        context = _named(whole["contexts"], whole["current-context"])["context"]
        cluster = _named(whole["clusters"], context["cluster"])["cluster"]
        user = _named(whole["users"], context["user"])["user"]
        server = str(cluster["server"])
    except (ValueError, LookupError, TypeError) as error:
        raise AccessError(f"{file}: not a kubeconfig with a current context ({error})") from None
    if not server.startswith("https://"):
        raise AccessError(f"{file}: the server {server!r} is not https://")
    token = str(user.get("token") or "")
    if "tokenFile" in user:
        named = file.parent / str(user["tokenFile"])
        token = kit.files.read_small(named).decode("ascii").strip()
    certificate = _content(file, user, "client-certificate")
    if not token and not certificate:
        raise AccessError(
            f"{file}: the user has neither a token nor a certificate; a login by a program "
            "(exec) is not supported"
        )
    trust = _Trust(
        _content(file, cluster, "certificate-authority"),
        certificate,
        _content(file, user, "client-key"),
    )
    return server, token, trust


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = next((each for each in entries if each["name"] == name), None)
    if found is None:
        raise LookupError(f"no entry {name!r}")
    return found


def _content(file: Path, section: dict[str, Any], name: str) -> bytes:
    """Of the file that ``name`` names, relative to the kubeconfig, or of the data in it."""
    try:
        if data := section.get(f"{name}-data"):
            return base64.b64decode(str(data), validate=True)
    except ValueError:
        raise AccessError(f"{file}: {name}-data is not base64") from None
    path = section.get(name)
    return kit.files.read_small(file.parent / str(path)) if path else b""

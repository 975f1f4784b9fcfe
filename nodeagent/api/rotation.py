"""What the door reads from files that somebody rotates: tokens and the certificate.

A file that cannot be used changes nothing: what was good last stays in force, the trouble is a
finding and a reason in /readyz. Before the first good file nobody is admitted. The files are looked
at by a task of its own; a disk that hangs holds up no request.

A file that others may read or write, and a certificate that expires soon, are used all the same:
they are findings.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import ssl
import stat
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic
import structlog

import kit.files
import kit.findings
import kit.settings
import kit.slips
import kit.tasks
import kit.units
from kit.room import Role
from nodeagent.api import access
from nodeagent.settings import ApiSettings
from nodeagent.state import State

log = structlog.get_logger("agent")

RECHECK_SECONDS = 1.0  # how often a file is looked at again
FIRST_LOOK_SECONDS = 5.0  # for which the start waits
SHORTEST_TOKEN = 16
# A finding tells of a certificate that has less time left than both: this, and this share of its
# life. A certificate of one day is renewed every day.
EXPIRY_SECONDS = 14 * 86400.0
EXPIRY_SHARE = 0.2

T = TypeVar("T")


@dataclass(frozen=True)
class Exposure:
    """A file that others may read or write."""

    path: Path
    what: str
    written: bool  # others may write it

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def exposure(path: Path, *, secret: bool) -> Exposure | None:
    """Whether anybody but root, and for reading a group of the operator's choice, gets at a file.

    ``secret``: it matters who reads it. None for a file that is not there.
    """
    try:
        found = path.stat()
        # Who may write to one of them may put another file in its place.
        above = {*path.absolute().parents, *path.resolve().parents}
        open_to = [str(each) for each in sorted(above) if _others_decide(each)]
    except OSError:
        return None
    written, read = _written(found), secret and bool(found.st_mode & stat.S_IROTH)
    what = []
    if _of_another(found):
        written = True
        what.append(f"belongs to uid {found.st_uid}")
    if written or read:
        verbs = [word for word, may in (("read", read), ("written", written)) if may]
        what.append(f"may be {' and '.join(verbs)} by others (mode {found.st_mode & 0o7777:04o})")
    if open_to:
        written = True
        what.append(f"lies below {open_to[0]}, which others may write")
    return Exposure(path, ", ".join(what), written) if what else None


def _written(found: os.stat_result) -> bool:
    mode = found.st_mode
    return bool(mode & stat.S_IWOTH or (mode & stat.S_IWGRP and found.st_gid != 0))


def _of_another(found: os.stat_result) -> bool:
    return found.st_uid not in (0, os.geteuid())


def _others_decide(folder: Path) -> bool:
    """Whether somebody else may replace what is in a directory."""
    found = folder.stat()
    if _of_another(found):
        return True
    # kubelet's volumes of ConfigMaps have mode 0777; only their pod comes to them.
    of_kubelet = (folder / "..data").is_symlink()
    return _written(found) and not found.st_mode & stat.S_ISVTX and not of_kubelet


def attempt(read: Callable[[], T]) -> tuple[T | None, str]:
    """What ``read`` gives, or None and what is wrong with the file."""
    try:
        return read(), ""
    except ssl.SSLError as error:
        return None, f"cannot be used ({error.reason or error})"
    except OSError as error:
        return None, f"cannot be read ({error.strerror or error})"
    except ValueError as error:
        return None, str(error)


class WatchedFiles(Generic[T]):
    """What the files ``paths`` last were when they could be used; None before that.

    ``read`` raises OSError or ValueError; the text of a ValueError is shown. ``secret``: those of
    the files that nobody else may read.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        read: Callable[[], T],
        secret: Sequence[Path] = (),
    ) -> None:
        self.name = name  # a setting
        self.value: T | None = None
        self.problem = ""
        self.exposures: tuple[Exposure, ...] = ()
        self._paths = paths
        self._secret = secret
        self._read = read
        self._seen: object = None

    def look(self) -> None:
        """Blocking."""
        found = [exposure(path, secret=path in self._secret) for path in self._paths]
        self.exposures = tuple(each for each in found if each)
        now = [self._stamp(path) for path in self._paths]
        if now == self._seen:
            return
        self._seen = now
        value, self.problem = attempt(self._read)
        if not self.problem:
            self.value = value
        if self.problem:
            log.error("file is unusable", setting=self.name, why=self.problem, then=self.then)
        else:
            log.info("file read", setting=self.name)

    @property
    def then(self) -> str:
        return "nobody is admitted" if self.value is None else "the earlier one stays in force"

    def finding(self) -> kit.findings.Finding | None:
        if not self.problem:
            return None
        return kit.findings.Finding(
            id=self.name,
            rule="unusable-file",
            severity=kit.findings.Severity.CRITICAL
            if self.value is None
            else kit.findings.Severity.WARNING,
            subject=str(self._paths[0]),
            message=f"{self.name} {self._paths[0]}: {self.problem}; {self.then}",
            advice="correct the file; it is read again within a second (docs/security.md)",
        )

    def warnings(self) -> list[kit.findings.Finding]:
        """What should be better about files that are used all the same."""
        return [
            kit.findings.Finding(
                id=f"{self.name}:exposed:{each.path.name}",
                rule="exposed-file",
                severity=kit.findings.Severity.CRITICAL
                if each.written
                else kit.findings.Severity.WARNING,
                subject=str(each.path),
                message=f"{self.name}: {each}",
                advice=EXPOSED_REMEDY,
            )
            for each in self.exposures
        ]

    @staticmethod
    def _stamp(path: Path) -> object:
        try:
            found = path.stat()
        except OSError as error:
            return error.errno
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


EXPOSED_REMEDY = (
    "give it to root with mode 0400 (of a Kubernetes Secret by defaultMode), then replace its "
    "tokens or key: others may have them (docs/security.md)"
)


@contextlib.asynccontextmanager
async def following(
    state: State,
    files: Sequence[WatchedFiles[Any]],
    also: Sequence[Callable[[], kit.findings.Finding | None]] = (),
) -> AsyncIterator[None]:
    """Look at the files again and again while the block runs, and say what is wrong; ``also`` with
    what else admits callers."""
    looked = asyncio.Event()

    async def follow() -> None:
        while True:
            for each in files:
                await asyncio.to_thread(each.look)
            found = [look() for look in (*(each.finding for each in files), *also)]
            warnings = [warning for each in files for warning in each.warnings()]
            state.judge("admin", [each for each in found if each is not None], warnings)
            looked.set()
            await asyncio.sleep(RECHECK_SECONDS)

    task = asyncio.create_task(follow(), name="rotation")
    try:
        await kit.tasks.until(looked, FIRST_LOOK_SECONDS)
        yield
    finally:
        await kit.tasks.end(task)


# --- tokens


class _Entry(kit.settings.Section):
    role: Role
    token: str = pydantic.Field(default="", repr=False)
    sha256: str = pydantic.Field(default="", pattern=r"^([0-9a-f]{64})?$")

    @pydantic.model_validator(mode="after")
    def _one_secret(self) -> "_Entry":
        if bool(self.token) == bool(self.sha256):
            raise ValueError("needs either token or sha256")
        if self.token and len(self.token) < SHORTEST_TOKEN:
            raise ValueError(f"the token is shorter than {SHORTEST_TOKEN} characters")
        return self


_File = pydantic.TypeAdapter(dict[kit.settings.Word, _Entry])
Known = tuple[tuple[bytes, access.Caller], ...]


def tokens(path: Path) -> WatchedFiles[Known]:
    """The callers of a tokens file, each with the digest of its token. ``{}`` admits nobody."""
    return WatchedFiles("admin.api.tokens_file", [path], lambda: read_tokens(path), secret=[path])


def read_tokens(path: Path) -> Known:
    """Raises OSError or ValueError."""
    content = kit.files.read_small(path)
    try:
        plain = kit.slips.load_yaml(content.decode("utf-8"))
        if plain is None:
            raise ValueError("is empty; {} admits nobody")
        entries = _File.validate_python(plain)
    except pydantic.ValidationError as error:
        # Not str(error): it repeats the value, and that may be a token.
        problems = (f"{'.'.join(map(str, e['loc'][:2]))}: {e['msg']}" for e in error.errors())
        raise ValueError("; ".join(problems)) from None
    except UnicodeDecodeError:
        raise ValueError("is not a text file") from None
    return tuple(
        (
            bytes.fromhex(entry.sha256) or digest(entry.token),
            access.Caller(f"token {name}", entry.role, f"token {name}"),
        )
        for name, entry in entries.items()
    )


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def bearer(authorization: str) -> str:
    """The token of an Authorization header; "" when it holds none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def whose(known: Known | None, token: str) -> access.Caller | None:
    """The caller of ``token``. Compares with every one, in constant time."""
    given, found = digest(token), None
    for each, caller in known or ():
        if hmac.compare_digest(each, given) and token:
            found = caller
    return found


# --- the certificate


@dataclass(frozen=True)
class Pair:
    context: ssl.SSLContext
    since: float  # Unix time
    until: float  # Unix time

    def expires_soon(self, now: float) -> bool:
        return self.until - now < min(EXPIRY_SECONDS, (self.until - self.since) * EXPIRY_SHARE)

    def left(self, now: float) -> str:
        return kit.units.format_duration(max(0.0, self.until - now))


class Certificate(WatchedFiles[Pair]):
    def __init__(self, api: ApiSettings) -> None:
        files = (api.cert_file, api.key_file)
        super().__init__(
            "admin.api.cert_file", files, lambda: read_pair(*files), secret=[api.key_file]
        )

    def look(self) -> None:
        super().look()
        if not self.problem and self.value is not None and self.value.until < time.time():
            self.problem = "has expired"

    def warnings(self) -> list[kit.findings.Finding]:
        found, now = super().warnings(), time.time()
        if self.value is not None and not self.problem and self.value.expires_soon(now):
            found.append(
                kit.findings.Finding(
                    id=f"{self.name}:expires",
                    rule="certificate-expires",
                    severity=kit.findings.Severity.WARNING,
                    subject=str(self._paths[0]),
                    message=f"{self.name} {self._paths[0]} expires in {self.value.left(now)}",
                    advice="renew it, and find out why nobody did; "
                    "the new one is taken within a second",
                )
            )
        return found


def read_pair(cert: Path, key: Path) -> Pair:
    """Raises OSError (SSLError too) or ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with kit.files.small(cert) as shown, kit.files.small(key) as secret:
        # No password is asked for on a terminal: an encrypted key is an error.
        context.load_cert_chain(shown, secret, password=lambda: "")
        return Pair(context, *_valid(context, shown))


def _valid(context: ssl.SSLContext, cert: str) -> tuple[float, float]:
    """From when to when the certificate is valid. ValueError when no client would take it now.

    Shown in a handshake with itself; the standard library reads certificates in no other way.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it may be signed by anybody
    client.load_verify_locations(cert)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(back, there)
    ends = [ours, context.wrap_bio(there, back, server_side=True)]
    for _ in range(10):  # flights of a handshake
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise ValueError(f"cannot be used ({error.verify_message})") from None
    found = ours.getpeercert()
    assert found is not None
    since, until = (ssl.cert_time_to_seconds(str(found[n])) for n in ("notBefore", "notAfter"))
    return since, until

"""The API server, by the official client: kubeconfig, logins, proxies and retries are its work.

Lists come page by page, so that 7,500 nodes cost the memory of one page. What fails is said as
``kit.errors``: the thing, the cause and what to do.
"""

import contextlib
import difflib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import urllib3.exceptions
from kubernetes import client, config
from kubernetes.config import kube_config

import kit.errors
from fleet import shapes

GROUP, VERSION = "nodeagent.io", "v1alpha1"
NODE_STORAGES = "nodestorages"
PAGE = 500
TIMEOUTS = (5.0, 60.0)  # seconds, to connect and for each answer
MOST_PAGES = 1000
LONGEST_SAID = 500
_USER = re.compile(r'User \\*"([^"\\]{1,253})')  # a stream's answer comes with more quotes

Object = TypeVar("Object", bound=shapes.Told)


class FleetServer:
    """One cluster as one user sees it. ``now``: Unix time of the API server, once it answered."""

    def __init__(self, kubeconfig: Path | None = None, context: str | None = None) -> None:
        self._api, self.context = _connected(kubeconfig, context)
        self.address = str(self._api.configuration.host)
        self.now = time.time()

    @property
    def core(self) -> Any:
        return client.CoreV1Api(self._api)

    def close(self) -> None:
        self._api.close()

    # --- reading

    def kinds(self, plural: str, shape: type[Object]) -> Iterator[list[Object]]:
        """All objects of a kind of nodeagent, page by page."""
        api = client.CustomObjectsApi(self._api)

        def ask(**page: Any) -> Any:
            return api.list_cluster_custom_object(GROUP, VERSION, plural, **page)

        return self._pages(ask, shape, f"list {plural}.{GROUP}")

    def kind(self, plural: str, name: str) -> shapes.WishObject:
        """NotFoundError when there is none of that name."""
        api = client.CustomObjectsApi(self._api)
        with self._errors(f"get {plural}.{GROUP}"):
            answer = api.get_cluster_custom_object(
                GROUP, VERSION, plural, name, _preload_content=False, _request_timeout=TIMEOUTS
            )
            found: shapes.WishObject = self._read(answer.data, shapes.WishObject)
            return found

    def nodes(self, selector: str) -> Iterator[list[shapes.Named]]:
        return self._pages(
            lambda **page: self.core.list_node(label_selector=selector, **page),
            shapes.Named,
            "list nodes",
        )

    def pods(self, namespace: str | None, **query: str) -> Iterator[list[shapes.PodObject]]:
        """Of all namespaces where none is given."""

        def ask(**page: Any) -> Any:
            if namespace is None:
                return self.core.list_pod_for_all_namespaces(**query, **page)
            return self.core.list_namespaced_pod(namespace, **query, **page)

        where = f"namespace {namespace}" if namespace else "all namespaces (or name one with -n)"
        return self._pages(ask, shapes.PodObject, f"list pods in {where}")

    def events(self, namespace: str, **query: str) -> Iterator[list[shapes.EventObject]]:
        return self._pages(
            lambda **page: self.core.list_namespaced_event(namespace, **query, **page),
            shapes.EventObject,
            f"list events in namespace {namespace}",
        )

    def _pages(
        self, ask: Callable[..., Any], shape: type[Object], right: str
    ) -> Iterator[list[Object]]:
        kind = _page_of(shape)
        token: str | None = None
        for _ in range(MOST_PAGES):
            query = {"limit": PAGE, "_preload_content": False, "_request_timeout": TIMEOUTS}
            try:
                with self._errors(right):
                    answer = ask(**query, **({"_continue": token} if token else {}))
                    self._clock(answer.headers.get("Date"))
                    body = answer.data  # read only now
            except _ExpiredError as error:
                # The list took longer than the server keeps its state: the rest as it is now.
                if error.token in ("", token):
                    raise
                token = error.token
                continue
            page = self._read(body, kind)
            yield page.items
            token = page.metadata.token
            if not token:
                return
        raise kit.errors.RefusedError(
            self.address, f"the list has more than {MOST_PAGES * PAGE} objects", "select fewer"
        )

    def _clock(self, date: str | None) -> None:
        """The server's clock tells how old a status is; an operator's may be wrong."""
        with contextlib.suppress(ValueError, TypeError):
            self.now = parsedate_to_datetime(date or "").timestamp()

    def _read(self, body: bytes, shape: type[Any]) -> Any:
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.DecodeError as error:
            raise kit.errors.UnreachableError(
                self.address,
                f"answers what no API server with nodeagent's kinds does ({error})",
                "see that the context names the right cluster, and that this command and the "
                "cluster's CRDs are of versions that fit (docs/upgrade.md)",
            ) from error

    # --- changing

    def annotate(self, plural: str, name: str, key: str, value: str) -> None:
        """NotFoundError when there is none of that name."""
        api = client.CustomObjectsApi(self._api)
        with self._errors(f"patch {plural}.{GROUP}"):
            api.patch_cluster_custom_object(
                GROUP, VERSION, plural, name, {"metadata": {"annotations": {key: value}}},
                _content_type="application/merge-patch+json", _preload_content=False,
                _request_timeout=TIMEOUTS,
            )  # fmt: skip

    # --- a program in a pod

    def opened(self, pod: shapes.PodObject, container: str, words: list[str]) -> Any:
        """The client's stream of the program's output, in bytes."""
        from kubernetes import stream

        meta = pod.metadata
        with self._errors(f"get and create pods/exec in namespace {meta.namespace}"):
            return stream.stream(
                self.core.connect_get_namespaced_pod_exec, meta.name, meta.namespace,
                container=container, command=words, stdout=True, stderr=True, stdin=False,
                tty=False, binary=True, _preload_content=False,
            )  # fmt: skip

    # --- errors

    @contextlib.contextmanager
    def _errors(self, right: str) -> Iterator[None]:
        """What the client raises, in our words. ``right``: what is asked, as a verb and a thing."""
        try:
            yield
        except client.ApiException as error:
            raise self._said(error, right) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._away(_innermost(error)) from error

    def _away(self, why: str) -> kit.errors.UnreachableError:
        return kit.errors.UnreachableError(
            self.address,
            f"no API server answers there ({why})",
            f"see that the cluster of context {self.context} is up and that the way to it is open "
            "(VPN, proxy), or name another with --context",
        )

    def _said(self, error: client.ApiException, right: str) -> kit.errors.AgentError:
        status, refusal = int(error.status or 0), _refusal(error.body)
        said = refusal.message or str(error.reason or "")
        if not status and (shook := re.search(r"[Hh]andshake status (\d{3})", said)):
            status = int(shook[1])  # of a stream: the client gives it no status of its own
        about = f"context {self.context}"
        if status == 401:
            return kit.errors.SettingsError(
                about,
                f"{self.address} does not know its user (401)",
                "log in again as for kubectl",
            )
        if status == 403:
            user = _USER.search(said)
            return kit.errors.RefusedError(
                f"{about}, user {user[1]}" if user else about,
                f"lacks the right to {right}",
                "ask an administrator of the cluster for it (docs/kubectl.md#rights)",
            )
        if status == 404 and not refusal.reason:
            return kit.errors.NotFoundError(
                f"the kinds of {GROUP}",
                f"{self.address} does not have them ({right})",
                "install nodeagent there (docs/install.md), or name another with --context",
            )
        if status == 404:
            return kit.errors.NotFoundError(about, said, "")
        if status == 410:
            return _ExpiredError(self.address, refusal.metadata.token)
        said = " ".join(said.split())[:LONGEST_SAID]
        if not status:
            return self._away(said)
        if status in (400, 422):
            return kit.errors.SettingsError(f"the request to {right}", said, "correct it")
        return kit.errors.UnreachableError(
            self.address, f"answers {status} to '{right}': {said}", "try again"
        )


class _ExpiredError(kit.errors.UnreachableError):
    """A list's next page is gone; ``token``: where it goes on."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(address, "the list took too long, and its rest is gone", "try again")
        self.token = token


def _page_of(shape: type[Object]) -> Any:
    return msgspec.defstruct(
        f"PageOf{shape.__name__}",
        [("items", list[shape]), ("metadata", shapes.ListMeta, shapes.ListMeta())],  # type: ignore[valid-type]
    )


def _refusal(body: Any) -> shapes.ToldStatus:
    try:
        return msgspec.json.decode(body or b"", type=shapes.ToldStatus)
    except msgspec.DecodeError:
        return shapes.ToldStatus()


def _innermost(error: BaseException) -> str:
    """urllib3 wraps the reason in layers, each of which repeats the URL."""
    reason = getattr(error, "reason", None)
    while isinstance(reason, BaseException):
        error, reason = reason, getattr(reason, "reason", None)
    text = str(error).rpartition("Failed to establish a new connection: ")[2]
    return text.rpartition("object at 0x")[2].partition(": ")[2] or text


# --- who asks


def _connected(kubeconfig: Path | None, context: str | None) -> tuple[Any, str]:
    """A client and the name of its context. SettingsError says what the kubeconfig lacks."""
    made = client.Configuration()
    made.retries, made.client_go_retries = 2, True  # of reads: also where it is told to wait
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and not _kubeconfig():
        config.load_incluster_config(client_configuration=made)
        return client.ApiClient(made), "in-cluster"
    files = str(kubeconfig) if kubeconfig else (_kubeconfig() or "~/.kube/config")
    names, current = _contexts(files)
    chosen = context or current
    if not chosen:
        raise kit.errors.SettingsError(
            f"kubeconfig {files}", "it has no current-context", "name a context with --context"
        )
    if chosen not in names:
        raise kit.errors.SettingsError(
            f"context {chosen}", f"kubeconfig {files} has none of that name", hint(chosen, names)
        )
    said = _Heard()
    logging.getLogger().addHandler(said)
    try:
        config.load_kube_config(files, chosen, client_configuration=made, persist_config=False)
    except Exception as error:
        raise kit.errors.SettingsError(
            f"context {chosen} of kubeconfig {files}", _plain(error), "correct it"
        ) from error
    finally:
        logging.getLogger().removeHandler(said)
    if said.lines:  # the client logs why a login failed, and would go on as nobody
        raise kit.errors.SettingsError(
            f"context {chosen}",
            f"its login failed: {'; '.join(said.lines)[:LONGEST_SAID]}",
            "run the login program of the kubeconfig by hand, or log in again as for kubectl",
        )
    return client.ApiClient(made), chosen


def _contexts(files: str) -> tuple[list[str], str]:
    """The names of the contexts, and the current one or ''. SettingsError."""
    try:
        merged = kube_config.KubeConfigMerger(files).config
        found = merged.value if merged is not None else None
        if found is None:
            raise ValueError("there is no such file, or it is empty")
        return [str(each["name"]) for each in found.get("contexts") or ()], str(
            found.get("current-context") or ""
        )
    except Exception as error:  # the client's reader raises whatever YAML and files do
        raise kit.errors.SettingsError(
            f"kubeconfig {files}", _plain(error), "correct it, or name another with --kubeconfig"
        ) from error


def _kubeconfig() -> str:
    """The files that kubectl would read; '' where there are none."""
    if named := os.environ.get("KUBECONFIG"):
        return named
    usual = Path("~/.kube/config").expanduser()
    return str(usual) if usual.exists() else ""


def _plain(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:LONGEST_SAID]


class _Heard(logging.Handler):
    """Keeps errors that a library logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(" ".join(record.getMessage().split()))


def check_node(cluster: FleetServer, node: str) -> None:
    """NotFoundError where no agent has written of the node."""
    pages = cluster.kinds(NODE_STORAGES, shapes.Named)
    names = [each.metadata.name for page in pages for each in page]
    if node not in names:
        raise kit.errors.NotFoundError(
            f"node {node}", "no agent has written of a node of that name", hint(node, names)
        )


def hint(name: str, names: Iterable[str]) -> str:
    """What to do about a name that is not there."""
    known = sorted(set(names))
    if near := difflib.get_close_matches(name, known, 3):
        return f"did you mean {' or '.join(near)}?"
    if not known:
        return "there are none at all"
    return f"there are {kit.errors.some(known, between=', ')}"

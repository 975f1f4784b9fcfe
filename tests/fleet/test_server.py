"""What the official client does with answers of an API server: pages, and errors in words."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from fleet import server, shapes

Answer = tuple[int, Any]
FORBIDDEN = {
    "kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403,
    "message": 'nodestorages.nodeagent.io is forbidden: User "eve" cannot list resource',
}  # fmt: skip
EXPIRED = {
    "kind": "Status", "status": "Failure", "reason": "Expired", "code": 410,
    "message": "the continue parameter is too old", "metadata": {"continue": "two-anew"},
}  # fmt: skip

BROKEN_OFF = '{"items": ['

CREDENTIAL = (
    'echo \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
    '"status": {%s}}\''
)


@contextlib.contextmanager
def answering(*answers: Answer) -> Iterator[tuple[int, list[str]]]:
    """A server that gives these in turn; its port, and the paths that were asked for."""
    left, asked = list(answers), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body = left.pop(0)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            missing = 9 if body == BROKEN_OFF else 0
            self.send_header("Content-Length", str(len(data) + missing))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield made.server_address[1], asked
        finally:
            made.shutdown()
            thread.join()


def kubeconfig(folder: Path, port: int, user: dict[str, Any] | None = None) -> Path:
    file = folder / "config"
    made = {
        "apiVersion": "v1", "kind": "Config", "current-context": "prod",
        "contexts": [{"name": "prod", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": user or {"token": "t"}}],
    }  # fmt: skip
    file.write_text(json.dumps(made))
    return file


def page(names: str, token: str = "") -> Answer:
    items = [{"metadata": {"name": name}, "status": {}} for name in names]
    return 200, {"items": items, "metadata": {"continue": token, "resourceVersion": "1"}}


def listed(folder: Path, *answers: Answer) -> tuple[list[list[str]], list[str]]:
    """The names of each page, and what was asked."""
    with answering(*answers) as (port, asked):
        cluster = server.FleetServer(kubeconfig(folder, port))
        pages = cluster.kinds("nodestorages", shapes.NodeStorage)
        names = [[each.metadata.name for each in found] for found in pages]
        cluster.close()
    return names, asked


def test_lists_come_in_pages(tmp_path: Path) -> None:
    names, asked = listed(tmp_path, page("ab", "two"), page("c", "three"), page("d"))
    assert names == [["a", "b"], ["c"], ["d"]]
    assert all("limit=500" in path for path in asked)
    assert ["continue=" in path for path in asked] == [False, True, True]


@pytest.mark.parametrize("details", [{}, None, {"causes": None}])
def test_a_list_that_expires_goes_on_where_it_was(
    details: dict[str, Any] | None, tmp_path: Path
) -> None:
    expired = {**EXPIRED, "details": details}
    names, asked = listed(tmp_path, page("ab", "two"), (410, expired), page("c"))
    assert names == [["a", "b"], ["c"]]
    assert "continue=two-anew" in asked[-1]


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((404, "404 page not found\n"), kit.errors.NotFoundError,
         ["the kinds of nodeagent.io", "install nodeagent there", "--context"]),
        ((401, {"kind": "Status", "reason": "Unauthorized", "message": "Unauthorized"}),
         kit.errors.SettingsError, ["context prod", "does not know its user", "log in again"]),
        ((403, FORBIDDEN), kit.errors.RefusedError,
         ["user eve", "lacks the right to list nodestorages.nodeagent.io", "administrator"]),
        ((400, {"kind": "Status", "reason": "BadRequest", "message": "unable to parse"}),
         kit.errors.SettingsError, ["the request to list", "unable to parse", "correct it"]),
        ((500, "boom"), kit.errors.UnreachableError, ["answers 500", "try again"]),
        ((200, BROKEN_OFF), kit.errors.UnreachableError, ["no API server answers there"]),
        ((200, "<html>"), kit.errors.UnreachableError, ["no API server", "right cluster"]),
        ((200, {"items": [{"metadata": {"name": 7}}]}), kit.errors.UnreachableError, ["`str`"]),
    ],
    ids=[
        *("no kinds", "nobody", "no right", "bad request"),
        *("broken", "broken off", "no API", "another shape"),
    ],
)  # fmt: skip
def test_errors_name_thing_cause_and_remedy(
    tmp_path: Path, answer: Answer, error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        listed(tmp_path, *[answer] * 12)
    assert not [word for word in words if word not in str(raised.value)], raised.value


def test_no_cluster(tmp_path: Path) -> None:
    with answering() as (port, _):
        pass  # nobody listens there any more
    cluster = server.FleetServer(kubeconfig(tmp_path, port))
    with pytest.raises(kit.errors.UnreachableError) as raised:
        list(cluster.kinds("nodestorages", shapes.NodeStorage))
    said = str(raised.value)
    assert said.startswith(f"http://127.0.0.1:{port}: no API server answers there (")
    assert "refused" in said.lower()
    assert "0x" not in said
    assert said.count(str(port)) == 1


def _login(folder: Path, script: str) -> dict[str, Any]:
    program = folder / "login"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": version, "command": str(program), "interactiveMode": "Never"}}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'the session is over' >&2; exit 3", ["returned 3", "the session is over"]),
        ("echo nothing of use", ["failed to decode"]),
        ("echo '{}'", ["missing key"]),
        (CREDENTIAL % "", ["missing token or clientCertificateData"]),
        ("rm $0", []),
    ],
    ids=["exit code", "text", "empty", "no credential", "nothing"],
)  # fmt: skip
def test_a_login_that_fails_is_told_and_nobody_is_asked(
    tmp_path: Path, script: str, words: list[str]
) -> None:
    with answering(page("a")) as (port, asked):
        with pytest.raises(kit.errors.SettingsError) as raised:
            server.FleetServer(kubeconfig(tmp_path, port, _login(tmp_path, script)))
        assert asked == []
    said = str(raised.value)
    assert said.startswith("context prod: its login failed: ")
    assert not [word for word in words if word not in said], said


def test_a_login_program_that_is_not_there(tmp_path: Path) -> None:
    login = _login(tmp_path, "")
    (tmp_path / "login").unlink()
    with pytest.raises(kit.errors.SettingsError, match="its login failed: .*No such file"):
        server.FleetServer(kubeconfig(tmp_path, 1, login))


def test_a_login_program_gives_the_token(tmp_path: Path) -> None:
    script = CREDENTIAL % '"token": "t"'
    with answering(page("a")) as (port, _):
        cluster = server.FleetServer(kubeconfig(tmp_path, port, _login(tmp_path, script)))
        assert len(list(cluster.kinds("nodestorages", shapes.NodeStorage))) == 1
        cluster.close()


@pytest.mark.parametrize(
    ("text", "context", "words"),
    [
        (None, None, ["kubeconfig", "--kubeconfig"]),
        ("{", None, ["kubeconfig"]),
        ("- a list", None, ["kubeconfig"]),
        ("", None, ["kubeconfig"]),
        ("contexts: []", None, ["it has no current-context", "--context"]),
        ("good", "prdo", ["context prdo", "has none of that name", "did you mean prod?"]),
    ],
    ids=["no file", "no YAML", "a list", "empty", "no current one", "no such context"],
)
def test_kubeconfigs_that_cannot_be_used(
    tmp_path: Path, text: str | None, context: str | None, words: list[str]
) -> None:
    file = tmp_path / "config"
    if text == "good":
        kubeconfig(tmp_path, 1)
    elif text is not None:
        file.write_text(text)
    with pytest.raises(kit.errors.SettingsError) as raised:
        server.FleetServer(file, context)
    assert not [word for word in words if word not in str(raised.value)], raised.value


@pytest.mark.parametrize(
    ("name", "names", "said"),
    [
        ("gpu-01", ["gpu-1", "cpu-9"], "did you mean gpu-1?"),
        ("zzz", ["a", "b"], "there are a, b"),
        ("zzz", [f"n{i}" for i in range(9)], "there are n0, n1, n2, n3, n4 and 4 more"),
        ("zzz", [], "there are none at all"),
    ],
)
def test_hints(name: str, names: list[str], said: str) -> None:
    assert server.hint(name, names) == said

"""Reads from the API server in this process: waiting asks often, and each kubectl costs 0.2 s."""

import contextlib
import http.client
import json
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

from tests.testbed import waiting


class Api:
    """As the cluster's admin; ``pki`` has its certificate."""

    def __init__(self, port: int, pki: Path) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"labelSelector": selector})
        answer = json.loads(self._get(f"/api/v1/namespaces/{namespace}/pods?{query}"))
        found: list[dict[str, Any]] = answer["items"]
        return found

    def read(self, path: str) -> Any:
        return json.loads(self._get(path))

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=waiting.limit(30), context=self._context
        )
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        assert response.status == 200, f"{path}: {response.status} {body[:500]!r}"
        return body

"""The repo names no host: registries, mirrors and indexes are settings of whoever builds."""

import re
import subprocess
from pathlib import Path

REPO = Path(__file__).parents[2]
ADDRESS = re.compile(r"\b(?:https?|ftp)://([\w.-]+\.[a-z]{2,})\b")
# Names of packages and the like, which no program asks.
NAMES = {
    "json-schema.org",  # the dialect of a schema
    "kubernetes.default",  # the API server's own name
    "www.apache.org",  # in the text of the licence
    "www.w3.org",  # the namespace of SVG
}
# Docker Hub's names are part of the grammar of references and login files.
OURS = {Path(__file__), REPO / "preheat" / "image" / "manifest.py"}
KNOWN = re.compile(
    r"\b(?:docker\.io|quay\.io|ghcr\.io|gcr\.io|registry\.k8s\.io|[\w-]+\.debian\.org|download\.ceph\.com"
    r"|pypi\.org|proxy\.golang\.org)\b"
)


def test_no_file_names_a_host() -> None:
    tracked = subprocess.run(
        ["git", "-C", REPO, "ls-files", "-z"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    found = []
    for name in filter(None, tracked):
        path = REPO / name
        if path in OURS or path.suffix == ".png" or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        hosts = {host for host in ADDRESS.findall(text) if not host.endswith(".example")} - NAMES
        hosts |= set(KNOWN.findall(text))
        found += [f"{name}: {host}" for host in sorted(hosts)]
    assert not found


def test_hosts_are_seen() -> None:
    assert ADDRESS.findall("FROM http://deb.some.org/x and https://a.example:1/") == [
        "deb.some.org",
        "a.example",
    ]
    assert KNOWN.findall("docker.io/library/debian http-deb.debian.org") == [
        "docker.io",
        "http-deb.debian.org",
    ]

"""Texts that somebody who may make objects writes into them, and objects made of them."""

from collections.abc import Iterable, Iterator
from typing import Any

from tests.kube import test_crds
from tests.kube.test_crds import DIR, dataset

CEPHFS = {**test_crds.CEPHFS, "monitors": ["127.0.0.1:1"]}
RBD = {**test_crds.RBD, "monitors": ["127.0.0.1:1"]}
PLAIN = "coco"
TEXTS = (
    "", ".", "..", "../../x", "../" * 12 + "x", "a/b", "/x", "//etc", "a//b", "a/../../b",
    "a?x=/..", "a?x=1", "a#b", "a%2f..%2fb", "%2e%2e", "a;b", "a:b", "a\\b",
    "a b", " a", "a\tb", "coco\n", "a\n[client]", "a\r\nb", "a\0b", "a\x1bb", "a\u2028b",
    "a,b", "a,ro=no", "a=b", "ns pool image -", "-", "--help", "-o", "$cluster", "$(x)", "`x`",
    "a@b", "A", "a_b", "ä", "\u2024\u2024/x", "\uff0e\uff0e", "\u0660", "\u00b2", "x" * 300,
    "{snapshot}", "{0.__class__}", "*" * 200, "[" * 100, "client.", "oci:/x/../y", "oci:../x",
)  # fmt: skip


def climbing(folder: str, name: str) -> tuple[str, ...]:
    """Texts that lead to ``name`` in ``folder`` for whoever makes a path of them."""
    up = "../" * 12
    return (
        f"{folder}/{name}", f"{up}{folder[1:]}/{name}", f"ceph?x=/{up}{folder[1:]}/{name}",
        f"ceph/{up}{folder[1:]}/{name}", f"ceph#/{up}{folder[1:]}/{name}", f"a\n{folder}/{name}",
    )  # fmt: skip


def _cached(source: dict[str, Any], **spec: Any) -> dict[str, Any]:
    kept = "frozen" if source["kind"] == "dir" else "snapshot"
    key = {} if source["kind"] == "dir" else {"secretRef": {"name": "ceph", "key": "admin"}}
    return dataset("", source=source, **{"freshness": kept, **key, **spec})


def datasets(text: str) -> Iterator[dict[str, Any]]:
    """One for each place of a CachedDataset that takes a text."""
    yield {**_cached(DIR), "metadata": {"name": text}}
    yield _cached({**DIR, "path": text})
    yield _cached({**DIR, "path": f"/mnt/{text}"})
    # Texts as monitors are tried elsewhere: here they would be looked up.
    for source, own in (
        (CEPHFS, ("filesystem", "path", "manifest")), (RBD, ("pool", "namespace", "image")),
    ):  # fmt: skip
        for field in (*own, "snapshot", "user"):
            yield _cached({**source, field: text})
        yield _cached(source, secretRef={"name": text})
        yield _cached(source, secretRef={"name": "ceph", "key": text})
        yield _cached({**source, "secret_file": text}, secretRef=None)
    open_end = {k: v for k, v in CEPHFS.items() if k != "snapshot"}
    yield _cached(open_end, freshness="follow", snapshots=text)
    yield _cached(DIR, access={"mode": text})
    for verb in ("warm", "verify", "pause", "rescan"):
        made = _cached(DIR)
        made["metadata"]["annotations"] = {f"nodeagent.io/{verb}": text}
        yield made


def image_sets(text: str) -> Iterator[dict[str, Any]]:
    """One for each place of an ImageSet that takes a text."""
    for image in (
        {"ref": text}, {"ref": f"r.test/{text}:1"}, {"ref": f"r.test/a:{text}"},
        {"ref": "r.test/a:1", "source": text}, {"ref": "r.test/a:1", "source": f"oci:{text}/b"},
        {"ref": "r.test/a:1", "pin": text},
    ):  # fmt: skip
        yield {
            "apiVersion": "nodeagent.io/v1alpha1", "kind": "ImageSet",
            "metadata": {"name": ""}, "spec": {"images": [image]},
        }  # fmt: skip


def of(*texts: str) -> list[dict[str, Any]]:
    """An object for each text in each place."""
    return [made for text in texts for made in (*datasets(text), *image_sets(text))]


def named(objects: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a name where the text is not the name."""
    return [
        {**each, "metadata": {**each["metadata"], "name": each["metadata"]["name"] or f"made-{n}"}}
        for n, each in enumerate(objects)
    ]

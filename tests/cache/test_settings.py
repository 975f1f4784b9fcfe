"""Settings of the cache, as mistakes in a settings file show them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import kit.errors
from cache.settings import DirSource, at_snapshot, same_place
from cache.sources import roots
from nodeagent import configfile
from nodeagent.cluster import intent
from nodeagent.settings import Settings


def refused(text: str) -> str:
    with pytest.raises(kit.errors.SettingsError) as error:
        configfile.parse(text, "file.yaml")
    return str(error.value)


def with_datasets(*lines: str) -> str:
    return "cache:\n  datasets:\n" + "".join(f"    - {line}\n" for line in lines)


FROZEN = "freshness: frozen"
INSIDE = "/x/../var/lib/nodeagent/store/y"


@pytest.mark.parametrize(
    "line",
    [
        "{name: a, source: {kind: dir, path: /a}}",
        "{name: a, freshness: live, source: {kind: dir, path: /a}}",
        "{name: a, freshness: snapshot, source: {kind: dir, path: /a}}",
        "{name: a, freshness: snapshot, source: {kind: cephfs, monitors: [a], secret_file: /s}}",
    ],
)
def test_live_tree_is_refused_with_alternatives(line: str) -> None:
    message = refused(with_datasets(line))
    assert "ESTALE" in message
    assert "freshness: snapshot" in message
    assert "freshness: frozen" in message
    assert message.startswith("file.yaml:3: cache.datasets[0]")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{name: Über, freshness: frozen, source: {kind: dir, path: /a}}", "dataset name"),
        ("{name: a/b, freshness: frozen, source: {kind: dir, path: /a}}", "dataset name"),
        ("{name: .., freshness: frozen, source: {kind: dir, path: /a}}", "dataset name"),
        ('{name: "demo\\n", freshness: frozen, source: {kind: dir, path: /a}}', "dataset name"),
        ('{name: a, freshness: frozen, source: {kind: dir, path: "/a\\0b"}}', "NUL"),
        ("{name: a, freshness: frozen, source: {kind: dir, path: //etc/x}}", "lies in /etc"),
        (f"{{name: a, source: {{kind: dir, path: {INSIDE}}}, freshness: frozen}}", "inside store"),
        (f"{{name: {'a' * 64}, freshness: frozen, source: {{kind: dir, path: /a}}}}", "at most 63"),
        ("{name: a, freshness: frozen, source: {kind: dir, path: a}}", "relative"),
        ("{name: a, freshness: frozen, source: {kind: nfs, path: /a}}", "nfs"),
        ("{name: a, freshness: frozen, source: {kind: dir}}", "missing"),
        ("{name: a, freshness: frozen, source: {kind: dir, path: /x/.snap/v1}}", "snapshot"),
        ("{freshness: frozen, source: {kind: dir, path: /a}}", "missing"),
    ],
)
def test_bad_dataset_is_refused(line: str, word: str) -> None:
    assert word in refused(with_datasets(line))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"path": "relative"}, "not an absolute path"),
        ({"path": "/a/../b"}, "not an absolute path"),
        ({"path": "/a/.snap/v1"}, "set a snapshot"),
        ({"snapshot": "a/b"}, "not a snapshot name"),
        ({"snapshot": ".."}, "not a snapshot name"),
        ({"monitors": []}, "at least 1"),
        ({"monitors": ["a b"]}, "not a monitor address"),
        ({"monitors": ["a,ro"]}, ""),
        ({"user": "a b"}, "plain name"),
        ({"filesystem": "a\nb"}, "plain name"),
        ({"user": "a\n"}, "plain name"),
        ({"monitors": ["a\nkeyring = /x"]}, "not a monitor address"),
        ({"monitors": ["10.0.0.1:6789\n"]}, "not a monitor address"),
        ({"secret_file": "secret"}, "relative"),
        ({"client": "nfs"}, "client"),
    ],
)
def test_bad_cephfs_source_is_refused(change: dict[str, object], word: str) -> None:
    source = {"kind": "cephfs", "monitors": ["a:1"], "snapshot": "s", "secret_file": "/s"} | change
    dataset = {"name": "a", "freshness": "snapshot", "source": source}
    text = yaml.safe_dump({"cache": {"datasets": [dataset]}})
    if word:
        assert word in refused(text)
    else:
        configfile.parse(text, "x")


def test_duplicate_dataset_name_is_refused() -> None:
    line = "{name: a, freshness: frozen, source: {kind: dir, path: /%s}}"
    assert "twice" in refused(with_datasets(line % "a", line % "b"))


@pytest.mark.parametrize(
    ("store", "views", "source"),
    [
        ("/a", "/a", "/s"),
        ("/a", "/a/b", "/s"),
        ("/a/b", "/a", "/s"),
        ("/a", "/b", "/a/s"),
        ("/a", "/b", "/a"),
        ("/a", "/b", "/b/s"),
        ("/s/a", "/b", "/s"),
        ("/a", "/s/b", "/s"),
    ],
)
def test_overlapping_roots_are_refused(store: str, views: str, source: str) -> None:
    dataset = f"{{name: x, {FROZEN}, source: {{kind: dir, path: {source}}}}}"
    text = f"cache:\n  store: {store}\n  views: {views}\n  datasets:\n    - {dataset}\n"
    assert "lies inside" in refused(text)


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("/var/lib/kubelet", "the kubelet's"),
        ("/var/lib/kubelet/pods/1/volumes", "the kubelet's"),
        ("/run/secrets/kubernetes.io/serviceaccount", "the agent's"),
        ("/mnt/x/../../var/lib/kubelet/pods", "the kubelet's"),
        ("/data/kubelet/pods", "the kubelet's"),
        ("/data", "the kubelet's"),
        ("/var/log/pods", "the kubelet's"),
        ("/var/lib/containerd/io.containerd.content.v1.content", "the container runtime's"),
        ("/data/images/overlay", "the container runtime's"),
        ("/run/containerd", "the container runtime's"),
        ("/etc/nodeagent", "the host's configuration"),
        ("/proc/1/root/etc", "the kernel's"),
        ("/", "lies in it"),
        ("/var/lib", "lies in it"),
        ("/mnt/imagenet", ""),
        ("/var/lib/kubelet2/x", ""),
        ("/etcetera", ""),
    ],
)
def test_no_source_shows_what_is_the_nodes_own(path: str, whose: str) -> None:
    dataset = f"{{name: x, {FROZEN}, source: {{kind: dir, path: {path}}}}}"
    text = (
        "kubelet: {root_dir: /data/kubelet, image_dir: /data/images}\n"
        f"cache:\n  datasets:\n    - {dataset}\n"
    )
    if whose:
        assert whose in refused(text)
    else:
        configfile.parse(text, "test")


def test_no_link_leads_a_source_to_what_is_the_nodes_own(tmp_path: Path) -> None:
    state, link = tmp_path / "state", tmp_path / "link"
    (state / "sources").mkdir(parents=True)
    for target, whose in ((state / "sources", "the agent's"), (Path("/proc/1"), "the kernel's")):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(kit.errors.SourceError, match=whose):
            roots.look_in_place(str(link), str(state))
    (tmp_path / "data").mkdir()
    link.unlink()
    link.symlink_to(tmp_path / "data")
    assert roots.look_in_place(str(link), str(state))["empty"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"kind": "dir", "path": "/home/ann/data"}, "its users'"),
        ({"kind": "dir", "path": "/root/data"}, "root's"),
        ({"kind": "dir", "path": "/var/lib/etcd/member"}, "the cluster's"),
        ({"kind": "dir", "path": "/mnt/data"}, ""),
        ({"secret_file": "/var/run/../lib/kubelet/key"}, "use secretRef"),
        ({"secret_file": "/etc/nodeagent/object-keys/../tokens"}, "use secretRef"),
        ({"secret_file": "/etc/nodeagent/object-keys/gpu"}, ""),
        ({"secret_file": "/run/nodeagent/secrets/0123"}, ""),
    ],
)
def test_objects_name_less_of_the_node_than_its_settings_do(
    source: dict[str, Any], why: str
) -> None:
    ceph = {"kind": "cephfs", "monitors": ["a:1"], "path": "/x"}
    spec = {"source": source if "kind" in source else ceph | source, "freshness": "frozen"}
    asked = intent.Wish("CachedDataset", "a", "u", 1, "2026-01-01T00:00:00Z", spec)
    secrets = intent.Secrets(Path("/run/nodeagent/secrets"), "nodeagent")
    given = Settings.model_validate({"cache": {}})
    made, (verdict,) = intent.merge(given, [asked], secrets)
    assert verdict.accepted is not bool(why)
    assert why in verdict.message
    assert [each.name for each in made.cache.datasets] == ([] if why else ["a"])
    if not why and "kind" in source:
        assert made.cache.datasets[0].source.by_object
        assert made.cache.datasets[0].model_copy(update={"warm": False}).source.by_object


def test_who_names_a_source_changes_nothing_of_what_it_is() -> None:
    given = DirSource(kind="dir", path=Path("/mnt/a"))
    named = given.named_by_object()
    assert given != named and same_place(given, named) and same_place(named, given)
    later = at_snapshot(named, "v1")
    assert isinstance(later, DirSource) and later.by_object

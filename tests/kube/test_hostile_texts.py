"""What becomes of hostile texts wherever a text of an object, a pod or a request becomes a path, a
part of a URL, an option of a mount, or a line of a file. Each is refused, or stays what it is: one
name."""

import os
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.files
from cache.csi import records, volumes
from cache.settings import CephfsSource, DatasetSettings, DirSource, RbdSource
from cache.sources import cephfs_mount
from cache.sources import kinds as source_kinds
from ceph.monitors import parse
from kube import client
from linux import krbd, rbd_sysfs
from nodeagent.cluster import follow, intent, kinds
from nodeagent.settings import ClusterSettings, Settings
from preheat.image import manifest
from preheat.registry import hosts
from tests.kube import hostile

STATE = Path("/var/lib/nodeagent/state")
SECRETS = intent.Secrets(Path("/run/nodeagent/secrets"), "nodeagent")
DATASET: dict[str, Any] = {"name": "a", "freshness": "frozen"}
CEPHFS: dict[str, Any] = {
    "kind": "cephfs", "monitors": ["h:1"], "path": "/", "snapshot": "s", "secret_file": "/k",
}  # fmt: skip
RBD: dict[str, Any] = {
    "kind": "rbd", "monitors": ["h:1"], "pool": "p", "image": "i", "snapshot": "s",
    "secret_file": "/k",
}  # fmt: skip
REFUSALS = (ValueError, OSError, kit.errors.AgentError)


def below(folder: Path | str, path: Path | str, parts: int = 1) -> bool:
    """Whether it is so many names below the folder, for the kernel too."""
    plain = os.path.normpath(path)
    return (
        plain == str(path) and "\0" not in plain
        and len(Path(plain).relative_to(folder).parts) == parts
    )  # fmt: skip


def one_segment(url: str, root: str, text: str) -> bool:
    name = url.removeprefix(f"{root}/")
    return re.fullmatch(r"[A-Za-z0-9._~%:-]+", name) is not None and (
        urllib.parse.unquote(name) == text
    )


def no_separators(text: str) -> bool:
    return re.fullmatch(r"[^\s,\0]+", text) is not None


def dataset_folder(text: str) -> bool:
    source = {"kind": "dir", "path": "/mnt/a"}
    made = DatasetSettings.model_validate({**DATASET, "name": text, "source": source})
    return below(STATE / "sources", source_kinds.folder_of(STATE, made.name))


def directory(text: str) -> bool:
    """Any absolute path that the kernel takes. What may be shown, other tests ask."""
    return "\0" not in str(DirSource(kind="dir", path=Path(text)).path)


def secret(text: str) -> bool:
    name = SECRETS.file(kinds.SecretRef(name=text))
    key = SECRETS.file(kinds.SecretRef(name="a", key=text)) if text != "key" else name
    return below(SECRETS.folder, name) and below(SECRETS.folder, key)


def secret_key(text: str) -> bool:
    return below(SECRETS.folder, SECRETS.file(kinds.SecretRef(name="a", key=text)))


def secret_url(text: str) -> bool:
    ref = kinds.SecretRef(name=text)
    return one_segment(client.path_to("/secrets", ref.name), "/secrets", text)


def object_url(text: str) -> bool:
    url = client.path_to("/api/v1/nodes", text)
    assert client._PATH.fullmatch(url) and client._PATH.fullmatch(f"{url}/status?watch=1")
    return one_segment(url, "/api/v1/nodes", text)


def cephfs_path(text: str) -> bool:
    made = CephfsSource.model_validate({**CEPHFS, "path": f"/{text}"}).path
    return (os.path.normpath(made) == made and made.isprintable()) or "\u2028" in made


def cephfs_snapshot(text: str) -> bool:
    made = CephfsSource.model_validate({**CEPHFS, "snapshot": text}).snapshot
    return below("/a/.snap", f"/a/.snap/{made}") and "\n" not in str(made)


def cephfs_manifest(text: str) -> bool:
    made = CephfsSource.model_validate({**CEPHFS, "manifest": text}).manifest
    return os.path.normpath(f"/a/{made}").startswith("/a/")


def cephfs_filesystem(text: str) -> bool:
    return no_separators(CephfsSource.model_validate({**CEPHFS, "filesystem": text}).filesystem)


def keyring(text: str, folder: Path) -> bool:
    source = CephfsSource.model_validate({**CEPHFS, "user": text, "monitors": [f"{text}:1"]})
    way = cephfs_mount.Way(source, parse(source.monitors), "KEY", "x")
    conf = cephfs_mount.configure(folder, way, 10.0)
    lines = (folder / "keyring").read_text().splitlines()
    sections = [each for each in conf.read_text().splitlines() if each.startswith("[")]
    return lines == [f"[client.{source.user}]", "key = KEY"] and sections == [
        "[global]",
        "[client]",
    ]


def added(field: str) -> Callable[[str], bool]:
    """Of what krbd writes: five words and no more, with no option that is not ours."""

    def try_it(text: str) -> bool:
        source = RbdSource.model_validate(
            {**RBD, field: [f"{text}:1"] if field == "monitors" else text}
        )
        written: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(krbd, "_write", lambda _, words: written.append(words))
            image = rbd_sysfs.RbdImage(
                pool=source.pool, namespace=source.namespace, name=source.image,
                snapshot=source.snapshot,
            )  # fmt: skip
            with pytest.raises(OSError, match="shows no device"):
                hosts_of = [str(each).partition(":")[2] for each in parse(source.monitors)]
                krbd.map_snapshot(hosts_of, source.user, "KEY", image, "v1")
        _, options, *names = written[0].split(" ")
        known = {"name", "secret", "ro", "_pool_ns"}
        keys = [each.partition("=")[0] for each in options.split(",")]
        return len(names) == 3 and names[2] != "-" and len(keys) <= 4 and set(keys) <= known

    return try_it


def image(text: str) -> bool:
    made = manifest.parse(text)
    url = f"https://{made.host}/v2/{made.path}/manifests/{made.tag or made.digest}"
    parts = urllib.parse.urlsplit(url)
    folders = hosts._folder([Path("/nowhere")], made.host)
    return parts.hostname is not None and not parts.query and ".." not in url and folders is None


def volume_target(text: str) -> bool:
    return os.path.normpath(volumes.target_below(f"/k/pods/{text}", "/k/pods")).startswith(
        "/k/pods/"
    )


def volume_record(text: str) -> bool:
    return below("/state/csi", records.file_of(Path("/state/csi"), text))


def volume_attribute(text: str) -> bool:
    """It is looked up among the node's datasets, and becomes nothing else."""
    made = volumes.wanted({"dataset": text}, read_only=True, block=False, options=False)
    return made.dataset == text


PLACES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "CachedDataset's name -> folders of source and view": ("coco.v1", dataset_folder),
    "source.path of a dir -> path": ("/mnt/coco", directory),
    "secretRef.name -> file": ("ceph", secret),
    "secretRef.key -> file": ("admin_1", secret_key),
    "secretRef.name -> URL": ("ceph", secret_url),
    "name of a node or an object -> URL": ("node-1", object_url),
    "source.path -> source of a mount": ("coco", cephfs_path),
    "source.snapshot -> path": ("v1", cephfs_snapshot),
    "source.manifest -> path": ("m", cephfs_manifest),
    "source.filesystem -> option of a mount": ("cephfs", cephfs_filesystem),
    "pool -> krbd": ("pool", added("pool")),
    "namespace -> krbd": ("space", added("namespace")),
    "image -> krbd": ("image", added("image")),
    "snapshot -> krbd": ("v1", added("snapshot")),
    "user -> krbd": ("admin", added("user")),
    "monitors -> krbd": ("10.0.0.1", added("monitors")),
    "ref -> URL and folder of hosts": ("r.test/a:1", image),
    "target path of a volume -> path": ("uid/volumes/x/mount", volume_target),
    "target path of a volume -> record": ("/x", volume_record),
    "volumeAttributes -> dataset": ("coco", volume_attribute),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_text_is_refused_or_stays_one_name(place: str) -> None:
    plain, is_well = PLACES[place]
    assert is_well(plain)
    for text in (*hostile.TEXTS, *hostile.climbing("/outside", "x")):
        try:
            well = is_well(text)
        except REFUSALS:
            continue
        assert well, repr(text)


def test_user_and_monitors_are_no_lines_of_ceph_conf(tmp_path: Path) -> None:
    assert keyring("admin", tmp_path)
    for text in hostile.TEXTS:
        try:
            well = keyring(text, tmp_path)
        except REFUSALS:
            continue
        assert well, repr(text)


def test_path_that_nobody_quoted_is_not_asked_for() -> None:
    for path in ("/api/v1/secrets/a?x=/..", "/a/../b", "/a/..", "/a b", "/a//b", "a", "/a#b", "/."):
        assert client._PATH.fullmatch(path) is None, path
    for name in ("", ".", ".."):
        with pytest.raises(client.KubeError, match="not the name"):
            client.path_to("/api/v1/nodes", name)


# --- files of Secrets


def test_key_is_put_only_where_nobody_else_writes(tmp_path: Path) -> None:
    folder, victim = tmp_path / "secrets", tmp_path / "victim"
    victim.write_text("before")
    file = folder / ("a" * 64)
    follow._put(file, b"key")
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    file.unlink()
    file.symlink_to(victim)
    follow._put(file, b"key")
    assert not file.is_symlink() and victim.read_text() == "before"
    folder.chmod(0o777)  # as an emptyDir is at first
    half = folder / f".{file.name}.new"
    half.write_text("of somebody who waits for the key, and has it open")
    follow._put(file, b"other")
    assert (folder.stat().st_mode & 0o777, file.read_bytes()) == (0o700, b"other")
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match="agent's own"):
        follow._put(file, b"other")


def test_only_files_of_secrets_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    follow._forget(folder, set())  # nothing was put yet
    kept, gone, half = "a" * 64, "b" * 64, f".{'c' * 64}.new"
    for name in (kept, gone, half, "ceph.admin", "b" * 63, f"{'b' * 64}.json"):
        follow._put(folder / name, b"x")
    follow._forget(folder, {kept})
    assert {each.name for each in folder.iterdir()} == {
        kept, "ceph.admin", "b" * 63, f"{'b' * 64}.json",
    }  # fmt: skip


async def test_secrets_are_asked_for_in_turn_and_some_at_a_time(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"admin": {"socket": str(tmp_path / "s")}, "state_dir": str(tmp_path), "cache": {}}
    )
    asked = ClusterSettings(server="https://127.0.0.1:1", namespace="n")
    follower = follow.Follower(asked, settings)
    wishes = [
        intent.Wish("CachedDataset", f"d{n}", "u", 1, "", {"secretRef": {"name": f"s{n}"}})
        for n in range(50)
    ]
    paths: list[str] = []

    async def refuse(_: str, path: str, **__: Any) -> dict[str, Any]:
        paths.append(path)
        raise client.KubeError(path, "no", 403)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower.server, "request", refuse)
        for count in (20, 40, 50, 50):
            await follower.secrets.read(wishes)
            assert len(paths) == len(set(paths)) == count


def test_link_in_the_place_of_a_file_that_is_written_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("before")
    (tmp_path / ".a.new").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        kit.files.save(tmp_path / "a", b"x")
    assert victim.read_text() == "before"

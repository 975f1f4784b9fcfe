"""The CephFS source without a cluster: its mounts, what it tells the kernel, its errors."""

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.errors
from cache.settings import CephfsSource, DatasetSettings
from cache.sources import cephfs, cephfs_child, cephfs_mount, roots, shared
from ceph import monitors, secrets
from ceph.monitors import Address
from linux import mountinfo, mounts


def source(folder: Path, **more: Any) -> cephfs.Cephfs:
    settings = CephfsSource(
        kind="cephfs", monitors=("127.0.0.1:1",), path="/a", secret_file=folder / "secret", **more
    )
    freshness = "snapshot" if settings.snapshot else "frozen"
    dataset = DatasetSettings(name="a", freshness=freshness, source=settings)
    return cephfs.Cephfs(dataset, settings, folder / "sources" / "a")


def settings(folder: Path, path: str = "/a", **more: Any) -> CephfsSource:
    fields: dict[str, Any] = {"monitors": ("127.0.0.1:1",), "secret_file": folder / "secret"}
    return CephfsSource(kind="cephfs", path=path, **fields | more)


def way(folder: Path, path: str = "/a", **more: Any) -> cephfs_mount.Way:
    addresses = [Address("v1", "127.0.0.1", 1)]
    return cephfs_mount.Way(settings(folder, path, **more), addresses, "secret", "it")


@pytest.mark.parametrize(
    ("addresses", "expected", "mode"),
    [
        ([("v2", "10.0.0.1", 3300), ("v2", "::1", 3300)], "10.0.0.1:3300,[::1]:3300:/a", True),
        ([("v2", "10.0.0.1", 3300), ("v1", "10.0.0.1", 6789)], "10.0.0.1:6789:/a", False),
    ],
)
def test_kernel_speaks_one_protocol(
    tmp_path: Path, addresses: list[Any], expected: str, mode: bool
) -> None:
    found = [Address(*each) for each in addresses]
    given = dataclasses.replace(way(tmp_path), addresses=found)
    strings = cephfs_mount.kernel_options(given, "/a")
    assert strings["source"] == expected
    assert ("ms_mode" in strings) == mode
    assert strings["recover_session"] == "clean"


@pytest.mark.parametrize(
    ("number", "cause"),
    [("13", "is refused"), ("2", "does not exist"), ("110", "or no MDS"), ("", "no reason")],
)
def test_explain_names_the_cause(tmp_path: Path, number: str, cause: str) -> None:
    error = way(tmp_path).explain(number)
    assert cause in error.cause
    assert error.remedy.endswith("it is tried again")


def test_native_access_only_for_snapshots(tmp_path: Path) -> None:
    assert not source(tmp_path).immutable
    snapshot = source(tmp_path, snapshot="v1")
    assert snapshot.immutable
    assert snapshot._access().root == "/a/.snap/v1"


@pytest.mark.real
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
async def test_root_that_was_good_and_is_refused_is_mounted_again(
    area: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As the kernel client answers once the cluster has shut it out."""
    made = source(area)
    target = area / "sources" / "a" / "mount"
    target.mkdir(parents=True)
    (target.parent / cephfs_mount.SHOWN).write_text(made._shows)
    mounts.mount(str(area), target, None, mounts.MS_BIND)
    real, shut_out = kit.child.call, [True]

    async def call(function: Any, *arguments: Any, deadline: float) -> Any:
        if function is roots.look and shut_out[0]:
            raise OSError(number, os.strerror(number))
        return await real(function, *arguments, deadline=deadline)

    monkeypatch.setattr(kit.child, "call", call)
    with pytest.raises(kit.errors.SourceError):
        await made.reach(10.0)
    mounted = mountinfo.at(str(target), mountinfo.read())
    assert mounted, "it never answered: perhaps a matter of rights"
    shut_out[0] = False
    await made.reach(10.0)
    shut_out[0] = True
    with pytest.raises(kit.errors.SourceError):
        await made.reach(10.0)
    assert mountinfo.at(str(target), mountinfo.read()) == []


@pytest.mark.real
async def test_release_ends_a_shared_mount_of_which_the_last_part_has_gone_before(
    area: Path,
) -> None:
    main, view = area / "@digest" / "mount", area / "view"
    for each in (main, view):
        each.mkdir(parents=True)
    mounts.mount("tmpfs", str(main), "tmpfs", 0)
    mounts.mount(str(main), str(view), None, mounts.MS_BIND)
    await cephfs.release(area / "a")
    assert mountinfo.top(main) is not None  # a view still shows it
    mounts.unmount(str(view))
    await cephfs.release(area / "a")
    assert mountinfo.top(main) is None
    assert not main.parent.exists()


@pytest.mark.real
async def test_release_unmounts_stacked_mounts(area: Path) -> None:
    made = source(area)
    target = area / "sources" / "a" / "mount"
    target.mkdir(parents=True)
    for _ in range(2):
        mounts.mount(str(area), target, None, mounts.MS_BIND)
    assert len(mountinfo.at(str(target), mountinfo.read())) == 2
    await made.release()
    assert mountinfo.at(str(target), mountinfo.read()) == []
    assert not target.parent.exists()


async def test_kernel_mount_leaves_what_reads_past_it_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = source(tmp_path, snapshot="v1")
    (tmp_path / "secret").write_text("AQB1aGVsbG8gd29ybGQgaGVsbG8gd29ybGQ=\n")
    called: list[Any] = []

    async def call(function: Any, *_: Any, **__: Any) -> None:
        called.append(function)

    async def resolve(_: Any) -> list[Address]:
        return [Address("v1", "127.0.0.1", 1)]

    monkeypatch.setattr(monitors, "resolve", resolve)
    monkeypatch.setattr(mounts, "kernel_has", lambda _: True)
    monkeypatch.setattr(kit.child, "call", call)
    await made._mount(10.0)
    assert called == [secrets.read, cephfs_child.mount_kernel]
    access = made._access()
    conf = Path(access.conf).read_text()
    assert "mon host = " in conf and "127.0.0.1:1" in conf
    keyring = conf.split("keyring = ")[1].splitlines()[0]
    assert Path(keyring).stat().st_mode & 0o077 == 0
    assert access.top == "/a"


def group(folder: Path, *paths: str, **more: Any) -> tuple[shared.SharedMounts, list[CephfsSource]]:
    """Mounts of datasets with these paths, of one user."""
    given = [settings(folder, path, **more) for path in paths]
    made = shared.SharedMounts(folder)
    for each in given:
        made.meant(each)
    return made, given


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/sets/a"], ["/sets/a"]),
        (["/sets/a", "/sets/b"], ["/sets", "/sets/a"]),
        (["/sets/a/1", "/sets/a/2", "/other"], ["/", "/sets", "/sets/a", "/sets/a/1"]),
        (["/sets", "/sets/b"], ["/sets"]),
        (["/a", "/ab"], ["/", "/a"]),
        (["/", "/a"], ["/"]),
    ],
)
def test_shared_mount_is_of_what_all_paths_have_in_common(
    tmp_path: Path, paths: list[str], expected: list[str]
) -> None:
    made, given = group(tmp_path, *paths)
    assert made.roots(given[0], []) == expected


def test_only_the_same_user_file_system_client_and_key_file_share(tmp_path: Path) -> None:
    made, (one, same) = group(tmp_path, "/a", "/b", monitors=("h:1", "i:1"))
    assert made.folder(one, "/") == made.folder(same, "/")
    assert made.folder(one, "/") == made.folder(
        settings(tmp_path, "/c", monitors=("i:1", "h:1")), "/"
    )
    others: list[dict[str, Any]] = [
        {"user": "other"}, {"filesystem": "other"}, {"client": "fuse"},
        {"secret_file": tmp_path / "other"}, {"monitors": ("h:1",)},
    ]  # fmt: skip
    for other in others:
        given = settings(tmp_path, "/b", **{"monitors": ("h:1", "i:1")} | other)
        assert made.folder(one, "/") != made.folder(given, "/"), other


def test_a_mount_that_is_there_is_used_before_another_is_made(tmp_path: Path) -> None:
    """As after a restart, when not every dataset is known yet."""
    made, (one, _) = group(tmp_path, "/sets/a/1", "/sets/b")
    for there in ("/", "/sets/a"):
        mounted = [str(made.folder(one, there) / cephfs_mount.POINT)]
        assert made.roots(one, mounted)[0] == there


async def test_what_a_key_may_not_mount_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of two directories: neither '/' nor '/sets', and each directory for all below it."""
    made, _ = group(tmp_path, "/sets/a/1", "/sets/a/2", "/sets/b/1", "/c")
    tried: list[str] = []

    async def mount(given: cephfs_mount.Way, root: str, *_: Any) -> None:
        tried.append(root)
        if not wrong_key and root in ("/sets/a", "/sets/b"):
            return
        raise given.explain("1")

    async def part(*_: Any, **__: Any) -> None:
        """The mount is fine."""

    monkeypatch.setattr(made, "_mount", mount)
    monkeypatch.setattr(kit.child, "call", part)
    wrong_key = True
    with pytest.raises(kit.errors.SourceError, match="wrong key"):
        await made.show(way(tmp_path, "/sets/a/1"), tmp_path, 1.0)
    assert tried == ["/", "/sets", "/sets/a", "/sets/a/1"]
    wrong_key = False
    tried.clear()
    for path in ("/sets/a/1", "/sets/a/2", "/sets/b/1"):
        await made.show(way(tmp_path, path), tmp_path, 1.0)
    assert tried == ["/", "/sets", "/sets/a", "/sets/a", "/sets/b"]


def mounted(device: int, target: Path | str, mount_id: int = 1) -> mountinfo.Mount:
    line = f"{mount_id} 0 0:{device} / {target} ro - fuse.ceph-fuse ceph-fuse ro"
    return mountinfo.parse_line(line.encode())


def test_shared_mount_is_unused_when_no_other_mount_shows_a_part_of_it(tmp_path: Path) -> None:
    one, two, gone = (tmp_path / name for name in ("@1", "@2", "@3"))
    table = [mounted(7, one / "mount"), mounted(8, two / "mount"), mounted(8, "/views/a/data")]
    assert shared.unused([one, two, gone], table) == [one, gone]
    # Mounted anew over a dead one: what shows parts of that does not use this.
    table.append(mounted(9, two / "mount", 2))
    assert shared.unused([two], table) == [two]


@pytest.mark.real
def test_a_part_is_never_chosen_by_links_of_the_source(area: Path) -> None:
    source, target = area / "source", area / "target"
    (source / "sets").mkdir(parents=True)
    (source / "sets" / "f").write_text("x")
    (source / "link").symlink_to("/etc")
    target.mkdir()
    with pytest.raises(OSError) as nothing:
        roots.show_part(str(source), "sets", str(target))
    assert nothing.value.errno == errno.ENOTCONN, "nothing is mounted there"
    mounts.mount("none", source, "tmpfs", 0)
    (source / "sets").mkdir()
    (source / "sets" / "f").write_text("y")
    (source / "link").symlink_to("/etc")
    for part in ("link", "sets/..", "link/ssl"):
        with pytest.raises(OSError):
            roots.show_part(str(source), part, str(target))
    with pytest.raises(FileNotFoundError):
        roots.show_part(str(source), "missing", str(target))
    assert mountinfo.top(target) is None
    roots.show_part(str(source), "sets", str(target))
    assert (target / "f").read_text() == "y"
    shown = mountinfo.top(target)
    assert shown is not None and (shown.root, shown.read_only) == ("/sets", True)


async def test_kernel_and_ceph_fuse_are_asked_whether_they_know_the_type_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = "AgBdGQlqAAAAACAA" + "QUJD" * 10 + "QUI="
    (tmp_path / "secret").write_text(newer)
    (tmp_path / "rados").write_text("#!/bin/sh\necho ceph version 16.2.15\n")
    (tmp_path / "rados").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(mounts, "kernel_has", lambda _: True)

    async def resolve(_: Any) -> list[Address]:
        return [Address("v1", "127.0.0.1", 1)]

    monkeypatch.setattr(monitors, "resolve", resolve)
    with pytest.raises(kit.errors.SourceError, match="this node's Ceph client 16.2.15 does not"):
        await cephfs_mount.way_to(settings(tmp_path, client="fuse"), "it")
    found = await cephfs_mount.way_to(settings(tmp_path), "it")
    assert found.secret == newer

    async def call(*_: Any, **__: Any) -> None:
        raise OSError(524, "Unknown error 524")

    monkeypatch.setattr(kit.child, "call", call)
    with pytest.raises(kit.errors.SourceError, match="aes256k, which this kernel's client"):
        await cephfs_mount.make(tmp_path / "m", found, "/", 10.0)
    other = dataclasses.replace(found, secret="AQAVUCdhj8DLCBAAKA9WzcQG6u44EeNooNobug==")
    with pytest.raises(kit.errors.SourceError, match="mounting failed .524"):
        await cephfs_mount.make(tmp_path / "m", other, "/", 10.0)

"""OCI layouts: what is read of them, and what of a hostile one is refused."""

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat import layout, manifest, settings, sources
from preheat.failure import Kind, PullError
from tests.testbed import layouts, registry

REF = manifest.parse("r.e/fw/torch:v2")
PLATFORM = "linux/amd64"


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("oci:/mnt/images/torch", "/mnt/images/torch"),
        ("oci:/mnt/torch.tar", "/mnt/torch.tar"),
        ("oci:shared/images/torch", "/views/shared/data/images/torch"),
    ],
)
def test_where_a_source_is(source: str, path: str) -> None:
    assert sources.path_of(sources.check(source), Path("/views")) == Path(path)


@pytest.mark.parametrize(
    "source",
    [
        *("", "/mnt/x", "oci:", "oci:x", "oci:x/", "docker://x", "oci:shared//etc", "oci:Shared/x"),
        *(
            "oci:/mnt/../etc",
            "oci:shared/../x",
            "oci:shared/a/..",
            "oci:/a\nb",
            "oci:/" + "a" * 1024,
        ),
    ],
)
def test_odd_sources_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="oci|path"):
        sources.check(source)
    with pytest.raises(ValueError, match="oci|path"):
        settings.ImageSettings(ref=REF.text, source=source)


def test_cri_o_takes_no_layouts() -> None:
    images = [{"ref": REF.text, "source": "oci:/mnt/x"}]
    with pytest.raises(ValueError, match="source needs containerd"):
        settings.PreheatSettings.model_validate({"runtime": "crio", "images": images})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "layout"
    made.mkdir()
    layouts.write(made, "v2", [registry.layer("a", 200_000, 1)], index=True)
    return made


async def read(path: Path, ref: manifest.Reference = REF) -> tuple[manifest.Shape, bytes]:
    """Its shape, and the bytes of its layers from the hundredth on."""
    found = layout.Layout(path)
    shape = await found.shape(ref, await found.target(ref, PLATFORM), PLATFORM)
    data = b""
    for each in shape.layers:
        async for chunk in found.blob(each.digest, each.size, 100):
            data += chunk
    return shape, data


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "tar"])
async def test_a_layout_is_read_from_any_offset(folder: Path, tmp_path: Path, packed: bool) -> None:
    (layer,) = [registry.layer("a", 200_000, 1)]
    path = layouts.pack(folder, tmp_path / "l.tar") if packed else folder
    shape, data = await read(path)
    assert data == layer.packed[100:]
    assert [each.digest for each in shape.layers] == [layer.digest]
    assert len(shape.documents) == 3


async def test_an_image_is_found_by_tag_name_digest_or_as_the_only_one(folder: Path) -> None:
    found = layout.Layout(folder)
    v2 = await found.target(REF, PLATFORM)
    v3 = layouts.write(folder, "v3", [registry.layer("b", 1000, 2)])
    assert (await found.target(manifest.parse("other.e/x:v3"), PLATFORM)).digest == v3.top
    by_digest = manifest.parse(f"r.e/fw/torch@{v2.digest}")
    assert await found.target(by_digest, PLATFORM) == v2
    with pytest.raises(PullError, match="there are: v2, v3") as absent:
        await found.target(manifest.parse("r.e/x:v4"), PLATFORM)
    assert absent.value.kind is Kind.NOT_FOUND
    entries = json.loads((folder / "index.json").read_text())["manifests"]
    bare = {key: value for key, value in entries[0].items() if key != "annotations"}
    (folder / "index.json").write_text(json.dumps({"manifests": [bare]}))
    assert await found.target(manifest.parse("r.e/x:v4"), PLATFORM) == v2


def _index(folder: Path, text: str) -> None:
    (folder / "index.json").write_text(text)


def _blobs(folder: Path) -> list[Path]:
    return sorted((folder / "blobs" / "sha256").iterdir(), key=lambda each: each.stat().st_size)


def _entry(**more: object) -> str:
    return json.dumps({"manifests": [{"mediaType": "x", "size": 5, **more}]})


def _replace(folder: Path) -> Path:
    """The place of the layer, free."""
    found = _blobs(folder)[-1]
    found.unlink()
    return found


def _move(folder: Path) -> None:
    (folder / "blobs").rename(folder / "other")
    (folder / "blobs").symlink_to("other")


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no marker": (lambda f: (f / "oci-layout").unlink(), "not there"),
    "another version": (
        lambda f: (f / "oci-layout").write_text('{"imageLayoutVersion": "9"}'),
        "not of version 1",
    ),
    "nested": (lambda f: _index(f, "[" * 100_000), "nested too deeply|not JSON"),
    "no list": (lambda f: _index(f, '{"manifests": 5}'), "does not list"),
    "too many": (lambda f: _index(f, json.dumps({"manifests": [{}] * 1001})), "does not list"),
    "huge": (lambda f: os.truncate(f / "index.json", 9 * 1024**2), "over 8388608"),
    "path as digest": (
        lambda f: _index(f, _entry(digest="sha256:../../../../etc/passwd")),
        "no sha256 digest",
    ),
    "no size": (
        lambda f: _index(f, _entry(digest="sha256:" + "a" * 64, size=-1)),
        "no usable size",
    ),
    "blob that is a link": (lambda f: _replace(f).symlink_to("/etc/passwd"), "symbolic link"),
    "folder that is a link": (_move, "symbolic link"),
    "pipe": (lambda f: os.mkfifo(_replace(f)), "no file"),
    "short layer": (lambda f: os.truncate(_blobs(f)[-1], 5000), "has 5000 bytes, not"),
    "other document": (
        lambda f: _blobs(f)[0].write_bytes(b"{}"),
        "other bytes than its digest says",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_layout_is_refused(folder: Path, what: str) -> None:
    spoil, why = HOSTILE[what]
    spoil(folder)
    with pytest.raises(PullError, match=why) as refused:
        await read(folder)
    assert refused.value.kind in (Kind.BAD_IMAGE, Kind.NOT_FOUND)


async def test_tars_that_cannot_be_used_say_why(folder: Path, tmp_path: Path) -> None:
    packed = layouts.pack(folder, tmp_path / "l.tar.gz", "w:gz")
    with pytest.raises(PullError, match="compressed ones cannot"):
        await read(packed)
    odd = tmp_path / "odd.tar"
    with tarfile.open(odd, "w") as archive:
        link = tarfile.TarInfo("oci-layout")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(PullError, match="no plain file"):
        await read(odd)
    with pytest.raises(PullError, match="not there") as absent:
        await read(tmp_path / "nothing.tar")
    assert absent.value.kind is Kind.NOT_FOUND


async def test_what_a_dataset_lacks_while_it_is_not_served_is_asked_again_soon(
    tmp_path: Path,
) -> None:
    """At its start the agent looks for images before the cache serves its datasets."""
    absent = layout.of("oci:images/torch", tmp_path)
    with pytest.raises(PullError, match="dataset images is not served on this node now") as found:
        await absent.read("sha256:" + "0" * 64)
    assert found.value.kind is Kind.NETWORK
    served = layout.Layout(Path("/proc/no-layout"), Path("/proc"))  # a mount
    with pytest.raises(PullError, match="is not there") as found:
        await served.read("sha256:" + "0" * 64)
    assert found.value.kind is Kind.NOT_FOUND

"""What objects add to the settings file, who wins, and when a missing one ends. Pure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodeagent.cluster import intent, kinds
from nodeagent.settings import Settings
from tests.testbed import growth

SECRETS = intent.Secrets(Path("/run/nodeagent/secrets"), "nodeagent")
DIR = {"kind": "dir", "path": "/mnt/a"}
CEPHFS = {"kind": "cephfs", "monitors": ["10.0.0.1:6789"], "snapshot": "v1"}
NOW = 1_000_000.0


def wish(name: str, created: str = "2026-01-01T00:00:00Z", **spec: Any) -> intent.Wish:
    given = {"source": DIR, "freshness": "frozen", **spec}
    return intent.Wish("CachedDataset", name, f"uid-{name}", 1, created, given)


def images(name: str, *refs: str, created: str = "2026-01-01T00:00:00Z") -> intent.Wish:
    spec = {"images": [{"ref": ref, "pin": "72h"} for ref in refs]}
    return intent.Wish("ImageSet", name, f"uid-{name}", 1, created, spec)


def settings(**sections: Any) -> Settings:
    return Settings.model_validate({"cache": {}, "preheat": {}, **sections})


def test_objects_add_to_the_file() -> None:
    made, verdicts = intent.merge(
        settings(), [wish("coco", priority=5), images("base", "r.test/a:1", "r.test/b:1")], SECRETS
    )
    (dataset,) = made.cache.datasets
    assert (dataset.name, dataset.priority) == ("coco", 5)
    assert [each.ref for each in made.preheat.images] == ["r.test/a:1", "r.test/b:1"]
    assert made.preheat.images[0].pin.duration == 72 * 3600
    assert all(each.accepted for each in verdicts)
    # Only what the file said counts as set: rooms ask for it.
    assert made.cache.model_fields_set == {"datasets"}


def test_file_wins_over_objects_and_the_older_object_over_the_newer() -> None:
    mine = {"name": "coco", "source": {"kind": "dir", "path": "/mine"}, "freshness": "frozen"}
    made, verdicts = intent.merge(
        settings(cache={"datasets": [mine]}),
        [
            wish("coco"),
            images("newer", "r.test/a:1", "r.test/c:1", created="2026-02-01T00:00:00Z"),
            images("older", "r.test/a:1", created="2026-01-15T00:00:00Z"),
        ],
        SECRETS,
    )
    assert str(made.cache.datasets[0].source.path) == "/mine"
    found = {each.wish.name: each for each in verdicts}
    assert (found["coco"].accepted, found["coco"].collides) == (False, True)
    assert "settings file" in found["coco"].message
    assert found["older"].keys == ("r.test/a:1",)
    assert (found["newer"].accepted, found["newer"].keys) == (True, ("r.test/c:1",))
    assert "r.test/a:1" in found["newer"].message


def test_object_that_the_models_refuse_is_left_out_alone() -> None:
    inside = {"kind": "dir", "path": "/var/lib/nodeagent/store/x"}
    made, verdicts = intent.merge(
        settings(), [wish("bad", source=inside), wish("odd", source={}), wish("good")], SECRETS
    )
    assert [each.name for each in made.cache.datasets] == ["good"]
    found = {each.wish.name: each.message for each in verdicts if not each.accepted}
    assert "lies inside store" in found["bad"]
    assert "odd" in found


def test_section_that_the_file_leaves_out_stays_out() -> None:
    made, (verdict,) = intent.merge(Settings.model_validate({}), [wish("coco")], SECRETS)
    assert made.cache is None
    assert "no 'cache'" in verdict.message


def test_key_from_a_secret_is_a_file_for_the_room() -> None:
    source = {"kind": "cephfs", "monitors": ["10.0.0.1:6789"], "snapshot": "v1"}
    asked = wish("coco", source=source, freshness="snapshot", secretRef={"name": "ceph"})
    made, _ = intent.merge(settings(), [asked], SECRETS)
    file = SECRETS.file(kinds.SecretRef(name="ceph", key="key"))
    assert made.cache.datasets[0].source.secret_file == file
    assert file.parent == SECRETS.folder


def test_only_selected_objects_count() -> None:
    seen = {"CachedDataset": {"a": wish("a", nodeSelector={"gpu": "h100"}), "b": wish("b")}}
    known = intent.step(intent.Known(), seen, (), {"gpu": "a100"}, NOW, 60.0)
    assert [key[1] for key in known.wishes] == ["b"]


def test_deletion_that_was_seen_ends_at_once_and_is_to_be_released() -> None:
    first = intent.step(intent.Known(), {"CachedDataset": {"a": wish("a")}}, (), {}, NOW, 60.0)
    then = intent.step(first, {"CachedDataset": {}}, [("CachedDataset", "a")], {}, NOW, 60.0)
    assert not then.wishes
    assert then.releasing == {("CachedDataset", "a")}


def test_object_that_is_only_missing_ends_later_and_may_come_back() -> None:
    seen = {"CachedDataset": {"a": wish("a", nodeSelector={"gpu": "h100"})}}
    labels = {"gpu": "h100"}
    first = intent.step(intent.Known(), seen, (), labels, NOW, 60.0)
    nothing: dict[str, dict[str, intent.Wish]] = {"CachedDataset": {}}
    for now_seen, now_labels in ((nothing, labels), (seen, {})):  # another etcd; a lost label
        missing = intent.step(first, now_seen, (), now_labels, NOW, 60.0)
        assert set(missing.wishes) == set(first.wishes)
        still = intent.step(missing, now_seen, (), now_labels, NOW + 59, 60.0)
        assert set(still.wishes) == set(first.wishes)
        back = intent.step(still, seen, (), labels, NOW + 59.5, 60.0)
        assert not back.until
        over = intent.step(still, now_seen, (), now_labels, NOW + 60, 60.0)
        assert not over.wishes and over.releasing


def test_kind_that_was_not_listed_yet_stays_as_remembered() -> None:
    first = intent.step(intent.Known(), {"CachedDataset": {"a": wish("a")}}, (), {}, NOW, 0.0)
    assert intent.step(first, {}, (), {}, NOW + 9999, 0.0).wishes == first.wishes


def test_known_objects_survive_a_restart() -> None:
    seen = {"CachedDataset": {"a": wish("a"), "b": wish("b")}}
    first = intent.step(intent.Known(), seen, (), {"x": "y"}, NOW, 60.0)
    left = {"CachedDataset": {"a": wish("a")}}
    known = intent.step(first, left, (), {"x": "y"}, NOW, 60.0)
    assert intent.from_json(intent.to_json(known)) == known


MANY_KINDS = [
    lambda n: wish(f"d{n}", source={"kind": "dir", "path": f"/mnt/d{n}"}),
    lambda n: wish(f"d{n}", source={"kind": "dir", "path": "/etc/x"}),
    lambda n: wish("same", source={"kind": "dir", "path": f"/mnt/d{n}"}),
    lambda n: wish(
        f"d{n}", source=CEPHFS, freshness="snapshot", secretRef={"name": "a", "key": "/"}
    ),
    lambda n: images(f"s{n}", f"r.test/a{n}:1"),
    lambda n: images(f"s{n}", *(f"r.test/a{k}:1" for k in range(5))),
]


@pytest.mark.parametrize("make", MANY_KINDS)
def test_work_grows_with_the_objects(make: Callable[[int], intent.Wish]) -> None:
    """Whoever may make one may make many, and each node judges them all."""

    def work(count: int) -> int:
        wishes = [make(n) for n in range(count)]
        places = (
            "cache/views/closed.py",
            "cache/settings.py",
            "cluster/intent.py",
            "kit/settings.py",
        )
        return growth.lines(
            lambda: intent.merge(settings(), wishes, SECRETS), *places, "pathlib.py"
        )

    assert work(160) < 5 * work(40)


def test_objects_beyond_what_a_node_can_have_are_refused_alone() -> None:
    wishes = [images(f"s{n:03}", *(f"r.test/{n}-{k}:1" for k in range(3))) for n in range(200)]
    wishes.append(images("small", "r.test/small:1", "r.test/0-0:1"))
    made, verdicts = intent.merge(settings(), wishes, SECRETS)
    assert len(made.preheat.images) == 499  # the last place is for one, and small asks for one
    found = {each.wish.name: each for each in verdicts}
    assert found["s165"].accepted and not found["s166"].accepted
    assert "at most 500" in found["s166"].message and "at most 500" in found["s199"].message


def test_keys_of_secrets_never_share_a_file() -> None:
    names = ("a", "a.b", "a.b.c", "b")
    keys = ("c", "b.c", "a", ".", "..", "_")
    files = {
        intent.Secrets(Path("/s"), space).file(kinds.SecretRef(name=name, key=key))
        for space in ("one", "two") for name in names for key in keys
    }  # fmt: skip
    assert len(files) == 2 * len(names) * len(keys)
    assert {each.parent for each in files} == {Path("/s")}


@pytest.mark.parametrize(
    "ref", [{"name": "../x"}, {"name": "a", "key": "a/b"}, {}, "a", {"name": 7}]
)
def test_reference_that_no_secret_can_have_is_refused_and_not_read(ref: Any) -> None:
    asked = wish("bad", source=CEPHFS, freshness="snapshot", secretRef=ref)
    good = wish("good", source=CEPHFS, freshness="snapshot", secretRef={"name": "a"})
    made, verdicts = intent.merge(settings(), [asked, good], SECRETS)
    assert [each.name for each in made.cache.datasets] == ["good"]
    assert [each.accepted for each in verdicts] == [False, True]
    assert intent.secrets_of([asked, good]) == {kinds.SecretRef(name="a")}

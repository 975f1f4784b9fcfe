"""Who uses a view, and what is kept of it."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kit.errors
import kit.formats
from cache import component
from cache.dataset import hits
from cache.dataset.figures import RECENT_SECONDS, Use
from cache.space import uses
from cache.store import generations
from cache.views import users
from cache.views.view import Stage
from tests.testbed import waiting
from tests.testbed.pod import pod
from tests.testbed.waiting import until

real = pytest.mark.real


@pytest.fixture
def view(area: Path) -> Iterator[str]:
    """Something mounted at <views>/coco/data, on a mount that others receive."""
    views = area / "views"
    target = views / "coco" / "data"
    target.mkdir(parents=True)
    subprocess.run(
        ["mount", "--bind", str(views), str(views)], check=True, timeout=waiting.limit(60)
    )
    subprocess.run(["mount", "--make-shared", str(views)], check=True, timeout=waiting.limit(60))
    subprocess.run(
        ["mount", "-t", "tmpfs", "none", str(target)], check=True, timeout=waiting.limit(60)
    )
    (target / "file").write_text("x")
    try:
        yield str(target)
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True, timeout=waiting.limit(60))
        subprocess.run(["umount", "-l", str(views)], check=True, timeout=waiting.limit(60))


OPENS = "import sys\nwhile True: open(sys.argv[1]).close()"


@real
def test_open_file_is_a_use_and_the_agents_own_is_none(view: str) -> None:
    with open(f"{view}/file") as opened, subprocess.Popen(["sleep", "600"], stdin=opened) as one:
        opened.close()
        try:
            assert f"pid {one.pid} (sleep)" in users.holders(0, [view])[view]
            assert users.holders(one.pid, [view, "/nowhere"]) == {}
        finally:
            one.kill()


@real
def test_opens_that_no_look_would_find_are_seen(view: str) -> None:
    def seen() -> list[str]:
        return list(users.opened(0, {view: "/nowhere"}))

    assert seen() == []
    with subprocess.Popen([sys.executable, "-c", OPENS, f"{view}/file"]) as process:
        try:
            until(lambda: seen() == [view], what="the opens to be seen")
            assert users.opened(process.pid, {view: "/nowhere"}) == {}
        finally:
            process.kill()


@real
def test_pod_that_was_given_a_dataset_uses_it(area: Path, view: str) -> None:
    with pod(area / "pod", Path(view).parent) as made:
        assert "its pod was given the dataset" in users.holders(0, [view])[view]
        command = made.command(sys.executable, "-c", OPENS, f"{made.data}/file")
        with subprocess.Popen(command) as process:
            try:
                until(lambda: users.opened(0, {view: "/nowhere"}), what="opens in a pod to be seen")
            finally:
                process.kill()
    assert users.holders(0, [view]) == {}


@real
async def test_a_look_keeps_what_was_opened_for_the_hit_ratio(area: Path, view: str) -> None:
    tree = area / "tree"
    tree.mkdir()
    (tree / "file").touch()
    shown = dataset("coco")
    shown.view, shown.stage, shown.current = view, Stage.OVERLAY, SimpleNamespace(layer=str(tree))
    shown.source = SimpleNamespace(block=False)
    looks = made(area, shown)
    shown.use = Use(1.0)
    # What this process starts would count as the agent's, so a shell that ends starts it.
    script = '"$@" >/dev/null 2>&1 & echo $!'
    words = ["sh", "-c", script, "sh", sys.executable, "-c", OPENS, f"{view}/file"]
    started = subprocess.run(words, check=True, timeout=waiting.limit(60), stdout=subprocess.PIPE)
    try:
        for _ in range(100):
            await looks._look_at_opens()
            if shown.hits.ratio(Stage.OVERLAY, time.monotonic()) is not None:
                break
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    ratio = shown.hits.ratio(Stage.OVERLAY, time.monotonic())
    assert ratio is not None
    assert ratio.ratio == 1.0
    assert shown.use.last > 1.0


def dataset(name: str, **record: Any) -> Any:
    kept = generations.Generation(dataset=name, identity="{}", **record)
    return SimpleNamespace(
        name=name,
        generation=kept,
        use=Use(),
        view=f"/{name}",
        stage=Stage.NONE,
        removed=False,
        hits=hits.Hits(),
    )


def made(tmp_path: Path, *datasets: Any) -> uses.Uses:
    named = {each.name: each for each in datasets}
    found = uses.Uses(cast(Any, named), tmp_path, lambda _: False)
    found.start()
    found.take(datasets)
    return found


async def test_times_outlive_the_agent(tmp_path: Path) -> None:
    before = time.time()
    a, b = dataset("a"), dataset("b", state="complete", created=50.0)
    first = made(tmp_path, a, b)
    assert a.use.last >= before, "a new one counts as used when it came"
    assert b.use.last == 50.0
    b.use = Use(70.0, by="a pod")
    await first._save()
    again = dataset("b", state="complete", created=50.0)
    made(tmp_path, again)
    assert again.use == Use(70.0)
    kit.formats.save(str(tmp_path / users.FILE), {"used": {"b": 2.0**40}}, users.FORMAT)
    made(tmp_path, again)
    assert again.use.last <= time.time(), "the clock went back since"


async def test_what_a_newer_agent_kept_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / users.FILE
    path.write_text(f'{{"{kit.formats.KEY}": {users.FORMAT + 1}, "used": "in another way"}}')
    text = path.read_text()
    with pytest.raises(kit.errors.HostError):
        users.load(path)
    await made(tmp_path, dataset("a"))._save()
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", "[]", '{"used": 3}', '{"used": {"a": "x"}}'])
def test_after_damaged_times_all_count_as_used_now(tmp_path: Path, text: str) -> None:
    (tmp_path / users.FILE).write_text(text)
    before, old = time.time(), dataset("a", state="complete", created=50.0)
    made(tmp_path, old)
    assert old.use.last >= before


async def test_only_so_many_times_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "MOST_KEPT", 2)
    many = [dataset(name, state="complete", created=at) for at, name in enumerate("abc", 1)]
    await made(tmp_path, *many)._save()
    kept = users.load(tmp_path / users.FILE)
    assert isinstance(kept, dict) and set(kept) == {"b", "c"}


def test_looks_at_a_crowded_node_are_rare() -> None:
    assert uses.pause(0.01) == uses.LOOK_SECONDS
    assert uses.pause(2.0) == 600
    assert uses.pause(3600.0) == uses.LONGEST_SECONDS


async def test_who_opens_and_closes_files_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody holds the view at the moment of a look: opens are what is seen of such a job."""
    shown = dataset("coco")
    shown.stage, shown.current = Stage.STORE, SimpleNamespace(layer="/l")
    shown.source = SimpleNamespace(block=True)
    looks = made(tmp_path, shown)
    component.refuse_read(shown, time.time())

    async def ask(what: Any, *_: Any) -> Any:
        return {shown.view: (1, 0)} if what is users.opened else {}

    monkeypatch.setattr(looks, "_ask", ask)
    await looks._look_at_opens()
    await looks.look()  # which finds no holder
    now = shown.use.opened
    assert shown.use.reader(now + 24) == "somebody who opened a file 24s ago"
    with pytest.raises(kit.errors.InUseError, match="opened a file 24s ago; end it, and try again"):
        component.refuse_read(shown, now + 24)
    shown.use = dataclasses.replace(shown.use, by="pid 7 (train)")  # at the last look, perhaps gone
    assert shown.use.reader(now) == "pid 7 (train)"
    component.refuse_read(shown, now + RECENT_SECONDS)
    shown.use = dataclasses.replace(shown.use, by="")
    assert shown.use.reader(now + RECENT_SECONDS) == ""

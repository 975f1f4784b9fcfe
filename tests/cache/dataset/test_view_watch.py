"""What the watch of the views takes for the folder that they lie on."""

import types
from pathlib import Path
from typing import Any

from cache.dataset.view_watch import ViewWatch
from cache.views import view
from linux import mountinfo

ROOT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
VIEWS = "47 27 0:39 / /views rw,nosuid,nodev,noexec shared:6 - tmpfs nodeagent rw,size=1024k\n"


async def test_a_question_during_the_start_does_not_make_the_folder_of_the_views_a_strangers(
    tmp_path: Path,
) -> None:
    """The API answers before the folder is a mount."""
    lines = [ROOT]

    async def prepare() -> None:
        lines.append(VIEWS)

    table: Any = types.SimpleNamespace(now=lambda: mountinfo.parse("".join(lines).encode()))
    hidden: list[object] = []
    dataset: Any = types.SimpleNamespace(
        view="/views/a/data", changes=0, published=False, mounted=None,
        find_view=lambda why, back: hidden.append(why),
    )  # fmt: skip
    datasets = {"a": dataset}
    successions: Any = {"a": types.SimpleNamespace(shown=())}
    dataset.mounted = view.Mounted()
    watch = ViewWatch("/views", datasets, successions, table, prepare, lambda: None)
    await watch.look()
    await watch.prepare()
    await watch.look()
    assert hidden == [None, None]

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import kit.errors
from nodeagent import configfile, main
from nodeagent.settings import GONE, Settings
from tests.testbed import growth

# The shape that other tools rely on, word by word.
ISSUE = """\
admin: {metrics: "127.0.0.1:9471"}
state_dir: /var/lib/nodeagent/state
cache:
  store: /var/lib/nodeagent/store        # on the SSD
  views: /var/lib/nodeagent/views        # a job reads <views>/<name>/data
  budget: 500GiB
  reserve: 10%                            # of the SSD, never used, bytes and inodes
  datasets:
    - {name: imagenet, source: {kind: dir, path: /mnt/imagenet}, freshness: frozen, warm: true}
    - {name: coco, freshness: snapshot, warm: true, priority: 10,
       source: {kind: cephfs, monitors: ["10.0.0.1:6789"], filesystem: cephfs, path: /datasets/coco,
                snapshot: v1, user: gpu, secret_file: /etc/nodeagent/ceph.secret, client: auto}}
"""

LISTS = ("images", "datasets", "clusters")  # settings with a list of elements


def refused(text: str) -> str:
    with pytest.raises(kit.errors.SettingsError) as error:
        configfile.parse(text, "file.yaml")
    return str(error.value)


def test_load_reads_the_known_shape() -> None:
    settings = configfile.parse(ISSUE, "x")
    assert settings.admin.metrics == "127.0.0.1:9471"
    assert settings.state_dir == Path("/var/lib/nodeagent/state")
    cache = settings.cache
    assert cache is not None
    assert (cache.budget, cache.reserve) == (500 * 2**30, 0.1)
    imagenet, coco = cache.datasets
    assert (imagenet.name, imagenet.freshness, imagenet.warm) == ("imagenet", "frozen", True)
    assert imagenet.source.kind == "dir"
    assert coco.priority == 10
    assert coco.source.kind == "cephfs"
    assert coco.source.monitors == ("10.0.0.1:6789",)
    assert (coco.source.snapshot, coco.source.user, coco.source.client) == ("v1", "gpu", "auto")


def test_dump_reads_back_the_same() -> None:
    settings = configfile.parse(ISSUE, "x")
    assert configfile.parse(configfile.dump(settings), "y") == settings
    assert configfile.parse(configfile.dump(Settings()), "y") == Settings()


@given(
    st.integers(1, 2**50),
    st.floats(0, 0.99),
    st.floats(0.001, 3600),
    st.integers(0, 2**40),
    st.integers(-1000, 1000),
)
def test_dump_reads_back_any_settings(
    budget: int, reserve: float, interval: float, rate: int, priority: int
) -> None:
    settings = Settings.model_validate(
        {
            "cache": {
                "budget": budget,
                "reserve": reserve,
                "scrub": {"every": interval},
                "fill": {"bytes_per_second": rate},
                "datasets": [
                    {"name": "a", "priority": priority, "freshness": "frozen",
                     "source": {"kind": "dir", "path": "/ä \n:'\""}}
                ],
            }
        }
    )  # fmt: skip
    assert configfile.parse(configfile.dump(settings), "y") == settings


def test_empty_file_is_all_defaults() -> None:
    assert configfile.parse("", "x") == configfile.parse("# only a remark\n", "x") == Settings()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("admin: {}\ncahce: {}\n", 2, ["cahce", "no such setting"]),
        ("cache:\n  budget: 5GiB\n  bugdet: 1GiB\n", 3, ["cache.bugdet", "no such setting"]),
        ("cache:\n  fill:\n    workers: 0\n", 3, ["cache.fill.workers", "at least 1"]),
        ("cache:\n  budget: 5 potatoes\n", 2, ["cache.budget", "potatoes", "GiB"]),
        ("cache:\n  reserve: 110%\n", 2, ["cache.reserve", "110%"]),
        ("cache:\n  budget: [\n", 3, ["YAML"]),
        ("cache:\n\tbudget: 1\n", 2, ["YAML"]),
        ("admin:\n  metrics: nowhere\n", 2, ["HOST:PORT"]),
        (f"admin:\n  socket: /{'x' * 107}\n", 2, ["107"]),
        ("state_dir: relative/path\n", 1, ["relative", "absolute"]),
        ("cache:\n  store: store\n", 2, ["relative"]),
        ("cache:\n  budget: 1GiB\n  store: /a\n  budget: 2GiB\n", 4, ["budget", "twice"]),
        (
            "cache: {datasets: [{name: a, freshness: frozen, source: {path: /x}}]}\n",
            1,
            ["datasets[0].source", "'kind' is missing"],
        ),
        (
            "cache: {datasets: [{name: a, freshness: frozen, source: {kind: directory}}]}\n",
            1,
            ["there is no 'kind' 'directory'", "'dir', 'cephfs', 'rbd'"],
        ),
        ("kubelet:\n", 1, ["kubelet", "write {}"]),
        ("kubelet: {config: here.yaml}\n", 1, ["kubelet.config", "absolute"]),
        ("node: Foo/../bar\n", 1, ["node", "not a node's name"]),
        ("- a\n- b\n", 1, ["the file"]),
        ("just text\n", 1, ["the file"]),
    ],
)
def test_error_names_line_setting_and_cause(text: str, line: int, words: list[str]) -> None:
    message = refused(text)
    assert message.startswith(f"file.yaml:{line}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("state_dir: /x\ncache:\n  store: 2024-13-45\n", "file.yaml:3"),
        ("state_dir: /x\ncache: {store: !!int abc}\n", "file.yaml:2"),
        ("state_dir: !!bool 7\n", "file.yaml:1"),
        ("state_dir: !!timestamp noon\n", "file.yaml:1"),
        ("state_dir: !!int ''\n", "file.yaml:1"),
        (f"a: {'9' * 5000}\n", "file.yaml:1"),
        ("[" * 1000 + "]" * 1000, "file.yaml"),
        ("{2024-13-45: 1}\n", "file.yaml:1"),
    ],
)
def test_malformed_value_is_reported_with_its_line(text: str, place: str) -> None:
    with pytest.raises(kit.errors.SettingsError) as raised:
        configfile.parse(text, "file.yaml")
    assert raised.value.thing == place
    assert "\n" not in raised.value.cause


def test_all_errors_are_reported_at_once() -> None:
    message = refused("cache:\n  bugdet: 1\n  reserve: 2\nadmn: {}\n")
    assert [int(n) for n in re.findall(r"file\.yaml:(\d+)", message)] == [2, 3, 4]


def test_an_error_names_twenty_mistakes_and_counts_the_others() -> None:
    message = refused("".join(f"wrong_{n}: 1\n" for n in range(1000)))
    assert len(re.findall(r"there is no such setting", message)) == 20
    assert message.startswith("file.yaml:1: wrong_0") and "and 980 more mistakes" in message
    assert len(refused(f"{'k' * 500_000}: 1\n{'v' * 500_000}: 1\n")) < 3000


def test_work_for_mistakes_grows_with_their_number() -> None:
    def work(count: int) -> int:
        text = "".join(f"wrong_{n}: 1\n" for n in range(count))
        return growth.lines(lambda: refused(text), "nodeagent/configfile.py")

    assert work(800) < 5 * work(200)


def test_file_larger_than_a_config_map_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"#" * 2**20)
    configfile.load(file)
    file.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(kit.errors.SettingsError, match="more than 1048576 bytes"):
        configfile.load(file)


def test_config_check_output_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(ISSUE)
    shown = CliRunner().invoke(main.cli, ["config", "check", str(file)])
    assert shown.exit_code == 0
    again = tmp_path / "b.yaml"
    again.write_text(shown.output)
    assert configfile.load(again) == configfile.load(file)
    assert "budget_inodes: 0" in shown.output


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(kit.errors.SettingsError, match=r"there is no such settings file; name one"):
        configfile.load(tmp_path / "none.yaml")
    with pytest.raises(kit.errors.SettingsError, match="cannot be read"):
        configfile.load(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(kit.errors.SettingsError, match="UTF-8"):
        configfile.load(tmp_path / "latin")


def test_locate_prefers_option_then_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NODEAGENT_CONFIG", "/from/env")
    assert configfile.locate(Path("/given")) == Path("/given")
    assert configfile.locate(None) == Path("/from/env")
    monkeypatch.setenv("NODEAGENT_CONFIG", "")
    assert configfile.locate(None) == Path("/etc/nodeagent/nodeagent.yaml")


def test_aliases_of_aliases_cost_what_they_are_long() -> None:
    """Each level has the one before ten times: 10**60 in all."""
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 60)]
    with pytest.raises(kit.errors.SettingsError):
        configfile.parse("\n".join(["a0: &a0 [x]", *levels]), "f")


@pytest.mark.parametrize("path", GONE)
def test_a_setting_that_went_is_refused_with_what_replaces_it(path: str) -> None:
    value: Any = "x"
    for name in reversed(path.split(".")):
        value = {name: [value] if name in LISTS and value != "x" else value}

    assert f"{path}: this setting is gone; {GONE[path]}" in re.sub(
        r"\[\d+\]", "", refused(yaml.safe_dump(value))
    )

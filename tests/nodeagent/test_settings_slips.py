"""What people write into the settings file by mistake, and what the answer names: the thing, the
line, the cause and what to do. In words of the file, not of the models."""

from pathlib import Path

import pytest

import kit.errors
from nodeagent import configfile

DATASET = "cache:\n  datasets:\n  - name: a\n    freshness: frozen\n"
CEPHFS = (
    "cache:\n  datasets:\n  - name: a\n    freshness: snapshot\n    source:\n"
    "      {{kind: cephfs, snapshot: v1, secret_file: /k, monitors: {}}}\n"
)
DIR = "  - {{name: {}, freshness: frozen, source: {{kind: dir, path: {}}}}}\n"
IMAGE = "preheat:\n  images:\n  - ref: registry.example/a:1\n"

MODE = (
    "cache: {{datasets: [{{name: a, freshness: frozen, source: {{kind: dir, path: /x}}, "
    "access: {{mode: {}}}}}]}}\n"
)

SLIPS = [
    # misspelt
    ("cache:\n  buget: 1GiB\n", "f:2: cache.buget: there is no such setting", "mean 'budget'?"),
    ("cahce: {}\n", "f:1: cahce: there is no such setting", "did you mean 'cache'?"),
    ("x: &a {user: gpu}\n", "f:1: x: there is no such setting", "use one of 'admin', 'node'"),
    (f"{DATASET}    source: {{kind: dir, pth: /x}}\n", "source.pth", "did you mean 'path'?"),
    (f"{DATASET}    source: {{kind: cepfs}}\n", "no 'kind' 'cepfs'", "did you mean 'cephfs'?"),
    (f"{IMAGE}    pin: {{duration: 72h}}\n", "f:4: preheat.images[0].pin.duration", "use 'for'"),
    ("preheat:\n  retain: {duration: 72h}\n", "f:2: preheat.retain.duration", "use 'for'"),
    # YAML's own
    ("a: 1\ncache: {budget: 1GiB,\nvolumes: {}\n", "f:4: ", "the '{' of line 2 is not closed"),
    ("cache:\n  datasets: [a\n", "f:3: ", "the '[' of line 2 is not closed"),
    ("state_dir: 'x\n", "f:2: ", "the quote of line 1 is not closed"),
    ("cache:\n\tbudget: 1\n", "f:2: ", "indent with spaces, not tabs"),
    ("cache: budget: 1\n", "f:1: ", "put a text with ': ' in quotes"),
    # a list, a section, a text
    (CEPHFS.format('"10.0.0.1:6789"'), "f:6: ", 'be a list: write ["10.0.0.1:6789"]'),
    (CEPHFS.format("[]"), "f:6: ", "source.monitors: the list is empty; name at least 1"),
    ("cache:\n  datasets:\n    a: {}\n", "f:2: ", "a list: begin each element with '- '"),
    ("volumes: {guard: {names: rbd*}}\n", "volumes.guard.names: ", 'write ["rbd*"]'),
    ("- a\n- b\n", "f:1: the file: it is no section: write KEY: VALUE", "KEY is one of admin,"),
    ("just text\n", "f:1: the file: it is no section", "KEY is one of admin,"),
    ("preheat:\n  images: [a]\n", "f:2: preheat.images[0]: it is no section", "is one of ref,"),
    (f"{DATASET}    source: /x\n", "f:5: cache.datasets[0].source: it is no section", "kind,"),
    ("cache: {csi: true}\n", "f:1: cache.csi: it is no section", "KEY is one of enabled"),
    ("kubelet:\n", "f:1: kubelet: it is empty", "write {} for its defaults, or leave it out"),
    ("preheat: {node_labels: [a]}\n", "node_labels: it is no section", "write KEY: VALUE"),
    (f"{DATASET}    access: {{mode: 0755}}\n    source: {{kind: dir, path: /x}}\n",
     "f:5: cache.datasets[0].access.mode: ", 'put it in quotes, "0755"'),
    ("cache:\n  datasets:\n" + DIR.format("yes", "/x"), "f:3: ", 'in quotes, "yes"'),
    ("cache:\n  datasets:\n" + DIR.format("1234", "/x"), "f:3: ", 'in quotes, "1234"'),
    ("preheat: {node_labels: {a: 5}}\n", "preheat.node_labels.a: ", 'put it in quotes, "5"'),
    ("state_dir: 5\n", "f:1: state_dir: it has to be a text", 'put it in quotes, "5"'),
    # one of some words, a number, a size, a time
    ("volumes: {guard: {mode: Enforce}}\n", "'Enforce' is not one of", "'off', 'dry-run' or"),
    ("volumes: {guard: {mode: on}}\n", "'on' is not one of", "'off', 'dry-run' or 'enforce'"),
    ("admin: {group_role: root}\n", "'root' is not one of 'read',", "'operate' or 'dangerous'"),
    (f"{IMAGE}    pin: forever\n", "f:4: preheat.images[0].pin: 'forever' is none of always",
     "never, or a time like 72h"),
    ("admin: {metrics: 9470}\n", "'9470' is not HOST:PORT", "like 127.0.0.1:9470"),
    ("cache: {fill: {workers: 0}}\n", "cache.fill.workers: '0' is not allowed", "at least 1"),
    ("cache: {fill: {workers: 65}}\n", "'65' is not allowed", "at most 64"),
    ("cache: {fill: {workers: many}}\n", "cache.fill.workers: ", "'many' is not a whole number"),
    ("cache: {fill: {workers: 2.5}}\n", "cache.fill.workers: ", "'2.5' is not a whole number"),
    ("cache: {csi: {enabled: maybe}}\n", "cache.csi.enabled: ", "neither true nor false"),
    ("cache: {scrub: {every: 1m30s}}\n", "not one number and one unit", "write it like 30s"),
    ("cache: {budget: -5GiB}\n", "'-5GiB' is not one number and one unit", "like 500GiB"),
    ("cache: {budget: 5 potatoes}\n", "unknown unit 'potatoes'", "use one of KiB MiB GiB"),
    ("cache: {reserve: 110%}\n", "'110%' is not a share of a whole", "write it like 10%"),
    ("node: Foo/bar\n", "'Foo/bar' is not a node's name", "use lower-case letters"),
    ("kubernetes: {server: 'http://x'}\n", "'http://x' is not an address", "https://HOST:PORT"),
    ("preheat:\n  images:\n  - ref: r.example/A:1\n", "f:3: ", "HOST and PATH have no capitals"),
    ("preheat: {windows: ['9-5']}\n", "preheat.windows[0]: ", "like 22:00-06:00 (UTC)"),
    ("cache: {datasets: [{name: a, freshness: frozen}]}\n", "source: ", "setting is missing"),
    (MODE.format("755"), "access.mode: it has to be a text", 'put it in quotes, "755"'),
    # two values that do not go together: the line of the one that is to be changed
    ("cache:\n  datasets:\n" + DIR.format("a", "/x") + DIR.format("a", "/z"),
     "f:4: cache.datasets[1].name: ", "dataset 'a' is there twice"),
    ("cache:\n  store: /s\n  views: /s/v\n", "f:3: cache.views: ", "choose another directory"),
    ("cache:\n  store: /s\n  datasets:\n" + DIR.format("a", "/s/x"), "f:4: ", "another directory"),
    ("cache:\n  datasets:\n" + DIR.format("a", "/etc"), "f:3: cache.datasets[0].source.path: ",
     "the host's configuration"),
    (f"{IMAGE}  - ref: registry.example/a:1\n", "f:4: preheat.images[1]: ", "is listed twice"),
    ("volumes:\n  clusters:\n  - {name: a, conf: /c}\n  - {name: a, conf: /c}\n",
     "f:4: volumes.clusters[1].name: ", "names are unique"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "thing", "remedy"), SLIPS)
def test_a_slip_is_told_in_words_of_the_file(text: str, thing: str, remedy: str) -> None:
    with pytest.raises(kit.errors.SettingsError) as raised:
        configfile.parse(text, "f")
    said = str(raised.value)
    assert thing in said
    assert remedy in said
    for word in ("Input should", "tuple", "dictionary", "instance of", "literal[", "String"):
        assert word not in said


@pytest.mark.parametrize(
    ("text", "one_mistake"),
    [
        (CEPHFS.format('["bad name!"]'), "monitors[0]: 'bad name!' is not a monitor address"),
        (f"{IMAGE}    pin: forever\n", "none of always"),
        ("preheat: {credentials: {docker_config: 5}}\n", "docker_config: it has to be a list"),
        # A misspelt key leaves the key that was meant missing.
        (f"{DATASET}    source: {{kind: dir, pth: /x}}\n", "source.pth: there is no such setting"),
        (f"{IMAGE}    pin: {{duration: 72h}}\n", "pin.duration: there is no such setting"),
        ("preheat:\n  retain: {duration: 72h}\n", "retain.duration: there is no such setting"),
        ("cache:\n  datasets:\n" + DIR.format("a", "/x").replace("name", "nme"), "[0].nme: "),
        ("cache:\n  datasets:\n" + DIR.format("a", "/x").replace("source", "sorce"), "[0].sorce"),
        ("cache:\n  datasets:\n" + DIR.format("a", "/x").replace("freshness", "freshnes"),
         "[0].freshnes: there is no such setting; did you mean 'freshness'?"),
        (f"{DATASET}    source: {{kid: dir, path: /x}}\n", "did you write 'kid' for it?"),
    ],
)  # fmt: skip
def test_what_follows_from_a_mistake_is_no_second_one(text: str, one_mistake: str) -> None:
    with pytest.raises(kit.errors.SettingsError) as raised:
        configfile.parse(text, "f")
    assert one_mistake in str(raised.value)
    assert not raised.value.lines


def test_a_missing_key_that_no_other_stands_for_is_told() -> None:
    with pytest.raises(kit.errors.SettingsError) as raised:
        configfile.parse(f"{DATASET}    source: {{kind: dir, user: a}}\n", "f")
    assert [line.split(": ")[1] for line in raised.value.lines[:2]] == [
        "cache.datasets[0].source.path", "cache.datasets[0].source.user",
    ]  # fmt: skip


def test_several_mistakes_have_a_line_each() -> None:
    with pytest.raises(kit.errors.SettingsError) as raised:
        configfile.parse("cache:\n  buget: 1\ncahce: {}\n", "f")
    first, second, remedy = raised.value.lines
    assert first.startswith("f:2: cache.buget: ")
    assert second.startswith("f:3: cahce: ")
    assert remedy == "correct it and run 'nodeagent config check f'"
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("word", ["off", "'off'", "no"])
def test_off_needs_no_quotes(word: str) -> None:
    text = f"volumes: {{guard: {{mode: {word}}}, audit: {{actions: {{detach_leaked: {word}}}}}}}"
    section = configfile.parse(text, "f").volumes
    assert section.guard.mode == section.audit.actions.detach_leaked == "off"


@pytest.mark.parametrize("word", ["on", "'on'"])
def test_on_needs_no_quotes(word: str) -> None:
    assert (
        configfile.parse(f"volumes: {{repair: {{mode: {word}}}}}", "f").volumes.repair.mode == "on"
    )


def test_a_file_in_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "latin"
    file.write_bytes("state_dir: /x\n# café\n".encode("latin-1"))
    with pytest.raises(kit.errors.SettingsError, match=r"latin:2: is not UTF-8 \(byte 0xe9\)"):
        configfile.load(file)

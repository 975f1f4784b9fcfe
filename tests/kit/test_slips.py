"""What is wrong with a text that a person wrote is said without a word of the text."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.slips
from kube import access, kubelet
from kube.settings import KubeletSettings
from nodeagent import configfile
from nodeagent.api import rotation
from preheat.registry import credentials, hosts
from volumes.audit.logs import patterns

CANARY = "hunter2-canary"
SLIPS = [
    f'a:\n  value: "{CANARY}\n', f"value: '{CANARY}", f"a:\n  value: *{CANARY}\n",
    f"value: !{CANARY} x\n", f"value: {CANARY}: x\n", f"a: b\n\t{CANARY}: x\n", f"[{CANARY}",
    f"value: &{CANARY} 1\nother: &{CANARY} 2\n{{", f"%{CANARY}\n---\n[", f"!{CANARY}!x a\n",
    f"- {CANARY}\nvalue: 1\n", f'value: "\\q{CANARY}"\n', f"{CANARY}\x00\n",
    f"when: 2024-13-45\nvalue: {CANARY}\n", f"value: !!int {CANARY}\n",
    f"value: !!binary {CANARY}\n", f"? [{{a: {CANARY}}}]\n: 1\n",
]  # fmt: skip


def _kubelet(file: Path) -> object:
    return kubelet.thresholds(KubeletSettings.model_validate({"config": str(file)}))


def _tokens(file: Path) -> object:
    held = rotation.tokens(file)
    held.look()
    raise ValueError(held.problem)


def _hosts(file: Path) -> object:
    folder = file.parent / "registry.example"
    folder.mkdir()
    file.rename(folder / "hosts.toml")
    return hosts.of([file.parent], "registry.example")


READERS: dict[str, Callable[[Path], object]] = {
    "settings": lambda file: configfile.load(file),
    "log patterns": lambda file: patterns.load(file),
    "login plugins": lambda file: credentials.read_providers(file.read_bytes()),
    "kubelet": _kubelet,
    "kubeconfig": lambda file: access._kubeconfig(file),
    "tokens": _tokens,
    "hosts.toml": _hosts,
}


@pytest.mark.parametrize("text", SLIPS)
@pytest.mark.parametrize("who", READERS)
def test_an_error_holds_nothing_of_the_text(who: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises((ValueError, kit.errors.AgentError)) as raised:
        READERS[who](file)
    said = "".join(traceback.format_exception(raised.value, chain=True))
    # Lines of source in it are ours; this test's own parameters are not shown there.
    assert CANARY not in said
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize(("text", "shown"), [
    ('a: 1\nb: "x\n', "the quote of line 2 is not closed, line 3"),
    ("a: b: c\n", "mapping values are not allowed here: put a text with ': ' in quotes, line 1"),
    ("a: 1\nb: *secret\n", "found undefined alias '***', line 2"),
    ("a: 2024-13-45\n", "month must be in 1..12"),
    ("\x00", "special characters are not allowed, at position 0"),
])  # fmt: skip
def test_yaml_problem_and_line_are_said(text: str, shown: str) -> None:
    with pytest.raises(ValueError, match="not valid YAML") as raised:
        kit.slips.load_yaml(text)
    assert str(raised.value) == f"it is not valid YAML ({shown})"


def test_toml_key_in_angle_brackets_is_not_said() -> None:
    with pytest.raises(ValueError, match="not valid TOML") as raised:
        kit.slips.load_toml("['<Hunter2>']\n['<Hunter2>']\n")
    assert "Hunter2" not in str(raised.value)


def test_toml_problem_and_line_are_said() -> None:
    with pytest.raises(ValueError, match=r"not valid TOML \(.*line 2"):
        kit.slips.load_toml("a = 1\nb = hunter2\n")


@pytest.mark.parametrize("load", [kit.slips.load_yaml, kit.slips.load_toml])
def test_nesting_without_end_is_an_error(load: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        load("a = " + "[" * 1_000 if load is kit.slips.load_toml else "[" * 1_000)

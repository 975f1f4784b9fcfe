"""YAML in the docs: the agent takes its settings; objects are for tests/kube/test_docs.py."""

import re
from pathlib import Path

import yaml

from nodeagent import configfile
from nodeagent.api import rotation
from nodeagent.settings import Settings
from tests.testbed import docpages

TOKENS = ("security.md", "# tokens.yaml:")  # the page, and how its block begins
PROMETHEUS = ("monitoring.md", "# prometheus.yml")


def written() -> list[docpages.Block]:
    """YAML blocks that contain no Kubernetes object."""
    return [
        block
        for block in docpages.all_blocks()
        if block.language == "yaml"
        and not any(docpages.is_object(each) for each in yaml.safe_load_all(block.text))
    ]


def of(file: tuple[str, str], block: docpages.Block) -> bool:
    return block.page == file[0] and block.text.startswith(file[1])


def test_settings_in_the_docs_are_taken() -> None:
    found = [each for each in written() if not (of(TOKENS, each) or of(PROMETHEUS, each))]
    assert {each.page for each in found} >= {"preheat.md", "rbd.md", "security.md"}
    for block in found:
        sections = configfile.parse(block.text, f"{block.page}:{block.line}").model_fields_set
        assert sections, f"{block.page}:{block.line} sets nothing"
        assert sections <= Settings.model_fields.keys()


def test_file_of_tokens_in_the_docs_is_taken(tmp_path: Path) -> None:
    (block,) = [each for each in written() if of(TOKENS, each)]
    file = tmp_path / "tokens.yaml"
    file.write_text(re.sub(r"(\w+)…", lambda cut: cut[1].ljust(64, "0"), block.text))
    assert {caller.name for _, caller in rotation.read_tokens(file)} == {
        "token prometheus", "token alice",
    }  # fmt: skip

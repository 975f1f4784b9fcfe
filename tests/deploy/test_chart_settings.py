"""``settings`` of the chart: helm refuses by the key's name what the agent's models refuse, and
takes what the docs show."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.nodeagent import test_docs_yaml as docs
from tests.testbed import kubernetes, scripts

CHART = Path(__file__).parents[2] / "deploy" / "chart"
SCHEMA = "values don't meet the specifications of the schema"


def _template(values: dict[str, Any], folder: Path, *words: str) -> Any:
    file = folder / "values.yaml"
    file.write_text(json.dumps(values))
    return _with(file, *words)


def _with(file: Path, *words: str) -> Any:
    chart = ("template", "nodeagent", str(CHART), "--values", str(file))
    return kubernetes.helm(*chart, *kubernetes.IMAGE, *words)


def test_schema_is_made_of_the_models() -> None:
    made = scripts.load("values_schema")
    assert made.TARGET.read_text() == made.document(), "run scripts/values_schema.py"


# Settings, and words of the answer: the key, and what may stand there.
REFUSED: tuple[tuple[str, str], ...] = (
    ("cache: {buget: 1TiB}", "'buget' not allowed"),
    ("cahce: {}", "'cahce' not allowed"),
    ("cache: {budget: 50gigs}", "/settings/cache/budget"),
    ("cache: {budget: 500gi}", "/settings/cache/budget"),
    ("cache: {budget: -1}", "/settings/cache/budget"),
    ("cache: {budget: [1]}", "/settings/cache/budget"),
    ("cache: {reserve: lots}", "/settings/cache/reserve"),
    ("cache: {fill: {workers: 99}}", "/settings/cache/fill/workers"),
    ("cache: {fill: {jitter: 1m30s}}", "/settings/cache/fill/jitter"),
    ("cache: {datasets: coco}", "/settings/cache/datasets"),
    ("cache: {datasets: [{name: a}]}", "'source', 'freshness'"),
    ("cache: {datasets: [{name: a, freshness: live, source: {kind: dir, path: /a}}]}", "freshness"),
    ("cache: {datasets: [{name: a, freshness: frozen, source: {kind: nfs}}]}", "source/kind"),
    ("cache: {datasets: [{name: a, freshness: frozen, source: {kind: dir, paht: /a}}]}", "'paht'"),
    ("volumes: {guard: {mode: Enforce}}", "'off', 'dry-run', 'enforce'"),
    ("volumes: {guard: {mode: on}}", "/settings/volumes/guard/mode"),
    ("volumes: {guard: {drivers: []}}", "/settings/volumes/guard/drivers"),
    ("volumes: {repair: {mode: yes please}}", "/settings/volumes/repair/mode"),
    ("volumes: {audit: {actions: {unmap: on}}}", "'unmap' not allowed"),
    ("volumes: {audit: {rules: {busy-mount: {severity: high}}}}", "busy-mount/severity"),
    ("preheat: {images: [{ref: a, pin: forever}]}", "/settings/preheat/images/0/pin"),
    ("preheat: {images: [{reff: a}]}", "'reff' not allowed"),
    ("admin: {metric: 1}", "'metric' not allowed"),
    ("admin: {group_role: root}", "/settings/admin/group_role"),
    ("kubernetes: {interval: soon}", "/settings/kubernetes/interval"),
)


@pytest.mark.real
@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_what_is_wrong_is_refused_by_its_name(text: str, said: str, tmp_path: Path) -> None:
    settings = yaml.safe_load(text)
    for values in ({"settings": settings}, {"pools": {"default": {"settings": settings}}}):
        done = _template(values, tmp_path)
        assert done.returncode != 0
        assert SCHEMA in done.stderr
        where = said.replace("/settings", "/pools/default/settings") if "pools" in values else said
        assert where in done.stderr


TAKEN = (
    "cache: {budget: 500GiB, reserve: 10%, fill: {jitter: 5m, bytes_per_second: 20MiB}}",
    "{cache: {budget: 500Gi, fill: {bytes_per_second: 20M}}, preheat: {pin_budget: 1Ti}}",
    "cache: {budget: 536870912000, reserve: 0.1, fill: {jitter: 300}}",
    "cache: {datasets: [{name: a, freshness: frozen, source: {kind: dir, path: /a}}]}",
    "{cache: null, volumes: null, preheat: null, kubernetes: null}",
    "volumes: {guard: {mode: off}, repair: {mode: on}, audit: {actions: {}}}",
    'volumes: {guard: {mode: "off"}, repair: {mode: "on"}}',
    "preheat: {images: [{ref: registry.example/a:1, pin: 72h}, {ref: registry.example/b:1}]}",
    "preheat: {images: [{ref: registry.example/a:1, pin: {for: 72h}}]}",
    "admin: {api: {listen: '0.0.0.0:9471', cert_file: /c, key_file: /k, kubernetes: {}}}",
)


@pytest.mark.real
@pytest.mark.parametrize("text", TAKEN)
def test_what_is_right_is_taken(text: str, tmp_path: Path) -> None:
    done = _template({"settings": yaml.safe_load(text)}, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.real
def test_words_that_yaml_takes_for_booleans_reach_the_agent_as_words(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(
        "settings: {volumes: {guard: {mode: off}, repair: {mode: on}}}\n"
        "policies: {hostPaths: {mode: off}, readOnlyVolumes: {mode: off}}\n"
    )
    done = _with(file)
    assert done.returncode == 0, done.stderr
    made = [each for each in yaml.safe_load_all(done.stdout) if each]
    (text,) = (
        each["data"]["nodeagent.yaml"] for each in made
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "nodeagent"
    )  # fmt: skip
    volumes = yaml.safe_load(text)["volumes"]
    assert volumes["guard"]["mode"] == "off"
    assert volumes["repair"]["mode"] == "on"
    names = [e["metadata"]["name"] for e in made if e["kind"] == "ValidatingAdmissionPolicy"]
    assert not [each for each in names if each.endswith(("host-paths", "read-only-volumes"))]


@pytest.mark.real
def test_settings_of_the_docs_pass_the_schema(tmp_path: Path) -> None:
    ours = scripts.load("values_schema").SECTIONS
    tried = 0
    for block in docs.written():
        settings = yaml.safe_load(block.text)
        if docs.of(docs.TOKENS, block) or not settings.keys() <= set(ours):
            continue
        done = _template({"settings": settings}, tmp_path)
        assert SCHEMA not in done.stderr, f"{block.page}:{block.line}: {done.stderr}"
        tried += 1
    assert tried >= 5, tried

"""Commands about the whole node, with a real agent: status, events, completion, support bundle."""

import asyncio
import json
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import kit.errors
from linux import mountinfo, mounts
from nodeagent import main
from nodeagent.commands import bundle
from tests.testbed import agent, waiting

# The bundle asks every check of 'nodeagent doctor', which takes its time on a busy machine.
pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
BUNDLE_SECONDS = 200.0
CANARIES = ("hunter2-canary", "AQDcanarycanarycanarycanarycanarycanary==", "bearer-canary-1234567")


@pytest.fixture
def busy(node: agent.Agent, area: Path) -> agent.Agent:
    """An agent with a complete dataset and one whose source is not there."""
    (area / "source").mkdir()
    (area / "source" / "f").write_bytes(b"x" * 1000)
    node.add_dir("coco", area / "source", warm=True)
    node.start()
    node.wait_state("coco", "complete")
    return node


def test_status_says_how_the_node_is(busy: agent.Agent, area: Path) -> None:
    done = busy.cli("status")
    assert done.returncode == 0, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert first == "WELL  This node is well: datasets 1/1."
    assert "\x1b" not in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("coco "))
    assert "complete" in row
    assert "100%" in row
    for how in ("json", "yaml"):
        shown = yaml.safe_load(busy.cli("status", "-o", how).stdout)
        assert shown["verdict"] == "well"
        assert shown["reports"]["datasets"][0]["percent"] == 100
    wide = busy.cli("status", "-o", "wide")
    assert "jobs read the SSD" in wide.stdout
    assert "jobs read the SSD" not in done.stdout


def test_status_ends_with_its_verdict(busy: agent.Agent, area: Path) -> None:
    busy.add_dir("lost", area / "not-there", warm=True)
    busy.write()
    waiting.until(busy.findings, what="a finding")
    said = busy.cli("status")
    assert said.returncode in (12, 13)
    assert "lost" in said.stdout.splitlines()[0]
    assert "to do: " in said.stdout
    busy.stop()
    assert busy.cli("status").returncode == kit.errors.UnreachableError.exit_code


def test_events_are_listed_and_followed(busy: agent.Agent, area: Path) -> None:
    with subprocess.Popen(
        [agent.COMMAND, "--config", str(busy.config), "events", "--follow", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=busy.environment,
    ) as following:
        try:
            busy.add_dir("later", area / "source", warm=True)
            busy.write()
            seen: list[dict[str, Any]] = []
            assert following.stdout is not None
            for line in following.stdout:  # pytest's own timeout ends this
                seen.append(json.loads(line))
                if seen[-1]["subject"] == "dataset later" and "complete" in seen[-1]["text"]:
                    break
        finally:
            following.terminate()
    assert [each["number"] for each in seen] == list(range(1, len(seen) + 1))
    listed = busy.cli("events").stdout
    assert "dataset later: new: state " in listed
    assert len(listed.splitlines()) >= len(seen)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script(node: agent.Agent, shell: str) -> None:
    done = subprocess.run(
        [agent.COMMAND, "completion", shell], capture_output=True, text=True, check=True
    )
    assert "_NODEAGENT_COMPLETE" in done.stdout


def test_bash_completes_commands_and_options(node: agent.Agent) -> None:
    """What bash gets when somebody presses the key."""
    for typed, offered in (("nodeagent sta", "status"), ("nodeagent support-bundle --", "--log")):
        script = (
            f"source <({agent.COMMAND} completion bash); PATH={Path(agent.COMMAND).parent}:$PATH; "
            f"COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); "
            'COMPREPLY=(); _nodeagent_completion nodeagent; echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert offered in done.stdout.split(), done.stderr


# --- the support bundle


def opened(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as held:
        files = {m.name.partition("/")[2]: held.extractfile(m) for m in held.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def planted(busy: agent.Agent, area: Path) -> Path:
    """Secrets where an agent's surroundings have them; the log that holds some."""
    password, key, token = CANARIES
    (busy.state / "odd.json").write_text(json.dumps({"a": [{"password": password}], "b": 1}))
    (busy.state / "odd.log").write_text(
        f'{{"event": "x", "secret": "{password}"}}\nAuthorization: Bearer {token}\n'
    )
    (busy.state / "secrets").mkdir()
    (busy.state / "secrets" / "s.json").write_text(json.dumps(password))
    (busy.state / "link.json").symlink_to(area / "outside")
    (area / "outside").write_text(json.dumps(password))
    log = area / "agent.log"
    body = "\n".join(["A" * 64] * 10)
    log.write_text(
        f"{body}\n-----END RSA PRIVATE KEY-----\nkeyring: key = {key}\n"
        f"GET https://user:{password}@r.e/v2?X-Amz-Signature={token}\nthe last line\n"
    )
    return log


def test_bundle_opens_has_an_index_and_no_secret(busy: agent.Agent, area: Path) -> None:
    log = planted(busy, area)
    target = area / "bundle.tar.gz"
    done = busy.cli(
        "support-bundle", "--file", str(target), "--log", str(log), seconds=BUNDLE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert target.stat().st_mode & 0o777 == 0o600
    assert target.stat().st_size < 10 * 2**20
    files = opened(target)
    index = json.loads(files.pop("index.json"))
    there = {each["name"]: each for each in index["files"] if not each["error"]}
    assert set(there) == set(files)
    assert {n: len(text.encode()) for n, text in files.items()} == {
        name: each["bytes"] for name, each in there.items()
    }
    for name, text in files.items():
        assert not any(canary in text for canary in CANARIES), name
        assert "A" * 64 not in text, name
    assert "the last line" in files["logs/agent.log"]
    assert json.loads(files["api/datasets.json"])["datasets"][0]["name"] == "coco"
    assert json.loads(files["api/status.json"])["verdict"] == "well"
    assert "nodeagent_component_ready" in files["metrics.txt"]
    assert str(busy.views).replace(" ", "\\040") in files["kernel/mountinfo"]
    assert json.loads(files["settings.json"])["cache"]["datasets"][0]["name"] == "coco"
    assert json.loads(files["state/odd.json"])["b"] == 1
    assert "state/secrets/s.json" not in files
    assert "state/link.json" not in files
    again = busy.cli("support-bundle", "--file", str(target), seconds=BUNDLE_SECONDS)
    assert again.returncode == kit.errors.RefusedError.exit_code


def test_bundle_without_an_agent_says_what_it_lacks(busy: agent.Agent, area: Path) -> None:
    busy.stop()
    target = area / "bundle.tar.gz"
    done = busy.cli("support-bundle", "--file", str(target), "--json", seconds=BUNDLE_SECONDS)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    lacking = {each["name"]: each["error"] for each in shown["files"] if each["error"]}
    assert "no agent answers" in lacking["api/status.json"]
    assert "api/datasets.json" in lacking
    files = opened(target)
    assert "settings.json" in files
    assert json.loads(files["index.json"])["files"] == shown["files"]


def test_bundle_goes_to_standard_output_and_nothing_else_does(
    busy: agent.Agent, area: Path
) -> None:
    """So that it passes through kubectl exec."""
    busy.stop()
    target = area / "piped.tar.gz"
    with target.open("wb") as out:
        done = subprocess.run(
            [agent.COMMAND, "--config", str(busy.config), "support-bundle", "--file", "-"],
            stdout=out, stderr=subprocess.PIPE, env=busy.environment,
            timeout=waiting.limit(BUNDLE_SECONDS),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(opened(target)["index.json"])["files"]
    assert f"-: {len(told)} files\n" in done.stderr.decode()
    wrong = busy.cli("support-bundle", "--file", "-", "--json")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert not Path("-").exists()


def test_bundle_is_bounded(tmp_path: Path) -> None:
    """A huge log of what does not compress: the archive stays below its limit and keeps the end."""
    log, target = tmp_path / "huge.log", tmp_path / "b.tar.gz"
    made = bundle.Bundle("stem")
    for number in range(30):
        text = "".join(chr(33 + (number * 7919 + at * at * 31) % 90) for at in range(2**18)) * 6
        made.add(f"{number}", "x", text + "END", newest=True)
    packed = made.pack({})
    assert len(packed) < 10 * 2**20
    assert made.total == bundle.MOST_BYTES
    assert sum(each["bytes"] for each in made.index) == bundle.MOST_BYTES
    assert all(each["bytes"] <= bundle.LARGEST for each in made.index)
    target.write_bytes(packed)
    assert opened(target)["0"].endswith("END")
    assert not log.exists()


async def test_bundle_of_an_unusable_settings_file_has_none_of_its_text(tmp_path: Path) -> None:
    config, target = tmp_path / "a.yaml", tmp_path / "b.tar.gz"
    config.write_text(f"cache: [\npassword: {CANARIES[0]}\n")
    context = main.Context(config, f"unix://{tmp_path}/none.sock")
    index = await bundle.make(target, "stem", config, context.client)
    assert next(e for e in index["files"] if e["name"] == "settings.json")["error"]
    files = await asyncio.to_thread(opened, target)
    assert not any(CANARIES[0] in text for text in files.values())


@pytest.fixture
def own_state(area: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of a node whose state directory has a log, and a store below it."""
    monkeypatch.setattr(bundle, "DOCTOR_SECONDS", 0.1)
    state, config = area / "state", area / "nodeagent.yaml"
    for name in ("state/store/coco/tree", "state/sources/coco/mount", "state/odd", "data"):
        (area / name).mkdir(parents=True)
    (state / "api.log").write_text("of the agent\n")
    for name in ("data/train.json", "state/store/coco/tree/train.json"):
        (area / name).write_text('{"of": "the dataset"}')
    config.write_text(f"state_dir: {state}\ncache: {{store: {state}/store, views: {area}/views}}\n")
    return config


async def made(config: Path, target: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    context = main.Context(config, f"unix://{target.parent}/none.sock")
    index = await bundle.make(target, "stem", config, context.client)
    return index["files"], await asyncio.to_thread(opened, target)


async def test_bundle_has_nothing_of_datasets(own_state: Path, area: Path) -> None:
    for place in ("sources/coco/mount", "odd"):
        mounts.mount(str(area / "data"), area / "state" / place, None, mounts.MS_BIND)
    _, files = await made(own_state, area / "b.tar.gz")
    assert "of the agent" in files["state/api.log"]
    assert [name for name, text in files.items() if "the dataset" in text] == []
    assert "train.json" not in files["state.json"]


async def test_bundle_outlives_a_disk_that_hangs(
    own_state: Path, area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "STATE_SECONDS", 2.0)
    (area / "hung").mkdir()
    own_state.write_text(own_state.read_text().replace(f"{area}/state", f"{area}/hung"))
    command = ["bindfs", "-f", str(area / "state"), str(area / "hung")]
    with subprocess.Popen(command) as daemon:
        try:
            await asyncio.to_thread(
                waiting.until, lambda: mountinfo.top(area / "hung") is not None, 20, "the mount"
            )
            daemon.send_signal(signal.SIGSTOP)
            index, files = await made(own_state, area / "b.tar.gz")
        finally:
            daemon.kill()
    assert "kernel/mountinfo" in files
    why = {each["name"]: each["error"] for each in index if each["error"]}
    assert "no answer within 2s" in why["state"]

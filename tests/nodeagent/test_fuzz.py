"""Every operation of the admin API with generated requests, over TLS: no 5xx, nothing undocumented.

All rooms run: a dataset, a real containerd with an image, a guard attached to a cgroup of its own.
The requests may set its mode, detach it and allow formats there. FUZZ_EXAMPLES says how many
requests each operation gets at most; `make test-fuzz`: 500, and every limit of the document.
"""

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.nodeagent.test_listeners import certify
from tests.testbed import agent, cell, containerd, kubelet_files, ports, registry, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600 if "FUZZ_EXAMPLES" in os.environ else 240)]

EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "5")
PHASES = "coverage,fuzzing" if "FUZZ_EXAMPLES" in os.environ else "fuzzing"
CALLERS = [f"fuzz-token-number-{number:04}" for number in range(100)]
IMAGE = "fw/fuzz:1"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance,unsupported_method"
)


def locked(made: agent.Agent) -> None:
    """The API over TLS for ``CALLERS``, in the settings of ``made``."""
    certify(made.folder, "fuzz")
    tokens = {f"n{number}": {"role": "dangerous", "token": t} for number, t in enumerate(CALLERS)}
    (made.folder / "tokens").write_text(yaml.safe_dump(tokens))
    made.settings["admin"]["api"] = {
        "listen": f"127.0.0.1:{ports.free(1)[0]}",
        "cert_file": str(made.folder / "tls.crt"),
        "key_file": str(made.folder / "tls.key"),
        "tokens_file": str(made.folder / "tokens"),
    }


def fuzz(made: agent.Agent, image: str, *words: str) -> subprocess.CompletedProcess[str]:
    url = f"https://{made.settings['admin']['api']['listen']}"
    authority = str(made.folder / "tls.crt")
    headers = {"Authorization": f"Bearer {CALLERS[0]}"}
    ask = urllib.request.Request(f"{url}/openapi.json", headers=headers)
    trust = ssl.create_default_context(cafile=authority)
    with urllib.request.urlopen(ask, context=trust) as answer:
        (made.folder / "openapi.json").write_bytes(answer.read())
    return subprocess.run(
        [Path(sys.executable).parent / "st", "run", "openapi.json", "--url", url,
         "--tls-verify", authority, "--checks", CHECKS, "--max-examples", EXAMPLES,
         "--phases", PHASES, "--continue-on-failure", "--request-timeout", "30",
         "--exclude-path", "/v1/events/follow",  # a stream without end
         "--suppress-health-check", "all", "--warnings", "off", "--seed", "1", *words],
        cwd=made.folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={
            **made.environment, "FUZZ_TOKENS": " ".join(CALLERS), "FUZZ_DATASET": "coco",
            "FUZZ_IMAGE": image, "SCHEMATHESIS_HOOKS": "tests.nodeagent.fuzz_hooks",
            "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1",
        },
    )  # fmt: skip


@pytest.fixture
def whole(tmp_path: Path, area: Path) -> Iterator[tuple[agent.Agent, str]]:
    """An agent with every room, and an image that it can pull."""
    images = registry.Registry(tmp_path / "registry")
    daemon = containerd.Containerd(tmp_path / "containerd", "trixie")
    (area / "source").mkdir()
    (area / "source" / "f").write_bytes(b"x" * 1000)
    try:
        images.start()
        host = f"127.0.0.1:{images.port}"
        images.push("fw/fuzz", "1", [registry.layer("fuzz", 1000, 1)])
        daemon.trust(host, f"http://{host}")
        daemon.start()
        with cell.cell(tmp_path) as where:
            made = agent.Agent(area / "node")
            made.add_dir("coco", area / "source")
            made.settings["volumes"] = cell.volumes(where)
            made.settings["kubelet"] = kubelet_files.written(area / "node")
            made.settings["preheat"] = {
                "socket": str(daemon.socket), "hosts_dir": str(daemon.certs), "spread": 0,
            }  # fmt: skip
            locked(made)
            try:
                made.start()
                waiting.until(lambda: made.get("/readyz")["ready"], what="the agent to be ready")
                yield made, f"{host}/{IMAGE}"
            finally:
                made.end()
    finally:
        daemon.remove()
        images.stop()


def test_generated_requests_meet_no_error_of_ours(whole: tuple[agent.Agent, str]) -> None:
    made, image = whole
    done = fuzz(made, image)
    said = "\n".join(line[:300] for line in (done.stdout + done.stderr).splitlines())
    assert done.returncode == 0, said[-8000:]
    print(said[-500:])  # how many requests there were: pytest -s
    assert made.get("/healthz")["alive"]
    # The requests came as far as the rooms: they were not all refused at the door. With many
    # examples the record is rotated more than once, and the first requests are no longer in it.
    record = made.state / "api.log"
    if not record.with_name("api.log.1").exists():
        entries = [json.loads(line) for line in record.read_text().splitlines()]
        reached = {entry["path"] for entry in entries if entry["result"] in (200, 202)}
        for room in ("/v1/datasets/", "/v1/images/", "/v1/volumes/"):
            assert any(path.startswith(room) for path in reached), room

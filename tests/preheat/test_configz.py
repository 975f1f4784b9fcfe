"""The kubelet's thresholds, asked of a real kubelet with the agent's account."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from kube import client, configz, kubelet, settings
from kube.kubelet import Limit
from kube.settings import AccessSettings
from tests.testbed import kubernetes, waiting

ANSWER = kubelet.of({"imageGCHighThresholdPercent": 70}, "the kubelet at https://h:1")


def asking(**more: Any) -> settings.KubeletSettings:
    return settings.KubeletSettings.model_validate({"api": {"server": "https://h:1"}, **more})


# --- when it is asked -----------------------------------------------------------------------------


async def test_an_answer_counts_for_an_hour_and_through_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, asked, changes = [0.0], [0], [0]
    away = [True]

    async def ask(_: settings.KubeletApiSettings) -> kubelet.Thresholds:
        asked[0] += 1
        if away[0]:
            raise client.KubeError("the kubelet at https://h:1", "no answer within 5s")
        return ANSWER

    def changed() -> None:
        changes[0] += 1

    monkeypatch.setattr(configz, "ask", ask)
    one = configz.Kubelet(changed, clock=lambda: now[0])

    async def after(seconds: float) -> kubelet.Thresholds:
        now[0] += seconds
        await one.thresholds(asking())
        if one._task is not None:
            await asyncio.gather(one._task)
        return await one.thresholds(asking())

    first = await after(0)
    assert first.assumed
    assert first.origin == "assumed; the kubelet at https://h:1: no answer within 5s"
    assert (await after(10)).assumed
    assert asked == [1]  # not before a minute or so
    away[0] = False
    assert await after(91) == ANSWER
    assert (asked, changes) == ([2], [1])
    away[0] = True
    assert await after(1000) == ANSWER
    assert asked == [2]
    assert await after(3000) == ANSWER  # the last answer counts while there is none
    assert (asked, changes) == ([3], [1])
    other = asking(gc_high=0.5, gc_low=0.4, api=None)
    assert (await one.thresholds(other)).gc_high == 0.5
    await one.close()


async def test_waits_are_varied_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(_: settings.KubeletApiSettings) -> kubelet.Thresholds:
        return ANSWER

    monkeypatch.setattr(configz, "ask", ask)
    due = []
    for _ in range(8):
        one = configz.Kubelet(lambda: None, clock=lambda: 0.0)
        await one.thresholds(asking())
        due.append(one._due)
    assert all(3240 <= each <= 3960 for each in due)
    assert len(set(due)) == len(due)


def test_address_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = settings.KubeletApiSettings()
    monkeypatch.delenv("NODE_IP", raising=False)
    with pytest.raises(kit.errors.SettingsError, match="NODE_IP"):
        configz.address(bare)
    monkeypatch.setenv("NODE_IP", "10.0.0.7")
    assert configz.address(bare) == "https://10.0.0.7:10250"
    monkeypatch.setenv("NODE_IP", "fd00::7")
    assert configz.address(bare) == "https://[fd00::7]:10250"
    named = settings.KubeletApiSettings(server="https://node-a:10250/")
    assert configz.address(named) == "https://node-a:10250"
    with pytest.raises(ValueError, match="server"):
        settings.KubeletApiSettings(server="http://node-a:10255")  # no token without TLS


# --- a real kubelet -------------------------------------------------------------------------------

NAMESPACE = "default"
_names = (f"images-{number}" for number in itertools.count())


@pytest.fixture
def account(kube: kubernetes.Kubernetes, tmp_path: Path) -> Iterator[settings.KubeletApiSettings]:
    yield from account_of(kube, tmp_path)


def account_of(
    kube: kubernetes.Kubernetes, tmp_path: Path
) -> Iterator[settings.KubeletApiSettings]:
    """An account without any right, and the settings that ask with it."""
    name = next(_names)
    kube.kubectl("create", "serviceaccount", name)
    token = tmp_path / name
    token.write_text(kube.kubectl("create", "token", name))
    yield settings.KubeletApiSettings(
        server=f"https://127.0.0.1:{kube.kubelet_port}",
        ca_file=kube.folder / "pki" / "ca.crt",
        token_file=token,
    )
    kube.kubectl("delete", "clusterrole,clusterrolebinding", name, "--ignore-not-found")
    kube.kubectl("delete", "serviceaccount", name)


def allow(kube: kubernetes.Kubernetes, account: settings.KubeletApiSettings) -> None:
    """The right that the chart gives: to read the configuration, and nothing else of a node."""
    name = account.token_file.name
    kube.kubectl("create", "clusterrole", name, "--verb=get", "--resource=nodes/configz")
    subject = f"--serviceaccount={NAMESPACE}:{name}"
    kube.kubectl("create", "clusterrolebinding", name, f"--clusterrole={name}", subject)


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_a_real_kubelet_tells_what_it_runs_with(
    kube: kubernetes.Kubernetes, account: settings.KubeletApiSettings, tmp_path: Path
) -> None:
    with pytest.raises(client.KubeError, match="nodes/configz") as refused:
        await configz.ask(account)
    allow(kube, account)

    async def answers() -> bool:
        try:
            await configz.ask(account)
        except client.KubeError as error:
            # The kubelet keeps a refusal for a while (webhook.cacheUnauthorizedTTL).
            assert error.status == 403
            return False
        return True

    await waiting.until_async(answers, 60, "the kubelet to hear of the right")
    found = await configz.ask(account)
    api = client.ApiServer(
        AccessSettings(
            server=account.server, ca_file=account.ca_file, token_file=account.token_file
        )
    )
    try:
        with pytest.raises(client.KubeError) as pods:
            await api.request("GET", "/pods", about="pods", deadline=waiting.limit(20))
    finally:
        await api.close()
    stranger = account.model_copy(update={"ca_file": _another_authority(tmp_path)})
    with pytest.raises(client.KubeError, match="certificate"):
        await configz.ask(stranger)

    # The kubelet starts with other settings; flags and files are one to its answer.
    file = kube.root / "var/lib/kubelet/config.yaml"
    before = file.read_text()
    changed = json.loads(before) | {"imageGCHighThresholdPercent": 77}
    changed["evictionHard"] = {"imagefs.available": "1Gi", "imagefs.inodesFree": "1%"}
    changed["evictionSoft"] = {"nodefs.available": "2%"}
    changed["evictionSoftGracePeriod"] = {"nodefs.available": "1h"}
    changed["imageGCLowThresholdPercent"] = 76
    try:
        file.write_text(json.dumps(changed))
        kube.restart_kubelet()

        async def says() -> bool:
            try:
                return (await configz.ask(account)).gc_high == 0.77
            except client.KubeError:
                return False

        await waiting.until_async(says, 60, "the kubelet to say what it has now")
        later = await configz.ask(account)
    finally:
        file.write_text(before)
        kube.restart_kubelet()

    assert refused.value.status == 403
    assert pods.value.status == 403
    assert (found.gc_high, found.gc_low, found.assumed) == (0.85, 0.84, False)
    assert found.free == (Limit(share=0.01),)
    assert found.nodefs_free == (Limit(share=0.01),)
    assert found.origin.startswith("the kubelet at https://127.0.0.1:")
    assert later.free == (Limit(amount=1024**3),)
    assert later.inodes == (Limit(share=0.01),)
    assert later.nodefs_free == (Limit(share=0.02),)


def _another_authority(folder: Path) -> Path:
    made = folder / "other.crt"
    kubernetes._run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other"),
        *("-keyout", str(folder / "other.key"), "-out", str(made), "-days", "2"),
    )
    return made

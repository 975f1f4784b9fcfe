"""The reserve as a real kubelet has it: by its file, and by what it answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.space import reserve
from kube import client, configz, kubelet, settings
from tests.preheat import test_configz
from tests.testbed import kubernetes, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture
def account(kube: kubernetes.Kubernetes, tmp_path: Path) -> Iterator[settings.KubeletApiSettings]:
    yield from test_configz.account_of(kube, tmp_path)


async def test_file_and_answer_of_a_real_kubelet_come_to_the_same(
    kube: kubernetes.Kubernetes, account: settings.KubeletApiSettings
) -> None:
    test_configz.allow(kube, account)
    answer: list[kubelet.Thresholds] = []

    async def answers() -> bool:
        try:
            answer.append(await configz.ask(account))
        except client.KubeError as error:
            assert error.status == 403  # it keeps a refusal for a while
        return bool(answer)

    await waiting.until_async(answers, 60, "the kubelet to answer")
    file = kube.root / "var/lib/kubelet/config.yaml"
    written = kubelet.thresholds(settings.KubeletSource(config=file))
    of_file, of_answer = (
        reserve.least(each, nodefs=True, imagefs=True) for each in (written, answer[0])
    )
    assert of_file == of_answer
    assert of_file.share == pytest.approx(0.01 * (1 + reserve.MARGIN))
    assert of_file.inodes_share == 0, "the file names signals, so others have no defaults"

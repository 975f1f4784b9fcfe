"""No false findings while pods come and go; half a minute here, ten by ``make soak``."""

import pytest

from tests.volumes.audit import churn
from tests.volumes.audit.stage import Stage

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def test_churn_brings_no_false_findings(stage: Stage) -> None:
    result = await churn.soak(stage, seconds=25, mounts=60, processes=200, spaces=100)
    assert result.false_findings == []
    assert result.namespaces >= 100
    assert result.processes >= 200
    # It was not asleep: a leak set up at the end is found.
    assert result.leak_found

"""The agent's pod comes and goes in every way that a cluster has; jobs, pins and guard stay."""

import os

import pytest

from tests.testbed import earlier, grave, installed, waiting

CYCLES = int(os.environ.get("SOAK_CYCLES", "1"))  # of four rounds each
pytestmark = [pytest.mark.real, pytest.mark.timeout(60 + 60 * CYCLES)]


def test_rounds_of_the_agent_cost_jobs_pins_and_guard_nothing(
    enforcing: installed.Node, volume: str
) -> None:
    node = enforcing
    before = earlier.build(node.image)
    node.kube.import_image(before.archive)
    if node.agent.dataset(installed.DATASET)["state"] != "complete":
        node.agent.tell(installed.DATASET, "warm")
        node.agent.wait_state(installed.DATASET, "complete")
    pins = node.leases()
    assert pins
    programs: list[int] = []

    def check(version: str, *, same_program: bool) -> None:
        node.all_ready()
        assert node.run("nodeagent", "--version").split()[-1] == version
        guard = node.agent.get("/v1/volumes/guard")
        assert guard["in_force"] is True
        (program,) = guard["programs"]
        programs.append(program["id"])
        assert (programs[-1] in programs[-2:-1]) is same_program, programs
        # A disk that is slow for a moment sends readers to the source, and is taken again.
        waiting.until(lambda: node.agent.dataset(installed.DATASET)["served_by"] == "store", 60)
        assert node.leases() == pins
        readers.wait_more(1)

    readers = installed.Readers(node.kube, 4)
    try:
        readers.wait_more(1)
        with installed.attempts(node.cell, volume) as tried:
            for _ in range(CYCLES):
                node.delete()
                check(node.image.version, same_program=bool(programs))
                node.kill()
                check(node.image.version, same_program=True)
                node.helm("upgrade", before.tag)  # to N-1: as good an upgrade as any
                node.pod(tag=before.tag)
                check(before.version, same_program=False)
                done = node.kube.helm("rollback", "nodeagent", "--namespace", installed.SPACE)
                assert done.returncode == 0, done.stderr
                node.pod(tag=node.image.tag)
                check(node.image.version, same_program=False)
        assert readers.restarts() == 0
    finally:
        readers.end()
    with grave.missing_denial():
        assert set(tried.outcomes) == {"Operation not permitted"}, tried.outcomes

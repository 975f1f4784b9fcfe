"""What the Dockerfile takes from outside: a build argument stays in the image's history."""

import re
from pathlib import Path

LINES = (Path(__file__).parents[2] / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
# None of them may hold a login. The last one is a path in the build.
ARGUMENTS = {"BASE", "CEPH_RELEASE", "DEBIAN_LOCK", "REVISION", "VERSION", "PIP_CONFIG_FILE"}


def test_arguments_hold_no_secret() -> None:
    found = {m[1] for line in LINES if (m := re.match(r"ARG (\w+)", line))}
    assert found == ARGUMENTS


def test_all_that_runs_apt_has_its_sources_as_a_secret() -> None:
    apt = [line for line in LINES if re.match(r"RUN .*(apt\.sh|install\.sh|apt-get)", line)]
    assert len(apt) == 2
    for line in apt:
        assert line.startswith("RUN --mount=type=secret,id=apt_sources "), line

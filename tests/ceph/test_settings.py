from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ceph.settings import ClusterSettings, unique

MONITORS = {"name": "c", "monitors": ["10.0.0.1:6789"], "secret_file": "/k"}


@pytest.mark.parametrize(
    "given",
    [
        MONITORS,
        MONITORS | {"monitors": ["[v2:10.0.0.1:3300/0,v1:10.0.0.1:6789/0]", "[fe80::1]:6789"]},
        {"name": "c", "conf": "/etc/ceph/ceph.conf"},
        {"name": "c", "conf": "/etc/ceph/ceph.conf", "secret_file": "/k", "user": "client.x"},
    ],
)
def test_a_cluster_is_named_by_monitors_or_by_a_conf(given: dict[str, Any]) -> None:
    made = ClusterSettings.model_validate(given)
    assert not made.user.startswith("client.")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": "c"}, "give either"),
        (MONITORS | {"conf": "/c"}, "give either"),
        ({"name": "c", "monitors": ["10.0.0.1:6789"]}, "need a 'secret_file'"),
        (MONITORS | {"monitors": ["a b"]}, "not a monitor address"),
        (MONITORS | {"name": "a b"}, "not a plain name"),
        (MONITORS | {"name": "x" * 64}, "at most 63"),
        (MONITORS | {"user": "a/b"}, "not a plain name"),
        (MONITORS | {"secret_file": "k"}, "give an absolute path"),
        ({"name": "c", "conf": "ceph.conf"}, "give an absolute path"),
        (MONITORS | {"keyring": "/k"}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ClusterSettings.model_validate(given)


def test_unique_refuses_two_clusters_of_one_name() -> None:
    one = ClusterSettings(name="a", conf=Path("/c"))
    other = ClusterSettings(name="b", conf=Path("/c"))
    assert unique((one, other)) == (one, other)
    with pytest.raises(ValueError, match="cluster 'a' is there twice"):
        unique((one, other, one))

"""How answers of a cluster are read; test_client.py has a real cluster."""

import pytest

from ceph import worker

# Ceph 16.2.15's exact answers to 'osd blocklist ls' in JSON; 15 says 'blacklist' and one array.
BOTH = (
    '[{"addr":"10.9.9.9:0/123","until":"2026-11-21T16:45:37.579343+0000"}]'
    '[{"range":"10.1.0.0:0/24","until":"2026-11-21T16:45:39.453176+0000"}]'
)
ONE = '\n[{"addr":"10.9.9.9:0/123","until":"2026-11-21T16:45:37.579343+0000"}]\n'


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (BOTH, ("cidr:10.1.0.0:0/24", "10.9.9.9:0/123")),
        (ONE, ("10.9.9.9:0/123",)),
        ("[][]", ()),
        ("", ()),  # this key may not ask
    ],
)
def test_parse_blocklist(text: str, entries: tuple[str, ...]) -> None:
    assert worker.parse_blocklist(text) == entries

"""``python -m tests.kube.scaled FACTOR COMMAND ...``: the agent, with shorter pauses.

Those towards the API server are shorter by the factor; everything else is the real one.
"""

import sys

from kube import client, watching
from nodeagent import main
from nodeagent.cluster import follow, writing


def shorten(factor: float) -> None:
    watching.LIST_SECONDS /= factor
    watching.SPREAD_SECONDS /= factor
    watching.NO_KIND_SECONDS /= factor
    watching.NO_STREAMS_SECONDS /= factor
    watching.PAUSES = (watching.PAUSES[0] / factor, watching.PAUSES[1] / factor)
    first, between, most = client.KEEPALIVE
    client.KEEPALIVE = (max(1, round(first / factor)), max(1, round(between / factor)), most)
    client.AWAY_SECONDS /= factor
    client.REFUSED_SECONDS /= factor
    writing.LEASE_SECONDS = max(5.0, writing.LEASE_SECONDS / factor)
    follow.SECRET_AGAIN_SECONDS /= factor


if __name__ == "__main__":
    shorten(float(sys.argv[1]))
    sys.argv = sys.argv[2:]
    main.main()

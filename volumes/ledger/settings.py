"""Settings of the second witness (``volumes.kubernetes``)."""

from typing import ClassVar

import kit.settings
import kit.units


class WitnessSettings(kit.settings.Section):
    """The PersistentVolume as a second witness: a volume that is marked there as holding data gets
    no automatic lease, and the first content that is seen is marked. It asks the API server of
    `kubernetes`, and in a pod with an account of its own it works by itself; without a cluster the
    guard decides by what the node and Ceph know."""

    enabled: bool = True
    """false: PersistentVolumes are neither asked nor marked."""
    timeout: ClassVar[kit.units.Seconds] = 3.0
    """For one request to the API server."""
    per_minute: ClassVar[int] = 60
    """Most requests of this node in a minute; marks use at most half of them."""
    outage: ClassVar[kit.units.Seconds] = 600.0
    """While the API server does not answer, a new volume is refused for so long; then the guard
    decides as without a cluster. With 'volumes.clusters' the cluster's 'nothing is allocated' ends
    the wait."""
    young: ClassVar[kit.units.Seconds] = 86400.0
    """A PersistentVolume that is older and reads as blank is refused, unless its cluster says that
    nothing is allocated, or it has the annotation nodeagent.io/allow-format with its uid."""

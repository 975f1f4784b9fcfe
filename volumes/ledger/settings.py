"""Settings of the second witness (``volumes.kubernetes``)."""

from pydantic import Field

import kit.units
import kube.settings


class WitnessSettings(kube.settings.AccessSettings):
    """The PersistentVolume as a second witness: a volume that is marked there as holding data gets
    no automatic lease, and the first content that is seen is marked. In a pod with an account of
    its own it works by itself; without a cluster the guard decides by what the node and Ceph
    know."""

    enabled: bool = True
    """false: PersistentVolumes are neither asked nor marked."""
    timeout: kit.units.Seconds = Field(default=3.0, ge=0.1, le=30)
    """For one request to the API server."""
    per_minute: int = Field(default=60, ge=6, le=6000)
    """Most requests of this node in a minute; marks use at most half of them."""
    outage: kit.units.Seconds = Field(default=600.0, ge=0, le=86400)
    """While the API server does not answer, a new volume is refused for so long; then the guard
    decides as without a cluster. With 'volumes.clusters' the cluster's 'nothing is allocated' ends
    the wait."""
    young: kit.units.Seconds = Field(default=86400.0, ge=60)
    """A PersistentVolume that is older and reads as blank is refused, unless its cluster says that
    nothing is allocated, or it has the annotation nodeagent.io/allow-format with its uid."""

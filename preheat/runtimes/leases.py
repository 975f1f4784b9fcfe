"""Holds as containerd leases: made, renewed, deleted.

A lease's labels cannot change. So a hold that changes is renewed by way of a second lease with all
that the first one holds (``-renew``): at each moment one of them keeps the content. What a renewal
left that was interrupted is put right by ``finish_renewals``.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence

from preheat.runtimes import base, cri
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb
from preheat.runtimes.base import allowing

# A lease with less left than this is renewed when its pull starts again.
LEAST_LEFT_SECONDS = 3600.0
RENEWAL = "-renew"


def content(digest: str) -> pb.LeaseResource:
    return pb.LeaseResource(id=digest, type="content")


class Leases:
    """Our leases in one containerd."""

    def __init__(self, connection: cri.Connection) -> None:
        self._connection = connection

    async def all(self) -> Sequence[pb.Lease]:
        request = pb.ListRequest(filters=[api.OWNER_FILTER])
        return (await self._connection.read(api.LIST_LEASES, request)).leases

    async def holds(self) -> list[base.Hold]:
        return [hold for each in await self.all() if (hold := api.hold_of(each)) is not None]

    async def begin(self, hold: base.Hold) -> base.Hold:
        """Make a hold, or return the equal one that exists."""
        created = hold.created or time.time()
        hold = dataclasses.replace(hold, id=base.hold_id(hold), created=created)
        with allowing("ALREADY_EXISTS"):
            await self._create(hold)
            return hold
        there = next((each for each in await self.holds() if each.id == hold.id), None)
        if there is None:  # it ended or expired just now
            await self._create(hold)
            return hold
        wanted = dataclasses.replace(hold, created=0, expires=None)
        if dataclasses.replace(there, created=0, expires=None) == wanted and (
            hold.expires is None or (there.expires or 0) > time.time() + LEAST_LEFT_SECONDS
        ):
            return there
        return await self.renew(there, hold)

    async def renew(self, old: base.Hold, new: base.Hold) -> base.Hold:
        """Replace a lease by way of a second one with all it holds."""
        resources = await self.resources(old.id)
        bridge = dataclasses.replace(new, id=old.id + RENEWAL)
        await self._create_with(bridge, resources)
        await self.delete(old.id)
        await self._create_with(new, resources)
        await self.delete(bridge.id)
        return new

    async def finish_renewals(self, holds: Iterable[base.Hold]) -> int:
        """Put interrupted renewals right: everything is in the lease itself; how many there were.

        A lease that exists keeps its labels: whoever wanted others asks again.
        """
        bridges = [hold for hold in holds if hold.id.endswith(RENEWAL)]
        for bridge in bridges:
            plain = dataclasses.replace(bridge, id=bridge.id.removesuffix(RENEWAL))
            await self._create_with(plain, await self.resources(bridge.id))
            await self.delete(bridge.id)
        return len(bridges)

    async def resources(self, lease: str) -> Sequence[pb.LeaseResource]:
        request = pb.ListResourcesRequest(id=lease)
        return (await self._connection.read(api.LIST_RESOURCES, request)).resources

    async def _create(self, hold: base.Hold) -> None:
        request = pb.CreateLeaseRequest(id=hold.id, labels=api.lease_labels(hold))
        await self._connection.change(api.CREATE_LEASE, request)

    async def _create_with(self, hold: base.Hold, resources: Iterable[pb.LeaseResource]) -> None:
        with allowing("ALREADY_EXISTS"):
            await self._create(hold)
        for resource in resources:
            await self.add(hold.id, resource)

    async def add(self, lease: str, resource: pb.LeaseResource) -> None:
        request = pb.AddResourceRequest(id=lease, resource=resource)
        await self._connection.change(api.ADD_RESOURCE, request)

    async def delete(self, lease: str, *, sync: bool = False) -> None:
        """``sync``: containerd collects garbage before it answers."""
        with allowing("NOT_FOUND"):
            request = pb.DeleteLeaseRequest(id=lease, sync=sync)
            await self._connection.change(api.DELETE_LEASE, request)

"""unattached-mapping: mapped here although the API has no VolumeAttachment for this node."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.rules.base import Outcome, Rule, Scene, Trouble


def _found(scene: Scene) -> Iterator[Trouble]:
    assert scene.inventory is not None and scene.claims is not None
    for volume in scene.inventory.volumes:
        claim = scene.claims.get(volume.handle)
        if claim is None or claim.attached is not False or not volume.device:
            continue
        yield Trouble(
            subject=volume.device,
            key=volume.handle,
            device=volume.device,
            message=f"{volume.device} holds volume {volume.name or volume.handle} of {claim.name}, "
            "which is not attached to this node",
            advice="another node may attach it at any time: find what keeps it here "
            "('nodeagent volume show'), unmount and unmap",
            evidence={"handle": volume.handle, "staging": volume.staging},
        )


def _judge(scene: Scene) -> Outcome:
    if scene.claims is None:
        return Outcome(off="no Kubernetes API")
    if scene.inventory is None or scene.blind:
        return Outcome(unknown=scene.blind or "the node has not been looked at yet")
    return Outcome(tuple(_found(scene)), unknown=scene.inventory.no_records)


RULE = Rule(
    name="unattached-mapping",
    summary="a volume is mapped here without a VolumeAttachment",
    severity=Severity.WARNING,
    patience=120.0,  # detaching and unmapping take a while
    judge=_judge,
)

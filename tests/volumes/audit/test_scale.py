"""What a round does grows with the volumes, not with their square: each tuple is walked as often
for a few of them as for many."""

from collections.abc import Iterator
from typing import Any

from ceph.protocol import ImageView
from linux.rbd_sysfs import RbdImage
from tests.volumes.audit import world
from volumes.audit import evaluate, scheduler
from volumes.audit.inventory.model import User


class _Counted(tuple[Any, ...]):
    """Counts how often somebody walks it."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self.walks += 1
        return iter(self[::-1])


def _walks(count: int) -> dict[str, int]:
    images = [RbdImage("rbd", f"v{number}", fsid="f1") for number in range(count)]
    numbers = [(252, number) for number in range(count)]
    devices = [
        world.device(name=f"rbd{at[1]}", number=at, diskseq=at[1], image=image, active=("ext4",))
        for at, image in zip(numbers, images, strict=True)
    ]
    volumes = [
        world.volume(handle=image.name, device=device.name, image=image)
        for device, image in zip(devices, images, strict=True)
    ]
    # Mounted by the host, in another namespace, and in use without a mount.
    inside = world.space(*(world.place(namespace=99, device=each) for each in numbers[1::4]))
    walked: dict[str, Any] = {
        "host": _Counted(world.place(f"/m{n[1]}", device=n) for n in numbers[::2]),
        "spaces": _Counted([inside]),
        "users": _Counted(User(world.OWNER, number, (), 99) for number in numbers[3::4]),
        "volumes": _Counted(volumes),
    }
    views = _Counted(ImageView("rbd", "", each.name, 0, (world.THEIRS,), ()) for each in images)
    cluster = world.view(images=views)
    scene = world.scene(
        devices=tuple(devices), users_of=tuple(numbers), clusters={"c1": cluster}, **walked
    )
    assert scene.inventory is not None
    scheduler.consider(scene, scene.inventory, scheduler.ScanMemory(), fresh=True)
    found, _ = evaluate.evaluate(scene)
    assert found
    return {name: each.walks for name, each in {**walked, "images": views}.items()}


def test_a_round_walks_each_list_as_often_for_many_volumes_as_for_few() -> None:
    few, many = _walks(8), _walks(80)
    assert many == few and all(few.values())

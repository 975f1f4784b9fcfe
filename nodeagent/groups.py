"""The command groups of the rooms, by name: a client of the API loads the one that is called, and
no settings of any room."""

from kit.room import Command, named

GROUPS = (
    Command(
        "volumes",
        "volume",
        "Volumes: format guard, probes, ledger, audit.",
        named("volumes.commands:volume"),
    ),
    Command(
        "cache",
        "dataset",
        "Datasets: warmed onto the SSD, served by the kernel.",
        named("cache.commands:dataset"),
    ),
    Command("preheat", "image", "Container images kept ready.", named("preheat.commands:image")),
)


def of(room: str) -> list[Command]:
    return [each for each in GROUPS if each.room == room]

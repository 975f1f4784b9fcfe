"""What about a source keeps its files from being cached as they are, as findings.

An overlay opens files of the source as root and crosses no mount, and the store keeps modes, owners
and POSIX ACLs. What a source decides by more than these is told, and what an overlay would lose
keeps the dataset at its source (``standing.unfit``).
"""

from collections.abc import Iterable

from cache.dataset.dataset import Dataset
from cache.dataset.standing import finding, named
from kit.findings import Finding, Severity


def findings(dataset: Dataset) -> Iterable[Finding]:
    name, inside = dataset.name, named(dataset.mounted_inside())
    records = [dataset.generation, *([dataset.coming.record] if dataset.coming else [])]
    refused = next((each.refused for each in records if each.refused), "")
    crossed = next((each.crossed for each in records if each.crossed), "")

    if refused:
        message = f"the source of dataset {name} refuses root {refused}, so it is not cached"
        advice = (
            "jobs read the source, each as who it is; let root of the nodes read all of it (NFS: "
            f"no_root_squash), or cache a copy, then 'nodeagent dataset warm {name}'"
        )
        yield finding("dataset-source-refuses", name, Severity.WARNING, message, advice)
    if inside or crossed:
        where = inside or crossed
        message = f"another file system is mounted inside the source of dataset {name}, at {where}"
        advice = (
            "jobs see what that place has without the mount, in all stages"
            if inside
            else "it comes when it is opened, so the dataset is not cached: jobs read the source"
        )
        advice += "; make a dataset of each file system, or unmount what does not belong there"
        yield finding("dataset-source-mounts", name, Severity.WARNING, message, advice)
    if dataset.server and dataset.settings.access.mode is None:
        message = (
            f"the source of dataset {name} is on {dataset.server}, whose server may refuse users "
            "more than modes and POSIX ACLs do; the store keeps only these"
        )
        advice = (
            "set access.mode of the dataset: '0750' and access.group for those whom the server "
            "lets read all of it, '0755' where modes and ACLs are all that decides"
        )
        yield finding("dataset-source-rights", name, Severity.INFO, message, advice)

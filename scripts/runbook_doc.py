"""Write docs/runbook.md from nodeagent/shown/runbook.yaml.

The page has what the yaml has, and beside it links and a table by symptom. The yaml
stays plain text, because the status page shows it as it is. Tests check that the page is current,
and that no finding and no alert is missing.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pages

from nodeagent.shown import page

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "runbook.md"
_PAGE = re.compile(r"docs/(\w+\.md)(?:#([\w-]+))?")
# A command or a word to type. An apostrophe begins none.
_QUOTED = re.compile(r"(?<!\w)'([^'\n]+)'(?!\w)")
_STEP = re.compile(r"\d+\. |\* ")

HEAD = """\
# Runbook

1. Run `nodeagent status` on the node ([where](#where-to-run-commands)). The command shows the
   findings with severity, cause and advice.
2. Find the [symptom](#symptoms), finding or alert on this page. Headings directly below each other
   share one entry. If an entry has no **Do**, follow the finding's advice.
3. If this does not help, run `nodeagent support-bundle`. Report the problem with the file that the
   command writes. The file has no secrets.

Restart the agent only if an entry or the advice says so. A restart does not change running jobs.
"""

# Commands of the entries, and where they run.
PLACES = (
    (
        "`nodeagent …`",
        (
            "on the node, or `kubectl -n nodeagent exec POD -c nodeagent -- nodeagent …` "
            "(POD: `kubectl -n nodeagent get pods --field-selector spec.nodeName=NODE`)"
        ),
    ),
    ("`rbd unmap`", "on the node, or in the ceph-csi pod of the node"),
    ("`ceph …`, and `rbd …` except `rbd unmap`", "on a host with an admin key of Ceph"),
    ("all other commands, except `kubectl`", "on the node, as root"),
    ("`STATE_DIR`", "the setting `state_dir`, by default `/var/lib/nodeagent/state`"),
)

# What somebody sees who does not know the finding yet, and the entries to read in this order.
SYMPTOMS = (
    (
        "Pod stays in ContainerCreating, event `format of disk … Operation not permitted`",
        "format-denied",
    ),
    (
        "Pod stays in ContainerCreating, event `FailedMount` for a dataset",
        "docs/kubernetes.md#when-the-pod-does-not-start",
    ),
    (
        "Pod that requires a dataset's label stays Pending",
        "dataset-partial, label-limit, label-refused, docs/kubernetes.md#on-some-of-the-nodes",
    ),
    (
        "Pod stays Terminating, or its Ceph volume is busy",
        "busy-mount, leaked-mount, unmap-failing",
    ),
    (
        "Pod stays Terminating, or its dataset volume is busy",
        "docs/kubernetes.md#what-holds",
    ),
    ("Reads of a dataset hang", "DatasetSourceSilent"),
    (
        "Reads of a dataset fail",
        "store-unusable, dataset-not-served, store-bad-files, dataset-view-lost",
    ),
    (
        "Reads of a dataset are slow",
        "dataset-partial, dataset-suspect, dataset-not-filled, store-unusable",
    ),
    (
        "Nodes show different versions of a dataset",
        "dataset-update-stuck, dataset-source-changed",
    ),
    ("Somebody restored the API server from a backup", "docs/kubernetes.md#after-a-restore"),
    (
        "Volume is attached to two nodes, or cannot move to another node",
        "leaked-mount, staged-unused, mapped-elsewhere",
    ),
    ("Volume held data, and now looks empty", "content-missing"),
    (
        "Volume has I/O errors",
        "blocklisted-client, volume-unreadable, claim-device-gone, file-system-errors",
    ),
    (
        "Node pulls an image again that it had",
        "preheat-gc-fight, ImageDiskUnderPressure, ImagesDropped, preheat-pull-failed",
    ),
)


def _check(page: str, anchor: str) -> None:
    """KeyError when the page has no such heading."""
    for words in re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE):
        if re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower()) == anchor:
            return
    raise KeyError(f"docs/{page}#{anchor}")


def _page_link(match: re.Match[str]) -> str:
    page, anchor = match[1], match[2]
    if not anchor:
        return f"[{page}]({page})"
    _check(page, anchor)
    return f"[{page}#{anchor}]({page}#{anchor})"


def _linked(text: str, names: Iterable[str]) -> str:
    """With links to pages and to other entries; what stands in quotes becomes code."""
    every = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    entry = re.compile(rf"(?<![\w'#/(\[-])({every})(?![\w'-])|(?<=\()({every})(?=[,)])")
    parts = _QUOTED.split(text)
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = f"`{part}`"
        else:
            part = _PAGE.sub(_page_link, part)
            parts[number] = entry.sub(
                lambda m: f"[{m[1] or m[2]}](#{(m[1] or m[2]).lower()})", part
            )
    return "".join(parts)


def _wrapped(text: str) -> list[str]:
    """Lines of a paragraph or of a step."""
    step = _STEP.match(text)
    return pages.wrapped(text, " " * len(step[0]) if step else "").split("\n")


def _section(group: str) -> Iterator[str]:
    """Headings of entries that have their texts from another one stand above that one."""
    every = page.runbook_entries()
    yield from (f"## {group}", "")
    for each in every:
        if each.see or each.group != group:
            continue
        for name in (*(alert.name for alert in every if alert.see == each.name), each.name):
            yield from (f"### {name}", "")
        others = {entry.name for entry in every} - {each.name}
        yield from (*_wrapped(_linked(each.means, others)), "")
        if each.look:
            yield from (*_wrapped(f"**Check:** {_linked(each.look, others)}"), "")
        if each.do:
            yield from (*_steps(_linked(each.do, others)), "")


def _steps(text: str) -> Iterator[str]:
    """Sentences, and lists with an empty line before and after."""
    listed = False
    first, *more = text.split("\n")
    if _STEP.match(first):
        first, more = "", [first, *more]
    yield from _wrapped(f"**Do:** {first}".rstrip())
    for line in more:
        step = _STEP.match(line) is not None
        if step is not listed:
            yield ""
        listed = step
        yield from _wrapped(line)


def document() -> str:
    """The whole page."""
    every = page.runbook_entries()
    names = [each.name for each in every]
    lines = [HEAD, "## Symptoms", ""]
    for seen, read in SYMPTOMS:
        lines += _wrapped(f"* {seen}: {_linked(read, names)}")
    lines += ["", "## Where to run commands", ""]
    for command, where in PLACES:
        lines += _wrapped(f"* {command}: {where}")
    lines.append("")
    for group in dict.fromkeys(each.group for each in every):
        lines += _section(group)
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())

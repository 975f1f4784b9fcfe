"""Write docs/runbook.md from nodeagent/shown/runbook.yaml.

The page has what the yaml has, and beside it links, severities and a table by symptom. The yaml
stays plain text, because the status page shows it as it is. Tests check that the page is current,
and that no finding and no alert is missing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pages
import yaml

from nodeagent.shown import page
from volumes.audit import evaluate

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "runbook.md"
_PAGE = re.compile(r"docs/(\w+\.md)(?:#([\w-]+))?")
# A command or a word to type. An apostrophe begins none.
_QUOTED = re.compile(r"(?<!\w)'([^'\n]+)'(?!\w)")
_STEP = re.compile(r"\d+\. |\* ")

HEAD = """\
# Runbook

You were paged about a GPU node:

1. Run `nodeagent status` on the node or in its agent's pod ([where](#where-to-run-commands)).
2. Find the [symptom](#symptoms), the finding or the alert below. The finding's message names the
   cause.
3. Not solved? Send somebody the file that `nodeagent support-bundle` writes. It has no secrets.

A stop or restart of the agent does not change running jobs.
"""

# Commands of the entries, and where they run.
PLACES = (
    (
        "`nodeagent …`",
        (
            "on the node, or `kubectl -n nodeagent exec POD -c nodeagent -- nodeagent …`; "
            "`kubectl -n nodeagent get pods --field-selector spec.nodeName=NODE` shows POD"
        ),
    ),
    ("`rbd unmap`", "on the node, or in its ceph-csi node plugin"),
    ("`ceph …`, other `rbd …`", "on a host with an admin key of the cluster"),
    ("all others", "on the node, as root"),
)

# What somebody sees who does not know the finding yet, and the entries to read in this order.
SYMPTOMS = (
    ("Pod in ContainerCreating, event `format of disk … Operation not permitted`", "format-denied"),
    (
        "Pod in ContainerCreating, event `FailedMount` for a dataset",
        "docs/kubernetes.md#when-the-pod-does-not-start",
    ),
    (
        "Pod Pending that requires the label of a dataset",
        "dataset-partial, label-limit, label-refused, docs/kubernetes.md#on-some-of-the-nodes",
    ),
    (
        "Pod Terminating, or its volume is busy",
        "busy-mount, leaked-mount, unmap-failing. Of a dataset: docs/kubernetes.md#what-holds",
    ),
    ("Jobs hang in reads of a dataset", "DatasetSourceSilent"),
    (
        "Jobs get I/O errors from a dataset",
        "store-unusable, dataset-not-served",
    ),
    (
        "Jobs read a dataset slowly",
        "dataset-partial, dataset-suspect, dataset-not-filled, store-unusable",
    ),
    (
        "Nodes show different versions of a dataset",
        "dataset-update-stuck, dataset-source-changed",
    ),
    ("API server restored from a backup", "docs/kubernetes.md#after-a-restore"),
    (
        "Volume attached on two nodes, or cannot move",
        "leaked-mount, staged-unused, mapped-elsewhere",
    ),
    ("Volume that held data is empty", "content-missing"),
    (
        "Volume has I/O errors",
        "blocklisted-client, volume-unreadable, claim-device-gone, file-system-errors",
    ),
    ("Processes in state D", "probe-hangs, ChildrenAbandoned"),
    (
        "Node pulls an image that should be there",
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


def severities() -> Mapping[str, str]:
    """Of findings and alerts by name, from where each is defined."""
    found = {each.name: each.severity for each in page.runbook_entries() if each.severity}
    found |= {rule.name: str(rule.severity) for rule in evaluate.RULES}
    for file in (ROOT / "deploy" / "alerts").glob("*.rules.yaml"):
        for group in yaml.safe_load(file.read_text())["groups"]:
            found |= {rule["alert"]: rule["labels"]["severity"] for rule in group["rules"]}
    return found


def _section(entries: Iterable[page.RunbookEntry], known: Mapping[str, str]) -> list[str]:
    lines = []
    names = {each.name for each in page.runbook_entries()}
    for each in entries:
        others = names - {each.name}
        behind = f" See [{each.see}](#{each.see})." if each.see else ""
        means = f"*{known[each.name]}.* {_linked(each.means, others)}{behind}"
        lines += [f"### {each.name}", "", *_wrapped(means), ""]
        if each.look and not behind:
            lines += [*_wrapped(f"**Check:** {_linked(each.look, others)}"), ""]
        if each.do and not behind:
            lines += [*_steps(_linked(each.do, others)), ""]
    return lines


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
    every, known = page.runbook_entries(), severities()
    names = [each.name for each in every]
    lines = [HEAD, "## Symptoms", ""]
    for seen, read in SYMPTOMS:
        lines += _wrapped(f"* {seen}: {_linked(read, names)}")
    lines += ["", "## Where to run commands", ""]
    for command, where in PLACES:
        lines += _wrapped(f"* {command}: {where}")
    lines += ["", "## Findings", "", *_section((e for e in every if not e.is_alert), known)]
    lines += ["## Alerts", "", *_section((e for e in every if e.is_alert), known)]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())

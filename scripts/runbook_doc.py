"""Write docs/runbook.md from nodeagent/shown/runbook.yaml.

The page has what the yaml has, and beside it links, severities and a table by symptom. The yaml
stays plain text, because the status page shows it as it is.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from nodeagent.shown import page
from volumes.audit import evaluate

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "runbook.md"
_PAGE = re.compile(r"docs/(\w+\.md)(?:#([\w-]+))?")

HEAD = """\
# Runbook

You were paged about a GPU node. Three steps:

1. `nodeagent status`, on the node or in its agent's pod ([where](#where-commands-run)). Its first
   line says in one sentence whether the node is well; the rest says what is not.
2. Look up the [symptom](#by-symptom), the finding or the alert below. The status page (on the node
   `http://127.0.0.1:9470/`) links each finding to its entry, and shows the entries at `/runbook`,
   without a network.
3. If that does not end it: `nodeagent support-bundle` makes one file for whoever helps you.
   Secrets are taken out of it.

The agent is never in the data path. Stopping or restarting it neither helps nor harms a running
job: the kernel serves the data and refuses the formats.

`scripts/runbook_doc.py` makes this page from `nodeagent/shown/runbook.yaml`; tests check that it is
current and that no finding and no alert is missing. Severities of the audit's rules can be changed
by the settings (`volumes.audit.rules`).
"""

# Commands of the entries, and where they run.
PLACES = (
    (
        "`nodeagent …`",
        (
            "on the node, or with the chart in its agent's pod: "
            "`kubectl -n nodeagent get pods -o wide --field-selector spec.nodeName=NODE` has "
            "the pod, then `kubectl -n nodeagent exec POD -- nodeagent status`"
        ),
    ),
    (
        (
            "`smartctl`, `findmnt`, `df`, `lsmod`, `ps`, `systemctl`, `timedatectl`, `ip`, `ping`, "
            "`crictl`, `ctr`, the kernel's log"
        ),
        "on the node, as root; the agent's image does not have all of them",
    ),
    ("`rbd unmap`", "on the node, or in the container of ceph-csi's node plugin there"),
    (
        "`ceph …`, other `rbd …`",
        "on a host with an admin key of the cluster; the agent's image has neither",
    ),
    ("`kubectl`, `helm`", "where you administer the cluster"),
)

# What somebody sees who does not know the finding yet, and the entries to read in this order.
SYMPTOMS = (
    (
        (
            "a pod stays in ContainerCreating; its event says "
            "`format of disk … Operation not permitted`"
        ),
        "format-denied",
    ),
    (
        "a pod stays in ContainerCreating with `FailedMount` of a dataset",
        "the table in docs/kubernetes.md#when-the-pod-does-not-start",
    ),
    (
        "a pod stays Pending and asks for the label of a dataset",
        "dataset-partial, docs/kubernetes.md#on-some-of-the-nodes, label-limit, label-refused",
    ),
    (
        "a pod stays Terminating, or its volume cannot be unmounted or unmapped (busy)",
        (
            "busy-mount, leaked-mount, unmap-failing. Of a dataset: does an agent run there? "
            "docs/kubernetes.md#what-holds"
        ),
    ),
    (
        "jobs hang in reads of a dataset, or its Ceph cluster is away",
        "DatasetSourceSilent",
    ),
    (
        "the API server was restored from a backup, or has another etcd",
        "docs/kubernetes.md#after-a-restore",
    ),
    (
        "a volume cannot move to another node, or is attached on two",
        "leaked-mount, mapped-elsewhere",
    ),
    (
        "a volume that held data shows up empty",
        "content-missing. Format nothing",
    ),
    (
        "reads or writes of a volume fail",
        "blocklisted-client, volume-unreadable",
    ),
    ("processes hang in state D", "probe-hangs, ChildrenAbandoned"),
    ("jobs get I/O errors from a dataset", "store-unusable, dataset-not-served"),
    (
        "jobs read a dataset slowly",
        "dataset-partial, dataset-suspect, dataset-not-filled, store-unusable",
    ),
    (
        "jobs on two nodes read different versions of a dataset",
        "dataset-update-stuck, dataset-source-changed",
    ),
    (
        "a node pulls an image that should be there",
        "preheat-gc-fight, ImageDiskUnderPressure, ImagesDropped, preheat-pull-failed",
    ),
    (
        "somebody took images out of the settings by mistake",
        "ImagesDropped, before you free any disk",
    ),
)


def _heading(page: str, anchor: str) -> str:
    """The words of a heading. KeyError when the page has no such anchor."""
    for words in re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE):
        if re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower()) == anchor:
            return str(words)
    raise KeyError(f"docs/{page}#{anchor}")


def _page_link(match: re.Match[str]) -> str:
    page, anchor = match[1], match[2]
    if not anchor:
        return f"[{page}]({page})"
    return f"[{page}: {_heading(page, anchor)}]({page}#{anchor})"


def _linked(text: str, names: Iterable[str]) -> str:
    """With links to pages and to other entries; what a command in quotes has stays."""
    text = _PAGE.sub(_page_link, text)
    every = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(
        rf"(?<![\w'#/(\[-])({every})(?![\w'-])", lambda m: f"[{m[1]}](#{m[1].lower()})", text
    )


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
        lines += [
            f"### {each.name}",
            "",
            f"*{known[each.name]}.* {_linked(each.means, others)}",
            "",
        ]
        if each.see:
            lines += [f"Behind it: [{each.see}](#{each.see}).", ""]
        look, do = _linked(each.look, others), _linked(each.do, others)
        lines += [f"* **Look:** {look}", f"* **Do:** {do}", ""]
    return lines


def document() -> str:
    """The whole page."""
    every, known = page.runbook_entries(), severities()
    names = [each.name for each in every]
    lines = [HEAD, "## By symptom", "", "| you see | read |", "| --- | --- |"]
    lines += [f"| {seen} | {_linked(read, names)} |" for seen, read in SYMPTOMS]
    lines += ["", "## Where commands run", "", "| command | where |", "| --- | --- |"]
    lines += [f"| {command} | {where} |" for command, where in PLACES]
    lines += ["", "## Findings", "", *_section((e for e in every if not e.is_alert), known)]
    lines += ["## Alerts", "", *_section((e for e in every if e.is_alert), known)]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())

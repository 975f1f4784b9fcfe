"""The command ``kubectl-nodeagent``, which kubectl runs for 'kubectl nodeagent'.

The Kubernetes client takes most of a second to import, so that ``--help`` does without it.
"""

import datetime
import functools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import kit.errors
import kit.redact
import kit.units
from kit import terminal

if TYPE_CHECKING:
    from fleet import folding, server

# As of 'nodeagent status' (docs/cli.md).
EXIT_CODES = {"well": 0, "attention": 12, "critical": 13}
DATASETS, IMAGE_SETS = "cacheddatasets", "imagesets"
EVENTS_NAMESPACE = "default"  # where agents write Events of their Node
MOST_EVENTS = 200
WARM = "nodeagent.io/warm"
LONGEST_VALUE = 63
LOOK_SECONDS = 2.0
_DURATION = "30m"


def _option(*names: str, **given: Any) -> Callable[[Any], Any]:
    """One that each command takes, and the group before them: people write it in both places."""

    def remember(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        found = ctx.ensure_object(dict)
        if value is not None:
            found[parameter.name] = value
        return value

    return click.option(*names, callback=remember, expose_value=False, **given)


def _who(command: Any) -> Any:
    """The options that say which cluster, and as whom."""
    for option in (
        _option("-n", "--namespace", metavar="NAME", help="Of the agents; default: any."),
        _option("--context", metavar="NAME", help="Context of the kubeconfig; default: its own."),
        _option(
            "--kubeconfig",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Default: $KUBECONFIG, then ~/.kube/config.",
        ),
    ):
        command = option(command)
    return command


selector_option = click.option(
    "-l", "--selector", metavar="LABELS", help="Only Nodes with these labels, as for kubectl."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@_who
@click.version_option(package_name="nodeagent")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """All nodes of a cluster that nodeagent runs on: datasets, images, findings.

    Reads objects of the cluster as the user of the kubeconfig; asks no agent but with exec and
    bundle."""
    ctx.ensure_object(dict)


def command(run: Callable[..., None]) -> click.Command:
    """One of the plugin's commands; its function gets the cluster first."""

    def callback(ctx: click.Context, /, **given: Any) -> None:
        cluster = _cluster(ctx)
        try:
            run(cluster, **given)
        finally:
            cluster.close()

    wrapped = functools.update_wrapper(callback, run)
    return cli.command(run.__name__.strip("_"))(_who(click.pass_context(wrapped)))


def _cluster(ctx: click.Context) -> "server.FleetServer":
    try:
        from fleet import server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("kubernetes", "urllib3"):
            raise
        raise kit.errors.HostError(
            "kubectl nodeagent",
            f"the Python package {error.name} is not installed",
            "install the extra: pip install 'nodeagent[kubectl]'",
        ) from error
    given = ctx.obj
    return server.FleetServer(given.get("kubeconfig"), given.get("context"))


def _namespace() -> str | None:
    found: str | None = click.get_current_context().obj.get("namespace")
    return found


# --- what there is


@command
@selector_option
@terminal.output_option
def status(cluster: "server.FleetServer", selector: str | None, output: str | None) -> None:
    """Say on one screen how all nodes are. Ends with 0 when all are well, 12 when somebody should
    look, 13 when somebody must look now."""
    from fleet import tables

    fleet = _fleet(cluster, selector)
    about = f"{cluster.address}, context {cluster.context}"
    _show(
        fleet.as_json(cluster.address),
        lambda width, _: tables.status(fleet, about, width),
        output,
    )
    sys.exit(EXIT_CODES[fleet.verdict])


@command
@selector_option
@terminal.output_option
def nodes(cluster: "server.FleetServer", selector: str | None, output: str | None) -> None:
    """List the nodes, the worst first."""
    from fleet import folding, tables

    fleet = _fleet(cluster, selector)
    _show(folding.nodes_json(fleet), functools.partial(tables.nodes, fleet), output)


@command
@selector_option
@terminal.output_option
def datasets(cluster: "server.FleetServer", selector: str | None, output: str | None) -> None:
    """List the datasets, with how many nodes have all of each; incomplete ones first."""
    from fleet import folding, tables

    fleet = _fleet(cluster, selector)
    _show(folding.datasets_json(fleet), functools.partial(tables.datasets, fleet), output)


@command
@selector_option
@terminal.output_option
def images(cluster: "server.FleetServer", selector: str | None, output: str | None) -> None:
    """List the images, with how many nodes have each, and the ImageSets."""
    from fleet import folding, tables

    fleet = _fleet(cluster, selector)
    made = {"images": folding.images_json(fleet), "image_sets": folding.sets_json(fleet)}
    _show(made, functools.partial(tables.images, fleet), output)


@command
@click.argument("node", required=False)
@click.option("--warnings", is_flag=True, help="Only Events of type Warning.")
@terminal.output_option
def events(
    cluster: "server.FleetServer", node: str | None, warnings: bool, output: str | None
) -> None:
    """List the newest Events that agents wrote, of NODE or of all; the newest last."""
    from fleet import folding, server, tables

    selected = ["source=nodeagent"]
    selected += [f"involvedObject.name={node}"] if node else []
    selected += ["type=Warning"] if warnings else []
    newest = folding.NewestEvents(MOST_EVENTS)
    for page in cluster.events(EVENTS_NAMESPACE, field_selector=",".join(selected)):
        for event in page:
            newest.add(event)
    listed = newest.listed()
    if node and not listed:
        server.check_node(cluster, node)
    _show(listed, functools.partial(tables.events, listed, cluster.now), output)


def _fleet(cluster: "server.FleetServer", selector: str | None) -> "folding.Fleet":
    from fleet import folding, server, shapes

    fleet: folding.Fleet | None = None
    chosen: set[str] | None = None
    if selector is not None:
        chosen = {each.metadata.name for page in cluster.nodes(selector) for each in page}
        if not chosen:
            raise kit.errors.NotFoundError(
                f"selector {selector}", "no Node has these labels", "kubectl get nodes -l LABELS"
            )
    for storages in cluster.kinds(server.NODE_STORAGES, shapes.NodeStorage):
        fleet = fleet or folding.Fleet(cluster.now)
        for each in storages:
            if chosen is None or each.metadata.name in chosen:
                fleet.add(each)
    fleet = fleet or folding.Fleet(cluster.now)
    # What a part of the nodes lacks, an object's status does not say.
    if chosen is None:
        for wishes in cluster.kinds(DATASETS, shapes.WishObject):
            fleet.add_datasets(wishes)
        for wishes in cluster.kinds(IMAGE_SETS, shapes.WishObject):
            fleet.add_sets(wishes)
    return fleet


def _show(
    made: Any, lines: Callable[[int | None, bool], Iterable[terminal.Line]], output: str | None
) -> None:
    """``lines``: at most so wide (None: nothing is cut), and whether with more columns."""
    if output in ("json", "yaml"):
        terminal.show((made, lambda _: ()), output=output)
        return
    wide = output == "wide"
    for line in lines(None if wide else terminal.columns_of_output(), wide):
        terminal.say(line)


# --- what is done


def _value(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not 0 < len(value) <= LONGEST_VALUE:
        raise click.BadParameter(f"{len(value)} characters; write 1 to {LONGEST_VALUE}")
    return value


def _seconds(_ctx: click.Context, _parameter: click.Parameter, value: str) -> float:
    try:
        return kit.units.parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@command
@click.argument("dataset")
@click.option(
    "--value",
    callback=_value,
    metavar="TEXT",
    help="What the annotation says: nodes act when it changes. Default: the time.",
)
@click.option("--wait", is_flag=True, help="Until all nodes have all of it.")
@click.option(
    "--timeout",
    callback=_seconds,
    default=_DURATION,
    show_default=True,
    metavar="TIME",
    help="How long --wait waits.",
)
def warm(
    cluster: "server.FleetServer", dataset: str, value: str | None, wait: bool, timeout: float
) -> None:
    """Ask all nodes of a CachedDataset to fill it now, by its annotation nodeagent.io/warm."""
    value = value or f"kubectl-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S.%fZ}"
    try:
        cluster.annotate(DATASETS, dataset, WARM, value)
    except kit.errors.NotFoundError as error:
        raise _no_dataset(cluster, dataset) from error
    terminal.say(f"dataset {dataset}: its nodes are asked to fill it ({WARM}={value})")
    if not wait:
        return
    end, last = time.monotonic() + timeout, ""
    while True:
        wish = cluster.kind(DATASETS, dataset)
        warmed = wish.status.condition("Warmed")
        mine = warmed if warmed and warmed.message.startswith(f"{value}: ") else None
        if mine is not None and wish.status.carried_out.get("warm") == value:
            if mine.status != "True":
                raise _Failed(f"dataset {dataset}", mine.message, "kubectl nodeagent datasets")
            terminal.say(f"dataset {dataset}: {mine.message}")
            return
        said = f"{wish.status.percent} % on its nodes"
        if mine is not None:
            said += f"; {mine.message.removeprefix(f'{value}: ')}"
        if said != last:
            terminal.say(f"dataset {dataset}: {said}", error=True)
            last = said
        if time.monotonic() > end:
            raise _Failed(
                f"dataset {dataset}",
                f"not on all of its nodes after {kit.units.format_duration(timeout)} ({said})",
                "it goes on by itself; see 'kubectl nodeagent datasets'",
            )
        time.sleep(LOOK_SECONDS)


class _Failed(kit.errors.AgentError):
    """What was waited for did not come."""

    exit_code = 11


def _no_dataset(cluster: "server.FleetServer", dataset: str) -> kit.errors.AgentError:
    from fleet import server

    fleet = _fleet(cluster, None)  # says it, too, when the cluster has no such kinds
    found = fleet.datasets.get(dataset)
    if found is not None and found.wish is None:
        return kit.errors.RefusedError(
            f"dataset {dataset}",
            f"{found.nodes} nodes have it of their settings file, and no CachedDataset is named so",
            f"kubectl nodeagent exec NODE -- dataset warm {dataset}",
        )
    names = [name for name, each in fleet.datasets.items() if each.wish is not None]
    return kit.errors.NotFoundError(
        f"dataset {dataset}", "no CachedDataset is named so", server.hint(dataset, names)
    )


@command
@click.argument("node")
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND...")
def _exec(cluster: "server.FleetServer", node: str, words: tuple[str, ...]) -> None:
    """Run 'nodeagent COMMAND' in the agent's pod on NODE; ends with its exit code. It gets neither
    input nor a terminal."""
    from fleet import pods

    words = words[1:] if words[0] == "nodeagent" else words
    pod = pods.of_node(cluster, node, _namespace())
    err = functools.partial(pods.to_here, error=True)
    sys.exit(pods.run(cluster, pod, words, (pods.to_here, err)))


@command
@click.argument("node")
@terminal.file_option(
    "-o", "--file", "target",
    help="Where to write it; default nodeagent-support-NODE-TIME.tar.gz in this directory.",
)  # fmt: skip
def bundle(cluster: "server.FleetServer", node: str, target: Path | None) -> None:
    """Fetch the support bundle of NODE: settings, state, findings, what doctor says; no secrets."""
    from fleet import pods

    pod = pods.of_node(cluster, node, _namespace())
    now = datetime.datetime.now(datetime.UTC)
    target = target or Path(f"nodeagent-support-{node}-{now:%Y%m%dT%H%M%SZ}.tar.gz")
    size, said = pods.bundle(cluster, pod, target)
    for line in said.splitlines():
        terminal.say(line, error=True)
    terminal.say(f"{target}: {kit.units.format_size(size)}")


def main() -> None:
    terminal.run(cli, "kubectl nodeagent")

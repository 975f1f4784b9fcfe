"""Draw both Grafana dashboards as they are for a node of the tests: docs/dashboard-*.png.

    make pictures

Needs root, containerd and Prometheus of scripts/setup.sh full, and four minutes. A real agent is in
the middle of its work (tests/testbed/busy_node.py), a real Prometheus scrapes it and evaluates the
dashboards' own queries; Grafana is not needed. Of the fleet's three nodes two are agents of
tests/testbed/census.py, which have every series and do nothing.
"""

import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plot
import prometheus_client
from matplotlib import gridspec, ticker
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

import kit.units
from nodeagent.api import figures
from tests.testbed import busy_node, census, leftovers, ports
from tests.testbed.prometheus import Prometheus

ROOT = Path(__file__).parent.parent
NODE, OTHERS = "gpu-node-07", ("gpu-node-08", "gpu-node-09")
SECONDS, STEP = 200, 2  # what is drawn; the fill is let go in the middle
INTERVAL = "15s"  # what Grafana would put for $__rate_interval
COLUMNS, ROW_INCHES, WIDE_INCHES, DOTS = 24, 0.36, 16, 90
MOST_LINES, MOST_ROWS = 8, 9
GOOD, BAD, ORANGE, SOFT, LINE = "#176b34", "#b3201f", "#8a4b08", "#5c5850", "#dedad2"
COLOURS = ("#0f6e66", "#b3621f", "#4a5fb0", "#8a3b74", "#6b7a1f", "#2f86b5", "#a33a3a", "#777777")

DAY = 86400
Found = list[dict[str, Any]]


def shown(value: float, unit: str) -> str:
    """As Grafana shows a number of this unit, about."""
    if not math.isfinite(value):
        return "-"
    match unit:
        case "bytes":
            return kit.units.format_size(value)
        case "Bps":
            return f"{kit.units.format_size(value)}/s"
        case "s":
            return kit.units.format_duration(value) if value < 2 * DAY else f"{value / DAY:,.0f} d"
        case "percentunit":
            return f"{value:.0%}"
        case "reqps" | "ops":
            return f"{value:.2g}/s"
    return f"{value:,.0f}" if value == round(value) else f"{value:.3g}"


def legend(panel: dict[str, Any], number: int, labels: dict[str, str]) -> str:
    text = str(panel["targets"][number].get("legendFormat") or "")
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


class Board:
    """One dashboard on one figure, on Grafana's grid of 24 columns."""

    def __init__(self, file: Path, watcher: Prometheus, end: float) -> None:
        self._board = json.loads(file.read_text())
        self._watcher, self._end = watcher, end

    def draw(self, target: Path) -> None:
        panels = self._board["panels"]
        height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
        figure = plot.figure(figsize=(WIDE_INCHES, height * ROW_INCHES), dpi=DOTS)
        figure.set_facecolor("#f6f5f2")
        edges = {"left": 0.02, "right": 0.985, "top": 0.995, "bottom": 0.005}
        grid = gridspec.GridSpec(height * 10, COLUMNS * 10, figure, **edges)
        for panel in panels:
            at = panel["gridPos"]
            top, left = at["y"] * 10, at["x"] * 10
            if panel["type"] == "row":
                axes = figure.add_subplot(grid[top : top + 10, :])
                axes.axis("off")
                axes.text(0, 0.2, panel["title"], fontsize=12, fontweight="bold")
                continue
            chart = panel["type"] == "timeseries"
            low, narrow = (20, 14) if chart else (6, 5)
            bottom, right = top + at["h"] * 10, left + at["w"] * 10
            card = figure.add_subplot(grid[top + 1 : bottom - 1, left + 1 : right - 1])
            card.set(xticks=(), yticks=(), facecolor="white")
            card.spines[:].set_color(LINE)
            above = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points"}
            card.annotate(panel["title"], xytext=(7, -15), fontsize=9, fontweight="bold", **above)
            axes = figure.add_subplot(grid[top + 12 : bottom - low, left + narrow : right - 6])
            axes.set_facecolor("none")
            getattr(self, f"_{panel['type']}")(axes, panel)
        with tempfile.NamedTemporaryFile(suffix=".png") as made:
            figure.savefig(made.name)
            Image.open(made.name).convert("RGB").quantize(255).save(target, optimize=True)
        plot.close(figure)

    def _ask(self, panel: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
        """Legend, labels and value of each series now."""
        for number, target in enumerate(panel["targets"]):
            for each in self._watcher.ask(expression(target)):
                labels = each["metric"]
                yield legend(panel, number, labels), labels, float(each["value"][1])

    def _timeseries(self, axes: Any, panel: dict[str, Any]) -> None:
        defaults = panel["fieldConfig"]["defaults"]
        lines: dict[str, dict[float, float]] = {}
        for number, target in enumerate(panel["targets"]):
            begin = self._end - SECONDS
            for each in self._watcher.over(expression(target), begin, self._end, STEP):
                name = legend(panel, number, each["metric"]) or panel["title"]
                lines[name] = {float(at): float(value) for at, value in each["values"]}
        if not lines:
            nothing(axes)
            return
        stacked = "stacking" in defaults["custom"]
        times = sorted({at for line in lines.values() for at in line})
        below = dict.fromkeys(times, 0.0)
        highest = sorted(lines.items(), key=lambda each: -max(each[1].values()))[:MOST_LINES]
        for (name, line), colour in zip(highest, COLOURS, strict=False):
            place = [at - self._end for at in times]
            top = [line.get(at, math.nan) + (below[at] if stacked else 0) for at in times]
            floor = [below[at] for at in times] if stacked else [0.0] * len(times)
            axes.plot(place, top, color=colour, linewidth=1.2, label=name)
            axes.fill_between(place, floor, top, color=colour, alpha=0.4 if stacked else 0.1, lw=0)
            if stacked:
                below = {at: below[at] + line.get(at, 0.0) for at in times}
        axes.set_xlim(-SECONDS, 0)
        axes.set_ylim(defaults.get("min", 0), defaults.get("max"))
        if "max" not in defaults:
            most = max((value for line in lines.values() for value in line.values()), default=0)
            axes.set_ylim(top=axes.get_ylim()[1] * 1.05 if most > 0 else 1.0)
        unit = defaults["unit"]
        axes.yaxis.set_major_locator(ticker.MaxNLocator(4))
        axes.yaxis.set_major_formatter(lambda value, _: shown(value, unit))
        axes.xaxis.set_major_locator(ticker.MultipleLocator(60))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 60:.0f} min" if value else "now")
        axes.tick_params(labelsize=7, colors=SOFT, length=0)
        axes.grid(color=LINE, linewidth=0.6)
        axes.spines[:].set_visible(False)
        axes.legend(
            fontsize=7, ncols=3, loc="upper left", bbox_to_anchor=(-0.02, -0.14), frameon=False,
            labelcolor=SOFT, handlelength=1, columnspacing=1, borderpad=0,
        )  # fmt: skip

    def _stat(self, axes: Any, panel: dict[str, Any]) -> None:
        axes.axis("off")
        defaults, found = panel["fieldConfig"]["defaults"], list(self._ask(panel))
        if not found:
            nothing(axes)
            return
        name, _, value = found[0]
        text, colour = shown(value, defaults["unit"]), step_colour(defaults, value)
        for mapping in defaults.get("mappings") or ():
            if mapped := mapping["options"].get(f"{value:g}"):
                text, colour = mapped["text"], mapped.get("color", colour)
        if panel["options"].get("textMode") == "name":
            text = name
        named = {"red": BAD, "green": GOOD, "orange": ORANGE}
        axes.text(
            0.5, 0.4, text, fontsize=19, fontweight="bold", ha="center", va="center",
            color=named.get(colour, "#1c1b19"), transform=axes.transAxes,
        )  # fmt: skip

    def _bargauge(self, axes: Any, panel: dict[str, Any]) -> None:
        found = [(name, value) for name, _, value in self._ask(panel)][:MOST_ROWS][::-1]
        if not found:
            nothing(axes)
            return
        axes.barh([name for name, _ in found], [1.0] * len(found), color=LINE, height=0.5)
        axes.barh([n for n, _ in found], [v for _, v in found], color=COLOURS[0], height=0.5)
        for at, (name, value) in enumerate(found):
            axes.text(0, at + 0.3, name, fontsize=7, color=SOFT)
            axes.text(1, at + 0.3, shown(value, "percentunit"), fontsize=8, ha="right")
        axes.set_ylim(len(found) - max(len(found), 5) - 0.6, len(found) - 0.2)
        axes.axis("off")

    def _table(self, axes: Any, panel: dict[str, Any]) -> None:
        axes.axis("off")
        (kept,) = [
            each["options"]["include"]["names"]
            for each in panel["transformations"]
            if each["id"] == "filterFieldsByName"
        ]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        rows = []
        for _, labels, value in self._ask(panel):
            cells = labels | {"Value": shown(value, unit)}
            rows.append([cells[name] for name in kept])
        if not rows:
            nothing(axes)
            return
        for number, cells in enumerate(rows[:MOST_ROWS]):
            for at, text in enumerate(cells):
                across = at / max(len(cells), 2)
                down = 1 - (number + 0.7) / MOST_ROWS
                axes.text(across, down, text, fontsize=8, transform=axes.transAxes)
        if len(rows) > MOST_ROWS:
            more = f"{len(rows) - MOST_ROWS} more"
            axes.text(0, -0.06, more, fontsize=7, color=SOFT, transform=axes.transAxes)


def nothing(axes: Any) -> None:
    axes.axis("off")
    axes.text(0.5, 0.5, "nothing", fontsize=9, color=SOFT, ha="center", transform=axes.transAxes)


def step_colour(defaults: dict[str, Any], value: float) -> str:
    found = "text"
    for step in defaults.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            found = step["color"]
    return found


def expression(target: dict[str, Any]) -> str:
    text = str(target["expr"])
    return text.replace("$node", NODE).replace("$__rate_interval", INTERVAL)


def main() -> None:
    plot.rcParams["font.family"] = "DejaVu Sans"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build")))
        stack.callback(leftovers.clear, folder)
        node = stack.enter_context(busy_node.busy(folder / "busy", NODE))
        targets = {NODE: f"127.0.0.1:{node.agent.port}"}
        for name in OTHERS:
            registry = figures.registry(census.agent(folder / name).state)
            port = ports.free(1)[0]
            server, _ = prometheus_client.start_http_server(port, "127.0.0.1", registry=registry)
            stack.callback(server.shutdown)
            targets[name] = f"127.0.0.1:{port}"
        watcher = Prometheus(folder / "prometheus", targets)
        stack.callback(watcher.end)
        stack.enter_context(node.reading())
        time.sleep(SECONDS / 2)
        node.let_go(files_per_second=40)  # so slow that it can be seen
        time.sleep(SECONDS / 2)
        for file in sorted((ROOT / "deploy" / "dashboards").glob("*.json")):
            Board(file, watcher, time.time()).draw(ROOT / "docs" / f"dashboard-{file.stem}.png")


if __name__ == "__main__":
    main()

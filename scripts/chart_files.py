"""Copy alert rules and dashboards into the chart: helm reads no file outside of a chart.

The originals are ``deploy/alerts`` and ``deploy/dashboards``; a test keeps the copies equal.
"""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "deploy" / "chart" / "files"
_SOURCES = (("alerts", "*.rules.yaml"), ("dashboards", "*.json"))


def files() -> Mapping[Path, str]:
    """Path and content of each copy."""
    return {
        TARGET / folder / file.name: file.read_text()
        for folder, names in _SOURCES
        for file in sorted((ROOT / "deploy" / folder).glob(names))
    }


def main() -> None:
    wanted = files()
    for old in TARGET.glob("*/*"):
        if old not in wanted:
            old.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()

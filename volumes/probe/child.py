"""The child of a probe, run as a script: DEVICE SEED; one line of JSON on standard output."""

import json
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs without site-packages
    from volumes.probe import look

    sys.stdout.write(json.dumps(look.examine(sys.argv[1], int(sys.argv[2]))) + "\n")


if __name__ == "__main__":
    main()

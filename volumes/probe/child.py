"""The child of a probe, run as a script: [device, seed] as JSON on standard input, the
verdict as JSON on standard output. Started ahead of time, it waits for its input."""

import json
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs without site-packages
    from volumes.probe import examine

    request = sys.stdin.read()
    if request:  # nothing: the parent has gone
        device, seed = json.loads(request)
        sys.stdout.write(json.dumps(examine.examine(device, seed).as_json()) + "\n")


if __name__ == "__main__":
    main()

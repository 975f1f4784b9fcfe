"""The scan child: one request a line on standard input, one inventory a line on standard output.

``python -m volumes.audit.inventory.worker``. It lives as long as the agent, so that a look costs no
interpreter start. Everything that can hang happens here; the agent only waits with a deadline.
"""

import contextlib
import gc
import json
import os
import sys

from volumes.audit.inventory import model, scan


def main() -> None:
    # Children of a dying agent must not stay: standard input closes with it.
    with contextlib.suppress(OSError):
        os.nice(5)
    gc.freeze()
    for line in sys.stdin:
        try:
            request = model.from_json(scan.Request, json.loads(line))
            answer = {"inventory": model.to_json(scan.look(request))}
        except OSError as error:
            answer = {"error": f"{error.filename or ''} {error.strerror}".strip()}
        except Exception as error:  # a bug must show as one failed look, not as a silent child
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

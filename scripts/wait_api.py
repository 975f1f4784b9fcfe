"""Wait until an agent is ready: wait_api.py URL PID. Ends with 1 when the process ends first."""

import os
import sys
import time
import urllib.error
import urllib.request

SECONDS = 60.0


def main() -> int:
    url, pid = sys.argv[1], int(sys.argv[2])
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            urllib.request.urlopen(f"{url}/readyz", timeout=2).close()
        except ProcessLookupError:
            return 1
        except OSError:
            time.sleep(0.1)
        else:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""What programs inside a guest share: lines for the test on the outside, and commands."""

import subprocess

from tests.testbed import blockdev


def say(text: str) -> None:
    print(f"check: {text}", flush=True)


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    """As kubelet runs it. Whatever its exit code is, it is the caller's affair."""
    return blockdev.run(*command, check=False)

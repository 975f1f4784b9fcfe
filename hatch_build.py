"""Compile the format guard's kernel program into the wheel; clang is needed for that."""

import subprocess
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BpfHook(BuildHookInterface):  # type: ignore[misc,type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":  # a checkout builds it in its set-up
            subprocess.run([f"{self.root}/scripts/bpf.sh"], check=True)
            build_data["artifacts"].append("volumes/guard/guard.bpf.o")

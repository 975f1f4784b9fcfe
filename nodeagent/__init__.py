"""The process: settings, lifecycle, admin API, status page, metrics and command line."""

from pathlib import Path

SOCKET = Path("/run/nodeagent/admin.sock")  # of the admin API, where the settings name no other
STARTING = "Nodeagent-Starting"  # header of an answer: the room that may not know all yet

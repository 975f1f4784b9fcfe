"""Sources: where a dataset's truth is. One module for each kind that the agent mounts."""

"""Sources: where a dataset's truth is."""

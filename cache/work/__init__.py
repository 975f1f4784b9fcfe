"""The work on datasets, in slots: jobs, evictions, the scrub and the compare."""

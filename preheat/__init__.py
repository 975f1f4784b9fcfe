"""Container images kept ready on the node: requested, planned, pulled, pinned, healed."""

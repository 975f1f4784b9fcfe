"""The audit: scans the node's volumes, applies rules, reports findings, and acts where it may."""

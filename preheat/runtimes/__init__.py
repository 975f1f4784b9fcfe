"""The containerd adapter: wire format, guarded calls, leases, pulls, pins."""

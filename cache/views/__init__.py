"""The mounts that jobs read: views, generations by their id, and who uses them."""

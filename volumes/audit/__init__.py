"""The audit: looks, judges, reports; the shape of a component, joined by the volumes room."""

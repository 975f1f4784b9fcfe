"""Typed bindings to kernel interfaces. No policy lives here."""

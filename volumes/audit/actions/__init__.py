"""What the audit may do by itself: opt-in, re-checked just before, journalled."""

"""What the audit may do by itself: off by default, checked again before each action, journalled."""

"""What the guard and the audit both ask of the node: its events, and its raw block volumes."""

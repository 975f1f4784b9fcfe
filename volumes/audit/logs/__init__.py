"""Log lines that foretell trouble: followed in a child process, matched against patterns.yaml."""

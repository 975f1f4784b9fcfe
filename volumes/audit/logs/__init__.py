"""Log lines that announce trouble: followed in a child process, matched against patterns.yaml."""

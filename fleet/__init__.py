"""The fleet, from an operator's machine: the command kubectl-nodeagent."""

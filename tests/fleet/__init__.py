"""Tests of kubectl-nodeagent."""

"""Volumes that pods ask for by the name of a dataset: a CSI node service for the kubelet."""

"""Ceph: the one package that speaks to clusters."""

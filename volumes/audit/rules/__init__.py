"""What is wrong with a node's volumes: one pure module for each rule, listed in registry.py."""

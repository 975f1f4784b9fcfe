"""What can be wrong with volumes: pure rules, one module for each subject (see base)."""

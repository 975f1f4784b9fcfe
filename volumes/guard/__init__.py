"""The format guard: what the kernel enforces, and who may format when."""

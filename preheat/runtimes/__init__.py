"""Container runtimes: the port, the connection to them, and one adapter for each."""

"""The process: settings, lifecycle, admin API, status page, metrics and command line."""

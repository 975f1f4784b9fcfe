"""The one place that speaks to the Kubernetes API."""

"""``nodeagent dataset``."""

import click


@click.group("dataset")
def group() -> None:
    """Datasets."""

"""What the scripts that write pages of docs/ share."""


def cell(text: str) -> str:
    """``text`` as it may stand in a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

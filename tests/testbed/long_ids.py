"""Short names of cases with a long text: ids stand in reports and on command lines."""

import zlib

LONGEST = 80


def name(value: object) -> str | None:
    """What a long text begins with, and a sum of all of it; None where pytest names it."""
    if not isinstance(value, str | bytes) or len(value) <= LONGEST:
        return None
    text = value if isinstance(value, str) else value.decode("latin-1")
    begin = text[: LONGEST // 2].encode("unicode_escape").decode()
    return f"{begin}-{zlib.crc32(text.encode(errors='surrogatepass')):08x}"

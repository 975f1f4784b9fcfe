"""Sizes, times and shares as people write them: ``500GiB``, ``30s``, ``10%``.

pydantic's ByteSize is not used: its errors name no units, its text form is rounded (effective
settings must read back exactly), and it has no counterpart for times and shares.
"""

import datetime
import decimal
import math
import re

_SIZES = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGTP")},
    **{f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("KMGTP")},
    "kB": 1000,
    # As Kubernetes writes quantities.
    **{f"{prefix}i": 1024 ** (power + 1) for power, prefix in enumerate("KMGTP")},
    **{prefix: 1000 ** (power + 1) for power, prefix in enumerate("kMGTP")},
}
_TIMES = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MOST = 2.0**63  # bytes or seconds
_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*$")


def _bounded(value: object, number: float) -> float:
    if number >= _MOST:
        raise ValueError(f"{str(value)[:40]!r} is too large; nothing has so much")
    return number


def _split(value: object, example: str) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected something like {example}, not {value!r}")
    if not isinstance(value, str) and 0 <= value < math.inf:
        return float(value), ""
    match = _NUMBER.match(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not one number and one unit; write it like {example}")
    return float(match[1]), match[2]


def parse_size(value: object) -> int:
    """Bytes from ``500GiB`` or ``500Gi`` (powers of 1024), ``500GB`` or ``500G`` (powers of 1000)
    or a plain number.

    Raises ValueError for anything else, negative numbers included.
    """
    number, unit = _split(value, "500GiB")
    if unit not in _SIZES:
        raise ValueError(
            f"{value!r}: unknown unit {unit!r}; use one of KiB MiB GiB TiB KB MB GB TB "
            "(or Ki Mi Gi Ti k M G T)"
        )
    return int(_bounded(value, number * _SIZES[unit]))


def parse_duration(value: object) -> float:
    """Seconds from ``30s``, ``5m``, ``1h``, ``200ms`` or a plain number. Raises ValueError."""
    number, unit = _split(value, "30s")
    if unit not in _TIMES:
        raise ValueError(f"{value!r}: unknown unit {unit!r}; use one of ms s m h d")
    return _bounded(value, number * _TIMES[unit])


def parse_share(value: object) -> float:
    """A share of a whole, 0 to below 1, from ``10%`` or ``0.1``. Raises ValueError."""
    number, unit = _split(value, "10%")
    share = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 <= share < 1:
        raise ValueError(f"{value!r} is not a share of a whole; write it like 10%")
    return share


def parse_count(text: str, most: int) -> int | None:
    """A whole number from 0 to ``most`` in ASCII digits; None for any other text.

    ``str.isdigit`` takes characters that ``int`` does not, and ``int`` has a longest text.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        return None
    return number if (number := int(text)) <= most else None


def format_size(size: float) -> str:
    """``1.5 GiB`` for people; exact below 1 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_share(share: float) -> str:
    """``57%`` for people. Only nothing is 0%, and only all of it is 100%."""
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


def format_duration(seconds: float) -> str:
    """``2h03m``, ``4m05s`` or ``12s`` for people."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def format_time(when: float) -> str:
    """``2026-11-22 04:10 UTC`` for people, from Unix time."""
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def rfc3339(when: float) -> str:
    """``2026-11-22T04:10:05Z``, as objects of the cluster have it, from Unix time."""
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(text: str) -> float:
    """Unix time. ValueError for what is no time."""
    return datetime.datetime.fromisoformat(text).timestamp()


def exact_size(size: int) -> str:
    """The shortest exact form, so that effective settings can be read back unchanged."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZES[unit] == 0:
            return f"{size // _SIZES[unit]}{unit}"
    return str(size)


def exact_duration(seconds: float) -> str:
    return f"{exact(seconds)}s"


def exact(number: float) -> str:
    """Exact, and without an exponent, which a setting may not have."""
    text = format(decimal.Decimal(repr(float(number))), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text

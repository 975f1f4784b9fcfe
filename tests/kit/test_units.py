from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500GiB", 500 * 2**30),
        ("500GB", 500 * 10**9),
        ("1.5 KiB", 1536),
        ("7", 7),
        (7, 7),
        ("0", 0),
        ("2kB", 2000),
        ("1PiB", 2**50),
        # As Kubernetes writes quantities.
        ("500Gi", 500 * 2**30),
        ("1.5Ki", 1536),
        ("1Pi", 2**50),
        ("500G", 500 * 10**9),
        ("2k", 2000),
        ("3P", 3 * 10**15),
    ],
)
def test_parse_size(text: object, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 gib", "1K", "1m", "1Gib", True, None, [], "1e3", "1%"]
)
def test_parse_size_refuses_with_example(text: object) -> None:
    with pytest.raises(ValueError, match=r"GiB"):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_size, f"{'9' * 400}GiB"),
        (units.parse_size, "9" * 400),
        (units.parse_size, "9999999PiB"),
        (units.parse_duration, f"{'9' * 400}d"),
    ],
)
def test_number_that_nothing_has_is_refused(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match="is too large"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("200ms", 0.2), ("5m", 300), ("1h", 3600), (2.5, 2.5)]
)
def test_parse_duration(text: object, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["-5s", "5 seconds", "s", False, "5sm"])
def test_parse_duration_refuses(text: object) -> None:
    with pytest.raises(ValueError, match=r"write it like|unknown unit|expected"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "share"), [("10%", 0.1), ("0.25", 0.25), (0, 0.0), ("99.9%", 0.999)]
)
def test_parse_share(text: object, share: float) -> None:
    assert units.parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["100%", "1", "1.5", "-1%", "10GiB", "ten"])
def test_parse_share_refuses(text: object) -> None:
    with pytest.raises(ValueError, match="10%"):
        units.parse_share(text)


@given(st.integers(0, 2**53))
def test_setting_size_reads_back_exactly(size: int) -> None:
    assert units.parse_size(units.exact_size(size)) == size


@given(st.floats(0.0, 1e7).map(lambda value: round(value, 3)))
def test_setting_duration_reads_back_exactly(seconds: float) -> None:
    assert units.parse_duration(units.exact_duration(seconds)) == pytest.approx(seconds, rel=1e-12)


@given(st.integers(0, 9999))
def test_setting_share_reads_back_exactly(tenths: int) -> None:
    share = tenths / 10_000
    assert units.parse_share(units.exact(share)) == pytest.approx(share, rel=1e-12)


@given(st.integers(0, 2**62))
def test_format_size_is_short(size: int) -> None:
    text = units.format_size(size)
    number, unit = text.split(" ")
    assert unit in ("B", "KiB", "MiB", "GiB", "TiB")
    assert abs(float(number) * units.parse_size(f"1{unit}") - size) <= max(1, size * 0.051)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (0.0004, "<1%"), (0.01, "1%"), (0.573, "57%"), (0.9996, ">99%"), (1, "100%")],
)
def test_format_share_says_all_and_nothing_only_when_it_is_so(share: float, text: str) -> None:
    assert units.format_share(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (245, "4m05s"), (7380, "2h03m"), (-3, "0s")]
)
def test_format_duration_is_short(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("007", 7), ("100", 100), ("101", None), ("", None), ("-1", None), ("+1", None),
        ("1.0", None), (" 1", None), ("1\n", None), ("\u00b2", None), ("\u0663", None),
        ("1_0", None), ("9" * 5000, None),
    ],
)  # fmt: skip
def test_count_is_of_ascii_digits_and_bounded(text: str, count: int | None) -> None:
    assert units.parse_count(text, 100) == count


@pytest.mark.parametrize("when", [0.0, 1_800_000_000.0])
def test_times_of_objects_read_back(when: float) -> None:
    assert units.from_rfc3339(units.rfc3339(when)) == when
    assert units.from_rfc3339("1970-01-01T00:00:01.500000Z") == 1.5


@pytest.mark.parametrize("text", ["", "yesterday", "~"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="isoformat"):
        units.from_rfc3339(text)

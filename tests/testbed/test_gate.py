"""The list of the gate names real tests that are there."""

from tests.testbed import gate

IDS = [
    "tests/a.py::test_x[1]",
    "tests/a.py::test_x[2]",
    "tests/a.py::test_xy",
    "tests/b.py::test_z",
]


def test_an_entry_is_a_folder_a_file_a_test_or_a_case() -> None:
    def named(entry: str) -> list[str]:
        return [each for each in IDS if gate.names(entry, each)]

    assert named("tests") == IDS
    assert named("tests/a.py") == IDS[:3]
    assert named("tests/a.py::test_x") == IDS[:2]
    assert named("tests/a.py::test_x[2]") == [IDS[1]]


def test_a_module_is_real_as_a_whole_by_its_own_mark() -> None:
    assert gate.is_real_whole("import os\npytestmark = pytest.mark.real\n")
    assert gate.is_real_whole("pytestmark = [\n    pytest.mark.real,\n]\nx = 1\n")
    assert not gate.is_real_whole("pytestmark = pytest.mark.timeout(3)\n@pytest.mark.real\n")
    assert not gate.is_real_whole("")


def test_comments_are_no_entries_and_a_wrong_name_is_found() -> None:
    entries = gate.lines(
        "# head\n\ntests/a.py::test_x[2]  # why\ntests/a.py::test_gone\ntests/c.py\n"
    )
    assert entries == ["tests/a.py::test_x[2]", "tests/a.py::test_gone", "tests/c.py"]
    assert gate.unknown(entries, IDS) == ["tests/a.py::test_gone"]
    assert gate.unknown(["tests", "tests/linux"], IDS) == []
    unit = ["tests/c.py::test_quick"]  # is in every run; its line would say what is not so
    assert gate.unknown(["tests/c.py"], IDS, [*IDS, *unit]) == ["tests/c.py"]

import os

import pytest

from linux import kmsg


def test_parse_takes_the_kernels_records() -> None:
    found = kmsg.parse(b"3,77,1500000,-;rbd: rbd0: failed\n SUBSYSTEM=block\n")
    assert found == kmsg.Record(1.5, "rbd: rbd0: failed", level=3, sequence=77)


@pytest.mark.parametrize("data", [b"", b"x,1,2,-;text", b"6,1;text", b";", b"\xff\xff"])
def test_parse_skips_what_is_not_a_record(data: bytes) -> None:
    assert kmsg.parse(data) is None


def test_parse_marks_records_of_processes() -> None:
    found = kmsg.parse(b"12,5,100,-;root wrote this")
    assert found == kmsg.Record(0.0001, "root wrote this", level=4, sequence=5, user=True)


def test_read_counts_the_records_that_were_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bytes | OSError] = [
        *(b"6,10,1,-;a", b"6,11,2,-;b", OSError(32, "Broken pipe"), b"6,20,3,-;c"),
        *(b"12,21,4,-;root wrote this", BlockingIOError()),
    ]

    def read(_: int, __: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    log = kmsg.Kmsg.__new__(kmsg.Kmsg)
    log.fd, log._user, log._next, log.lost = -1, False, None, 0
    monkeypatch.setattr(os, "read", read)
    assert [record.text for record in log.read()] == ["a", "b", "c"]
    assert log.lost == 8


@pytest.mark.real
def test_read_gives_new_records_in_order() -> None:
    ours = f"nodeagent test {os.urandom(4).hex()}"
    log = kmsg.Kmsg(from_now=True, user=True)
    try:
        for number in range(3):
            with open("/dev/kmsg", "w") as stream:
                stream.write(f"{ours} {number}\n")
        texts = [record.text for record in log.read()]
    finally:
        log.close()
    assert [text[-1] for text in texts if ours in text] == ["0", "1", "2"]

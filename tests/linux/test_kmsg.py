"""Records of /dev/kmsg."""

from linux import kmsg


def test_parse_skips_records_of_processes() -> None:
    assert kmsg.parse(b"4,1234,5000000,-;I/O error, dev rbd0\n SUBSYSTEM=block\n") == kmsg.Record(
        5.0, "I/O error, dev rbd0", level=4, sequence=1234
    )
    assert kmsg.parse(b"12,1,1,-;I/O error, dev rbd0 says a process") is None
    assert kmsg.parse(b"nonsense") is None

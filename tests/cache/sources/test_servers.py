"""Which file systems let more than modes and POSIX ACLs decide who may read."""

import pytest

from cache.sources import roots
from linux import mountinfo


@pytest.mark.parametrize(
    ("kind", "options", "decides"),
    [
        ("ext4", "rw", False),
        ("xfs", "rw", False),
        ("tmpfs", "rw", False),
        ("ceph", "rw,acl", False),
        ("nfs", "rw,vers=3,sec=sys", True),
        ("nfs4", "rw,vers=4.2,sec=krb5p", True),
        ("lustre", "rw,flock", True),
        ("gpfs", "rw", True),
        ("cifs", "rw,vers=3.1.1", True),
        ("smb3", "rw", True),
        ("fuse", "rw,user_id=0,allow_other", True),
        ("fuse.sshfs", "rw,user_id=0,allow_other", True),
        ("fuse.bindfs", "rw,user_id=0,default_permissions,allow_other", False),
        ("fuse.ceph-fuse", "rw,user_id=0,allow_other", False),
        ("fuseblk", "rw,default_permissions", False),
    ],
)
def test_kinds(kind: str, options: str, decides: bool) -> None:
    line = f"1 0 0:5 / /data rw - {kind} what {options}"
    assert roots.server_decides(mountinfo.parse_line(line.encode())) is decides

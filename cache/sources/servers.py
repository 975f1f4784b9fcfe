"""Which file systems let more than modes and POSIX ACLs decide who may read."""

from linux import mountinfo

# By Kerberos, NFSv4 or Windows ACLs, squashing and maps of users.
SERVERS = frozenset(
    (
        "nfs", "nfs4", "lustre", "lustre_tgt", "gpfs", "cifs", "smb3", "smbfs", "afs", "beegfs",
        "beegfs_nodev", "panfs", "wekafs", "9p", "pvfs2", "vboxsf", "prl_fs",
    )
)  # fmt: skip


def decides(mount: mountinfo.Mount) -> bool:
    """Pure."""
    if mount.fstype.startswith("fuse"):
        # The daemon decides, unless it has the kernel check modes. That of CephFS knows no more.
        kernel = "default_permissions" in mount.super_options.split(",")
        return not kernel and mount.fstype != "fuse.ceph-fuse"
    return mount.fstype in SERVERS

"""By which ids a directory of a CephFS is known: file system, inode, snapshot.

Names can be given again, ids cannot. libcephfs blocks: only processes that may be killed call this.
"""

from typing import Any

_PATIENCE = "10"  # seconds for each answer


def ids(conf: str, user: str, filesystem: str, path: str, snapshot: str) -> dict[str, str]:
    """``filesystem``, ``root`` and ``snapshot`` ('' reads no snapshot); {} without bindings.

    OSError when the cluster does not answer, or has no such path or snapshot.
    """
    try:
        import cephfs  # here: its libraries take 17 MiB, which the agent's own process saves
    except ImportError:  # no bindings on this host
        return {}
    client: Any = cephfs.LibCephFS(conffile=conf, auth_id=user)
    try:
        client.conf_set("client_mount_timeout", _PATIENCE)
        # A key that is restricted to the path may mount nothing above it.
        client.mount(mount_root=path.encode(), filesystem_name=filesystem)
        found = {
            "filesystem": str(client.get_fscid()),
            "root": str(client.stat("/").st_ino),
        }
        if snapshot:
            found["snapshot"] = str(client.snap_info(b"/.snap/" + snapshot.encode())["id"])
        return found
    except cephfs.Error as error:
        # Its errors are no OSErrors, but have their number.
        raise OSError(getattr(error, "errno", None) or 5, str(error)) from error
    finally:
        client.shutdown()

"""Whose logs are believed: a pod's author chooses its name and its lines, not its namespace."""

from pathlib import Path

import pytest

from volumes.audit.logs import sources
from volumes.settings import LogSettings

ID = "0a" * 32
NAMESPACES = LogSettings().namespaces


@pytest.mark.parametrize(("path", "expected"), [
    (f"/var/log/containers/csi-rbdplugin-x7_rook-ceph_csi-rbdplugin-{ID}.log", True),
    (f"/var/log/containers/rook-ceph.rbd.csi.ceph.com-nodeplugin-a_ceph-csi_csi-rbdplugin-{ID}.log",
     True),
    (f"/var/log/containers/my-csi-rbdplugin_team-a_main-{ID}.log", False),
    (f"/var/log/containers/job_team-a_csi-rbdplugin-{ID}.log", False),
    (f"/var/log/containers/x_rook-ceph-2_csi-rbdplugin-{ID}.log", False),
    # Names that kubelet cut off at 255 bytes, in the pod, the namespace or the id.
    (f"/var/log/containers/csi-rbdplugin{'a' * 238}.log", False),
    (f"/var/log/containers/csi-rbdplugin{'a' * 226}_kube-system.log", False),
    (f"/var/log/containers/csi-rbdplugin{'a' * 170}_kube-system_main-{ID[:50]}.log", False),
    # The directory under another name.
    (f"/var/log/containers/./job_team-a_csi-rbdplugin-{ID}.log", False),
    (f"/host/logs/job_team-a_csi-rbdplugin-{ID}.log", False),
    ("/var/log/kubelet.log", True),  # no container's log: the host's programs write there
    ("/var/log/pods_of_rook/0.log", True),
])  # fmt: skip
def test_containers_logs_are_believed_of_configured_namespaces_only(
    path: str, expected: bool
) -> None:
    assert sources.believed(path, NAMESPACES) is expected


def test_files_of_others_are_not_opened_however_many_there_are(tmp_path: Path) -> None:
    folder = tmp_path / "containers"
    folder.mkdir()
    for number in range(300):
        (folder / f"a{number}-csi-rbdplugin_team-a_main-{ID}.log").touch()
    files = sources.LogFiles(
        str(folder / "*csi-rbdplugin*.log"), lambda _, begun: begun, print, print, NAMESPACES
    )
    files._open_new()
    assert not files.files
    assert "volumes.audit.logs.namespaces" in files._unread
    believed = folder / f"csi-rbdplugin-x7_rook-ceph_csi-rbdplugin-{ID}.log"
    believed.touch()
    files._open_new()
    try:
        assert list(files.files) == [str(believed)]
        assert files._unread == ""
    finally:
        files._leave()


def test_two_logs_of_one_name_are_refused() -> None:
    for name in ("kernel", "kubelet"):
        with pytest.raises(ValueError, match="give each its own"):
            LogSettings.model_validate(
                {"sources": [{"name": name, "files": "/a"}, {"name": "kubelet", "files": "/b"}]}
            )

"""What `nodeagent uninstall` takes of systemd on a host, and that the host starts without it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kit.traces import Trace
from nodeagent.commands import uninstall, units
from tests.testbed import blockdev, waiting

DEPLOY = Path(__file__).parents[2] / "deploy"
GUARD = DEPLOY / "guard" / units.GUARD
AGENT = DEPLOY / "nodeagent.service"
KUBELETS = ("kubelet", "k3s", "k3s-agent", "rke2-server", "rke2-agent")
KUBELET = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with kubelets, before anything of ours is on it."""
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for name in KUBELETS:
        (folder / f"{name}.service").write_text(KUBELET)
        systemctl(tmp_path, "enable", f"{name}.service")
    return tmp_path


@pytest.fixture
def installed(root: Path) -> Path:
    folder = root / "etc/systemd/system"
    for each in (GUARD, AGENT):
        shutil.copy(each, folder)
        systemctl(root, "enable", each.name)
    return root


def systemctl(root: Path, *arguments: str) -> None:
    command = ["systemctl", f"--root={root}", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=waiting.limit(60))


def found(root: Path) -> list[Trace]:
    return units.find(root / "etc/systemd/system", root / "modules.conf")


def take_off(root: Path) -> None:
    traces = [each for each in found(root) if not each.stays]
    assert not [user for each in traces for user in each.users]
    for each in traces:
        uninstall.remove({}, "", each.kind, each.name)


def tree(root: Path) -> dict[str, str]:
    """Each path below the root, and what is in it or where it leads."""
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink()
        else path.read_text() if path.is_file() else "folder"
        for path in sorted(root.rglob("*"))
    }  # fmt: skip


def test_what_was_enabled_leaves_no_trace(root: Path) -> None:
    before = tree(root)
    folder = root / "etc/systemd/system"
    for each in (GUARD, AGENT):
        shutil.copy(each, folder)
        systemctl(root, "enable", each.name)
    shutil.copy(DEPLOY / "guard/modules-load.conf", root / "modules.conf")
    links = [each for each in folder.rglob("nodeagent*.service") if each.is_symlink()]
    assert len(links) == len(KUBELETS) + 2

    take_off(root)

    assert tree(root) == before
    assert found(root) == []


@pytest.mark.parametrize("most", range(9))
def test_kubelets_start_wherever_an_uninstall_is_cut(installed: Path, most: int) -> None:
    for each in found(installed)[:most]:
        uninstall.remove({}, "", each.kind, each.name)
    folder = installed / "etc/systemd/system"
    required = [*folder.glob(f"*.requires/{units.GUARD}")]
    assert (folder / units.GUARD).exists() or not required
    take_off(installed)
    assert not [*installed.rglob("*nodeagent*")]


def test_links_that_an_earlier_uninstall_left_go(installed: Path) -> None:
    folder = installed / "etc/systemd/system"
    (folder / units.GUARD).unlink()
    take_off(installed)
    assert not [*folder.rglob(units.GUARD)]


def test_links_to_a_unit_of_a_package_stay_with_it(root: Path) -> None:
    wants = root / "etc/systemd/system/kubelet.service.requires"
    wants.mkdir()
    (wants / units.GUARD).symlink_to(f"/usr/lib/systemd/system/{units.GUARD}")
    assert found(root) == []


def test_enabled_from_elsewhere_goes_with_its_links(root: Path) -> None:
    before = tree(root)
    elsewhere = root / "opt"
    elsewhere.mkdir()
    shutil.copy(GUARD, elsewhere)
    systemctl(root, "enable", f"/opt/{units.GUARD}")
    shutil.rmtree(elsewhere)  # as in a container that has no /opt of the host
    assert found(root)
    take_off(root)
    assert tree(root) == before


def test_unit_that_another_file_requires_is_in_use(installed: Path) -> None:
    drop_ins = installed / "etc/systemd/system/kubelet.service.d"
    drop_ins.mkdir()
    (drop_ins / "guard.conf").write_text(
        f"[Unit]\nAfter=x.service\nRequires = a.service {GUARD.name}\n"
    )
    (one,) = [each for each in found(installed) if each.users]
    assert Path(one.name).name == units.GUARD
    assert str(drop_ins / "guard.conf") in one.users[0]


def test_a_name_on_the_next_line_counts(installed: Path) -> None:
    folder = installed / "etc/systemd/system"
    text = f"[Unit]\nRequires=a.service \\\n# why\n  {GUARD.name}\n"
    (folder / "mine.service").write_text(text)
    assert [each.users for each in found(installed) if each.users]


@pytest.mark.parametrize("above", ["run", "usr/lib", "usr/local/lib"])
def test_units_of_packages_and_of_this_boot_count(installed: Path, above: str) -> None:
    drop_ins = installed / above / "systemd/system/kubelet.service.d"
    drop_ins.mkdir(parents=True)
    (drop_ins / "10.conf").write_text(f"[Unit]\nBindsTo={GUARD.name}\n")
    assert [each.users for each in found(installed) if each.users]


def test_links_of_this_boot_go(installed: Path) -> None:
    links = installed / "run/systemd/system/crio.service.requires"
    links.mkdir(parents=True)
    (links / GUARD.name).symlink_to(units.SYSTEMD / GUARD.name)
    take_off(installed)
    assert not links.exists()


def test_what_only_bears_our_name_stays(root: Path) -> None:
    folder = root / "etc/systemd/system"
    (folder / "nodeagent.service").write_text(
        "[Service]\nExecStart=/usr/sbin/nodeagent serve\n" + KUBELET[-36:]
    )
    systemctl(root, "enable", "nodeagent.service")
    drop_ins = folder / f"{units.GUARD}.d"
    drop_ins.mkdir()
    (drop_ins / "10-settings.conf").write_text("[Service]\nEnvironment=SETTINGS=/x\n")
    (root / "modules.conf").write_text("rbd\nnvme_tcp\n")
    before = tree(root)
    assert len(found(root)) == 3
    assert all(each.stays for each in found(root))
    take_off(root)
    assert tree(root) == before


def listed(state: Path, socket: Path) -> dict[str, str]:
    """What is found, and why it stays."""
    found = uninstall.find({"socket": str(socket)}, str(state))
    return {each["name"]: each["stays"] for each in found}


def test_keys_of_objects_go(tmp_path: Path) -> None:
    state, socket = tmp_path / "state", tmp_path / "nodeagent/admin.sock"
    state.mkdir()
    socket.parent.mkdir()
    secrets = socket.parent / "secrets"
    secrets.mkdir(mode=0o700)
    (secrets / "ceph.admin").write_text("key")
    for each in uninstall.find({"socket": str(socket)}, str(state)):
        uninstall.remove({}, str(state), each["kind"], each["name"])
    assert not socket.parent.exists()


def test_secrets_of_another_program_beside_the_socket_stay(tmp_path: Path) -> None:
    socket, secrets = tmp_path / "admin.sock", tmp_path / "secrets"
    secrets.mkdir(mode=0o755)  # as /run/secrets
    (secrets / "token").write_text("another's")
    assert not [name for name in listed(tmp_path / "x", socket) if name.startswith(str(secrets))]
    secrets.chmod(0o700)
    found = listed(tmp_path / "x", socket)
    assert "another program's" in found[str(secrets)]
    assert str(secrets / "token") not in found


@pytest.mark.parametrize(
    ("above", "text", "ours"),
    [
        ("srv", "database: {host: x}\n", False),
        ("srv", "state_dir: /srv/state\n", True),  # the chart's, with host.state=/srv
        ("nodeagent", "cache: [", True),
    ],
)
def test_settings_of_another_program_beside_the_state_stay(
    tmp_path: Path, above: str, text: str, ours: bool
) -> None:
    state = tmp_path / above / "state"
    state.mkdir(parents=True)
    for name in ("settings.yaml", "unguarded"):
        (state.parent / name).write_text(text)
    found = listed(state, tmp_path / "x/admin.sock")
    assert {
        str(state.parent / "settings.yaml") in found,
        str(state.parent / "unguarded") in found,
    } == {ours}


PROVE = """
mount --make-rprivate / && mount --bind "$1/etc/systemd/system" /etc/systemd/system || exit 99
for unit in kubelet k3s k3s-agent rke2-server rke2-agent; do
  systemd-analyze verify "$unit.service" || exit 1
done
"""


@pytest.mark.real
@pytest.mark.timeout(300)
def test_systemd_starts_every_kubelet_afterwards(installed: Path) -> None:
    def starts() -> subprocess.CompletedProcess[str]:
        apart = ("unshare", "--mount", str(blockdev.APART), str(installed), "--")
        command = [*apart, "sh", "-c", PROVE, "sh", str(installed)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=waiting.limit(280)
        )

    (installed / "etc/systemd/system" / units.GUARD).rename(installed / "away")
    done = starts()
    assert done.returncode == 1, "the proof sees a unit that is missing: " + done.stderr[-2000:]
    assert f"Unit {units.GUARD} not found" in done.stderr
    (installed / "away").rename(installed / "etc/systemd/system" / units.GUARD)

    take_off(installed)

    done = starts()
    assert done.returncode == 0, done.stderr[-2000:]

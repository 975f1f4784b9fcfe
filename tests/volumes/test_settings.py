"""Settings of the volumes room."""

import pytest

from volumes import settings
from volumes.settings import AuditSettings


@pytest.mark.parametrize(("change", "text"), [
    ({"mode": "on"}, "dry-run"), ({"words": ["cryptsetup"]}, "PROGRAM ARGUMENT"),
    ({"lease": "6m"}, "300"), ({"drivers": []}, "at least 1"), ({"pins": "x"}, "absolute"),
    ({"drivers": ["a b"]}, "plain name"), ({"openers": ["mount", "mkfs.ext4"]}, "needs a lease"),
    ({"openers": ["wipefs"]}, "needs a lease"),
    ({"words": ["cryptsetup luksFormat"]}, "needs a lease"),
])  # fmt: skip
def test_guard_settings_reject_bad_values(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings.GuardSettings.model_validate(change)


@pytest.mark.parametrize(("names", "watched"), [
    (("*",), ["rbd0", "rbd0p1", "rbd10", "dm-1"]),
    (("rbd0",), ["rbd0", "rbd0p1"]),
    (("rbd1*", "dm-?"), ["rbd10", "dm-1"]),
])  # fmt: skip
def test_audit_watches_devices_by_name_with_their_partitions(
    names: tuple[str, ...], watched: list[str]
) -> None:
    audit = settings.VolumesSettings.model_validate({"audit": {"names": names}}).audit
    assert [name for name in ("rbd0", "rbd0p1", "rbd10", "dm-1") if audit.watches(name)] == watched


def test_audit_watches_every_device_by_default() -> None:
    assert AuditSettings().names == settings.GuardSettings().names == ("*",)


def test_an_audit_of_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names\n.* at least 1"):
        AuditSettings.model_validate({"names": []})

"""Denials: who was refused, and what becomes a finding."""

from volumes.guard import denials


def _denial(device: str = "rbd0", program: str = "mkfs.ext4", **more: object) -> denials.Denial:
    values: dict[str, object] = {
        "at": 1.0, "device": device, "volume": "v", "title": "t", "denied": True, "pid": 1,
        "program": program, "parent": "", "command": "", "cgroup": "", "pod": "", "container": "",
    }  # fmt: skip
    return denials.Denial(**{**values, **more})  # type: ignore[arg-type]


def test_denial_followed_by_lease_is_not_reported() -> None:
    kept = denials.Denials()
    kept.add(_denial())
    kept.decided("rbd0", "blank_verified", ())
    assert kept.findings(2.0) == [] and kept.delayed == 1


def test_dry_run_says_what_it_could_not_check() -> None:
    kept = denials.Denials()
    kept.add(_denial(denied=False, early=True))
    kept.decided("rbd0", "has_fs ext4", ("it is not blank",))
    (unchecked,) = kept.findings(2.0)
    assert (unchecked.rule, unchecked.severity) == ("format-unchecked", "info")
    kept.add(_denial(denied=False, early=False, program="dd"))
    kept.decided("rbd0", "unreadable", ("it is not blank",))
    assert [f.rule for f in kept.findings(2.0)] == ["format-unchecked", "format-would-be-denied"]


def test_denials_are_bounded_and_expire() -> None:
    kept = denials.Denials()
    for number in range(1000):
        kept.add(_denial(f"rbd{number}"))
        kept.decided(f"rbd{number}", "x", ("no",))
        kept.add(_denial("rbd0", at=2.0))
    assert len(kept.last) == denials.KEPT and len(kept.waiting["rbd0"]) == denials.KEPT
    assert len(kept.findings(2.0)) == denials.MOST_GROUPS
    assert kept.findings(2.0 + denials.FINDING_SECONDS + 1) == []

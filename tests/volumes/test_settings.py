"""Settings of the volumes room."""

import pytest

from volumes import settings


@pytest.mark.parametrize(("change", "text"), [
    ({"mode": "on"}, "dry-run"), ({"words": ["cryptsetup"]}, "PROGRAM ARGUMENT"),
    ({"lease": "6m"}, "300"), ({"drivers": []}, "at least 1"), ({"pins": "x"}, "absolute"),
    ({"drivers": ["a b"]}, "plain name"),
])  # fmt: skip
def test_guard_settings_reject_bad_values(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings.GuardSettings.model_validate(change)

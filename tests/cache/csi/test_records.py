"""Records of volumes: what is mounted is known again, what is not is forgotten."""

import json
from pathlib import Path

from cache.csi import driver, records

VOLUME = records.DatasetVolume("v", "/k/pods/u/d/mount", "coco", "direct", "ml/train")
OTHER = records.DatasetVolume("w", "/k/pods/t/d/mount", "coco", "parent")


def test_mounted_volumes_are_known_again_and_others_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "csi"
    for each in (VOLUME, OTHER):
        records.write(folder, each)
    assert records.load(folder, {VOLUME.target, "/"}) == {VOLUME.target: VOLUME}
    assert records.read(folder) == [VOLUME]


def test_torn_records_and_those_of_a_newer_agent_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text("{")
    newer = {"format": records.FORMAT + 1, "id": "v"}
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    (tmp_path / "strange.json").write_text("[]")
    records.write(tmp_path, VOLUME)
    assert records.load(tmp_path, {VOLUME.target}) == {VOLUME.target: VOLUME}
    assert len(list(tmp_path.iterdir())) == 4


def test_there_may_be_none(tmp_path: Path) -> None:
    assert records.load(tmp_path / "none", ()) == {}
    records.forget(tmp_path / "none", VOLUME.target)


def test_pods_of_a_dataset_are_named_once(tmp_path: Path) -> None:
    """A volume whose record is lost may be of any dataset; kubelet need not say the pod."""
    made = driver.Driver({}, tmp_path)
    given = [("a", "lab/x"), ("a", "lab/x"), ("b", "lab/y"), ("a", ""), ("", "ops/z")]
    made.node.volumes = {
        f"/t{at}": records.DatasetVolume(f"v{at}", f"/t{at}", dataset, "direct", pod)
        for at, (dataset, pod) in enumerate(given)
    }
    assert made.pods("a") == ["lab/x", "ops/z", "unknown"]
    assert made.pods("b") == ["lab/y", "ops/z"]
    assert made.pods("c") == ["ops/z"]

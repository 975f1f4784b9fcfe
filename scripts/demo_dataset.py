"""A dataset to try the agent with: demo_dataset.py FOLDER. 2,000 small files in 20 classes."""

import random
import sys
from pathlib import Path

CLASSES, FILES = 20, 100


def main() -> None:
    root = Path(sys.argv[1])
    for number in range(CLASSES):
        source = random.Random(number)
        folder = root / "train" / f"class-{number:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        for file in range(FILES):
            (folder / f"sample-{file:03d}.bin").write_bytes(
                source.randbytes(source.randrange(4096, 65536))
            )
    (root / "labels.txt").write_text("".join(f"class-{n:02d}\n" for n in range(CLASSES)))
    (root / ".made").touch()


if __name__ == "__main__":
    main()

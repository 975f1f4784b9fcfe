"""Read a dataset as a training job does, and say how fast: a PyTorch DataLoader over its files.

    python train.py [--workers N] [--epochs N] [--batch N] DIRECTORY

DIRECTORY is where the pod has the dataset's volume, or <views>/NAME/data on the node. Nothing here
knows of the cache: put your own decoding into ``Files.__getitem__``. Without PyTorch the files are
read one after the other, to try the way to the data in an image that has only Python.
"""

import argparse
import os
import random
import sys
import time
import zlib
from collections.abc import Iterable, Iterator

try:
    from torch.utils.data import DataLoader, Dataset
except ImportError:
    DataLoader, Dataset = None, object


class Files(Dataset):  # type: ignore[misc,valid-type]
    """The files below a directory, in the order of their names."""

    def __init__(self, top: str) -> None:
        self.paths = sorted(
            os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[int, int]:
        """Size and checksum of a file; a training job returns a tensor here."""
        with open(self.paths[number], "rb") as file:
            content = file.read()
        return len(content), zlib.crc32(content)


def one_by_one(files: Files, size: int) -> Iterator[list[tuple[int, int]]]:
    """What a DataLoader with ``shuffle`` hands out, without PyTorch and its workers."""
    order = random.sample(range(len(files)), len(files))
    for at in range(0, len(order), size):
        yield [files[number] for number in order[at : at + size]]


def batches(files: Files, size: int, workers: int) -> Iterable[list[tuple[int, int]]]:
    if DataLoader is None:
        return one_by_one(files, size)
    return DataLoader(files, batch_size=size, shuffle=True, num_workers=workers, collate_fn=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    if not os.path.isdir(given.directory):
        sys.exit(f"{given.directory} is no directory: is the dataset's volume mounted there?")
    files = Files(given.directory)
    if not len(files):
        sys.exit(f"{given.directory} has no files: look at 'kubectl describe pod'")
    print("by", "one process, PyTorch is not installed" if DataLoader is None else "PyTorch")
    for epoch in range(1, given.epochs + 1):
        begun, size, count, checksums = time.monotonic(), 0, 0, 0
        for batch in batches(files, given.batch, given.workers):
            size += sum(each for each, _ in batch)
            checksums += sum(checksum for _, checksum in batch)
            count += len(batch)
        seconds = max(time.monotonic() - begun, 1e-9)
        print(
            f"epoch {epoch}: {count} files, {size} bytes, {count / seconds:.0f} files/s, "
            f"{size / seconds / 1e6:.1f} MB/s, checksums {checksums:x}"
        )


if __name__ == "__main__":
    main()

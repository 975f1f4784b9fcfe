"""Datasets for benchmarks: many small files, the same for the same seed."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILES_IN_A_FOLDER = 200


def make(
    root: Path, files: int, smallest: int, largest: int, *, skew: float = 1.0, threads: int = 1
) -> int:
    """``files`` files of ``smallest`` to ``largest`` bytes, log-uniform; their bytes together.

    ``skew`` above 1 makes small ones more frequent. Bytes are random: nothing compresses, nothing
    is a hole.
    """
    chance = random.Random(files)
    noise = chance.randbytes(largest + 65536)
    plan = []
    for number in range(files):
        size = int(smallest * (largest / smallest) ** (chance.random() ** skew))
        at = chance.randrange(65536)
        plan.append((f"{number // FILES_IN_A_FOLDER:04}/{number:06}.bin", at, size))
    for folder in sorted({name.partition("/")[0] for name, _, _ in plan}):
        (root / folder).mkdir(parents=True)

    def write(item: tuple[str, int, int]) -> None:
        name, at, size = item
        (root / name).write_bytes(noise[at : at + size])

    if threads == 1:
        for item in plan:
            write(item)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, plan))
    return sum(size for _, _, size in plan)

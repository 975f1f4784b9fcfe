"""A blob by several ranges at a time, in order: for registries that limit each connection.

At most as many pieces as there are connections are fetched or wait to be taken, so memory is
bounded. Where a range is refused, comes short or does not come, the rest comes as one stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from preheat import lanes
from preheat.failure import Kind, PullError

PIECE = 2 * 1024**2
# For smaller layers one connection is fast enough.
LARGE = 256 * 1024**2

Span = Callable[[int, int], Awaitable[bytes]]  # first byte, last byte; empty without ranges
Rest = Callable[[int], AsyncGenerator[bytes, None]]  # from this byte to the end


async def stream(
    span: Span, rest: Rest, offset: int, size: int, connections: lanes.Lanes
) -> AsyncGenerator[bytes, None]:
    """The bytes from ``offset`` to ``size``. Raises PullError."""
    pieces: deque[asyncio.Task[bytes]] = deque()
    position = asked = offset
    many = 1  # the first one shows whether the registry serves ranges at all
    try:
        while position < size:
            while asked < size and len(pieces) < many:
                last = min(asked + PIECE, size) - 1
                pieces.append(asyncio.create_task(_piece(span, asked, last), name="range"))
                asked = last + 1
            data = await pieces.popleft()
            if not data:
                async for chunk in rest(position):
                    yield chunk
                return
            connections.took(len(data))
            many = connections.many
            position += len(data)
            yield data
    finally:
        for task in pieces:
            task.cancel()
        await asyncio.gather(*pieces, return_exceptions=True)


async def _piece(span: Span, first: int, last: int) -> bytes:
    """All of it or nothing. A login that is refused is told: the caller has another."""
    try:
        data = await span(first, last)
    except PullError as error:
        if error.kind is not Kind.NETWORK:
            raise
        return b""
    return data if len(data) == last + 1 - first else b""

"""The registry of rooms: the only place in the process that names one."""

import cache.room
import preheat.room
import volumes.room

# In the order in which they start: the guard has to be in the kernel before anything else takes
# its time.
ROOMS = (volumes.room.ROOM, cache.room.ROOM, preheat.room.ROOM)

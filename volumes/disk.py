"""The thread for the disk of the state directory, which may hang.

One for the whole room, and not one for each object: a room that is started again and again on a
dead disk makes its objects anew, and must not leave a thread behind each time.
"""

import kit.threads

STATE = kit.threads.Apart("state directory")

"""When a pass stops to ask a source that gives nothing any more.

One silent object costs only itself: it is put off, waited for at the end, and recorded. But when
no object answers at all, waiting for each of them would hold up other datasets for days.
"""

from cache.fill import protocol

# Entries in a row that were silent, with no file copied in between.
MOST_SILENT = 1024
# A chunk that was waited for patiently counts as this many.
_PATIENT = 100


class Silence:
    """What was heard of objects since the last one that answered."""

    def __init__(self) -> None:
        self._row = 0

    def heard(self, answer: protocol.Copied, *, patient: bool) -> None:
        """The answer to a copy."""
        if answer.files:
            self._row = 0
        elif patient and answer.failed:
            self._row += _PATIENT
        else:
            self._row += len(answer.silent)

    @property
    def lasts(self) -> bool:
        """Nothing more is asked for in this pass."""
        return self._row >= MOST_SILENT

"""Progress lines during a wait: the first one after a while, then one every ten seconds, and of the same ever fewer."""

from __future__ import annotations

PROGRESS_EVERY = 10.0  # seconds between two lines about a wait: often enough to show that the node lives
LONGEST_PAUSE = 60.0  # seconds between two equal lines, which come 10, 20, 40, 60, 60, ... seconds after each other
LONG_LINE = 200  # characters; a longer line is said in full once, then up to its first semicolon
MOST_NOTES = 4  # lines at once about unreadable bytes in the store


class Wait:
    """The present wait, and the lines that were said last. All times are seconds of this node's clock."""

    def __init__(self, now: float) -> None:
        self.restart(now)
        self._last = ""

    def restart(self, now: float) -> None:
        """Begin another wait, whose first line is due in ``PROGRESS_EVERY`` seconds."""
        self.since = now
        self._due = now + PROGRESS_EVERY
        self._pause = PROGRESS_EVERY

    def line(self, text: str, now: float, at_once: bool) -> str:
        """Return the line to be said about a wait; empty: none now. ``at_once``: a new text is said without delay.

        A new text does not wait for the pause after an old one to end.
        """
        again = text == self._last
        due = self._due if again else self._due - self._pause + PROGRESS_EVERY
        if now < due and (again or not at_once):
            return ""
        self._last = text
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if again else PROGRESS_EVERY
        self._due = now + self._pause
        return text.partition(";")[0] if again and len(text) > LONG_LINE else text


class Notes:
    """The lines about what was ignored in the store: few at once, and then none for a while. Times in seconds of this node's clock."""

    def __init__(self, now: float) -> None:
        self._due = now

    def lines(self, notes: list[str], now: float) -> list[str]:
        """Return the lines to be said about ``notes``, each of which says what was ignored, and why."""
        if not notes or now < self._due:
            return []
        self._due = now + PROGRESS_EVERY
        return [f"ignored: {note}" for note in notes[:MOST_NOTES]]

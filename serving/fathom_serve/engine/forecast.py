"""How many pages a request will really take, so that more are let in than their worst cases would allow."""

import math

RATE = 0.1
"""Weight of the newest observation."""


class Forecast:
    """The share of its worst case (the longest answer, every row at every depth) that a request takes, as a moving
    average over those that have ended; 1 before any has. One number covers answers that end early and rows that stop
    early. A preemption counts as a request that took everything."""

    def __init__(self) -> None:
        self.share = 1.0

    def pages(self, worst: int) -> int:
        """Pages to expect of a request that takes at most ``worst``."""
        return math.ceil(self.share * worst)

    def learn(self, pages: int, worst: int) -> None:
        """A request with this worst case took so many pages."""
        self.share += RATE * (pages / worst - self.share)

"""Waiting for a store that is away: the same action again, after pauses that grow."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from fathom.errors import StorageUnavailable

T = TypeVar("T")
log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


def patiently(action: Callable[[], T], patience_s: float) -> T:
    """Do what may be done twice, again and again while the store is unavailable.

    Args:
        action: leaves the same behind however often it ran in part or whole.
        patience_s: seconds after which the store's last answer is raised.

    Raises:
        StorageUnavailable: the store was away for all that time.
        StorageError: anything that waiting does not cure, at once.
    """
    began, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return action()
        except StorageUnavailable as error:
            if time.monotonic() + pause - began > patience_s:
                raise
            log.warning("%s; trying again in %.0f s", error.message, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

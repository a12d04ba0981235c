"""Results as plain JSON values: what every ``as_json()`` of a measure returns."""

import math
from typing import Any


def plain(value: Any) -> Any:
    """Named tuples become objects, keys strings, sequences lists, and what is no finite number ``None``.

    JSON has no NaN: an interval that one item cannot have, or R^2 of a constant, is ``null`` in the file.
    """
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""All claims, in the order of the report."""

import difflib
from collections.abc import Sequence

from fathom.claims import (
    claim_compute,
    claim_depth,
    claim_lookahead,
    claim_options,
    claim_scaling,
    claim_settling,
    claim_supervision,
    claim_wasted,
)
from fathom.claims.results import Claim
from fathom.errors import ConfigError

CLAIMS: list[Claim] = [
    claim_compute.SAME_DATA,
    claim_compute.EQUAL_COMPUTE,
    claim_depth.CLAIM,
    claim_wasted.CLAIM,
    claim_settling.SETTLING,
    claim_settling.BEYOND,
    claim_supervision.ROUTING,
    claim_supervision.ABLATION,
    claim_scaling.CLAIM,
    claim_lookahead.CLAIM,
    *claim_options.CLAIMS,
    claim_lookahead.VALUE_HEAD,
]
ONLY_FULL = frozenset(claim.key for claim in (*claim_options.CLAIMS, claim_lookahead.VALUE_HEAD))
"""Claims that --quick leaves out unless they are named: they want five seeds, and time."""


def choose(keys: Sequence[str], quick: bool) -> list[Claim]:
    """Claims by key; without any, all that the budget has time for.

    Raises:
        ConfigError: no such claim; names the nearest.
    """
    known = {claim.key: claim for claim in CLAIMS}
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"--only: unknown claim {key!r}", f"{hint}known claims: {', '.join(known)}")
    if keys:
        return [known[key] for key in known if key in keys]
    return [claim for claim in CLAIMS if not (quick and claim.key in ONLY_FULL)]

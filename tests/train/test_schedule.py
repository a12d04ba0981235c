"""The learning rate is a pure function with the documented values at its corners."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.config.schema import ScheduleConfig
from fathom.train.schedule import learning_rate


def rates(steps: int, **schedule: object) -> list[float]:
    return [learning_rate(ScheduleConfig.model_validate(schedule), 2.0, step, steps) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates(10, kind="constant", warmup_ratio=0.4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_cosine_ends_at_its_minimum_and_passes_the_middle_half_way() -> None:
    table = rates(11, kind="cosine", warmup_ratio=0.0, min_ratio=0.1)
    assert table[0] == 2.0
    assert table[5] == pytest.approx(1.1)
    assert table[10] == pytest.approx(0.2)


def test_wsd_holds_then_falls_linearly() -> None:
    table = rates(11, kind="wsd", warmup_ratio=0.0, min_ratio=0.0, decay_ratio=0.3)
    assert table[:7] == [2.0] * 7
    assert table[7:] == pytest.approx([1.5, 1.0, 0.5, 0.0])


@given(
    kind=st.sampled_from(["cosine", "wsd", "constant"]),
    steps=st.integers(1, 60),
    warmup=st.floats(0, 1),
    lowest=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
def test_rates_are_positive_bounded_and_never_rise_after_warm_up(
    kind: str, steps: int, warmup: float, lowest: float, decay: float
) -> None:
    table = rates(steps, kind=kind, warmup_ratio=warmup, min_ratio=lowest, decay_ratio=decay)
    assert all(0.0 <= rate <= 2.0 + 1e-12 for rate in table)
    top = table.index(max(table))
    assert all(later <= earlier + 1e-12 for earlier, later in zip(table[top:], table[top + 1 :], strict=False))

"""The learning rate, a pure function of the step: nothing to save, nothing to advance twice."""

import math

from fathom.config.schema import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """Rate of one optimizer step.

    Warm-up rises linearly and reaches the peak at its last step; then ``cosine`` falls to ``min_ratio * peak`` at the
    run's last step, ``wsd`` holds the peak and falls linearly to the same value over its last ``decay_ratio`` of all
    steps, ``constant`` holds.

    Args:
        schedule: the shape.
        peak: largest rate.
        step: 0-based, below ``steps``.
        steps: of the whole run.
    """
    warmup = math.ceil(schedule.warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak
    lowest = schedule.min_ratio * peak
    last = max(steps - 1, 1)
    if schedule.kind == "wsd":
        begin = max(last - math.ceil(schedule.decay_ratio * steps), warmup - 1)
        left = (last - step) / (last - begin) if last > begin else 1.0
        return lowest + (peak - lowest) * min(max(left, 0.0), 1.0)
    begin = max(warmup - 1, 0)
    progress = (step - begin) / (last - begin) if last > begin else 0.0
    return lowest + (peak - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))

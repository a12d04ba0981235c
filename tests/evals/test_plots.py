"""Plots: they draw what they were given, and the same numbers give the same bytes."""

from pathlib import Path

from fathom.evals.plots import depth_colour, plot_calibration, plot_depths, plot_loss

HISTORY = {
    "nll": [(0, 2.0), (1, 1.5), (2, 1.25)],
    "nll/depth_1": [(0, 2.0), (1, 1.6), (2, 1.4)],
    "nll/depth_2": [(1, 1.7), (2, 1.2)],
    "tokens_per_second": [(0, 100.0)],
}


def test_every_plot_is_an_svg_and_a_png(tmp_path: Path) -> None:
    paths = [
        *plot_loss(HISTORY, tmp_path, {"base model": 2.1, "after": 1.2}),
        *plot_depths({1: 75, 2: 25}, tmp_path),
        *plot_calibration(
            [(0.0, 0.1, 40, -0.2), (0.1, 0.2, 0, 0.0), (0.9, 1.0, 5, 0.4)],
            0.5,
            tmp_path,
        ),
    ]
    names = [
        "loss.svg",
        "loss.png",
        "depths.svg",
        "depths.png",
        "calibration.svg",
        "calibration.png",
    ]
    assert [path.name for path in paths] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[1::2])
    loss, depths, calibration = (path.read_text() for path in paths[::2])
    assert "mixture" in loss and "depth 2" in loss and "held out, base model" in loss
    assert "mean depth 1.250 over 100 tokens" in depths and "25.0%" in depths
    assert "threshold 0.5" in calibration and ">40<" in calibration and ">0<" not in calibration


def test_an_unused_depth_shows_as_an_empty_bar(tmp_path: Path) -> None:
    assert "0.0%" in plot_depths({1: 10}, tmp_path, max_depth=2)[0].read_text()


def test_empty_input_still_draws(tmp_path: Path) -> None:
    assert plot_loss({}, tmp_path)[0].exists()
    assert plot_depths({}, tmp_path)[0].exists()
    assert plot_calibration([], 0.5, tmp_path)[0].exists()


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (plot_loss(HISTORY, tmp_path / name)[0].read_bytes() for name in ("a", "b"))
    assert first == second


def test_depths_beyond_the_palette_keep_a_colour() -> None:
    assert depth_colour(9) == depth_colour(4) != depth_colour(1)

"""Figures: everything that a run holds is shown, and what is computed for a figure is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from geocont.measures.continuity import chance
from geocont.report.figures import Figure, curves, rows_of
from geocont.report.overview import config_differences, guard_table, overview_table
from geocont.report.records import RunRecord, read_runs
from geocont.report.sections import sections, shown_at_first
from geocont.report.series import Fineness
from geocont.report.trajectories import through_depth


@pytest.fixture
def gpt2(trained: dict[str, Path]) -> RunRecord:
    return read_runs([trained["gpt2"]])[0]


def by_title(run: RunRecord) -> dict[str, list[Figure]]:
    return {section.title: section.figures for section in sections([run], Fineness())}


def test_every_measure_has_a_figure(gpt2: RunRecord) -> None:
    """A measure that is logged and shown nowhere is paid for in vain."""
    found = by_title(gpt2)
    titles = {figure.title for figures in found.values() for figure in figures}
    curves_of = ("weight/", "gradient/", "cumulative/", "update/", "train/", "val/", "lr/", "throughput/")
    for key in gpt2.keys(""):
        if key.startswith(curves_of):
            assert key in titles, key
        if key.startswith("softmax/") and key.endswith(("mean", "worst_head")):
            assert key in titles, key
    assert {"optim/certified_ratio/attention", "optim/manifold_residual/mlp"} <= titles
    for title in ("Pairs of layers", "Singular vectors through depth", "Attention", "Spectra of the weights"):
        assert any(figure.frames for figure in found[title]), title
    for section in sections([gpt2], Fineness()):
        assert shown_at_first(section), section.title
        for label, options in section.selects.items():
            for option in options:
                assert any(option in figure.choice.get(label, [option]) for figure in section.figures), option


def test_frames_hold_the_stored_values_and_chance_is_that_of_the_matrices(gpt2: RunRecord) -> None:
    found = by_title(gpt2)
    pairs = next(f for f in found["Pairs of layers"] if f.choice["Measure"] == ["v1, |cos|"])
    rows = [row for row in rows_of(pairs.series, 0) if row["projection"] == "q"]
    assert [row["pair"] for row in rows] == ["0-1", "1-2", "2-3"]
    assert [row["value"] for row in rows] == pytest.approx(list(gpt2.arrays["weight/v1/q"][pairs.frames[0]]), rel=1e-3)
    expected = next(f for f in found["Pairs of layers"] if f.choice["Measure"] == ["side that theory expects"])
    rows = [row["value"] for row in rows_of(expected.series) if row["projection"] == "down"]
    assert rows == pytest.approx(list(gpt2.arrays["weight/u1/down"][expected.frames[-1]]), rel=1e-3)
    for key, width in (("weight/v1/q", 32), ("weight/u1/up", 128), ("weight/topk_out/q", 32)):
        spec = json.dumps(next(f for f in found["Continuity through depth"] if f.title == key).spec)
        level = chance(key.split("/")[1], width)
        assert f'{{"datum": {level}}}' in spec, key


def test_trajectories_follow_directions_whatever_the_signs() -> None:
    """Signs of singular vectors are arbitrary: a turned one made a path through depth zigzag."""
    angles = np.linspace(0, 1.2, 6)
    smooth = np.stack([np.cos(angles), np.sin(angles), np.zeros(6)], axis=1)
    signs = np.array([1, -1, -1, 1, -1, 1])[:, None]
    plain, turned = through_depth({0: smooth, 9: smooth}), through_depth({0: smooth, 9: smooth * signs})
    assert plain is not None
    assert turned is not None
    assert np.allclose(np.abs(turned.x), np.abs(plain.x), atol=1e-3)
    steps = np.hypot(np.diff(turned.x, axis=1), np.diff(turned.y, axis=1))
    assert np.allclose(steps, 2 * np.sin(0.12), atol=2e-3)  # chords of equal angles, at every step of training
    assert sum(turned.shares) == pytest.approx(1)
    assert through_depth({0: smooth[:1]}) is None
    assert through_depth({0: smooth * np.nan}) is None


def test_a_curve_of_one_value_is_a_point_and_gaps_stay_gaps() -> None:
    one = curves("t", "l", [{"run": "a", "step": [0], "value": [1.0]}])
    assert one.spec["layer"][0]["layer"][1]["mark"]["opacity"] == 1
    gap = curves("t", "l", [{"run": "a", "step": [0, 1, 2], "value": [1.0, None, None]}])
    assert [row["value"] for row in rows_of(gap.series)] == [1.0, None, None]
    assert "from 1 to 1" in gap.about
    assert curves("t", "l", [{"run": "a", "step": [0], "value": [None]}]).about == "l: no values."


def test_a_run_has_one_colour_in_all_figures(trained: dict[str, Path]) -> None:
    """A run that alone has a measure was drawn in the first run's colour, without a name."""
    runs = read_runs([trained["mlp"], trained["gpt2"]])
    scales, legends = set(), {}
    for section in sections(runs, Fineness()):
        for figure in section.figures:
            colour = figure.spec["layer"][0].get("encoding", {}).get("color", {})
            if colour.get("field") == "run":
                scales.add(tuple(colour["scale"]["domain"]))
                legends[figure.title] = colour["legend"]["values"]
    assert scales == {("mlp", "gpt2")}
    assert legends["train/loss"] == ["mlp", "gpt2"]
    assert legends["weight/v1/q"] == ["gpt2"]


def test_values_that_are_all_the_same_are_not_rounded_on_their_axis() -> None:
    """A loss of 5.47 at one step stood beside a mark that said 5."""
    for value, ends in ((5.471, [4.9239, 6.0181]), (0.0, [0, 1]), (-2.0, [-2.2, -1.8])):
        figure = curves("t", "l", [{"run": "a", "step": [0, 1], "value": [value, value]}])
        assert figure.spec["layer"][0]["encoding"]["y"]["scale"]["domain"] == pytest.approx(ends)


def test_a_model_of_one_layer_has_no_pairs_and_no_crash(gpt2: RunRecord) -> None:
    arrays = {"weight/v1/q": {0: np.zeros(0)}, "weight/v1_vector/q": {0: np.ones((1, 4))}}
    rows = [{"step": 0, "train/loss": 1.0, "weight/gap/q": 2.0}]
    one = replace(gpt2, arrays=arrays, rows=rows)
    assert [section.title for section in sections([one], Fineness())] == ["Loss and speed"]


def test_tables_tell_runs_apart(trained: dict[str, Path]) -> None:
    runs = read_runs([trained["mlp"], trained["gpt2"]])
    differences = config_differences(runs)
    assert differences is not None
    table = {row[0]: row[1:] for row in differences.body}
    assert table["model.class_path"] == ["geocont.modules.ResidualMLPModule", "geocont.modules.GPT2Module"]
    assert not any(key.startswith(("run.dir", "trainer.max_steps")) for key in table)
    assert config_differences(runs[:1]) is None
    events = guard_table(runs)
    assert events is not None
    assert events.body[0][:3] == ["gpt2", "0", "max_logit"]
    overview = {row[0]: row[1:] for row in overview_table(runs).body}
    assert overview["status"] == ["finished", "finished"]
    assert overview["last step"] == ["6", "6"]

"""Images and tables of pairs on their way to W&B, read back from the real files of offline runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch.loggers import Logger, WandbLogger

from callbacks import WeightContinuity, weight_continuity
from geocont.runs.store import RunStore, read_arrays
from geocont.runs.wandb import WandbRunLogger
from tests.callbacks.stranger import DEPTH, PATTERNS, Stranger, train
from tests.conftest import same
from tests.runs.test_wandb import inspect, read_history, read_records, run_file

COLUMNS = ["step", "projection", "pair", "measure", "value", "defined"]
KEYS = ("weight/pairs", "weight/heat_map/hidden")


def watched(logger: Logger | list[Logger], steps: int = 3, module: Stranger | None = None, **options: Any) -> None:
    """Trains with a table at every firing, unless options say otherwise, and finishes the W&B run."""
    defaults: dict[str, Any] = {"weights": PATTERNS, "full_every_n_firings": 1, "image_every_seconds": 0.0}
    callback = WeightContinuity(1, **(defaults | options))
    train(module or Stranger(), [callback], steps=steps, logger=logger)
    wandb.finish()


def tables(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Step -> the table that the row of this step refers to, from the run's files."""
    found = run_file(run_dir)
    rows = [row for row in read_history(found) if "weight/pairs" in row]
    files = {row["trainer/global_step"]: found.parent / "files" / row["weight/pairs"]["path"] for row in rows}
    return {step: json.loads(path.read_text()) for step, path in files.items()}


@pytest.mark.parametrize("kind", [WandbRunLogger, WandbLogger])
def test_the_table_holds_what_the_local_store_holds(tmp_path: Path, kind: type[WandbLogger]) -> None:
    """The values of single pairs could be seen in W&B as pixels only, never filtered or plotted."""
    options: dict[str, Any] = {"run_dir": tmp_path} if kind is WandbRunLogger else {"save_dir": tmp_path}
    plain, module = Stranger(), Stranger()
    train(plain, [], steps=3)
    watched([kind(**options), RunStore(tmp_path)], module=module)
    assert same(plain.state_dict(), module.state_dict())
    stored = {name: read_arrays(tmp_path, f"weight/{name}/hidden") for name in ("v1", "defined")}
    found = tables(tmp_path)
    assert list(found) == [0, 1, 2, 3]
    for last, table in found.items():
        assert table["columns"] == COLUMNS
        expected = [
            [step, "hidden", pair, "v1", round(float(values[pair]), 6), bool(stored["defined"][step][pair])]
            for step, values in stored["v1"].items()
            for pair in range(DEPTH - 1)
            if step <= last
        ]
        assert table["data"] == expected
    summary = inspect(run_file(tmp_path))["summary"]
    assert [summary[key]["_type"] for key in KEYS] == ["table-file", "image-file"]
    assert (summary["weight/pairs"]["nrows"], summary["weight/pairs"]["ncols"]) == (4 * (DEPTH - 1), len(COLUMNS))


def test_a_table_is_a_file_of_the_run_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an artifact each table lay in the user's home too, and a run copied to another machine did not sync whole."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    watched(WandbRunLogger(run_dir=str(tmp_path / "run")))
    kinds = Counter(record.WhichOneof("record_type") for record in read_records(run_file(tmp_path / "run")))
    assert kinds["artifact"] == 0
    assert [path for path in tmp_path.glob("data/**/*") if path.is_file()] == []


def test_a_long_training_sends_a_bounded_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of all pairs at all firings grows without end, and is sent again and again."""
    monkeypatch.setattr(weight_continuity, "TABLE_ROWS", 4 * (DEPTH - 1) + 1)
    watched(WandbRunLogger(run_dir=str(tmp_path)), steps=9)
    steps = {last: sorted({row[0] for row in table["data"]}) for last, table in tables(tmp_path).items()}
    assert steps[3] == [0, 1, 2, 3]
    assert steps[9] == [0, 3, 6, 9]
    monkeypatch.setattr(weight_continuity, "TABLE_ROWS", 3)  # not one firing fits
    watched(WandbRunLogger(run_dir=str(tmp_path / "tiny")), steps=2)
    assert [row[:3] for row in tables(tmp_path / "tiny")[2]["data"]] == [[2, "hidden", pair] for pair in range(3)]


def test_tables_and_images_come_at_a_bounded_rate(tmp_path: Path) -> None:
    """At every firing they would take longer than the training that they show."""
    watched(WandbRunLogger(run_dir=str(tmp_path)), image_every_seconds=3600.0)
    assert list(tables(tmp_path)) == [3]  # the end


def test_nothing_is_made_without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heat maps and tables that no logger takes cost time for nothing."""
    made: list[str] = []
    for name in ("_draw", "_tabulate"):
        monkeypatch.setattr(WeightContinuity, name, lambda *_, name=name: made.append(name))
    train(Stranger(), [WeightContinuity(1, weights=PATTERNS, image_every_seconds=0.0)], steps=3)
    assert made == []


@pytest.mark.parametrize("kind", [WandbRunLogger, WandbLogger])
def test_files_that_cannot_be_written_cost_no_number_and_no_weight(tmp_path: Path, kind: type[WandbLogger]) -> None:
    """A full disk, met by a picture, took the numbers of the row with it, or the training."""
    plain, module = Stranger(), Stranger()
    train(plain, [], steps=3)
    logger = kind(**({"run_dir": str(tmp_path)} if kind is WandbRunLogger else {"save_dir": str(tmp_path)}))
    (Path(logger.experiment.dir) / "media").write_text("in the way")
    with pytest.warns(UserWarning, match="W&B does not get weight/") as caught:
        watched([logger, RunStore(tmp_path)], module=module)
    assert same(plain.state_dict(), module.state_dict())
    rows = read_history(run_file(tmp_path))
    assert [row["trainer/global_step"] for row in rows if "weight/v1/hidden" in row] == [0, 1, 2, 3]
    assert not any(key in row for key in KEYS for row in rows)
    said = [str(warning.message) for warning in caught if "does not get" in str(warning.message)]
    assert len(said) == len(KEYS)  # each of them once
    assert list(read_arrays(tmp_path, "weight/v1/hidden")) == [0, 1, 2, 3]


def test_pairs_without_a_value_have_no_row(tmp_path: Path) -> None:
    """NaN in a table turns a column of numbers into one of mixed types, which W&B does not plot."""
    module = Stranger(lr=0.0)
    with torch.no_grad():
        module.blocks[2].weight[0, 0] = math.nan
    watched(WandbRunLogger(run_dir=str(tmp_path)), steps=1, module=module)
    assert {row[2] for row in tables(tmp_path)[1]["data"]} == {0, 3}


def test_a_resumed_training_goes_on_with_the_table(tmp_path: Path) -> None:
    """The last step of a session is measured again by the next one, and stood in the table twice."""
    callbacks = [WeightContinuity(1, weights=PATTERNS) for _ in range(2)]
    first, _ = train(Stranger(), [callbacks[0]], steps=2)
    first.save_checkpoint(tmp_path / "a.ckpt")
    logger = WandbRunLogger(run_dir=str(tmp_path))
    train(Stranger(), [callbacks[1]], steps=4, logger=logger, ckpt_path=tmp_path / "a.ckpt")
    wandb.finish()
    (table,) = tables(tmp_path).values()
    assert [row[0] for row in table["data"]] == [step for step in range(5) for _ in range(DEPTH - 1)]

"""``geocont analyze``: what it prints, what it writes, what it says no to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image

from tests.pretrained.planted import gpt2, llama

Geocont = Callable[..., tuple[int, str, str]]


def test_tables_figures_and_rows(geocont: Geocont, folder: Path) -> None:
    """All formats must hold the same rows, under the names that everything else uses."""
    llama(folder / "one")
    gpt2(folder / "two")
    status, out, err = geocont("analyze", "one", "two", "--out=out", "--json=rows.json", "--advise")
    assert status == 0, out + err
    for text in ("one (llama, 3 layers)", "two (gpt2, 3 layers)", "theory's side", "shared by 4 adjacent layers"):
        assert text in out
    assert "no task was run" in " ".join(out.split())
    rows = json.loads((folder / "rows.json").read_text())
    assert {row["model"] for row in rows} == {"one", "two"}
    table = pyarrow.parquet.read_table(folder / "out/rows.parquet")
    assert table.column_names[:5] == ["model", "projection", "layer", "v1", "u1"]
    assert table.column("v1").to_pylist() == [row["v1"] for row in rows]
    assert json.loads((folder / "out/rows.json").read_text())[0]["u1"] == rows[0]["u1"]
    assert len((folder / "out/rows.csv").read_text().splitlines()) == len(rows) + 1
    assert (folder / "out/spectra.parquet").exists()
    summary = json.loads((folder / "out/summary.json").read_text())
    assert summary[1]["projections"]["down"]["theory"] == "u1"
    for name in ("one-pairs", "one-trajectories", "two-pairs", "two-trajectories", "comparison"):
        assert Image.open(folder / f"out/figures/{name}.png").size[0] > 300
    assert (folder / "out/one/advice.md").read_text().count("\n| ") >= 7
    assert (folder / "out/two/figures/advice.png").exists()


def test_models_of_one_name_are_told_apart(geocont: Geocont, folder: Path) -> None:
    llama(folder / "a/model")
    llama(folder / "b/model")
    status, out, err = geocont("analyze", "a/model", "b/model", "--light", "--projections", "q", "--json=rows.json")
    assert status == 0, out + err
    assert {row["model"] for row in json.loads((folder / "rows.json").read_text())} == {"a/model", "b/model"}
    assert (folder / "runs/analyze/model-model/figures/a_model-pairs.png").exists()
    status, _, err = geocont("analyze", "a/model", "./a/model")
    assert (status, "a MODEL is given twice" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not there"),
        (["model", "--exact-side=0"], "--exact-side must be at least 1, got 0"),
        (["model", "--run-length=1"], "--run-length must be at least 2, got 1"),
        (["model", "--lihgt"], "did you mean --light?"),
        (["model", "--device=abacus"], "--device: abacus is not there"),
        (["model", "--json=model/config.json/x"], "--json: model/config.json/x cannot be written"),
        (["model", "--fold-norms", "--map=map.yaml"], "--fold-norms: model"),
        (["model", "--against=nowhere"], "nowhere is not there"),
    ],
)
def test_what_makes_no_sense_is_named(arguments: list[str], message: str, geocont: Geocont, folder: Path) -> None:
    llama(folder / "model")
    (folder / "map.yaml").write_text("q: layers\\.(\\d+)\\.self_attn\\.q_proj\\.weight")
    status, _, err = geocont("analyze", *arguments)
    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_offline_wandb_run_holds_the_rows(geocont: Geocont, folder: Path) -> None:
    llama(folder / "model")
    status, out, err = geocont("analyze", "model", "--out=out", "--light", "--wandb")
    assert status == 0, out + err
    assert len(list((folder / "out/wandb").glob("offline-run-*/run-*.wandb"))) == 1


def test_help_explains_every_option_without_torch(geocont: Geocont) -> None:
    status, out, _ = geocont("analyze", "--help")
    assert status == 0
    for option in (
        "--against",
        "--fold-norms",
        "--map",
        "--light",
        "--exact-side",
        "--advise",
        "--revision",
        "--wandb",
    ):
        assert option in out


def test_a_model_against_itself_is_one_note(geocont: Geocont, folder: Path) -> None:
    """The difference of a model with itself printed a line for each of its matrices."""
    llama(folder / "model")
    status, out, _ = geocont("analyze", "model", "--against=model", "--light", "--out=out")
    assert status == 1  # no row has a value
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert notes == ["note: 21 of 21 matrices are zero and have no rows: q k v o gate up down of layers 0 to 2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"abc\xff", "not a safetensors file: it has 4 bytes"),
        (b"<!DOCTYPE html><html>Not found</html>", "it begins with the text '<!DOCTYPE html>"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        (b"\xf0" * 100, "not a whole safetensors file, or none at all: its header should be"),
        (b"\x02" + b"\0" * 7 + b"{}", "there is no tensor in it"),
    ],
)
def test_a_file_that_is_something_else_is_told_what(
    content: bytes, message: str, geocont: Geocont, folder: Path
) -> None:
    """An empty file, a web page or a pointer was said to have a header of trillions of bytes."""
    (folder / "model.safetensors").write_bytes(content)
    status, _, err = geocont("analyze", "model.safetensors")
    assert status == 2
    assert message in err
    assert "model.safetensors: " in err
    assert err.count("\n") == 1

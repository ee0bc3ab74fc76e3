"""``geocont dashboard``: what would be sent, and nothing without an account."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from geocont.report.dashboard import SECTIONS

Command = Callable[..., tuple[int, str, str]]


def test_dry_run_prints_what_would_be_sent(geocont: Command) -> None:
    pytest.importorskip("wandb_workspaces")
    status, out, err = geocont("dashboard", "--dry-run", "--project=p", "--entity=e", "--name=mine")
    assert status == 0, err
    view = json.loads(out)
    assert (view["entity"], view["project"], view["displayName"]) == ("e", "p", "mine")
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(SECTIONS)
    for section in sections:
        for panel in section["panels"]:
            if panel["viewType"] == "Run History Line Plot":
                assert panel["config"]["xAxis"] == "trainer/global_step"
                assert panel["config"]["useMetricRegex"] is True
    images = [panel["config"]["mediaKeys"] for panel in sections[0]["panels"] if "mediaKeys" in panel["config"]]
    assert "weight/heat_map/q" in images[0]
    assert '"weight/pairs"' in json.dumps(sections[0])  # the table of the same pairs


def test_errors_are_one_line_with_the_way_out(geocont: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr("geocont.report.dashboard.key_configured", lambda _: False)
    assert geocont("dashboard")[::2] == (
        2,
        "geocont: error: no W&B API key is configured; `wandb login` stores one, and --dry-run needs none\n",
    )
    monkeypatch.setattr("geocont.report.dashboard.key_configured", lambda _: True)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr("wandb_workspaces.workspaces.internal.upsert_view2", refuse)
    status, _, err = geocont("dashboard", "--entity=e", "--project=p")
    assert (status, err) == (2, "geocont: error: W&B did not take the workspace for e/p: refused\n")
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert "pip install 'geocont[dashboard]' brings it" in geocont("dashboard", "--dry-run")[2]


def refuse(_: object) -> None:
    raise RuntimeError("refused\nby the server")

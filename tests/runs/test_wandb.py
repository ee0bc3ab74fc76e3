"""The W&B logger, with the real client writing real offline files that are read back, and real sockets on loopback."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import logging
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from wandb.proto import wandb_internal_pb2

import geocont.runs.wandb as module
from geocont.runs.wandb import STEP, WandbRunLogger

FAKE_KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def fresh_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    os.environ.pop("WANDB_SERVICE", None)  # of a service that ends with the test, so it must not come back
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    yield
    with contextlib.suppress(ConnectionError):  # the service was killed
        wandb.teardown()


def read_records(wandb_file: Path) -> list[Any]:
    """All whole records of a .wandb file (LevelDB log: blocks of 32 KiB, parts with crc, length and type)."""
    data, position, whole, records = wandb_file.read_bytes(), 7, b"", []
    assert data[:4] in (b":W&B", b"")  # nothing is written yet
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if kind == 0 or position + 7 + length > len(data):
            break
        part = data[position + 7 : position + 7 + length]
        position += 7 + length
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            records.append(record)
    return records


def read_history(wandb_file: Path) -> list[dict[str, Any]]:
    """Rows of a .wandb file, without W&B's own keys (`_step` and so on)."""
    histories = [r.history for r in read_records(wandb_file) if r.WhichOneof("record_type") == "history"]
    rows: list[dict[str, Any]] = []
    for history in histories:
        rows.append({})
        for item in history.item:
            key, *rest = item.nested_key or [item.key]
            value = json.loads(item.value_json)
            if rest:  # a picture: one item per field
                rows[-1].setdefault(key, {})[rest[0]] = value
            elif not key.startswith("_"):
                rows[-1][key] = value
    return rows


def exit_codes(wandb_file: Path) -> list[int]:
    return [r.exit.exit_code for r in read_records(wandb_file) if r.WhichOneof("record_type") == "exit"]


def run_file(run_dir: Path, folder: str = "*run-*", finished: bool = True) -> Path:
    """The one .wandb file; `finish` returns some 2 ms before W&B's service has written the last block."""
    (found,) = run_dir.glob(f"wandb/{folder}/*.wandb")
    deadline = time.monotonic() + 5
    while finished and not exit_codes(found) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def inspect(wandb_file: Path) -> dict[str, Any]:
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--summary", "--json", wandb_file]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout)


def offline(run_dir: Path, **options: Any) -> WandbRunLogger:
    return WandbRunLogger(mode="offline", run_dir=str(run_dir), **options)


class Server:
    """A W&B server on loopback: `mode` is "ok", an HTTP status, or "hang" (reads and never answers)."""

    def __init__(self, mode: str) -> None:
        server = self
        self.mode = mode

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if server.mode == "hang":
                    time.sleep(600)
                answer: dict[str, Any] = {}
                if server.mode == "ok" and self.path == "/graphql":
                    answer = server.answer(json.loads(body))
                data = json.dumps({"data": answer}).encode()
                self.send_response(200 if server.mode == "ok" else int(server.mode))
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        variables = request.get("variables", {})
        if "upsertBucket" in request["query"]:
            project = {"name": "p", "entity": {"name": "e"}}
            bucket = {"id": "1", "name": variables.get("name"), "displayName": "n", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in request["query"]:
            files = [{"name": name, "uploadUrl": f"{self.url}/up/{name}"} for name in variables.get("files", [])]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == module.__name__]


def server_url(kind: str) -> str:
    if kind != "closed":
        return Server(kind).url
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


# -- rows ------------------------------------------------------------------------------------------------


def test_staged_values_and_lightnings_share_one_row(tmp_path: Path) -> None:
    """Each log call was a row of its own, so measures and loss of one step could not be plotted together."""
    logger = offline(tmp_path)
    logger.stage({"weight/a": 1.0, "weight/bad": math.nan, "weight/inf": torch.tensor(math.inf)}, 3)
    logger.stage({"weight/b": np.float32(2.0), "val/picture": wandb.Image(np.zeros((4, 4, 3), np.uint8))}, 3)
    logger.log_metrics({"train/loss": math.nan}, step=3)
    logger.stage({"weight/a": math.nan}, 4)  # nothing is left: no row
    logger.commit_staged(4)
    logger.log_metrics({}, step=4)
    logger.stage({"weight/a": torch.tensor(5.0, dtype=torch.bfloat16)}, 5)
    logger.commit_staged(5)
    logger.commit_staged(5)
    logger.finish()
    first, second = read_history(run_file(tmp_path))
    assert first.keys() == {"weight/a", "weight/b", "val/picture", "train/loss", STEP}
    assert (first["weight/a"], first["weight/b"], first[STEP]) == (1, 2, 3)
    assert math.isnan(first["train/loss"])  # a diverged loss must show
    assert first["val/picture"]["_type"] == "image-file"
    assert second == {"weight/a": 5, STEP: 5}


def test_client_semantics_this_module_rests_on(tmp_path: Path) -> None:
    """A later client that counts steps, empty rows or uncommitted rows in another way would lose rows silently."""
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
    run.log({"a": 1}, commit=False)
    assert run.step == 0
    run.log({"b": 1})
    assert run.step == 1
    run.log({})  # an empty call makes an empty row
    run.log({"a": 2}, commit=False)
    run.log({})  # ... or commits what is staged
    run.log({"a": 3}, commit=False)
    run.finish()  # ... as does the end
    assert read_history(run_file(tmp_path)) == [{"a": 1, "b": 1}, {}, {"a": 2}, {"a": 3}]


def test_step_is_never_passed(tmp_path: Path) -> None:
    """W&B drops a row whose step= is below its own counter, with a warning that nobody reads (wandb#1507)."""
    logger = offline(tmp_path)
    calls: list[dict[str, Any]] = []
    original = logger.experiment.log

    def spy(row: dict[str, Any], **options: Any) -> None:
        calls.append(options)
        original(row, **options)

    logger.experiment.log = spy
    for step in (5, 3):  # a validation whose step lies behind
        logger.stage({"weight/a": 1.0}, step)
        logger.log_metrics({"val/loss": 1.0}, step=step)
    logger.finish()
    assert all("step" not in options for options in calls)
    assert [row[STEP] for row in read_history(run_file(tmp_path))] == [5, 3]


def test_summary_holds_min_max_last_of_measures(tmp_path: Path) -> None:
    """Of two globs that match a key W&B took one at random, so the summaries came and went from run to run."""
    keys = [f"{section}/x" for section in module.MEASURES]
    logger = offline(tmp_path)
    for step, value in enumerate((2.0, 1.0, 4.0, 3.0)):
        picture = wandb.Image(np.zeros((4, 4, 3), np.uint8))
        logger.stage(dict.fromkeys(keys, value) | {"val/picture": picture}, step)
        logger.log_metrics({"epoch": step, "lr": value}, step=step)
    logger.finish()
    summary = inspect(run_file(tmp_path))["summary"]
    assert [summary[key] for key in keys] == [{"min": 1, "max": 4, "last": 3}] * len(keys)
    assert (summary["epoch"], summary["lr"], summary[STEP]) == (3, 3, 3)
    assert summary["val/picture"]["_type"] == "image-file"
    metrics = [r.metric for r in read_records(run_file(tmp_path)) if r.WhichOneof("record_type") == "metric"]
    assert {m.name: m.step_metric for m in metrics if m.name} == {STEP: ""} | dict.fromkeys(keys, STEP)
    assert [(m.glob_name, m.step_metric) for m in metrics if m.glob_name] == [("*", STEP)]


# -- mode ------------------------------------------------------------------------------------------------


def test_no_key_is_offline_without_prompt_or_banner(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A first run on a machine without an account stopped at a prompt on stdin."""
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("prompted"))
    environment = dict(os.environ)
    for mode, warnings in (("auto", 0), ("online", 1)):
        caplog.clear()
        logger = WandbRunLogger(run_dir=str(tmp_path / mode), mode=mode, run_id="same")  # type: ignore[arg-type]
        logger.log_metrics({"train/loss": 1.0}, step=0)
        logger.finish()
        assert run_file(tmp_path / mode).parent.name.startswith("offline-run-")
        assert run_file(tmp_path / mode).name == "run-same.wandb"
        assert len(warnings_of(caplog)) == warnings
    assert "wandb sync" in caplog.text
    assert dict(os.environ) == environment
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("variable", ["disabled", "offline", "dryrun"])
def test_auto_follows_wandb_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """WANDB_MODE of the user was overridden, or left set for the whole process (field report C4)."""
    monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    logger = WandbRunLogger(run_dir=str(tmp_path), run_id="abc")
    logger.add_config({"a": 1})
    logger.stage({"weight/a": 1.0}, 0)
    logger.log_metrics({"train/loss": 1.0}, step=0)
    logger.finish()
    assert os.environ["WANDB_MODE"] == variable
    assert logger.version == "abc"
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == (variable != "disabled")


@pytest.mark.parametrize("kind", ["closed", "hang", "401", "500"])
def test_server_down_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """A server that is down, silent, or refuses the key aborted the training before its first step, or hung its end."""
    monkeypatch.setenv("WANDB_BASE_URL", server_url(kind))
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    began = time.monotonic()
    logger = WandbRunLogger(run_dir=str(tmp_path), init_timeout=1.5)
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.finish()
    wandb.teardown()  # what the exit hook does
    assert time.monotonic() - began < 12
    found = run_file(tmp_path, "offline-run-*")
    assert read_history(found) == [{"train/loss": 1, STEP: 1}]
    (message,) = warnings_of(caplog)
    assert f"wandb sync {found.parent}" in message
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")


def test_malformed_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A key with a typing error raised out of the logger."""
    monkeypatch.setenv("WANDB_API_KEY", "too short")
    logger = WandbRunLogger(run_dir=str(tmp_path))
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.finish()
    assert read_history(run_file(tmp_path)) == [{"train/loss": 1, STEP: 1}]
    assert "not valid" in caplog.text


@pytest.mark.parametrize("kind", ["closed", "hang", "500"])
def test_server_dies_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The end of a training waited for ever for a server that had gone."""
    server = Server("ok")
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    monkeypatch.setattr(module, "FINISH_TIMEOUT", 2.0)
    logger = WandbRunLogger(run_dir=str(tmp_path), run_id="abc", init_timeout=10)
    logger.log_metrics({"train/loss": 1.0}, step=0)
    assert not logger.experiment.settings._offline
    if kind == "closed":
        server.http.shutdown()
        server.http.server_close()
    else:
        server.mode = kind
    began = time.monotonic()
    for step in range(1, 200):
        logger.log_metrics({"train/loss": 1.0}, step=step)
    assert time.monotonic() - began < 5
    logger.finish()
    wandb.teardown()
    assert time.monotonic() - began < 15
    assert len(read_history(run_file(tmp_path))) == 200


def test_disk_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run directory that cannot be made ended the training from within its logger."""
    (tmp_path / "file").write_text("")
    logger = offline(tmp_path / "file" / "run")
    logger.log_metrics({"train/loss": 1.0}, step=0)
    files = Path(logger.experiment.dir).parent
    logger.finish()
    assert len(read_history(run_file(files.parent.parent))) == 1
    assert str(files.parent.parent) in caplog.text


def test_service_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """W&B's service process, killed for memory, took the training with it."""
    logger = offline(tmp_path)
    logger.log_metrics({"train/loss": 1.0}, step=0)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if not children.exists():
        pytest.skip("needs Linux's list of child processes")
    pids = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    for pid in pids:
        if "wandb-core" in Path(f"/proc/{pid}/comm").read_text():
            os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.3)
    began = time.monotonic()
    for step in range(20):
        logger.stage({"weight/a": 1.0}, step)
        logger.log_metrics({"train/loss": 1.0}, step=step)
    logger.add_config({"a": 1})
    logger.finalize("success")
    logger.finish()
    assert time.monotonic() - began < 10
    assert len([m for m in warnings_of(caplog) if "did not take a row" in m]) == 1


ABSENT = """
import sys
sys.modules["wandb"] = None
import lightning.pytorch.loggers.wandb as parent
parent._WANDB_AVAILABLE = {requirement}
from geocont.runs.wandb import WandbRunLogger
logger = WandbRunLogger(run_dir={run_dir!r}, run_id="abc", name="n")
logger.log_hyperparams({{"a": 1}}); logger.add_config({{"a": 1}})
logger.stage({{"weight/a": 1.0}}, 0); logger.commit_staged(0)
logger.log_metrics({{"a": 1.0}}, step=1); logger.log_image("a", [1]); logger.experiment.config.update({{"a": 1}})
logger.experiment.summary["a"] = 1
assert (logger.save_dir, logger.version, logger.name, bool(logger.experiment)) == ({run_dir!r}, "abc", "geocont", False)
logger.finalize("failed"); logger.finish()
import pickle, copy
copy.deepcopy(pickle.loads(pickle.dumps(logger))).log_metrics({{"a": 1.0}}, step=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("requirement", ["False", "True"])
def test_wandb_absent_or_broken(tmp_path: Path, requirement: str) -> None:
    """Without wandb, or with one that does not import, neither the module nor a run may fail."""
    code = ABSENT.format(requirement=requirement, run_dir=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stderr.splitlines() if "W&B is off" in line]) == 1


# -- life of a run ---------------------------------------------------------------------------------------


def test_foreign_run_is_used_and_left_open(tmp_path: Path) -> None:
    """With a run already open the step axis was not defined, and our end closed the user's run (field report C3)."""
    mine = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
    logger = offline(tmp_path)
    logger.log_metrics({"train/loss": 1.0}, step=7)
    logger.finalize("failed")
    logger.finish()
    mine.log({"own": 1})
    mine.finish()
    assert [row[STEP] for row in read_history(run_file(tmp_path))] == [7, 7]
    records = read_records(run_file(tmp_path))
    globs = [r.metric for r in records if r.WhichOneof("record_type") == "metric" and r.metric.glob_name]
    assert [(m.glob_name, m.step_metric) for m in globs] == [("*", STEP)]
    assert exit_codes(run_file(tmp_path)) == [0]


def test_two_runs_in_one_process_and_resume(tmp_path: Path) -> None:
    """A second run wrote into the first, and a resumed one became a new run."""
    for folder, value in (("a", 1), ("b", 2), ("b", 3)):
        logger = offline(tmp_path / folder, run_id=f"id-{folder}", group="g", tags=["t"], name=folder)
        logger.add_config({"optim": {"lr": value, "betas": [0.9, 0.95]}})
        logger.add_config({"optim": {"lr": value * 10}})
        logger.log_metrics({"train/loss": 1.0}, step=value)
        assert logger.version == f"id-{folder}"
        logger.finish()
        logger.log_metrics({"train/loss": 1.0}, step=9)  # closed stays closed
    wandb.teardown()  # all files are written
    assert len(read_history(run_file(tmp_path / "a"))) == 1
    files = sorted(tmp_path.glob("b/wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == ["run-id-b.wandb"] * len(files)
    steps = [row[STEP] for file in files for row in read_history(file)]
    assert steps == [2, 3]
    state = inspect(run_file(tmp_path / "a"))
    assert (state["run_id"], state["state"], state["tags"], state["name"]) == ("id-a", "finished", ["t"], "a")
    assert state["config"]["optim"]["lr"] == 10


def test_a_relative_folder_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the working directory, the rows of a second run were written below the first one's."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        logger = offline(Path("run"))
        logger.log_metrics({"train/loss": 1.0}, step=0)
        logger.finish()
        assert len(read_history(run_file(tmp_path / name / "run"))) == 1


class Tiny(LightningModule):
    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.fail_at = torch.nn.Linear(2, 1), fail_at

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise RuntimeError("planned")
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val/loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stager(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.logger.stage({"weight/a": float(trainer.global_step)}, trainer.global_step)  # type: ignore[union-attr]


def fit(logger: WandbRunLogger, run_dir: Path, fail_at: int = -1) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        max_epochs=2,
        logger=logger,
        callbacks=[Stager()],
        log_every_n_steps=1,
        accelerator="cpu",
        default_root_dir=run_dir,
        **quiet,  # type: ignore[arg-type]
    )
    data = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2)
    trainer.fit(Tiny(fail_at), data, torch.utils.data.DataLoader(torch.ones(2, 2)))


def test_fit_makes_one_row_per_step(tmp_path: Path) -> None:
    """With Lightning's own log calls in between, a staged row was committed alone or lost."""
    logger = offline(tmp_path)
    fit(logger, tmp_path)
    logger.log_metrics({"test/loss": 1.0}, step=6)  # success leaves the run open
    logger.finish()
    rows = read_history(run_file(tmp_path))
    train = [row for row in rows if "train/loss" in row]
    assert [row["weight/a"] for row in train] == [1, 2, 3, 4, 5, 6]
    assert len(rows) == 6 + 2 + 1  # steps, validations, ours
    assert exit_codes(run_file(tmp_path)) == [0]
    assert inspect(run_file(tmp_path))["config"]["fail_at"] == -1


def test_raising_run_is_marked_failed(tmp_path: Path) -> None:
    """A run that raised in offline mode left no summary and no exit code (field report C4)."""
    environment = dict(os.environ)
    logger = offline(tmp_path)
    with pytest.raises(RuntimeError, match="planned"):
        fit(logger, tmp_path, fail_at=2)
    state = inspect(run_file(tmp_path))
    assert (state["state"], state["exit_code"], state["summary"]["train/loss"].keys()) == (
        "failed",
        1,
        {"min", "max", "last"},
    )
    assert dict(os.environ) == environment


END = """
import os, sys
from geocont.runs.wandb import WandbRunLogger
logger = WandbRunLogger(run_dir=sys.argv[1])
for step in range(500):
    logger.stage({"weight/a": 1.0}, step); logger.log_metrics({"train/loss": 1.0}, step=step)
print("logged", flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "raise":
    raise RuntimeError("planned")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "codes"), [("kill", []), ("raise", [1])])
def test_process_ends_without_finish(tmp_path: Path, how: str, codes: list[int]) -> None:
    """A killed or forgotten run left a file that could not be read."""
    subprocess.run([sys.executable, "-c", END, str(tmp_path), how], capture_output=True, timeout=60, check=False)
    deadline = time.monotonic() + 10
    while len(rows := read_history(run_file(tmp_path, finished=how != "kill"))) <= 400 and time.monotonic() < deadline:
        time.sleep(0.2)  # the service process outlives a killed parent for a moment
    assert rows == [{"weight/a": 1, "train/loss": 1, STEP: step} for step in range(len(rows))]
    assert len(rows) > 400 if how == "kill" else len(rows) == 500
    assert exit_codes(run_file(tmp_path, finished=how != "kill")) == codes


def log_elsewhere(pickled: bytes) -> None:
    pickle.loads(pickled).log_metrics({"train/loss": 2.0}, step=2)


@pytest.mark.slow
def test_spawned_process_logs_to_the_same_run(tmp_path: Path) -> None:
    """Lightning's spawn strategies pickle the logger; the child opened a second run, or none."""
    logger = offline(tmp_path)
    logger.log_metrics({"train/loss": 1.0}, step=1)
    child = multiprocessing.get_context("spawn").Process(target=log_elsewhere, args=(pickle.dumps(logger),))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    twin = copy.deepcopy(logger)
    twin.log_metrics({"train/loss": 3.0}, step=3)
    twin.finish()  # not its run
    logger.log_metrics({"train/loss": 4.0}, step=4)
    logger.finish()
    assert sorted(row[STEP] for row in read_history(run_file(tmp_path))) == [1, 2, 3, 4]


def test_other_ranks_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank opened a run of its own, all but one empty (field report C5)."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = offline(tmp_path)
    logger.add_config({"a": 1})
    logger.log_hyperparams({"a": 1})
    logger.stage({"weight/a": 1.0}, 0)
    logger.commit_staged(0)
    logger.log_metrics({"train/loss": 1.0}, step=0)
    pickle.dumps(logger)
    logger.finalize("failed")
    logger.finish()
    assert list(tmp_path.iterdir()) == []
    assert wandb.run is None


def test_bad_value_costs_one_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One value that W&B cannot write ended the training."""
    caplog.set_level(logging.WARNING)
    logger = offline(tmp_path)
    for step in range(3):
        logger.log_metrics({3: 1.0} if step else {"train/loss": 1.0}, step=step)  # type: ignore[dict-item]
    logger.finish()
    assert len(read_history(run_file(tmp_path))) == 1
    assert len(warnings_of(caplog)) == 1

"""One directory per run: config.yaml, manifest.json, metrics, checkpoints, plots."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from geocont.errors import UserError
from geocont.runs.files import write_json

MANIFEST_FILE = "manifest.json"
CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
LAST_CHECKPOINT = "last.ckpt"
PATIENCE = 300.0  # seconds that a process waits for another one's run directory, on a disk that may lag
LOCK_FILE = ".lock"
#: What a run's directory holds before training begins; W&B's folder too, which has no row then.
BARE = {LOCK_FILE, CONFIG_FILE, MANIFEST_FILE, "wandb"}
PACKAGES = ("geocont", "torch", "lightning", "torchmetrics", "wandb", "datasets", "numpy")


@dataclass
class RunOptions:
    """Where a run lives.

    Attributes:
        experiment: Name of the experiment; runs of one experiment share the folder ``root/experiment``.
        name: Name of the run in W&B and at the end of its directory's name; by default the experiment's name.
        root: Folder of all experiments.
        dir: The run's own directory, instead of a new one below ``root/experiment``.
    """

    experiment: str = "default"
    name: str | None = None
    root: str = "runs"
    dir: str | None = None


class RunDirectory:
    """A run's directory, with its manifest and the lock that keeps a second process out.

    Attributes:
        path: The directory.
        run_id: Identity of the run, also in W&B; it survives resumptions.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self._lock = FileLock(path / LOCK_FILE, timeout=0)
        self._made: list[Path] = []  # folders that this process has made, the innermost first
        self._was_empty = False

    @classmethod
    def create(cls, options: RunOptions) -> RunDirectory:
        """Makes the directory of a new run; two runs started at once get two.

        Raises:
            UserError: The directory holds a run already, or cannot be made.
        """
        agent = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        run_id = agent or secrets.token_hex(4)  # an agent of a W&B sweep gives its runs their identity itself
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = "-".join(filter(None, (stamp, (options.name or "").replace("/", "-"), run_id)))
        path = Path(options.dir) if options.dir else Path(options.root) / options.experiment / name
        if (path / MANIFEST_FILE).exists():
            raise UserError(f"run.dir: {path} holds a run already; continue it with --resume {path}, or name another")
        run = cls(path, run_id)
        run._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            run._was_empty = not any(path.iterdir())
        except OSError as error:
            raise UserError(f"run.root: {path} cannot be made: {error.strerror}") from error
        run.lock()
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Opens the directory of a run that is to go on.

        Raises:
            UserError: There is no run, or a process is still writing to it.
        """
        run = cls(path, read_manifest(path)["run_id"])
        run.lock()
        return run

    @classmethod
    def open_beside(cls, path: Path) -> RunDirectory:
        """Opens a run's directory for a process that works beside the one that makes it (another device's).

        Raises:
            UserError: It was not made within ``PATIENCE`` seconds, or is not that of a run.
        """
        deadline = time.monotonic() + PATIENCE
        while not (path / MANIFEST_FILE).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return cls(path, read_manifest(path)["run_id"])

    def lock(self) -> None:
        """Keeps other processes out until this one ends, however it ends.

        Raises:
            UserError: Another process holds the directory.
        """
        try:
            self._lock.acquire()
        except Timeout as error:
            raise UserError(
                f"{self.path} is being written by another process; wait for it, or start a new run"
            ) from error
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Lets other processes in."""
        self._lock.release()

    def remove_if_bare(self) -> None:
        """Removes what this process wrote of a run that never began, and the folders that it made for it.

        A checkpoint, a row, or a file of the user's keeps all of it.
        """
        try:
            entries = list(self.path.iterdir())
            if not self._was_empty or not {entry.name for entry in entries} <= BARE:
                return
            for entry in entries:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            for folder in self._made:
                folder.rmdir()  # fails where another run is in it by now
        except OSError:
            pass  # what cannot be removed may stay

    def close_abandoned(self, error: str) -> None:
        """Marks the run as failed where the process that held it has died without a word (killed, say)."""
        if not (self.path / MANIFEST_FILE).exists():
            return  # it never began, and is removed
        try:
            self.lock()
        except UserError:
            return  # it is alive, and says itself how the run ends
        if self.manifest.get("status") == "running":
            self.update_manifest(status="failed", error=error)
        self.release()

    @property
    def last_checkpoint(self) -> Path:
        """Path of the newest checkpoint; it may not exist yet."""
        return self.path / CHECKPOINTS / LAST_CHECKPOINT

    @property
    def manifest(self) -> dict[str, Any]:
        """What manifest.json says now."""
        return read_manifest(self.path)

    def update_manifest(self, **entries: Any) -> None:
        """Adds entries to manifest.json, in one step."""
        path = self.path / MANIFEST_FILE
        manifest = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, manifest | {"run_id": self.run_id} | entries)


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a run.

    Raises:
        UserError: The folder is not that of a run.
    """
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        return manifest | {"run_id": str(manifest["run_id"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not the directory of a run: it has no readable {MANIFEST_FILE}") from error


def newest_run(options: RunOptions) -> Path:
    """Returns the newest run of an experiment that can go on: the one started last among those with a checkpoint.

    Raises:
        UserError: The experiment has no run, or none of its runs has a checkpoint.
    """
    folder = Path(options.root) / options.experiment
    runs = [path.parent for path in folder.glob(f"*/{MANIFEST_FILE}")]
    ready = [run for run in runs if (run / CHECKPOINTS / LAST_CHECKPOINT).exists()]
    if not ready:
        why = f"none of its {len(runs)} runs has a checkpoint" if runs else "there is no run"
        raise UserError(f"--resume last: nothing to resume in {folder}: {why}; start without --resume")
    return max(ready, key=lambda run: (read_manifest(run).get("created", ""), run.name))


def describe_environment() -> dict[str, Any]:
    """Returns what a run ran on: command, versions, code version and hardware."""
    return {
        "command": shlex.join(["geocont", *sys.argv[1:]]),
        "created": datetime.now().astimezone().isoformat(timespec="milliseconds"),  # runs may start in one second
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git": _git_state(Path(__file__).parent),
        "hardware": _hardware(),
        "host": platform.node(),
        "pid": os.getpid(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the code and whether files differ from it; None where there is no repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _hardware() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}

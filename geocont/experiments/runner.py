"""The resumable runner behind ``reproduce``: many trainings, each in its own process and directory.

A run that has ended is never repeated, one that was stopped goes on from its checkpoint, and a failed one is a result.
Runners started together share the work: each run is locked by the one that trains it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from geocont.errors import UserError
from geocont.runs.directory import CHECKPOINTS, LAST_CHECKPOINT, MANIFEST_FILE, read_manifest
from geocont.runs.files import write_json

POLL_SECONDS = 0.25
PLAN_FILE = "plan.json"
USER_ERROR_STATUS = 2


@dataclass(frozen=True)
class Job:
    """One training of an experiment.

    Attributes:
        variant: What is trained.
        seed: Its ``seed_everything``.
        arguments: Options of ``geocont fit``, without seed and directory.
    """

    variant: str
    seed: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.variant}-seed{self.seed}"


def absolute(data: str) -> str:
    """Returns a folder's path so that it means the same wherever the experiment is continued; names as they are."""
    return str(Path(data).resolve()) if Path(data).is_dir() else data


class Size(Protocol):
    """What every preset of an experiment has: its data and its number of seeds, unless others are given."""

    @property
    def data(self) -> str: ...  # noqa: D102

    @property
    def seeds(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class TextSize:
    """Size of an experiment on text: data by default, seeds, options of every run, whether of the small models."""

    data: str
    seeds: int
    options: tuple[str, ...] = ()
    small: bool = True


S = TypeVar("S", bound=Size)


@dataclass(frozen=True)
class Grid(Generic[S]):
    """The trainings of an experiment: variants by seeds.

    Attributes:
        name: Of the experiment.
        presets: Its sizes.
        arguments: (variant, data, size) -> options of ``geocont fit``, without seed and directory.
    """

    name: str
    presets: Mapping[str, S]
    arguments: Callable[[str, str, S], Sequence[str]]

    def plan(self, preset: str, data: str | None) -> dict[str, Any]:
        """Returns what identifies the experiment: runs of another plan do not belong into the same folder."""
        return {"experiment": self.name, "preset": preset, "data": absolute(data or self.presets[preset].data)}

    def jobs(self, preset: str, data: str | None, variants: Sequence[str], seeds: int | None) -> list[Job]:
        """Returns a job for each variant and seed, all of a seed before the next, so that one can compare early.

        Raises:
            UserError: There are no seeds.
        """
        size = self.presets[preset]
        count, source = size.seeds if seeds is None else seeds, absolute(data or size.data)
        if count < 1:
            raise UserError(f"--seeds must be at least 1, got {count}")
        return [
            Job(name, seed, tuple(self.arguments(name, source, size))) for seed in range(count) for name in variants
        ]


class Runner:
    """Trains the jobs of an experiment below one folder.

    Args:
        out: Folder of the experiment; runs lie in ``out/runs``.
        plan: What the experiment is (preset, data ...). A folder that holds another plan is refused.
        jobs: The trainings.
        parallel: Trainings at a time; by default one for each two cores, at least two where there are two cores.

    Raises:
        UserError: ``out`` holds another experiment or cannot be made.
    """

    def __init__(self, out: Path, plan: dict[str, Any], jobs: Sequence[Job], parallel: int | None = None) -> None:
        self.out = out
        self.jobs = list(jobs)
        if parallel is not None and parallel < 1:
            raise UserError(f"--jobs must be at least 1, got {parallel}")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.parallel = max(1, min(parallel or cores, len(self.jobs)))
        self.threads = max(1, cores // self.parallel)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: {out} cannot be made: {error.strerror}") from error
        self._check_plan(plan)

    def folder(self, job: Job) -> Path:
        """Returns the run's directory of a job."""
        return self.out / "runs" / job.name

    def run(self, console: Console) -> None:
        """Trains whatever is not done yet, here or by another runner on the same folder, with a progress bar.

        Raises:
            UserError: A training could not start because of something the user can put right.
        """
        waiting = [job for job in self.jobs if not is_done(self.folder(job))]
        running: dict[Job, tuple[subprocess.Popen[bytes], FileLock]] = {}
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        progress = Progress(*columns, console=console, disable=not console.is_terminal)
        with _interruptible_by_sigterm(), progress:
            task = progress.add_task("runs", total=len(self.jobs), completed=len(self.jobs) - len(waiting))
            try:
                while waiting or running:
                    for job in list(waiting):
                        if is_done(self.folder(job)):  # by another runner
                            waiting.remove(job)
                            progress.advance(task)
                        elif len(running) < self.parallel and (lock := self._claim(job)):
                            waiting.remove(job)
                            running[job] = (self._start(job), lock)
                    for job, (process, lock) in list(running.items()):
                        if process.poll() is not None:
                            del running[job]
                            lock.release()
                            console.print(f"{job.name}: {self._check_ending(job, process.returncode)}", highlight=False)
                            progress.advance(task)
                    progress.update(task, description=self._describe(running))
                    time.sleep(POLL_SECONDS)
            finally:
                for process, _ in running.values():
                    process.terminate()  # SIGTERM: each saves its state and can go on
                for process, lock in running.values():
                    process.wait()
                    lock.release()

    def _check_plan(self, plan: dict[str, Any]) -> None:
        path = self.out / PLAN_FILE
        with self._plan_lock():
            trained = any((self.out / "runs").glob(f"*/{CHECKPOINTS}/{LAST_CHECKPOINT}"))
            if not path.exists() or not trained:  # an attempt that never began to train binds nobody
                write_json(path, plan)
            elif (found := _read_plan(path)) != plan:
                differing = [key for key in {*found, *plan} if found.get(key) != plan.get(key)]
                key = sorted(differing)[0]
                raise UserError(
                    f"--out: {self.out} holds an experiment with {key} {found.get(key)!r}, not {plan.get(key)!r};"
                    " give another --out, the same options to continue it, or delete the folder"
                )

    def _plan_lock(self) -> FileLock:
        if not os.access(self.out, os.W_OK):
            raise UserError(f"--out: {self.out} cannot be written")
        return FileLock(self.out / ".plan.lock")

    def _claim(self, job: Job) -> FileLock | None:
        """Returns the job's lock, or None while another runner, or a training that outlived its runner, has it."""
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{job.name}.lock", timeout=0)
        try:
            lock.acquire()
            with FileLock(folder / ".lock", timeout=0):
                pass
        except Timeout:
            lock.release()
            return None
        if is_done(folder):
            lock.release()
            return None
        return lock

    def _start(self, job: Job) -> subprocess.Popen[bytes]:
        folder = self.folder(job)
        if (folder / CHECKPOINTS / LAST_CHECKPOINT).exists():
            options = ["--resume", str(folder)]
        else:
            (folder / MANIFEST_FILE).unlink(missing_ok=True)  # of a start that was stopped before its first checkpoint
            options = [
                *job.arguments,
                "--seed_everything",
                str(job.seed),
                "--run.dir",
                str(folder),
                "--run.name",
                job.name,
            ]
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        with (folder / "output.log").open("ab") as log:
            command = [sys.executable, "-m", "geocont", "fit", *options]
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def _check_ending(self, job: Job, status: int) -> str:
        """Returns how a training ended.

        Raises:
            UserError: It could not start because of something the user can put right.
        """
        folder = self.folder(job)
        if is_done(folder):
            manifest = read_manifest(folder)
            return f"failed: {manifest.get('error')}" if manifest["status"] == "failed" else str(manifest["status"])
        log = folder / "output.log"
        if status == USER_ERROR_STATUS:
            lines = [
                line for line in log.read_text(errors="replace").splitlines() if line.startswith("geocont: error:")
            ]
            raise UserError(f"{job.name}: {lines[-1].removeprefix('geocont: error: ') if lines else f'see {log}'}")
        return f"stopped with status {status}, to be continued by the next start; see {log}"

    def _describe(self, running: dict[Job, Any]) -> str:
        return "runs: " + (", ".join(job.name for job in running) or "waiting for another runner")


@contextlib.contextmanager
def _interruptible_by_sigterm() -> Iterator[None]:
    """Has SIGTERM end a ``with`` block in order, as Ctrl-C does: its trainings must not outlive a runner."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        return plan | {}
    except (ValueError, TypeError) as error:
        raise UserError(f"--out: {path} is not the plan of an experiment; give another --out") from error


def is_done(run_dir: Path) -> bool:
    """Tells whether a run has ended for good: finished, or failed for a reason that lies in the training itself."""
    if not (run_dir / MANIFEST_FILE).exists():
        return False
    manifest = read_manifest(run_dir)
    if manifest.get("status") == "failed":
        return not str(manifest.get("error", "")).startswith("UserError")
    return manifest.get("status") == "finished"


def collect(runner: Runner, describe: Callable[[Path], dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a flat row for each ended run: variant, seed, what ``describe`` reads, status, and its folder."""
    rows = []
    for job in runner.jobs:
        folder = runner.folder(job)
        if is_done(folder):
            row = {"variant": job.variant, "seed": job.seed, **describe(folder)}
            rows.append(row | {"status": read_manifest(folder)["status"], "run": str(folder)})
    return rows

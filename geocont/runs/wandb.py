"""The Weights & Biases side of a run: a logger that never prompts, never stops and never slows a training.

W&B is a convenience: if it is absent, refuses the key, does not answer or dies in mid-run, one line says so and the
training goes on. Values of one optimizer step share one row: `stage` adds to the row in progress, the next
`log_metrics` (Lightning's own) commits it. `trainer/global_step` is the x axis of everything; W&B's own step counter
is never set, because W&B drops rows whose `step=` is below it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from geocont.runs.wandb_log import heal_earlier_parts

_log = logging.getLogger(__name__)  # not warnings.warn: it takes two lines, and -W error would stop a training

STEP = "trainer/global_step"
"""Key of the x axis: the optimizer step that a row belongs to."""

MEASURES = frozenset({"weight", "gradient", "cumulative", "update", "softmax", "spectrum", "optim", "val", "train"})
"""Sections (the text before the first slash of a key) whose summary holds min, max and last; elsewhere last alone."""

FINISH_TIMEOUT = 60.0
"""Seconds that the end of an online run waits for a server that no longer answers; the rows stay on the disk."""

SYSTEM_METRICS_INTERVAL = 30.0
"""Seconds between two samples of processor, memory and accelerator use (W&B's default: 15)."""


class _Nothing:
    """Stands in for a W&B run: every attribute and call is itself, and it is false."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False


def _if_wandb(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of WandbLogger, skipped where there is no run (it would import wandb)."""

    @functools.wraps(method)
    def guarded(self: WandbRunLogger, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if self.experiment else None

    return guarded


class WandbRunLogger(WandbLogger):
    """Lightning's WandbLogger for one geocont run.

    Args:
        project: W&B project.
        entity: W&B user or team; None: the default of the account.
        group: name under which W&B gathers runs (e.g. the seeds of one experiment).
        tags: labels of the run.
        name: shown name of the run; None: W&B invents one.
        notes: free text about the run.
        mode: "online", "offline" (files only, for `wandb sync`) or "disabled". "auto": WANDB_MODE of the environment
            if it is set, else online if an API key is configured, else offline. Online falls back to offline, with
            one line of warning, if there is no key, the server refuses it, or nothing answers in `init_timeout`.
        run_dir: the run's own directory; the files go to `<run_dir>/wandb/`. None: the current directory.
        run_id: id of the W&B run. A later logger with the same id continues that run. None: W&B makes one up.
        job_type: kind of work within the group ("train", "eval").
        init_timeout: seconds to wait for the server at the start.

    Nothing here raises because of W&B. On ranks other than zero every method does nothing. A run that the user opened
    before (`wandb.run`) is used and left open. A logger whose run was finished stays closed.
    """

    _service: str | None = None  # how to reach W&B's service process; WANDB_SERVICE is not left in the environment

    def __init__(
        self,
        project: str = "geocont",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        name: str | None = None,
        notes: str | None = None,
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        run_dir: str | None = None,
        run_id: str | None = None,
        job_type: str | None = None,
        init_timeout: float = 30.0,
    ) -> None:
        if init_timeout <= 0:
            raise ValueError(f"init_timeout must be above 0 seconds, got {init_timeout}")
        options: dict[str, Any] = {"entity": entity, "group": group, "tags": tags, "notes": notes, "job_type": job_type}
        try:
            super().__init__(name=name, project=project, save_dir=run_dir or ".", id=run_id, **options)
        except ModuleNotFoundError:  # wandb is not installed: what the parent's properties read
            Logger.__init__(self)
            self._project, self._name, self._id, self._save_dir = project, name, run_id, run_dir or "."
            self._experiment, self._log_model, self._prefix, self._wandb_init = None, False, "", {}
            self._checkpoint_callbacks, self._logged_model_time = {}, {}
        self._mode = mode
        self._init_timeout = init_timeout
        self._attach_id: str | None = None  # of the run that a copy of this logger attaches to
        self._owned = False  # whether the run is ours to finish
        self._staged = False  # whether the row in progress holds anything
        self._defined: set[str] = set()  # keys whose summary has been defined
        self._warned: set[str] = set()

    # -- opening ----------------------------------------------------------------------------------------------------

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, opened at the first use; an object that swallows everything where there is none."""
        if self._experiment is None:
            try:
                self._experiment = self._open()
            except Exception as error:
                self._warn(f"W&B is off for this run ({_brief(error)})")
                self._experiment = _Nothing()  # type: ignore[assignment]
        return self._experiment

    def _open(self) -> Any:
        mode = os.environ.get("WANDB_MODE") or "auto" if self._mode == "auto" else self._mode
        if mode == "disabled":
            return _Nothing()
        import wandb

        if wandb.run is not None:
            run: Any = wandb.run
        elif self._attach_id is not None:  # unpickled in another process: its rows go to the run of the first one
            with _environment(WANDB_SERVICE=self._service or ""):
                run = wandb._attach(self._attach_id)  # type: ignore[attr-defined]
        else:
            # W&B's own telemetry is off: it delays the exit by 30 s if the server is silent.
            with _environment(WANDB_ERROR_REPORTING="false"):
                run = self._create(wandb, {"dryrun": "offline", "run": "online"}.get(mode, mode))
                WandbRunLogger._service = os.environ.get("WANDB_SERVICE") or self._service
            self._owned = True
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        self._id = run.id
        return run

    def _create(self, wandb: Any, mode: str) -> Any:
        arguments = {key: value for key, value in self._wandb_init.items() if key != "anonymous"}  # deprecated
        # W&B's service process stays in the working directory that this process had at its first run.
        arguments["dir"] = os.path.abspath(arguments["dir"])
        try:  # the folder has to be there before, or W&B warns about its git root
            Path(arguments["dir"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            arguments["dir"] = tempfile.mkdtemp(prefix="geocont-wandb-")
            self._warn(f"W&B's files go to {arguments['dir']}, {self._save_dir} refuses them ({_brief(error)})")
        if arguments.get("id"):
            heal_earlier_parts(Path(arguments["dir"]), arguments["id"])
        settings = {
            "silent": True,
            "quiet": True,
            "console": "off",
            "save_code": False,
            "init_timeout": self._init_timeout,
            "finish_timeout": FINISH_TIMEOUT,
            "x_stats_sampling_interval": SYSTEM_METRICS_INTERVAL,
            "x_transaction_log_flush_interval": 2.0,  # seconds of rows lost if the whole machine goes (default: 15)
        }
        known = wandb.Settings.model_fields  # older clients lack the newest ones
        arguments["settings"] = wandb.Settings(**{key: value for key, value in settings.items() if key in known})
        reason = ""
        if mode != "offline":
            if key_configured(wandb):
                try:
                    return wandb.init(mode="online", **arguments)
                except Exception as error:
                    reason = f"the server did not accept the run: {_brief(error)}"
            elif mode == "online":
                reason = "no API key is configured"
        run = wandb.init(mode="offline", **arguments)
        if reason:
            self._warn(f"W&B is offline for this run ({reason}); later: wandb sync {Path(run.dir).parent}")
        return run

    def __getstate__(self) -> dict[str, Any]:
        """For spawned processes and copies: the run is opened here and attached to there."""
        _ = self.experiment
        state = self.__dict__.copy()
        if self._experiment:
            attach_id = getattr(self._experiment, "_attach_id", None)
            state.update(_attach_id=attach_id, _service=self._service, _experiment=None)
        state["_owned"] = False  # the first process finishes it
        return state

    # -- rows -------------------------------------------------------------------------------------------------------

    @rank_zero_only
    def stage(self, metrics: dict[str, Any], step: int) -> None:
        """Add values to the row of optimizer step `step`; the next `log_metrics` or `commit_staged` commits it.

        Numbers that are not finite are dropped (a measure that is not defined at this step); images, tables and
        histograms pass. A later value of a key replaces an earlier one of the same row.
        """
        row = {key: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for key, v in metrics.items()}
        row = {key: v for key, v in row.items() if not isinstance(v, Real) or math.isfinite(v)}
        if row and self.experiment:
            self._log({**row, STEP: step}, commit=False)
            self._staged = True

    @rank_zero_only
    def commit_staged(self, step: int) -> None:
        """Commit the staged values as the row of optimizer step `step`; nothing if none are staged."""
        if self._staged:
            self._log({STEP: step}, commit=True)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Commit one row: what is staged and `metrics`, at optimizer step `step`. NaN passes (a loss must show it)."""
        if metrics or self._staged:
            self._log(dict(metrics) if step is None else {**metrics, STEP: step}, commit=True)

    def _log(self, row: dict[str, Any], commit: bool) -> None:
        run = self.experiment
        try:
            for key in row.keys() - self._defined:  # by name: of two matching globs W&B takes one at random
                self._defined.add(key)
                if key.split("/")[0] in MEASURES and isinstance(row[key], Real | Tensor):
                    run.define_metric(key, step_metric=STEP, step_sync=True, summary="min,max,last")
            run.log(row, commit=commit)
        except Exception as error:
            self._warn(f"W&B did not take a row ({_brief(error)}); later failures are not reported", once="row")
        if commit:
            self._staged = False

    # -- config and end ---------------------------------------------------------------------------------------------

    @rank_zero_only
    def add_config(self, config: dict[str, Any]) -> None:
        """Merge a nested plain config into the config of the W&B run; a resumed run may change values."""
        try:
            self.experiment.config.update(config, allow_val_change=True)
        except Exception as error:
            self._warn(f"W&B did not take the config ({_brief(error)})")

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Lightning's hook: the hyper-parameters of module and data go into the config."""
        if self.experiment:
            try:
                super().log_hyperparams(params)
            except Exception as error:
                self._warn(f"W&B did not take the hyper-parameters ({_brief(error)})")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Lightning's hook: "success" leaves the run open (another fit or test may follow), all else fails it."""
        if status != "success":
            self.finish(exit_code=1)

    @rank_zero_only
    def finish(self, exit_code: int = 0) -> None:
        """Finish the run if this logger opened it: 0 marks it finished, all else failed. Waits FINISH_TIMEOUT at most.

        Without it W&B's own exit hook finishes the run when the process ends. The file's last block is written some
        milliseconds after the return.
        """
        if self._experiment and self._owned:
            try:
                self._experiment.finish(exit_code=exit_code)
            except Exception as error:
                self._warn(f"W&B did not finish the run ({_brief(error)})")
            self._experiment = _Nothing()  # type: ignore[assignment]
            self._owned = False

    def _warn(self, message: str, once: str | None = None) -> None:
        if once not in self._warned:
            _log.warning(message)
        if once:
            self._warned.add(once)

    log_table = _if_wandb(WandbLogger.log_table)
    log_image = _if_wandb(WandbLogger.log_image)
    log_audio = _if_wandb(WandbLogger.log_audio)
    log_video = _if_wandb(WandbLogger.log_video)


def _brief(error: BaseException) -> str:
    """One line about an error."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def key_configured(wandb: Any) -> bool:
    """Whether W&B finds credentials for its server (environment, netrc, settings), without a prompt or a request."""
    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib import wbauth

        host = wandb_setup.singleton().settings.base_url
        with contextlib.redirect_stderr(io.StringIO()):  # "Loaded credentials ..."
            return wbauth.authenticate_session(host=host, source="geocont", prompt=False) is not None
    except (ImportError, AttributeError, TypeError):  # other versions of wandb
        return bool(wandb.api.api_key)
    except Exception as error:
        _log.warning(f"W&B's credentials are not valid ({_brief(error)})")
        return False


@contextlib.contextmanager
def _environment(**temporary: str) -> Iterator[None]:
    """Set variables that are not set yet, and put every WANDB_* variable back as it was afterwards."""
    before = {key: value for key, value in os.environ.items() if key.startswith("WANDB_")}
    for key, value in temporary.items():
        os.environ.setdefault(key, value)
    try:
        yield
    finally:
        for key in [key for key in os.environ if key.startswith("WANDB_")]:
            if key not in before:
                del os.environ[key]
        os.environ.update(before)

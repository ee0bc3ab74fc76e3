"""``geocont fit | validate | test | predict``: a LightningCLI with switches for callbacks and one directory per run."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

import callbacks
from geocont.cli.arguments import with_found_configs, with_resumed_run
from geocont.cli.parsing import GeoContParser, essence
from geocont.conf import conf_folder
from geocont.errors import UserError
from geocont.report.summary import print_summary
from geocont.runs.checkpoint_io import AtomicCheckpointIO
from geocont.runs.directory import CHECKPOINTS, CONFIG_FILE, RunDirectory, RunOptions, describe_environment
from geocont.runs.files import write_atomically
from geocont.runs.store import RunStore
from geocont.runs.wandb import WandbRunLogger

#: Tells the processes that Lightning launches for other devices where the run lives.
RUN_DIR_VARIABLE = "GEOCONT_RUN_DIR"
#: Number of a process and of all of them, as launchers other than Lightning's own set them: torchrun, and srun.
LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
SIGTERM_STATUS = 143


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a training command; returns 0, or 143 after SIGTERM."""
    _check_callbacks_package()
    _keep_the_terminal_readable()
    found = with_found_configs(arguments, {"callbacks": callback_switches(), "logger": ("wandb",)})
    sys.argv = [sys.argv[0], command, *with_resumed_run(found)]
    defaults = {"default_config_files": [str(conf_folder() / "base.yaml")]}
    try:
        GeoContCLI(
            parser_class=GeoContParser,
            parser_kwargs={name: dict(defaults) for name in GeoContCLI.subcommands()},
            save_config_callback=None,
            auto_configure_optimizers=False,
            seed_everything_default=0,
        )
    except SIGTERMException:
        return SIGTERM_STATUS
    except UserError:
        raise
    except RuntimeError as error:
        if "loading state_dict" in str(error):
            raise UserError(f"ckpt_path: the checkpoint does not fit the model: {essence(str(error))[:300]}") from error
        raise _users_own(error) or error from None
    except ValueError as error:  # Lightning's, about a cadence that does not fit the data
        if "val_check_interval" in str(error):
            raise UserError(f"trainer.val_check_interval: {essence(str(error))}") from error
        raise _users_own(error) or error from None
    except MisconfigurationException as error:
        raise _users_own(error) or UserError(essence(str(error))) from error
    except Exception as error:
        raise _users_own(error) or error from None
    return 0


def callback_switches() -> dict[str, type[Callback]]:
    """Returns switch -> class for every callback that geocont ships: ``weight_continuity`` -> ``WeightContinuity``."""
    return {callbacks.switch_of(found): found for found in (getattr(callbacks, name) for name in callbacks.__all__)}


class GeoContCLI(LightningCLI):
    """LightningCLI with a switch for each callback, a directory for each run, and resumption."""

    run_directory: RunDirectory | None = None
    resumed_at: int | None = None  # optimizer step of the checkpoint that training starts from

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the switches ``callbacks.*`` and ``logger.wandb``, the options ``run.*`` and ``--resume``."""
        for switch, callback in callback_switches().items():
            parser.add_lightning_class_args(callback, f"callbacks.{switch}", subclass_mode=True, required=False)
        parser.add_subclass_arguments(WandbRunLogger, "logger.wandb", required=False)
        parser.add_class_arguments(RunOptions, "run")
        parser.add_argument(
            "--resume",
            type=str | None,
            default=None,
            help="Continue a run in its own directory with its own configuration: a run's directory, or `last` for the"
            " newest run of the experiment. Other options given beside it override that configuration.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the options; a run that is resumed has been put in front of them by :func:`run`."""
        super().parse_arguments(parser, args)
        options = self.config[self.config.subcommand]
        rank, ranks = _launched()
        self.is_main_process = rank == 0 and RUN_DIR_VARIABLE not in os.environ
        if ranks > 1 and self.config.subcommand == "fit" and options.resume is None and options.run.dir is None:
            raise UserError(
                f"run.dir: the {ranks} processes of this launch must share a directory; give --run.dir=DIR, a new"
                " one on a disk that all of them see, or --resume=DIR"
            )
        checkpoint = options.get("ckpt_path")
        if checkpoint in ("last", "best", "hpc"):
            raise UserError(f"ckpt_path: give a file, not {checkpoint!r}; `geocont fit --resume last` continues a run")
        if checkpoint is not None and not Path(checkpoint).is_file():
            raise UserError(f"ckpt_path: {checkpoint} is not there")
        if checkpoint is None and self.config.subcommand != "fit":
            rank_zero_info(
                f"geocont: warning: {self.config.subcommand}: the weights are those the model starts with;"
                " --ckpt_path=FILE loads others, such as RUN/checkpoints/last.ckpt"
            )
        if options.resume is None:
            return
        if self.config.subcommand != "fit":
            raise UserError("--resume continues training; give the checkpoint of a run with --ckpt_path")
        path = Path(options.resume)
        self.run_directory = RunDirectory.reopen(path) if self.is_main_process else RunDirectory.open_beside(path)
        options.run.dir, options.resume = options.resume, None
        options.ckpt_path = str(self.run_directory.last_checkpoint)

    def before_instantiate_classes(self) -> None:
        """Opens the run's directory before anything is built, so that whatever goes wrong leaves its traces there."""
        if self.config.subcommand != "fit":
            return
        config = self.config.fit
        resumed = self.run_directory is not None
        if self.run_directory is None and self.is_main_process:
            self.run_directory = RunDirectory.create(_run_options(config))
        elif self.run_directory is None:
            self.run_directory = RunDirectory.open_beside(Path(os.environ.get(RUN_DIR_VARIABLE) or config.run.dir))
        directory = self.run_directory
        if self.is_main_process:
            os.environ[RUN_DIR_VARIABLE] = str(directory.path)
            self._config_text = self._parser("fit").dump(config, skip_none=False)
            if not resumed:  # a resumed run keeps its configuration until the new one has proved to fit
                write_atomically(directory.path / CONFIG_FILE, self._config_text)
            environment = describe_environment()
            if resumed:
                environment = {"resumed": environment}
            directory.update_manifest(
                **environment, status="running", experiment=config.run.experiment, seed=config.seed_everything
            )
        if config.trainer.default_root_dir is None:
            config.trainer.default_root_dir = str(directory.path)
        if config.logger.wandb is not None:
            options = config.logger.wandb.init_args
            options.run_dir, options.run_id = str(directory.path), directory.run_id
            options.name = options.name or config.run.name or directory.path.name
            options.group = options.group or config.run.experiment

    def instantiate_classes(self) -> None:
        """Builds model, data, callbacks and trainer; a run that fails here says so in its manifest."""
        try:
            super().instantiate_classes()
        except BaseException as error:
            self._close_run({"status": "failed", "error": _told(error)})
            if not isinstance(error, Exception):
                raise
            own = _users_own(error)
            # Parser, Trainer and classes say what they cannot take in exceptions of many kinds.
            told = str(own) if own else f"{type(error).__name__}: {essence(str(error))}"
            raise UserError(located(told, self.config[self.config.subcommand])) from error

    def _parse_ckpt_path(self) -> None:
        """Checks a checkpoint before anything is built, and leaves a resumed run its own configuration."""
        checkpoint = self.config[self.config.subcommand].get("ckpt_path")
        if checkpoint is not None:
            self.resumed_at = int(AtomicCheckpointIO().load_checkpoint(checkpoint)["global_step"])
        if self.run_directory is None:
            super()._parse_ckpt_path()

    def _close_run(self, outcome: dict[str, Any]) -> None:
        """Writes how the run ended and lets other processes into its directory; one that never began leaves none."""
        if self.run_directory is not None and self.is_main_process:
            os.environ.pop(RUN_DIR_VARIABLE, None)
            self.run_directory.update_manifest(**outcome)
            self.run_directory.release()
            if outcome["status"] != "finished" and _launched()[1] == 1:  # other processes would wait for it
                self.run_directory.remove_if_bare()
        elif self.run_directory is not None and outcome["status"] == "failed":
            self.run_directory.close_abandoned(f"the main process is gone; another one ended with {outcome['error']}")

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        # Overrides a private method: the only place where LightningCLI lets go of switches that are off (None). A test
        # holds it.
        config = dict(config)
        if self.run_directory is not None:
            self._add_loggers(config)
            config["plugins"] = [*_as_list(config.get("plugins")), AtomicCheckpointIO()]
        elif config.get("logger") is None:
            config["logger"] = False
        trainer = super()._instantiate_trainer(config, [callback for callback in callbacks if callback is not None])
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None and self.run_directory is not None:
                callback.dirpath = str((self.run_directory.path / CHECKPOINTS).absolute())
        return trainer

    def _add_loggers(self, config: dict[str, Any]) -> None:
        """Puts the run's local store and W&B before the user's own loggers."""
        assert self.run_directory is not None
        wandb_logger = self._get(self.config_init, "logger").wandb
        ours = [RunStore(self.run_directory.path, self.resumed_at)]
        users = [] if config.get("logger") in (None, True, False) else _as_list(config["logger"])
        config["logger"] = [*ours, *([] if wandb_logger is None else [wandb_logger]), *users]
        self.wandb_logger = wandb_logger

    def fit(self, model: LightningModule, **kwargs: Any) -> None:
        """Trains, and leaves in the manifest how that ended."""
        directory = self.run_directory
        assert directory is not None
        fingerprint = getattr(self.datamodule, "fingerprint", None)
        outcome: dict[str, Any] = {"status": "failed"}
        try:
            if self.is_main_process:
                data = {"class": _class_path(self.datamodule), "fingerprint": fingerprint() if fingerprint else None}
                directory.update_manifest(data=data)
                write_atomically(directory.path / CONFIG_FILE, self._config_text)
                self._describe_to_wandb()
            self.trainer.fit(model, **kwargs)
            outcome = {"status": "finished" if self.trainer.state.finished else "interrupted"}
        except (SIGTERMException, KeyboardInterrupt, SystemExit):
            outcome = {"status": "interrupted"}
            raise
        except BaseException as error:
            outcome["error"] = _told(error)
            raise
        finally:
            if self.is_main_process and self.wandb_logger is not None:
                self.wandb_logger.finish(0 if outcome["status"] == "finished" else 1)
            self._close_run(outcome | {"step": self.trainer.global_step, "epoch": self.trainer.current_epoch})
        if self.is_main_process:
            print_summary(directory.path)
            if self.resumed_at == self.trainer.global_step:
                print("  nothing was trained: the run had reached its end; --trainer.max_steps or max_epochs move that")

    def _describe_to_wandb(self) -> None:
        if self.wandb_logger is not None:
            assert self.run_directory is not None
            config = self._parser("fit").dump(self.config.fit, format="json")
            manifest = self.run_directory.manifest
            self.wandb_logger.add_config({**json.loads(config), "manifest": manifest})


def located(message: str, config: Any) -> str:
    """Returns what a class says of one of its values, with the whole name of the option that has this value."""
    options = {key.replace("init_args.", ""): value for key, value in config.items()}
    found = re.match(r"([\w.]+)( must be .*, got (.+?)(?:;.*)?)$", message)
    if found:
        keys = [
            key
            for key, value in options.items()
            if key.endswith(f".{found[1]}") and found[3] in (str(value), repr(value))
        ]
        return f"{keys[0]}{found[2]}" if len(keys) == 1 else message
    named = [name for name in re.findall(r"`(\w+)", message) if f"trainer.{name}" in options]
    return f"{message} (--trainer.{named[0]}={options[f'trainer.{named[0]}']})" if named else message


def _launched() -> tuple[int, int]:
    """Returns the number of this process and of all of them, where a launcher from outside has started them."""
    for rank, ranks in LAUNCHERS:
        if rank in os.environ and ranks in os.environ:
            return int(os.environ[rank]), int(os.environ[ranks])
    return 0, 1


def _told(error: BaseException) -> str:
    error = _users_own(error) or error
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _run_options(config: Any) -> RunOptions:
    return RunOptions(**config.run.as_dict())


def _class_path(instance: Any) -> str | None:
    return None if instance is None else f"{type(instance).__module__}.{type(instance).__qualname__}"


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _users_own(error: BaseException | None) -> UserError | None:
    """Returns the :class:`UserError` that a library has wrapped into an exception of its own, if there is one."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _keep_the_terminal_readable() -> None:
    """Drops Lightning's advertisements and what it says of itself at every start; warnings about the run stay."""
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    chatter = ("💡 Tip", "GPU available", "TPU available", "`weights_only` was not set", "Loading `train_dataloader`")
    for name in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector"):
        logger = logging.getLogger(f"lightning.pytorch.{name}")
        logger.addFilter(lambda record: not record.getMessage().strip().startswith(chatter))
    for handler in (*logging.getLogger("lightning.pytorch").handlers, *logging.getLogger("lightning.fabric").handlers):
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(_CurrentStderr())
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*", category=DeprecationWarning)


class _CurrentStderr:
    """Whatever ``sys.stderr`` is by then: a progress bar puts its own in place, so that lines come above it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _check_callbacks_package() -> None:
    """Raises a :class:`UserError` if ``import callbacks`` found a package of the user's own."""
    if not hasattr(callbacks, "WeightContinuity"):
        place = getattr(callbacks, "__file__", None) or next(iter(callbacks.__path__))
        raise UserError(f"a package of yours, {place}, hides geocont's own `callbacks`; rename it or start elsewhere")

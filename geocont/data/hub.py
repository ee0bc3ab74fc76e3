"""Loading through Hugging Face ``datasets``: a name on the hub, or a local folder of parquet of the same schema."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from geocont.errors import UserError

HUB_TIMEOUT = 5.0  # seconds to wait for the hub before saying that it is out of reach


def load_splits(path: str, splits: tuple[str, ...]) -> dict[str, Any]:
    """Loads splits of a data set.

    Args:
        path: A folder with one or more parquet files for each split, named after it (``train-0.parquet``); or a name on
            the Hugging Face hub, taken from the local cache where the hub is out of reach.
        splits: Names of the splits that are wanted.

    Returns:
        Split -> ``datasets.Dataset``.

    Raises:
        UserError: The folder, one of its splits, or the data set on the hub is not there; in one line.
    """
    if _is_local(path):
        return _load_folder(Path(path).expanduser(), splits)
    return _load_from_hub(path, splits)


def _is_local(path: str) -> bool:
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(".parquet")
    return looks_local or Path(path).exists()


def _load_folder(folder: Path, splits: tuple[str, ...]) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"data.path: {folder} is not a folder; it must hold {' and '.join(_names(splits))}")
    files = {split: sorted(str(file) for file in folder.glob(f"{split}*.parquet")) for split in splits}
    missing = [split for split, found in files.items() if not found]
    if missing:
        raise UserError(f"data.path: {folder} has no {' and no '.join(_names(tuple(missing)))}")
    import datasets

    with _quietly():
        try:
            return dict(datasets.load_dataset("parquet", data_files=files))
        except Exception as error:
            raise UserError(f"data.path: the parquet files in {folder} cannot be read: {_first_line(error)}") from error


def _load_from_hub(name: str, splits: tuple[str, ...]) -> dict[str, Any]:
    import datasets

    offline = not _hub_answers(name)
    with _quietly(), _offline() if offline else contextlib.nullcontext():
        try:
            return {split: datasets.load_dataset(name, split=split) for split in splits}
        except Exception as error:
            if offline:
                raise UserError(
                    f"data.path: the Hugging Face hub is out of reach and {name} is not in the local cache; connect, or"
                    f" give a folder with {' and '.join(_names(splits))}, or unset HF_HUB_OFFLINE if it is set"
                ) from error
            raise UserError(
                f"data.path: {name} cannot be loaded from the Hugging Face hub: {_first_line(error)}"
            ) from error


def _hub_answers(name: str) -> bool:
    """Asks once, without the retries of a download, so that a missing network is known at once.

    Raises:
        UserError: The hub answers that it has no such data set.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        raise UserError(f"data.path: {name} is neither a folder here nor a data set on the Hugging Face hub") from error
    except Exception:  # no route, no name service, a proxy, a time-out: all of them mean that there is no network
        return False
    return True


def _names(splits: tuple[str, ...]) -> list[str]:
    return [f"{split}*.parquet" for split in splits]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Looks into the local cache only. Both libraries read HF_HUB_OFFLINE once, when they are imported."""
    import datasets
    import huggingface_hub

    settings: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [setting.HF_HUB_OFFLINE for setting in settings]
    for setting in settings:
        setting.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.HF_HUB_OFFLINE = value


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps the progress bars of ``datasets`` out of a training's terminal."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()

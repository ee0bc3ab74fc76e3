"""Loading through Hugging Face: a data set's name on the hub, or a folder of parquet of its schema; and tokenizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from geocont.errors import UserError

HUB_TIMEOUT = 5.0  # seconds to wait for the hub before saying that it is out of reach


def load_splits(
    path: str, splits: tuple[str, ...], config: str | None = None, optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Loads splits of a data set.

    Args:
        path: A folder with one or more parquet files for each split, named after it (``train-0.parquet``); or a name on
            the Hugging Face hub, taken from the local cache where the hub is out of reach.
        splits: Names of the splits that are wanted.
        config: Configuration of a data set on the hub that has several, as ``wikitext-103-raw-v1``; a folder has none.
        optional: Those of the splits that may be missing.

    Returns:
        Split -> ``datasets.Dataset``, without the optional splits that are missing.

    Raises:
        UserError: The folder, one of its splits, or the data set on the hub is not there; in one line.
    """
    if is_local(path):
        return _load_folder(Path(path).expanduser(), splits, optional)
    return _load_from_hub(path, splits, config, optional)


def is_local(path: str) -> bool:
    """Tells whether a path is meant for this machine rather than for the hub, be it there or not."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith((".parquet", ".txt"))
    return looks_local or Path(path).exists()


def _load_folder(folder: Path, splits: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    required = tuple(split for split in splits if split not in optional)
    if not folder.is_dir():
        raise UserError(f"data.path: {folder} is not a folder; it must hold {' and '.join(_names(required))}")
    files = {split: sorted(str(file) for file in folder.glob(f"{split}*.parquet")) for split in splits}
    files = {split: found for split, found in files.items() if found or split in required}
    missing = [split for split, found in files.items() if not found]
    if missing:
        raise UserError(f"data.path: {folder} has no {' and no '.join(_names(tuple(missing)))}")
    import datasets

    with _quietly():
        try:
            return dict(datasets.load_dataset("parquet", data_files=files))
        except Exception as error:
            raise UserError(f"data.path: the parquet files in {folder} cannot be read: {_first_line(error)}") from error


def _load_from_hub(name: str, splits: tuple[str, ...], config: str | None, optional: tuple[str, ...]) -> dict[str, Any]:
    import datasets
    import huggingface_hub

    required = tuple(split for split in splits if split not in optional)
    online = _hub_answers(
        lambda: huggingface_hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT),
        f"data.path: {name} is neither a folder here nor a data set on the Hugging Face hub",
    )
    with _quietly(), contextlib.nullcontext() if online else _offline():
        try:
            found = datasets.load_dataset(name, config)
        except Exception as error:
            if not online:
                raise UserError(
                    f"data.path: {name} is not a folder, the hub is out of reach and {name} is not in the local cache;"
                    f" connect, or give a folder with {' and '.join(_names(required))}, or unset HF_HUB_OFFLINE if set"
                ) from error
            if "Config name is missing" in str(error):  # the next line of the message lists them
                raise UserError(f"data.config: {name} has several; {str(error).splitlines()[1]}") from error
            raise UserError(
                f"data.path: {name} cannot be loaded from the Hugging Face hub: {_first_line(error)}"
            ) from error
    missing = [split for split in required if split not in found]
    if missing:
        raise UserError(f"data.path: {name} has no split {' and no split '.join(missing)}, only {', '.join(found)}")
    return {split: found[split] for split in splits if split in found}


def fetch_tokenizer(name: str) -> Path:
    """Returns the tokenizer.json of a model on the hub; that of the local cache where it is there.

    Raises:
        UserError: There is none, or the hub is out of reach; in one line.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    otherwise = "give a tokenizer.json, or one of bpe and bytes, which need no network"
    missing = f"data.tokenizer: {name} is neither a tokenizer.json here nor on the Hugging Face hub; {otherwise}"
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError as error:  # it cannot be a name there
        raise UserError(missing) from error
    if isinstance(cached, str):
        return Path(cached)
    if not _hub_answers(lambda: huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT), missing):
        raise UserError(
            f"data.tokenizer: the Hugging Face hub is out of reach and {name} is not in the local cache; connect, or"
            f" {otherwise}, or unset HF_HUB_OFFLINE if it is set"
        )
    try:
        return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except Exception as error:
        raise UserError(
            f"data.tokenizer: {name} has no tokenizer.json that can be fetched ({_first_line(error)}); {otherwise}"
        ) from error


def _hub_answers(ask: Callable[[], object], missing: str) -> bool:
    """Asks once, without the retries of a download, so that a missing network is known at once.

    Raises:
        UserError: The hub answers that it has no such thing, as ``missing`` says.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        ask()
    except (RepositoryNotFoundError, HFValidationError) as error:  # the latter: no possible name
        raise UserError(missing) from error
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

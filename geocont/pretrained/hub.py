"""Models on the Hugging Face hub: which files are needed, and fetching them; what is in the local cache comes first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from geocont.errors import UserError
from geocont.pretrained.checkpoint import INDEXES, SHARD, SINGLE, read_json

HUB_TIMEOUT = 5.0  # seconds to wait for the hub before saying that it is out of reach
NAME = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG = "config.json"


def is_hub_name(model: str) -> bool:
    """Tells whether a model is meant to be on the hub: ``owner/model``, and no such file here."""
    return (
        len(model) < 200
        and bool(NAME.fullmatch(model))
        and not model.startswith((".", "/", "~"))
        and not Path(model).exists()
    )


def fetch_model(name: str, revision: str | None = None) -> Path:
    """Returns the folder of a model's weights, fetched file by file; what was broken off is continued.

    A token is taken from the environment's HF_TOKEN and from nowhere else.

    Raises:
        UserError: There is no such model, it has no weights that can be read, or the hub is out of reach and the files
            are not all in the local cache.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    cached = _cached(name, revision)
    if cached is not None:
        return cached
    at = f" at revision {revision}" if revision else ""
    token = os.environ.get("HF_TOKEN") or False
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{name}{at} is not whole in the local cache, and HF_HUB_OFFLINE is set; unset it, or give a path"
        )
    try:
        info = huggingface_hub.HfApi(token=token).model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except GatedRepoError as error:
        raise UserError(f"{name}: its owner grants access on the hub; then set HF_TOKEN in the environment") from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{name}{at} is neither a file or folder here nor a model on the hub that HF_TOKEN (if set) may read"
        ) from error
    except Exception as error:  # no route, no name service, a proxy, a time-out
        raise UserError(
            f"{name}{at} is not whole in the local cache and the Hugging Face hub is out of reach; connect, or give a"
            " path"
        ) from error
    files = [entry.rfilename for entry in info.siblings or ()]
    folder = None
    for file in needed_files(name, files):
        folder = Path(_fetch(name, file, info.sha, token)).parent
    if folder is None:
        raise UserError(f"{name}{at} has no weights on the hub")
    for index in INDEXES:
        if (folder / index).is_file():
            for shard in dict.fromkeys(_shards(folder / index)):
                _fetch(name, shard, info.sha, token)
            break
    return folder


def needed_files(name: str, files: Iterable[str]) -> list[str]:
    """Returns what of a repository's files must be fetched: config.json, and the index or the one file of weights.

    Raises:
        UserError: It has no weights in a format that can be read, or several sets.
    """
    files = set(files)
    described = [CONFIG] if CONFIG in files else []
    for chosen in (INDEXES[0], SINGLE[0], INDEXES[1], SINGLE[1]):
        if chosen in files:
            return [*described, chosen]
    quantised = sorted(file for file in files if file.endswith(".gguf"))
    sets = {SHARD.sub(r"\1", file) for file in quantised}
    if len(sets) == 1:
        return [*described, *quantised]
    if quantised:
        raise UserError(f"{name} has several GGUF files ({', '.join(quantised[:3])} ..); fetch one and give its path")
    raise UserError(f"{name} has no safetensors, GGUF or PyTorch weights on the hub")


def _shards(index: Path) -> list[str]:
    table = read_json(index).get("weight_map")
    return [file for file in table.values() if isinstance(file, str)] if isinstance(table, dict) else []


def _fetch(name: str, file: str, revision: str | None, token: Any) -> str:
    import huggingface_hub

    try:
        return str(huggingface_hub.hf_hub_download(name, file, revision=revision, token=token))
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{name}: {file} could not be fetched ({reason}); the same command continues there") from error


def _cached(name: str, revision: str | None) -> Path | None:
    """Returns the folder of a model in the local cache, if all of it is there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, CONFIG, revision=revision)
    for chosen in (INDEXES[0], SINGLE[0], INDEXES[1], SINGLE[1]):
        found = try_to_load_from_cache(name, chosen, revision=revision)
        if not isinstance(found, str) or not isinstance(config, str):
            continue
        shards = _shards(Path(found)) if chosen in INDEXES else []
        if all(isinstance(try_to_load_from_cache(name, shard, revision=revision), str) for shard in shards):
            return Path(found).parent
    return None

"""A checkpoint on this machine, whatever its format: names, shapes, its configuration, and one tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from torch import Tensor

from geocont.errors import UserError
from geocont.pretrained.gguf_file import dequantise, gguf_tensors
from geocont.pretrained.mapped import FLOATS, MappedBytes, TensorInfo
from geocont.pretrained.safetensors_file import safetensors_tensors
from geocont.pretrained.torch_file import TorchFile

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: In a folder, the first of these that is there holds the weights.
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")


@dataclass
class Piece:
    """Part of a tensor as it lies in the file, not yet numbers: hashing it needs no memory.

    Attributes:
        info: Of the whole tensor.
        shape: Of this part.
        data: Mapped bytes, or a tensor that PyTorch has read.
    """

    info: TensorInfo
    shape: tuple[int, ...]
    data: MappedBytes | Tensor

    def numbers(self) -> Tensor:
        """Returns the part as a floating-point tensor; quantised types as float32."""
        if isinstance(self.data, Tensor):
            return self.data
        if self.info.kind in FLOATS:
            return self.data.tensor(FLOATS[self.info.kind], self.shape)
        return dequantise(self.data.array, self.info.kind, self.shape, self.info.name, self.info.file)


@dataclass
class Checkpoint:
    """An open checkpoint.

    Attributes:
        name: For tables: the last part of its path, or its name on the hub.
        path: File or folder.
        kind: ``hf`` (described by config.json), ``gguf`` (by its own metadata) or ``run`` (by geocont's config.yaml).
        tensors: Name -> where it lies.
        config: What describes it; empty where nothing does.
    """

    name: str
    path: Path
    kind: Literal["hf", "gguf", "run"]
    tensors: dict[str, TensorInfo]
    config: dict[str, Any]
    _opened: dict[Path, TorchFile] = field(default_factory=dict)

    def piece(self, name: str, start: int = 0, stop: int | None = None) -> Piece:
        """Returns entries ``start`` to ``stop`` of a tensor's first dimension.

        Raises:
            UserError: It does not hold floating-point numbers, or cannot be read.
        """
        info = self.tensors[name]
        if info.kind not in FLOATS and (self.kind != "gguf" or (info.kind[0] == "I" and info.kind[1:].isdigit())):
            raise UserError(
                f"{info.file}: tensor {name} holds {info.kind}, not floating-point numbers; give the model's original"
                " weights, or a GGUF file if it is quantised"
            )
        stop = info.shape[0] if stop is None else stop
        shape = (stop - start, *info.shape[1:])
        if info.offset is None:
            return Piece(info, shape, self._opened[info.file].read(info, start, stop))
        entry = info.size // info.shape[0] if info.shape[0] else 0
        mapped = MappedBytes(info.file, info.offset + start * entry, (stop - start) * entry, name)
        return Piece(info, shape, mapped)


def open_checkpoint(path: Path, name: str | None = None) -> Checkpoint:
    """Opens a checkpoint: a file, a folder of files with their config.json, or the folder of a geocont run.

    Raises:
        UserError: There is none, or a part of it is missing, cut short, or contradicts another; in one line.
    """
    try:
        return _open(path.expanduser(), name)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _open(path: Path, name: str | None) -> Checkpoint:
    name = name or path.resolve().name or str(path)
    if path.is_dir():
        files, index = _files_in(path)
    elif path.is_file():
        files, index = ([path], path) if path.name.endswith(".index.json") else (_with_siblings(path), None)
    else:
        raise UserError(f"{path} is not there; give a file, a folder, or a name on the Hugging Face hub (owner/model)")
    promised = _read_index(index) if index else {}
    if index:
        files = list(dict.fromkeys(promised.values()))
    opened: dict[Path, TorchFile] = {}
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, Any] = {}
    for file in files:
        found = _tensors_of(file, opened, metadata, promised)
        for tensor, info in found.items():
            if tensor in tensors:
                raise UserError(f"tensor {tensor} is in two files, {tensors[tensor].file} and {file}; remove one")
            tensors[tensor] = info
    for tensor, file in promised.items():
        if tensor not in tensors or tensors[tensor].file != file:
            raise UserError(f"{index}: tensor {tensor} should be in {file}, but is not there; fetch both again")
    if metadata:
        return Checkpoint(name, path, "gguf", tensors, metadata, opened)
    kind, config = _description(path if path.is_dir() else path.parent, files[0])
    return Checkpoint(name, path, kind, tensors, config, opened)


def _tensors_of(
    file: Path, opened: dict[Path, TorchFile], metadata: dict[str, Any], promised: dict[str, Path]
) -> dict[str, TensorInfo]:
    if not file.is_file():
        lost = next((tensor for tensor, where in promised.items() if where == file), None)
        raise UserError(f"{file} is not there{f'; tensor {lost} should be in it' if lost else ''}; fetch it")
    if file.suffix == ".safetensors":
        return safetensors_tensors(file)
    if file.suffix == ".gguf":
        found, described = gguf_tensors(file)
        metadata.update({key: value for key, value in described.items() if key not in metadata})
        return found
    if file.suffix in TORCH_SUFFIXES:
        opened[file] = TorchFile(file)
        return opened[file].tensors
    raise UserError(f"{file} is not a checkpoint: know .safetensors, .gguf and {', '.join(TORCH_SUFFIXES)}")


def _files_in(folder: Path) -> tuple[list[Path], Path | None]:
    """Returns the files of weights in a folder, or the index that names them."""
    last = folder / "checkpoints" / "last.ckpt"
    if last.is_file():
        return [last], None
    for name in INDEXES:
        if (folder / name).is_file():
            return [], folder / name
    for name in SINGLE:
        if (folder / name).is_file():
            return [folder / name], None
    for suffix in (".safetensors", ".gguf", *TORCH_SUFFIXES):
        files = sorted(file for file in folder.iterdir() if file.suffix == suffix and not file.name.startswith("."))
        sets = {tuple(_with_siblings(file)) for file in files}
        if len(sets) == 1:
            return list(sets.pop()), None
        if sets:
            names = ", ".join(file.name for file in files[:4])
            raise UserError(f"{folder} holds several checkpoints ({names}); name the file, or add an index")
    raise UserError(f"{folder} holds no checkpoint: no .safetensors, .gguf, {', '.join(TORCH_SUFFIXES)}")


def _with_siblings(file: Path) -> list[Path]:
    """Returns the shards of a set of which a file named ``x-00001-of-00003.gguf`` is one, in order."""
    match = SHARD.fullmatch(file.name)
    if match is None:
        return [file]
    stem, _, count, suffix = match.groups()
    return [file.with_name(f"{stem}-{i:05d}-of-{count}{suffix}") for i in range(1, min(int(count), 10_000) + 1)]


def _read_index(index: Path) -> dict[str, Path]:
    """Returns tensor -> file of an index, none of them outside the index's folder."""
    content = read_json(index)
    table = content.get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(file, str) for file in table.values()):
        raise UserError(f"{index}: has no weight_map of tensors to files")
    files = {}
    for tensor, name in table.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name or not name:
            raise UserError(
                f"{index}: tensor {tensor!r:.200} is said to be in {name!r:.200}, outside the folder; refused"
            )
        files[tensor] = index.parent / name
    return files


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON file's table.

    Raises:
        UserError: It cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object, not {type(content).__name__}")
    return content


def _description(folder: Path, file: Path) -> tuple[Literal["hf", "run"], dict[str, Any]]:
    """Returns what describes a checkpoint: geocont's own config.yaml for its runs, otherwise config.json."""
    if (folder / "config.json").is_file():
        return "hf", read_json(folder / "config.json")
    if file.suffix == ".ckpt":
        for place in (folder, file.parent.parent):
            if (place / "config.yaml").is_file():
                return "run", _read_yaml(place / "config.yaml")
    return "hf", {}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())[:200]}") from error
    return content if isinstance(content, dict) else {}


def matrix_names(tensors: Iterable[TensorInfo]) -> list[str]:
    """Returns the names of two-dimensional tensors."""
    return [info.name for info in tensors if len(info.shape) == 2]


def as_bytes(tensor: Tensor) -> np.ndarray:
    """Returns the bytes of a contiguous tensor, without a copy."""
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1) if tensor.numel() else np.empty(0, np.uint8)

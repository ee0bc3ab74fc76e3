"""Weights from and to safetensors files in Hugging Face's layouts. Such a file holds tensors only: nothing executes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from geocont.errors import UserError

NOTHING = r"(?!)"


@dataclass(frozen=True)
class Layout:
    """How the tensors of a file differ from a model's parameters.

    Attributes:
        prefix: What the file's names may have in front, all but that of the head, ``lm_head.weight``.
        ignored: Regular expression of whole names, without prefix, that hold no weights.
        transposed: Regular expression of whole names of matrices stored in x out.
    """

    prefix: str = ""
    ignored: str = NOTHING
    transposed: str = NOTHING

    def key(self, name: str) -> str:
        """Returns a parameter's name as a file has it."""
        return name if name.startswith("lm_head.") else self.prefix + name

    def turn(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor as the model has it, given the file's, or the other way round; a view."""
        return tensor.mT if re.fullmatch(self.transposed, name) else tensor

    def turned(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a shape as the file has it, given the model's, or the other way round."""
        return shape[::-1] if re.fullmatch(self.transposed, name) else shape


class WeightsFile:
    """An open file, seen through its layout: names without prefix, matrices out x in.

    Attributes:
        path: Where it lies.
        layout: Of the file.
        shapes: Name -> shape, as it is in the file.
    """

    def __init__(self, path: Path, handle: Any, layout: Layout) -> None:
        self.path, self.layout, self._handle = path, layout, handle
        names = {key.removeprefix(layout.prefix): key for key in handle.keys()}  # noqa: SIM118  (not a dict)
        self._keys = {name: key for name, key in names.items() if not re.fullmatch(layout.ignored, name)}
        self.shapes = {name: tuple(handle.get_slice(key).get_shape()) for name, key in self._keys.items()}

    def read(self, name: str) -> Tensor:
        """Returns one tensor as the model has it.

        Raises:
            UserError: It holds integers.
        """
        tensor = self._handle.get_tensor(self._keys[name])
        if not tensor.is_floating_point():
            raise UserError(f"weights: {name} in {self.path} holds {tensor.dtype}, not floating-point numbers")
        return self.layout.turn(name, tensor)


@contextmanager
def open_weights(path: str | Path, layout: Layout) -> Iterator[WeightsFile]:
    """Opens a safetensors file, or the ``model.safetensors`` of a folder.

    Raises:
        UserError: The file is not there, or is not a whole safetensors file.
    """
    path = Path(path).expanduser()
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"weights: {path} is not there; give the path of a safetensors file")
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            yield WeightsFile(path, handle, layout)
    except (SafetensorError, OSError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"weights: {path} cannot be read as a safetensors file: {reason}") from error


@torch.no_grad()
def load_weights(model: nn.Module, file: WeightsFile, redundant: Callable[[str, WeightsFile], bool]) -> None:
    """Copies every tensor of a file into a model, cast to the model's type; the model stays as it was if any is wrong.

    Args:
        model: Gets the weights.
        file: Holds them.
        redundant: Tells whether a tensor that the model has no place for says nothing that the model lacks.

    Raises:
        UserError: A tensor is missing, is unexpected, or has the wrong shape.
    """
    targets: Mapping[str, Tensor] = model.state_dict()
    for name, target in targets.items():
        if name not in file.shapes:
            raise UserError(f"weights: {file.path} lacks {name}; {_differs(name)}")
        expected = file.layout.turned(name, tuple(target.shape))
        if file.shapes[name] != expected:
            raise UserError(
                f"weights: {name} has shape {file.shapes[name]} in {file.path}, but the network needs {expected};"
                " give network.* the sizes of the file"
            )
    for name in file.shapes.keys() - targets.keys():
        if not redundant(name, file):
            raise UserError(f"weights: {file.path} has {name}, which the network does not have; {_differs(name)}")
    for name, target in targets.items():
        target.copy_(file.read(name))


def save_weights(model: nn.Module, path: str | Path, layout: Layout) -> None:
    """Writes all weights of a model to a safetensors file in the given layout, with its prefix."""
    named = model.state_dict().items()
    tensors = {layout.key(name): layout.turn(name, tensor).contiguous() for name, tensor in named}
    save_file(tensors, Path(path).expanduser(), metadata={"format": "pt"})


def _differs(name: str) -> str:
    if name.startswith("lm_head."):
        return "network.tied must be true for one matrix as embedding and head, false for two"
    key = "network.layers or network.bias" if name.endswith(".bias") else "network.layers"
    return f"{key} differs from the file's, or it is of another model family"

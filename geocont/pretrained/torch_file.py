"""PyTorch files (``.bin``, ``.pt``, ``.pth``, ``.ckpt``): tensors and plain values only, nothing in them executes."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geocont.errors import UserError
from geocont.pretrained.mapped import TensorInfo

KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
#: Bytes read through one mapping before it is opened anew: what was read of it stays resident.
READ_AT_A_TIME = 1 << 28


class TorchFile:
    """An open PyTorch file: mapped, and mapped anew after every quarter of a gigabyte.

    Attributes:
        tensors: Name -> where it lies; names of a Lightning checkpoint are those in its ``state_dict``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: Mapping[str, Any] | None = self._load()
        self._read = 0
        self.tensors = {
            name: TensorInfo(name, tuple(t.shape), KINDS.get(t.dtype, str(t.dtype)), path, None, t.nbytes)
            for name, t in self._state.items()
            if isinstance(name, str) and _is_plain(t)
        }
        if not self.tensors:
            raise UserError(f"{path}: holds no tensors; it must be a state_dict, or a checkpoint with one")

    def read(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Returns entries ``start`` to ``stop`` of a tensor's first dimension, copied."""
        if self._state is None or self._read > READ_AT_A_TIME:
            self._state, self._read = None, 0
            self._state = self._load()
        part = self._state[info.name][start:stop].detach().clone()
        self._read += part.nbytes
        return part

    def _load(self) -> Mapping[str, Any]:
        if not zipfile.is_zipfile(self.path):
            raise UserError(
                f"{self.path}: not a whole PyTorch file, or one from before PyTorch 1.6, which cannot be mapped; fetch"
                " it again, or save its tensors as safetensors"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # the unpickler raises nearly anything on a corrupt file
            reason = " ".join(str(error).split())
            if "weights_only" in reason or "Unsupported" in reason:
                raise UserError(
                    f"{self.path}: refused: it holds more than tensors and plain values (a pickle that would run"
                    " code); nothing of it was executed. Ask its author for safetensors"
                ) from error
            raise UserError(f"{self.path}: cannot be read as a PyTorch file: {reason[:200]}") from error
        if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
            content = content["state_dict"]
        if not isinstance(content, Mapping):
            raise UserError(f"{self.path}: holds {type(content).__name__}, not a table of tensors")
        return content


def _is_plain(value: Any) -> bool:
    """Tells whether a value is a dense tensor whose bytes are all in the file."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return not value.is_quantized

"""Full float32 for what would be wrong with less: constraints hold to 1e-6, TF32 and bfloat16 have three digits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

FULL = "ieee"  # of a backend; "highest" of all


@contextmanager
def full_precision() -> Iterator[None]:
    """Takes autocast and reduced float32 products (TF32, bfloat16) back for what is computed within.

    Lightning recommends ``torch.set_float32_matmul_precision("high")`` on GPUs with tensor cores, which is right for
    the model. Also a decorator. It changes what the whole process does, so no other thread should compute meanwhile.
    """
    accelerator = torch.accelerator.current_accelerator()
    devices = {"cpu", "cuda"} | ({accelerator.type} if accelerator else set())
    with ExitStack() as stack:
        for device in devices:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_full_products())
        yield


@contextmanager
def _full_products() -> Iterator[None]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set backends one by one, after which torch refuses to speak of all of them
        backends: Any = torch.backends  # mkldnn.matmul is not typed
        with ExitStack() as stack:
            for backend in (backends.cuda.matmul, backends.mkldnn.matmul):
                stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
                backend.fp32_precision = FULL
            yield
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

"""Full float32 whatever the user has chosen for the model's products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from geocont.linalg import exact_subspace, full_precision, leading_subspace, svd_by_gram
from geocont.manifolds import DGram, Stiefel
from geocont.measures.attention import head_totals, logit_scale
from geocont.measures.continuity import full_table, gram_cosine, light_table
from geocont.optim import ManifoldMuon


class Products(TorchDispatchMode):
    """Notes in which precision products of float32 are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func) and args[0].dtype != torch.float64:
            self.seen.add(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def _step(manifold: str, solver: Literal["reweighted", "projected"]) -> Callable[[Tensor], Any]:
    def step(w: Tensor) -> None:
        parameter = Parameter(w[0].clone())
        optimizer = ManifoldMuon([parameter], lr=0.1, manifold=manifold, solver=solver)
        parameter.grad = w[1].clone()
        optimizer.step()

    return step


WORK: dict[str, Callable[[Tensor], Any]] = {
    "leading_subspace": leading_subspace,
    "exact_subspace": exact_subspace,
    "svd_by_gram": svd_by_gram,
    "light_table": light_table,
    "full_table": full_table,
    "gram_cosine": gram_cosine,
    "head_totals": lambda w: head_totals(w[None], w[None]),
    "logit_scale": lambda w: logit_scale(w[0], w[1], 2, 2),
    "residual": Stiefel().residual,
    "tangent_residual": lambda w: DGram().tangent_residual(w[0], w[1]),
    "step on Stiefel": _step("stiefel", "reweighted"),
    "step on DGram": _step("dgram", "projected"),
}


@pytest.mark.parametrize("name", WORK)
def test_what_needs_all_digits_computes_with_all(name: str) -> None:
    """Lightning recommends TF32 on GPUs, whose three digits would leave constraints and measures at 1e-3."""
    w = torch.randn(2, 96, 80, generator=torch.Generator().manual_seed(0))
    torch.set_float32_matmul_precision("high")
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        WORK[name](w)
    assert products.seen == {"highest"}
    assert torch.get_float32_matmul_precision() == "high"


def test_backends_set_one_by_one_are_put_back() -> None:
    """Torch refuses to speak of all backends at once to a user who has set one of them by its own name."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new"):
        torch.get_float32_matmul_precision()
    with full_precision():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_what_was_chosen_survives_an_error() -> None:
    """A failed measurement must not slow the rest of the training down."""
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(ValueError, match="takes"):
        leading_subspace(torch.zeros(3))
    assert torch.get_float32_matmul_precision() == "medium"

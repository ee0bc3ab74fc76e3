"""Polar factors and inverse square roots against float64."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from geocont.linalg.polar import SCHEDULES, THREAD_SIDE, eigh, inverse_sqrt, msign, schedule

METHODS = ["polar_express", "newton_schulz", "muon", "eigh"]
#: Largest distance of singular values from one, for condition numbers up to 100.
ACCURACY = {"polar_express": 2e-5, "newton_schulz": 2e-5, "muon": 0.33, "eigh": 1e-3}


def with_condition(condition: float, *shape: int, seed: int = 0) -> Tensor:
    """Matrices ``shape`` in float64 whose singular values are log-spaced from 1 down to 1 / condition."""
    generator = torch.Generator().manual_seed(seed)
    m, n = shape[-2:]
    r = min(m, n)
    u = torch.linalg.qr(torch.randn(*shape[:-2], m, r, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(*shape[:-2], n, r, generator=generator, dtype=torch.float64))[0]
    return (u * torch.logspace(0, -math.log10(condition), r, dtype=torch.float64)) @ v.mT


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh


def distance_from_one(x: Tensor) -> float:
    return float((torch.linalg.svdvals(x.double()) - 1).abs().max())


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24), (96, 32), (3, 16, 48), (2, 2, 20, 8), (5, 1), (1, 1)])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_polar_factor(method: str, shape: tuple[int, ...]) -> None:
    """Protects orientation and batching: rows and columns are not confused, whatever is longer."""
    x = with_condition(100, *shape)
    given = x.float()
    before = given.clone()
    y = msign(given, method)
    assert y.shape == x.shape
    assert y.dtype == torch.float32
    assert torch.equal(given, before)
    assert distance_from_one(y) <= ACCURACY[method]
    if method != "muon":  # whose singular values differ from one, so that entries do
        torch.testing.assert_close(y.double(), polar(given), atol=ACCURACY[method], rtol=0.0)
    inner = polar(given).mT @ y.double()
    torch.testing.assert_close(inner, inner.mT, atol=1e-4, rtol=0.0)  # U V^T's own U and V, not turned


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_equals_its_matrices_one_by_one(method: str) -> None:
    """Protects the batch: a matrix's answer does not depend on its neighbours or their scale."""
    x = with_condition(50, 3, 24, 12).float() * torch.tensor([1e-6, 1.0, 1e5])[:, None, None]
    together = msign(x, method)
    for i in range(3):
        torch.testing.assert_close(together[i], msign(x[i], method), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_goes_in_and_comes_out(method: str) -> None:
    """Protects gradients in bfloat16: the answer has their type, and an accuracy of the type's own rounding."""
    x = with_condition(10, 2, 48, 16).bfloat16()
    y = msign(x, method)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, msign(x.float(), method).bfloat16())
    assert distance_from_one(y) <= ACCURACY[method] + 1e-2


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "muon"])
def test_products_in_bfloat16_do_not_blow_up(method: str) -> None:
    """Protects accelerators: bfloat16 rounding must not push a singular value out of the iteration's basin."""
    x = with_condition(1e4, 4, 96, 32).float()
    largest = torch.linalg.svdvals(msign(x, method, dtype=torch.bfloat16).double()).max()
    assert 0.95 <= largest <= (1.25 if method == "muon" else 1.02)
    assert not torch.equal(msign(x, method, dtype=torch.bfloat16), msign(x, method))


@pytest.mark.parametrize("scale", [1e-20, 1e-8, 3.0, 1e4])
@pytest.mark.parametrize("method", METHODS)
def test_the_scale_does_not_matter(method: str, scale: float) -> None:
    """Protects small gradients, whose squares vanish in float32, and large ones, whose squares overflow."""
    x = with_condition(50, 48, 16).float()
    torch.testing.assert_close(msign(x * scale, method), msign(x, method), atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_stays_zero_and_a_nan_stays_visible(method: str, dtype: torch.dtype) -> None:
    """Protects weights from NaNs turned into zeros (nan_to_num in a published msign), and neighbours from NaNs."""
    x = with_condition(10, 5, 12, 8).to(dtype)
    alone = msign(x, method)
    x[0], x[1, 3, 4], x[2, 0, 0], x[3, 1, 1] = 0.0, math.nan, math.inf, -math.inf
    for batch in (x, x.mT):
        y = msign(batch, method)
        assert (y[0] == 0).all()
        assert y[1:4].isnan().all()
        torch.testing.assert_close(y[4] if batch is x else y[4].mT, alone[4], atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_missing_rank_and_no_entries_are_fine(method: str) -> None:
    """Protects low-rank gradients: what is not there is not invented, and nothing is divided by zero."""
    a, b = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)), torch.eye(9)[:, :2]
    s = torch.linalg.svdvals(msign(a @ b.T, method).double())
    assert (s[:2] - 1).abs().max() <= ACCURACY[method]
    assert s[2:].max() <= 1e-3
    assert msign(torch.zeros(0, 5), method).shape == (0, 5)
    assert msign(torch.zeros(3, 4, 0), method).shape == (3, 4, 0)


def test_eight_steps_of_polar_express_do_for_a_condition_number_of_1e3() -> None:
    """Protects the coefficients: a wrong digit or a schedule sliced from the wrong end shows at once."""
    for condition in (1.0, 10.0, 100.0, 1e3):
        for shape in ((48, 16), (16, 48), (24, 24)):
            assert distance_from_one(msign(with_condition(condition, *shape).float(), steps=8)) <= 1e-3


def test_the_schedule_starts_at_its_start_and_repeats_its_end() -> None:
    """Protects the order of the coefficients: Amsel et al. 2025, Algorithm 1, with its safety of 1.01."""
    own = SCHEDULES["polar_express"]
    first = [8.28721201814563 / 1.01, -23.595886519098837 / 1.01**3, 17.300387312530933 / 1.01**5]
    assert list(schedule("polar_express", 1)[0]) == pytest.approx(first, rel=1e-12)
    five, twelve = schedule("polar_express", 5), schedule("polar_express", 12)
    assert five == twelve[:5]
    assert [c[0] * 1.01 for c in five] == pytest.approx([c[0] for c in own[:5]])
    assert [c[2] * 1.01**5 for c in five] == pytest.approx([c[2] for c in own[:5]])
    assert twelve[7:] == [(1.875, -1.25, 0.375)] * 5
    assert schedule("newton_schulz", 3) == [(1.875, -1.25, 0.375)] * 3
    assert schedule("muon", 2) == [(3.4445, -4.7750, 2.0315)] * 2


@pytest.mark.parametrize("steps", [5, 8, 10, 12])
def test_the_composed_polynomial_never_exceeds_one(steps: int) -> None:
    """Protects stability: singular values that rounding pushed to 1.01 come back instead of growing."""
    x = torch.linspace(0, 1.01, 20001, dtype=torch.float64)
    for a, b, c in schedule("polar_express", steps):
        x = a * x + b * x**3 + c * x**5
    assert x.min() >= 0
    assert x.max() <= (1 + 1e-5 if steps >= 8 else 1.13)  # after five steps it still swings around one
    assert x.max() >= 1 - 1e-5


def test_wrong_arguments_are_refused() -> None:
    """Protects the user from a misspelt method or an iteration that never runs."""
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match="method must be one of newton_schulz, muon, polar_express, eigh, got 'svd'"):
        msign(x, "svd")
    for steps in (0, -1):
        with pytest.raises(ValueError, match=f"steps must be at least 1, got {steps}"):
            msign(x, steps=steps)
        with pytest.raises(ValueError, match="steps"):
            schedule("muon", steps)


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("root", ["eigh", "newton_schulz"])
def test_inverse_square_roots_agree_with_float64(root: str, condition: float) -> None:
    """Protects both roots, in batches and at any scale: the one used on CPUs and the one used on accelerators."""
    x = with_condition(math.sqrt(condition), 3, 40, 20)
    s = x.mT @ x * torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)[:, None, None]
    values, vectors = torch.linalg.eigh(s)
    exact = (vectors * values.rsqrt()[..., None, :]) @ vectors.mT
    found = inverse_sqrt(s.float(), root)
    error = torch.linalg.matrix_norm(found.double() - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    assert error.max() <= 1e-6 * condition + 1e-6
    root_of_s = inverse_sqrt(s, root)
    product = root_of_s @ s @ root_of_s
    torch.testing.assert_close(product, torch.eye(20, dtype=torch.float64).expand(3, 20, 20), atol=1e-8, rtol=0.0)
    assert (inverse_sqrt(torch.zeros(2, 4, 4), root) == 0).all()


def test_eigenvalues_up_to_the_cut_count_as_zero() -> None:
    """Protects pseudo-inverses: rounding noise in a null space must not become the largest entry."""
    s = torch.diag(torch.tensor([4.0, 1.0, 1e-9, 0.0]))
    torch.testing.assert_close(inverse_sqrt(s, cut=1e-6), torch.diag(torch.tensor([0.5, 1.0, 0.0, 0.0])))
    assert inverse_sqrt(s)[2, 2] > 1e4


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("batch", [2, 5])
def test_eigh_of_a_batch_in_threads(batch: int) -> None:
    """What a thread does not inherit, whether gradients are recorded, has to travel with the work."""
    s = symmetric(batch, THREAD_SIDE)
    before = threading.active_count()
    values, vectors = eigh(s)
    assert threading.active_count() == before
    assert torch.allclose((vectors * values[:, None]) @ vectors.mT, s, atol=1e-4)
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            assert eigh(s.clone().requires_grad_())[0].requires_grad == recording


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("nan", [True, False])
def test_what_fails_in_float32_is_done_in_float64(nan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gram matrix of a gradient of rank 32 came out with NaN in two of its 256 eigenvalues, and no error."""
    s, real = symmetric(2, THREAD_SIDE), torch.linalg.eigh

    def fails(a: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = real(a)
        if a.dtype == torch.float32 and not nan:
            raise torch.linalg.LinAlgError("failed to converge")
        return (values, vectors * math.nan) if a.dtype == torch.float32 else (values, vectors)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, vectors = eigh(s)
    assert values.dtype == torch.float32
    assert torch.allclose((vectors * values[:, None]) @ vectors.mT, s, atol=1e-4)


def symmetric(batch: int, n: int) -> Tensor:
    x = torch.randn(batch, n, n, generator=torch.Generator().manual_seed(0))
    return (x + x.mT) / 2

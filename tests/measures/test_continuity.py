"""Continuity measures against a float64 oracle, and what they say of matrices that have no directions."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from geocont.measures.continuity import (
    DEFINED_GAP,
    chance,
    cosine,
    full_table,
    gram_cosine,
    leading_alignment,
    light_table,
    relative_norm,
    sigma2,
    summarise,
)


def stack(m: int, n: int, layers: int = 4, gap: float = 1.3, seed: int = 0) -> Tensor:
    """Layers with a shared part, so that the measures are neither 0 nor 1, and well separated singular values."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(m, n, generator=generator, dtype=torch.float64)
    result = []
    for _ in range(layers):
        u, _, vh = torch.linalg.svd(shared + 0.7 * torch.randn(m, n, generator=generator, dtype=torch.float64), False)
        s = gap ** -torch.arange(min(m, n), dtype=torch.float64)
        result.append(u @ torch.diag(s) @ vh)
    return torch.stack(result)


def oracle(w: Tensor) -> dict[str, Tensor]:
    """The definitions, written out with a float64 SVD, pair by pair."""
    w = w.double()
    result: dict[str, list[float]] = {}
    for a, b in pairwise(w):
        (ua, sa, va), (ub, sb, vb) = (torch.linalg.svd(x, full_matrices=False) for x in (a, b))
        va, vb = va.T, vb.T
        pair = {"v1": abs(va[:, 0] @ vb[:, 0]), "u1": abs(ua[:, 0] @ ub[:, 0])}
        pair["topk_in"] = ((va[:, :5].T @ vb[:, :5]) ** 2).sum() / 5
        pair["topk_out"] = ((ua[:, :5].T @ ub[:, :5]) ** 2).sum() / 5
        pair["cosine"] = (a * b).sum() / a.norm() / b.norm()
        for side, x, y in (("in", va, vb), ("out", ua, ub)):
            pair[f"sigma2_{side}"] = sum(sa[i] ** 2 * abs(x[:, i] @ y[:, i]) for i in range(len(sa))) / (sa**2).sum()
            ga, gb = x @ torch.diag(sa**2) @ x.T, y @ torch.diag(sb**2) @ y.T
            ga, gb = (g - g.trace() / len(g) * torch.eye(len(g), dtype=g.dtype) for g in (ga, gb))
            pair[f"gram_{side}"] = (ga * gb).sum() / ga.norm() / gb.norm()
        for name, value in pair.items():
            result.setdefault(name, []).append(float(value))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in result.items()}


@pytest.mark.parametrize(("m", "n"), [(48, 48), (96, 32), (32, 96)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tables_equal_the_oracle(m: int, n: int, dtype: torch.dtype) -> None:
    w = stack(m, n).to(dtype)
    expected = oracle(w)
    measured = light_table(w).values | full_table(w)
    for name, values in expected.items():
        assert torch.allclose(measured[name].double(), values, atol=2e-3), name
    assert torch.allclose(measured["gap"].double(), torch.tensor(1.3, dtype=torch.float64), rtol=1e-2)
    assert measured["defined"].tolist() == [1, 1, 1]


def test_measures_do_not_depend_on_signs_or_scale() -> None:
    w = stack(40, 40).float()
    signs = torch.tensor([1e-20, -1.0, 1e15, -3.0])[:, None, None]
    plain, scaled = (light_table(x).values | full_table(x) for x in (w, w * signs))
    for name in ("v1", "u1", "topk_in", "topk_out", "gap", "sigma2_in", "sigma2_out", "gram_in", "gram_out"):
        assert torch.allclose(plain[name], scaled[name], atol=1e-3), name
    assert torch.allclose(plain["cosine"].abs(), scaled["cosine"].abs(), atol=1e-5)


def test_random_matrices_are_at_the_chance_level() -> None:
    w = torch.randn(200, 128, 128, generator=torch.Generator().manual_seed(0))
    measured = light_table(w).values | full_table(w)
    for name in ("v1", "u1", "topk_in", "topk_out", "sigma2_in", "gram_in", "gram_out", "cosine"):
        assert measured[name].mean() == pytest.approx(chance(name, 128), abs=0.02), name
    assert chance("gap", 128) is None


def test_orthonormal_matrices_have_no_direction_and_no_gram_but_everything_else() -> None:
    w = torch.linalg.qr(torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0)))[0]
    values = light_table(w).values | full_table(w)
    assert values["defined"].tolist() == [0, 0]
    assert (values["gap"] < DEFINED_GAP).all()
    assert values["gram_in"].isnan().all()
    assert values["gram_out"].isnan().all()
    means, skipped = summarise(values)
    assert "gram_in" not in means
    assert "gram_out" not in means
    assert skipped == 4
    assert all(math.isfinite(value) for value in means.values())


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_bad_matrix_spoils_only_its_own_pairs(bad: float) -> None:
    """One NaN, Inf or zero layer once turned every measure of a projection into NaN."""
    w = stack(40, 40, layers=5).float()
    clean = light_table(w).values | full_table(w)
    w[1] = bad if bad == 0 else w[1].clone().index_fill_(0, torch.tensor([3]), bad)
    values = light_table(w).values | full_table(w)
    for name, value in values.items():
        if name == "gap":
            assert value.isfinite().tolist() == [True, False, True, True, True]
        else:
            assert value.isfinite().tolist() == [False, False, True, True], name
            assert torch.allclose(value[2:], clean[name][2:], atol=1e-3), name
    means, skipped = summarise(values)
    assert all(math.isfinite(value) for value in means.values())
    assert skipped == 2 * (len(values) - 1) + 1


def test_matrices_of_rank_one_and_of_one_row_are_measured() -> None:
    a, b = torch.randn(6, 8), torch.randn(6, 1)
    rank_one = torch.stack([a[:, :1] @ a[:1], b @ a[1:2]])
    values = light_table(rank_one).values | full_table(rank_one)
    assert values["v1"].isfinite().all()
    assert values["gap"].isfinite().all()
    one_row = light_table(torch.randn(3, 1, 8)).values
    assert one_row["u1"].tolist() == pytest.approx([1, 1])
    assert light_table(torch.randn(1, 4, 4)).values["v1"].shape == (0,)


def test_sigma2_pairs_equal_indices_and_weights_with_the_lower_layer() -> None:
    s = torch.tensor([[2.0, 1.0], [9.0, 1.0]])
    swapped = torch.stack([torch.eye(2), torch.eye(2).flip(1)])
    assert sigma2(s, torch.stack([torch.eye(2)] * 2)).item() == pytest.approx(1)
    assert sigma2(s, swapped).item() == pytest.approx(0)


def test_gram_of_a_wide_matrix_needs_no_large_product() -> None:
    w = stack(16, 96).float()
    assert torch.allclose(gram_cosine(w).double(), oracle(w)["gram_in"], atol=1e-4)


def test_relative_norm_and_alignment() -> None:
    w0 = torch.randn(4, 4)
    norms = relative_norm([0.5 * w0, w0], [w0, torch.zeros(4, 4)])
    assert norms[0].item() == pytest.approx(0.5)
    assert norms[1].isnan()
    aligned = leading_alignment(torch.stack([w0, w0]), torch.stack([-3 * w0, torch.zeros(4, 4)]))
    assert aligned[0].item() == pytest.approx(1, abs=1e-5)
    assert aligned[1].isnan()
    assert cosine(torch.stack([w0, -w0]), torch.ones(2)).item() == pytest.approx(-1, abs=1e-6)


def test_equal_matrices_of_low_rank_overlap_fully() -> None:
    """Divided by k = 5 whatever the rank, the gradients of one sample looked as if they had nothing in common."""
    for rank in (1, 3, 5):
        w = (torch.randn(70, rank) @ torch.randn(rank, 70)).expand(2, -1, -1)
        values = light_table(w).values
        assert values["topk_in"].item() == pytest.approx(1, abs=1e-4)


def test_tables_of_tiny_and_huge_matrices_are_those_of_ordinary_ones() -> None:
    w = stack(40, 40).float()
    plain = light_table(w).values | full_table(w, light_table(w).subspace)
    for scale in (1e-23, 1e18):
        scaled = light_table(w * scale).values | full_table(w * scale, light_table(w * scale).subspace)
        for name, value in plain.items():
            assert torch.allclose(scaled[name], value, atol=1e-3), (name, scale)


def test_full_tables_of_low_rank_equal_the_oracle() -> None:
    """Gradients of small batches: a fifth of the directions, most of the weight in the first ones."""
    generator = torch.Generator().manual_seed(0)
    shared, own = (torch.randn(*size, 25, generator=generator) for size in ((128,), (4, 128)))
    u, v = torch.linalg.qr(shared + 0.7 * own)[0], torch.linalg.qr(shared + 0.7 * own.flip(0))[0]
    w = (u * 1.3 ** -torch.arange(25)) @ v.mT
    measured = full_table(w, light_table(w).subspace)
    expected = oracle(w)
    for name, values in measured.items():
        assert torch.allclose(values.double(), expected[name], atol=2e-3), name
    assert len(measured) == 4

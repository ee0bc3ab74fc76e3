"""Leading singular subspaces against the float64 SVD."""

import math
import time

import pytest
import torch
from torch import Tensor

from geocont.linalg import LeadingSubspace, exact_subspace, leading_subspace, svd_by_gram
from geocont.linalg import subspace as module

SPECTRA = ["power_half", "power_one", "marchenko_pastur", "spikes", "flat"]


def matrix(spectrum: str, m: int, n: int, seed: int = 0) -> Tensor:
    """A matrix with s1 = 1.02 s2; ``flat`` and ``spikes`` have six values 1.02 apart over a bulk."""
    generator = torch.Generator().manual_seed(seed)
    r = min(m, n)
    index = torch.arange(1, r + 1, dtype=torch.float64)
    if spectrum.startswith("power"):
        s = index ** (-0.5 if spectrum == "power_half" else -1.0)
        s[0] = 1.02 * s[1]
    elif spectrum == "flat":
        s = torch.ones(r, dtype=torch.float64)
        s[:6] = 1.02 ** torch.arange(6, 0, -1, dtype=torch.float64)
    else:
        s = torch.linalg.svdvals(torch.randn(m, n, generator=generator, dtype=torch.float64))
        if spectrum == "spikes":
            s[:6] = 1.3 * s[0] * 1.02 ** torch.arange(5, -1, -1, dtype=torch.float64)
        else:
            s[0] = 1.02 * s[1]
    u, v = (torch.linalg.qr(torch.randn(d, r, generator=generator, dtype=torch.float64))[0] for d in (m, n))
    return ((u * s) @ v.T).float()


def moved(w: Tensor, share: float = 0.01) -> Tensor:
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(5))
    return w + share * noise * (w.norm() / noise.norm())


def check(result: LeadingSubspace, w: Tensor, k: int = 6) -> None:
    """v1 and u1 to 1e-3 and the (k-1)-space to 1e-2 wherever they are defined; s to 2e-2; orthonormal vectors."""
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    torch.testing.assert_close(result.s.double(), s[..., :k], rtol=2e-2, atol=0.0)
    for mine, true in ((result.u.double(), u), (result.v.double(), vh.mT)):
        assert mine.shape == true[..., :k].shape
        eye = torch.eye(k, dtype=torch.float64).expand(*w.shape[:-2], k, k)
        torch.testing.assert_close(mine.mT @ mine, eye, atol=1e-3, rtol=0.0)
        error = 1 - (mine[..., 0] * true[..., 0]).sum(-1).abs()
        assert (error[s[..., 0] >= 1.0199 * s[..., 1]] < 1e-3).all()
        error = 1 - (mine[..., : k - 1].mT @ true[..., : k - 1]).square().sum((-1, -2)) / (k - 1)
        assert (error[s[..., k - 2] >= 1.0199 * s[..., k - 1]] < 1e-2).all()
    assert (result.residual <= module.TOLERANCE).all()


@pytest.mark.parametrize("shape", [(128, 300), (300, 128), (160, 160)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_cold_and_warm_agree_with_the_float64_svd(spectrum: str, shape: tuple[int, int]) -> None:
    w = matrix(spectrum, *shape)
    before = w.clone()
    cold = leading_subspace(w)
    check(cold, w)
    assert torch.equal(w, before)
    check(leading_subspace(moved(w), start=cold.start), moved(w))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_wide_layer_is_certified_by_iteration(spectrum: str) -> None:
    w = matrix(spectrum, 320, 960)
    result = leading_subspace(w)
    check(result, w)
    assert not result.exact
    assert not leading_subspace(moved(w), start=result.start).exact


def test_a_batch_equals_its_matrices_one_by_one() -> None:
    w = torch.stack([matrix(spectrum, 144, 200, seed) for seed, spectrum in enumerate(SPECTRA)])
    result = leading_subspace(w)
    check(result, w)
    for i in range(len(w)):
        alone = leading_subspace(w[i])
        torch.testing.assert_close(result.s[i, 0], alone.s[0], rtol=1e-3, atol=0.0)
    warm = leading_subspace(w, start=result.start)
    check(warm, w)
    assert warm.start.shape == result.start.shape == (5, 144, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    w = matrix("spikes", 128, 160).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, twin = leading_subspace(w), leading_subspace(w.detach().float())
    assert torch.equal(result.u, twin.u)
    assert result.u.dtype == torch.float32
    assert not result.u.requires_grad
    assert w.dtype == dtype
    assert w.grad is None


def test_float64_stays_float64() -> None:
    w = matrix("power_one", 96, 200).double()
    result = leading_subspace(w)
    assert result.v.dtype == torch.float64
    check(result, w)


@pytest.mark.parametrize(
    ("shape", "k"), [((1, 1), 6), ((5, 3), 6), ((3, 40, 64), 2), ((70, 60), 1), ((1, 900), 6), ((80, 80), 80)]
)
def test_small_matrices_and_large_k_are_dense(shape: tuple[int, ...], k: int) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = leading_subspace(w, k)
    k = min(k, *shape[-2:])
    assert result.u.shape == (*shape[:-1], k)
    torch.testing.assert_close(result.s, torch.linalg.svdvals(w)[..., :k], rtol=1e-3, atol=1e-3)
    again = leading_subspace(w, k, start=result.start)
    torch.testing.assert_close(again.s, result.s, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_small_k_iterates_too(k: int) -> None:
    w = matrix("spikes", 200, 200)
    result = leading_subspace(w, k)
    assert 1 - (result.u[:, 0] @ exact_subspace(w).u[:, 0]).abs() < 1e-3


@pytest.mark.parametrize("size", [48, 128])
def test_bad_matrices_do_not_poison_the_others(size: int) -> None:
    w = torch.stack([matrix("spikes", size, size, seed) for seed in range(5)])
    w[0], w[2, 3, 4], w[3, 0, 0] = 0.0, math.nan, math.inf
    for result in (leading_subspace(w), exact_subspace(w)):
        assert torch.equal(result.residual.isnan(), torch.tensor([False, False, True, True, False]))
        assert (result.s[0] == 0).all()
        assert result.s[2:4].isnan().all()
        assert (result.u[[0, 2, 3]] == 0).all()
        assert (result.v[[0, 2, 3]] == 0).all()
        good = torch.tensor([1, 4])
        check(LeadingSubspace(result.u[good], result.s[good], result.v[good], result.residual[good], *[w] * 2), w[good])
    repaired = torch.stack([matrix("spikes", size, size, seed) for seed in range(5)])
    check(leading_subspace(repaired, start=leading_subspace(w).start), repaired)


@pytest.mark.parametrize("scale", [1e-20, 1e18])
@pytest.mark.parametrize("size", [60, 128])
def test_scale_does_not_matter(scale: float, size: int) -> None:
    w = matrix("spikes", size, size + 10)
    batch = torch.stack([w, w * scale])
    cold = leading_subspace(batch)
    for result in (cold, leading_subspace(batch, start=cold.start)):
        torch.testing.assert_close(result.s[1] / scale, result.s[0], rtol=1e-4, atol=0.0)
        assert (result.u[0, :, 0] @ result.u[1, :, 0]).abs() > 1 - 1e-4
        assert (result.v[0, :, 0] @ result.v[1, :, 0]).abs() > 1 - 1e-5


@pytest.mark.parametrize("shape", [(40, 50), (128, 150)])
def test_rank_one_and_its_missing_triplets(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(shape[0], generator=generator), torch.randn(shape[1], generator=generator)
    result = leading_subspace(torch.outer(a, b))
    assert result.residual <= module.TOLERANCE
    assert (result.u[:, 0] @ a).abs() / a.norm() > 1 - 1e-5
    assert (result.v[:, 0] @ b).abs() / b.norm() > 1 - 1e-5
    torch.testing.assert_close(result.s[0], a.norm() * b.norm())
    assert (result.s[1:] < 1e-4 * result.s[0]).all()


def test_orthonormal_matrices_converge_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.linalg.qr(torch.randn(4, 200, 128, generator=torch.Generator().manual_seed(0)))[0]
    monkeypatch.setattr(module, "_dense", None)
    cold = leading_subspace(q)
    calls = []
    gram_times = module._gram_times
    monkeypatch.setattr(module, "_gram_times", lambda *a: calls.append(1) or gram_times(*a))
    warm = leading_subspace(q, start=cold.start)
    assert len(calls) == module.PROBE_POWER
    for result in (cold, warm):
        torch.testing.assert_close(result.s, torch.ones_like(result.s), rtol=1e-3, atol=0.0)
        torch.testing.assert_close(result.u.mT @ result.u, torch.eye(6).expand(4, 6, 6), rtol=0.0, atol=1e-3)


def test_diagonal_and_block_matrices_from_a_start_that_is_invariant() -> None:
    """The old block is exactly invariant, its residual is zero, and the new leading direction is outside it."""
    old = torch.linspace(1.0, 0.2, 200)
    new = old.clone()
    new[150:156] = 1.5 * 1.02 ** torch.arange(6, 0, -1)
    start = leading_subspace(old.diag()).start
    exact_start = torch.eye(200)[:, : start.shape[1]].contiguous()
    for block in (start, exact_start):
        check(leading_subspace(new.diag(), start=block), new.diag())
    blocks = torch.block_diag(matrix("spikes", 100, 100, 1), 2 * matrix("spikes", 100, 100, 2))
    start = leading_subspace(torch.block_diag(3 * matrix("spikes", 100, 100, 1), matrix("spikes", 100, 100, 2))).start
    check(leading_subspace(blocks, start=start), blocks)


@pytest.mark.parametrize("size", [1.4, 2.0, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_sudden_new_leading_direction_is_found(size: float, seed: int) -> None:
    """A Gaussian matrix gets a rank-one part orthogonal to all that the block knows, ``size`` times its norm."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(256, 256, generator=generator) / 32
    u, s, vh = torch.linalg.svd(w)
    index = 100 + seed
    start = exact_subspace(w).start
    jumped = w + (size * s[0] - s[index]) * torch.outer(u[:, index], vh[index])
    result = leading_subspace(jumped, start=start)
    assert 1 - (result.u[:, 0] @ u[:, index]).abs() < 1e-3
    assert 1 - (result.v[:, 0] @ vh[index]).abs() < 1e-3


def test_a_long_chain_of_warm_starts_stays_orthonormal_and_certified() -> None:
    w = matrix("spikes", 128, 128)
    result = leading_subspace(w)
    for _ in range(100):
        w = moved(w, 1e-3)
        result = leading_subspace(w, start=result.start)
    check(result, w)
    torch.testing.assert_close(result.start.mT @ result.start, torch.eye(8), atol=1e-4, rtol=0.0)


def test_a_start_of_pure_chance_is_as_good_as_none() -> None:
    w = matrix("marchenko_pastur", 150, 150)
    start = torch.linalg.qr(torch.randn(150, 8, generator=torch.Generator().manual_seed(3)))[0]
    check(leading_subspace(w, start=start), w)


def test_the_random_state_is_untouched_and_calls_repeat() -> None:
    w = matrix("marchenko_pastur", 128, 128)
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first = leading_subspace(w)
    second = leading_subspace(w)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.u, second.u)
    assert torch.equal(leading_subspace(w, start=first.start).v, leading_subspace(w, start=first.start).v)


def test_what_is_not_certified_goes_through_the_dense_fallback() -> None:
    w = torch.stack([matrix("marchenko_pastur", 128, 128), matrix("power_one", 128, 128)])
    result = leading_subspace(w, tolerance=0.0)
    assert result.exact.all()
    assert (result.residual == 0).all()
    check(result, w)


@pytest.mark.parametrize("shape", [(40, 90), (3, 90, 40), (50, 50)])
def test_svd_by_gram_is_an_svd(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-20
    u, s, v = svd_by_gram(w)
    torch.testing.assert_close((u * (s * 1e20)[..., None, :]) @ v.mT, w * 1e20, atol=1e-3, rtol=0.0)
    torch.testing.assert_close(s * 1e20, torch.linalg.svdvals(w * 1e20), atol=2e-2, rtol=1e-3)


def test_svd_by_gram_guards_rank_and_values() -> None:
    w = torch.zeros(3, 12, 20)
    w[1, :4] = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    w[2, 0, 0] = math.nan
    u, s, v = svd_by_gram(w)
    assert u.isfinite().all()
    assert v.isfinite().all()
    assert (s[0] == 0).all()
    assert s[2].isnan().all()
    assert (s[1, 4:] < 1e-3 * s[1, 0]).all()
    torch.testing.assert_close((u[1] * s[1]) @ v[1].T, w[1], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("shape", [(256, 256), (128, 300), (300, 128)])
@pytest.mark.parametrize("rank", [1, 20])
def test_svd_by_gram_of_low_rank_brings_fewer_triplets(shape: tuple[int, int], rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, shape[0], rank, generator=generator) @ torch.randn(4, rank, shape[1], generator=generator)
    w *= torch.tensor([1.0, 1e-20, 1e15, -1.0])[:, None, None]
    u, s, v = svd_by_gram(w, low_rank=True)
    assert s.shape[1] == v.shape[2] == min(shape) // 4
    scale = w.abs().amax((1, 2), keepdim=True)
    torch.testing.assert_close((u * (s / scale[:, 0])[:, None, :]) @ v.mT, w / scale, atol=1e-4, rtol=0.0)
    assert (s[:, rank:] <= 1e-4 * s[:, :1]).all()


def test_svd_by_gram_of_what_is_not_of_low_rank_is_whole() -> None:
    low = torch.outer(torch.randn(128), torch.randn(128))
    for other in (matrix("power_one", 128, 128), torch.zeros(128, 128), torch.full((128, 128), math.nan)):
        w = torch.stack([low, other])
        for part, expected in zip(svd_by_gram(w, low_rank=True), svd_by_gram(w), strict=True):
            assert torch.equal(part.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="takes"):
        leading_subspace(torch.randn(4))
    with pytest.raises(ValueError, match="start"):
        leading_subspace(torch.randn(128, 128), start=torch.randn(128, 3))


@pytest.mark.slow
def test_it_is_faster_than_the_dense_path() -> None:
    w = matrix("spikes", 768, 3072)
    start = leading_subspace(w).start
    tasks = (lambda: leading_subspace(w), lambda: leading_subspace(w, start=start), lambda: torch.linalg.eigh(w @ w.T))
    times: list[list[float]] = [[], [], []]
    for _ in range(7):
        for task, record in zip(tasks, times, strict=True):
            begin = time.perf_counter()
            task()
            record.append(time.perf_counter() - begin)
    cold, warm, dense = (sorted(record)[3] for record in times)
    assert dense > 1.5 * cold
    assert dense > 2 * warm


def test_rank_deficient_matrices_do_not_fail() -> None:
    """LAPACK's float32 eigh gives up on Gram matrices with hundreds of equal (zero) values, as dead ReLUs make them."""
    generator = torch.Generator().manual_seed(0)
    w = torch.zeros(4, 256, 256)
    for i, rank in enumerate((1, 3, 25, 60)):
        w[i, :134] = torch.randn(134, rank, generator=generator) @ torch.randn(rank, 256, generator=generator)
        w[i] *= 10.0 ** torch.arange(0, -12, -12 / 256)[:256, None]
    u, s, v = svd_by_gram(w)
    assert all(part.isfinite().all() for part in (u, s, v))
    reference = torch.linalg.svdvals(w.double())
    assert torch.allclose(s[:, 0].double(), reference[:, 0], rtol=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        real = torch.linalg.eigh

        def fails_in_float32(a: Tensor) -> tuple[Tensor, Tensor]:
            if a.dtype == torch.float32:
                raise torch.linalg.LinAlgError("failed to converge")
            return real(a)

        patch.setattr(torch.linalg, "eigh", fails_in_float32)
        assert torch.allclose(svd_by_gram(w)[1][:, 0], s[:, 0], rtol=1e-4)


def test_ill_defined_vectors_of_a_batch_are_not_alike() -> None:
    """All matrices once started from the same random rows: unrelated random layers then looked aligned."""
    w = torch.randn(60, 128, 128, generator=torch.Generator().manual_seed(0))
    v = leading_subspace(w).v[..., 0]
    exact = exact_subspace(w).v[..., 0]
    measured, expected = ((x[:-1] * x[1:]).sum(-1).abs().mean() for x in (v, exact))
    assert abs(measured - expected) < 0.02

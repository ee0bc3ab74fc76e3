"""Saturation of attention against the definitions written out in float64, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from geocont.measures import attention
from geocont.measures.attention import (
    ROW_MEASURES,
    TOTALS,
    head_totals,
    head_values,
    logit_scale,
    merge_totals,
    sampled_rows,
    summarise_heads,
)

B, H, H_KV, T, D = 3, 4, 2, 33, 8


def heads_of(seed: int = 0, scale: float = 1.5, length: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, length, D, generator=generator, dtype=torch.float64)
    return scale * q, torch.randn(B, H_KV, length, D, generator=generator, dtype=torch.float64)


def oracle(q: Tensor, k: Tensor, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    """Totals ``(H, 7)`` by the definitions; ``visible`` and ``bias`` are ``(B, H, T, S)``."""
    totals = torch.zeros(q.shape[1], len(TOTALS), dtype=torch.float64)
    for b in range(len(q)):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = visible[b, h, i]
                if seen.sum() < 2:
                    continue
                z = (k[b, h * k.shape[1] // q.shape[1]] @ q[b, h, i])[seen] / math.sqrt(q.shape[-1])
                p = torch.softmax(z if bias is None else z + bias[b, h, i][seen], 0)
                entropy = -(p * p.log()).sum() / math.log(len(p))
                jacobian = torch.linalg.matrix_norm(p.diag() - p[:, None] * p)
                values = torch.stack([entropy, p.max(), (p.max() > 0.99).double(), jacobian])
                totals[h, 0] += 1
                totals[h, 2] = torch.maximum(totals[h, 2], z.abs().max())
                totals[h, 3:] += values
    return totals


def masks(kind: str) -> tuple[dict[str, object], Tensor, Tensor | None]:
    """Options for :func:`head_totals`, and what the oracle makes of them."""
    generator = torch.Generator().manual_seed(5)
    causal = torch.ones(T, T).tril().bool().expand(B, H, T, T)
    drawn = torch.rand(B, 1, T, T, generator=generator) > 0.4
    if kind == "causal":
        return {"diagonal": 0}, causal, None
    if kind == "bool":
        return {"mask": drawn}, drawn.expand(B, H, T, T), None
    if kind == "none":
        return {}, torch.ones(B, H, T, T).bool(), None
    bias = torch.randn(1, H, T, T, generator=generator, dtype=torch.float64).expand(B, H, T, T)
    mask = bias.masked_fill(~drawn, -math.inf)
    return {"mask": mask, "diagonal": 0}, drawn & causal, bias


@pytest.mark.parametrize("kind", ["causal", "bool", "float", "none"])
@pytest.mark.parametrize("block", [1, 8, 33, 64, None])
def test_blocks_of_rows_equal_the_dense_definitions(kind: str, block: int | None) -> None:
    q, k = heads_of()
    options, visible, bias = masks(kind)
    expected = oracle(q, k, visible, bias)
    assert (expected[:, 0] > 0).all()
    found = head_totals(q, k, block=block, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    single = head_totals(q.float(), k.float(), block=block, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(single.double(), expected, rtol=1e-6, atol=1e-5)


def test_blocks_of_sequences_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = heads_of()
    options, _, _ = masks("float")
    whole = head_totals(q, k, **options)  # type: ignore[arg-type]
    for entries in (1, H * T * 5, H * T * T, 2 * H * T * T):
        monkeypatch.setattr(attention, "ENTRIES", entries)
        torch.testing.assert_close(head_totals(q, k, **options), whole, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def test_uniform_causal_attention_has_entropy_one() -> None:
    """Rows of T = 4 have entropies log 1, log 2, log 3, log 4; the first has nothing to be spread over."""
    q = torch.zeros(1, 1, 4, 4)
    for row in range(1, 4):
        totals = head_totals(q, q, diagonal=0, rows=torch.tensor([row]))
        assert head_values(totals)["entropy"].item() * math.log(row + 1) == pytest.approx(math.log(row + 1))
    totals = head_totals(q, q, diagonal=0)
    values = head_values(totals)
    assert totals[0, 0] == 3
    assert values["entropy"].item() == pytest.approx(1, abs=1e-6)
    assert values["top_probability"].item() == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert values["jacobian"].item() == pytest.approx(sum(math.sqrt(1 / n - 1 / n**2) for n in (2, 3, 4)) / 3)
    alone = head_totals(q, q, diagonal=0, rows=torch.tensor([0]))
    assert not alone.any()
    assert head_values(alone)["entropy"].isnan().all()


def test_max_logit_includes_the_scale_and_two_equal_keys_share() -> None:
    q = torch.zeros(1, 1, 2, 4)
    q[..., 0] = 10
    values = head_values(head_totals(q, q))
    assert values["max_logit"].item() == 50
    assert values["top_probability"].item() == 0.5
    assert values["jacobian"].item() == pytest.approx(0.5)
    assert head_values(head_totals(q, -q))["max_logit"].item() == 50
    assert head_values(head_totals(q, q, scale=1.0))["max_logit"].item() == 100


@pytest.mark.parametrize("margin", [5.0, 20.0, 40.0, 80.0, 300.0])
def test_saturated_rows_keep_their_digits(margin: float) -> None:
    """In float32, 1 - p of a saturated row is 0, and sums of p^2 and p^3 cancel to noise of 3e-4."""
    q = torch.full((1, 1, 1, 1), margin)
    k = torch.tensor([1.0, 0.0, 0.0])[None, None, :, None]
    rest = 2 * math.exp(-margin)
    a, e = 1 / (1 + rest), math.exp(-margin) / (1 + rest)
    jacobian = math.sqrt((a * rest * a) ** 2 + 2 * (e * (1 - e)) ** 2 + 4 * (a * e) ** 2 + 2 * e**4)
    entropy = (math.log1p(rest) + rest * a * margin) / math.log(3)
    values = head_values(head_totals(q, k, scale=1.0))
    assert values["jacobian"].item() == pytest.approx(jacobian, rel=1e-5, abs=1e-30)
    assert values["entropy"].item() == pytest.approx(entropy, rel=1e-5, abs=1e-30)
    assert values["saturated"].item() == (margin > 5)


@pytest.mark.parametrize("hide", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_padding_takes_no_part_however_a_model_hides_it(hide: float) -> None:
    """-inf made 0 * log 0, finfo.min a largest logit of 3e38; rows of padding see others but are no tokens."""
    q, k = heads_of()
    lengths = [33, 20, 7]
    keep = torch.stack([torch.arange(T) < n for n in lengths])[:, None, None]  # (B, 1, 1, T)
    mask = torch.zeros(B, 1, 1, T).masked_fill(~keep, hide)
    visible = (keep & keep.mT).expand(B, H, T, T)
    for given in (keep, mask):
        totals = head_totals(q, k, mask=given)
        torch.testing.assert_close(totals, oracle(q, k, visible), rtol=1e-10, atol=1e-10)
    causal = torch.ones(T, T).tril().bool()
    both = head_totals(q, k, mask=torch.where(keep & causal, 0.0, hide))
    torch.testing.assert_close(both, oracle(q, k, visible & causal), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_counted(bad: float) -> None:
    q, k = heads_of()
    good = head_totals(q, k, diagonal=0)
    q[1, 2, 7, 3] = bad
    totals = head_totals(q, k, diagonal=0)
    assert totals.isfinite().all()
    assert totals[:, 1].tolist() == [0, 0, 1, 0]
    assert totals[2, 0] == good[2, 0] - 1
    assert torch.equal(totals[:2], good[:2])
    k[0, 0, 30] = bad  # of two heads of q: the attention itself is then NaN
    assert head_totals(q, k, diagonal=0)[:, 1].tolist() == [T - 1, T - 1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_measured_in_float32(dtype: torch.dtype) -> None:
    q, k = heads_of(scale=40.0)  # products beyond what float16 holds: 65504
    q, k = (10 * q).to(dtype), (10 * k).to(dtype)
    expected = head_totals(q.double(), k.double(), diagonal=0)
    torch.testing.assert_close(head_totals(q, k, diagonal=0).double(), expected, rtol=1e-5, atol=1e-5)


def test_sampled_rows_are_spread_and_end_with_the_last() -> None:
    assert sampled_rows(128, 4).tolist() == [31, 63, 95, 127]
    assert sampled_rows(5, 64).tolist() == [0, 1, 2, 3, 4]
    assert sampled_rows(7, 3).tolist() == [1, 3, 6]
    q, k = heads_of()
    rows = sampled_rows(T, 5)
    dense = oracle(q[:, :, rows], k, torch.ones(T, T).tril().bool()[rows].expand(B, H, 5, T))
    torch.testing.assert_close(head_totals(q, k, diagonal=0, rows=rows), dense, rtol=1e-10, atol=1e-10)


def test_totals_of_parts_are_those_of_the_whole() -> None:
    q, k = heads_of()
    parts = torch.stack([head_totals(q[i : i + 1], k[i : i + 1], diagonal=0) for i in range(B)])
    torch.testing.assert_close(merge_totals(parts), head_totals(q, k, diagonal=0), rtol=1e-12, atol=1e-12)


def test_long_rows_need_no_square_of_their_length() -> None:
    """Protects the memory: no tensor of T x T entries is made for 64 sampled rows of T = 2048."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))  # type: ignore[operator]
            sizes.extend(x.untyped_storage().nbytes() for x in (result,) if isinstance(x, Tensor))
            return result

    q = torch.randn(1, 1, 2048, 8)
    with Sizes():
        head_totals(q, q, diagonal=0, rows=sampled_rows(2048, 64))
    assert 0 < max(sizes) <= 64 * 2048 * 4


def test_logit_scale_is_the_product_of_the_heads_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    wq, wk = torch.randn(H * D, 40, generator=generator), torch.randn(H_KV * D, 40, generator=generator)
    expected = [
        torch.linalg.matrix_norm(wq[h * D : (h + 1) * D].double(), 2)
        * torch.linalg.matrix_norm(wk[h // 2 * D : (h // 2 + 1) * D].double(), 2)
        / math.sqrt(D)
        for h in range(H)
    ]
    torch.testing.assert_close(logit_scale(wq, wk, H, H_KV).double(), torch.stack(expected), rtol=1e-5, atol=0.0)
    tiny = logit_scale(wq * 1e-15, wk * 1e-15, H, H_KV)
    torch.testing.assert_close(tiny.double() * 1e30, torch.stack(expected), rtol=1e-5, atol=0.0)
    wq[D] = math.nan
    assert logit_scale(wq, wk, H, H_KV).isnan().tolist() == [False, True, False, False]
    assert logit_scale(torch.zeros(8, 4), torch.ones(8, 4), 2, 2).tolist() == [0, 0]


def test_rows_of_keys_name_layers_means_and_the_worst_head() -> None:
    values = {
        "max_logit": [torch.tensor([1.0, 3.0]), torch.tensor([5.0, math.nan])],
        "entropy": [torch.tensor([0.2, 0.4]), torch.tensor([0.9, math.nan])],
        "jacobian": [torch.tensor([math.nan]), torch.tensor([math.nan])],
    }
    assert summarise_heads(values) == pytest.approx(
        {
            "max_logit/layer_00": 3.0,
            "max_logit/layer_01": 5.0,
            "max_logit/mean": 4.0,
            "max_logit/worst_head": 5.0,
            "entropy/layer_00": 0.3,
            "entropy/layer_01": 0.9,
            "entropy/mean": 0.6,
            "entropy/worst_head": 0.2,
        }
    )
    assert set(head_values(torch.zeros(2, len(TOTALS)))) == set(ROW_MEASURES)

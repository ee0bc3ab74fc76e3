"""Saturation of softmax attention: how far its rows are from uniform, and from one-hot.

For a query row with scores z_j = scale * <q, k_j> and p = softmax(z + bias) over its visible keys: ``max_logit`` is the
largest abs z_j (scale included; a bias that a mask adds does not count, for it does not grow with the weights),
``entropy`` that of p over the log of the number of visible keys (1 is uniform), ``top_probability`` the largest p_j,
``saturated`` whether that exceeds 0.99, and ``jacobian`` the Frobenius norm of diag(p) - p p^T, through which all
gradients pass. What a mask hides takes no part, nor do rows that see fewer than two keys and padded queries.
``logit_scale`` is sigma(Wq) sigma(Wk) / sqrt(head_dim) of a head; times the largest squared norm of an input it bounds
the logits (without biases and norms of q and k).

:func:`head_totals` sums over rows, :func:`merge_totals` over batches and ranks, :func:`head_values` divides, so that
every row counts alike wherever it was measured. The definitions are this project's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from geocont.linalg import full_precision

#: Measures of attention rows, in the order of their totals.
ROW_MEASURES = ("max_logit", "entropy", "top_probability", "saturated", "jacobian")
#: What :func:`head_totals` returns for each head; all but ``max_logit`` are sums over rows.
TOTALS = ("rows", "skipped", *ROW_MEASURES)
MAX_LOGIT = TOTALS.index("max_logit")
#: Measures whose worst head is the one with the smallest value; for all others it is the largest.
WORST_IS_SMALLEST = ("entropy", "jacobian")
#: A row counts as saturated where its largest probability exceeds this.
SATURATED = 0.99
#: A mask that adds this or less hides the key: models hide with -inf, the smallest number of a type, -1e9 or -1e4.
HIDDEN = -1e4
#: Where scores beside the top one end: exp(-87) = 1e-38 is nothing beside 1, and exp of less is slow.
FLOOR = -87.0
#: Scores held at a time, so that long rows of many heads do not exhaust the memory (16 MiB each in float32).
ENTRIES = 2**22


def sampled_rows(length: int, count: int, device: torch.device | str | None = None) -> Tensor:
    """Returns at most ``count`` evenly spaced positions of ``length``, ``(R,)``; the last position is among them."""
    count = min(count, length)
    return torch.arange(1, count + 1, device=device) * length // count - 1


@full_precision()
def head_totals(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    diagonal: int | None = None,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Sums the measures of some query rows for each head, in blocks of rows: no T x S tensor.

    Args:
        q: Queries ``(B, H, T, head_dim)``, as they enter the product (after any rotary embedding).
        k: Keys ``(B, H_kv, S, head_dim)``; each of their heads serves H / H_kv adjacent heads of q.
        scale: Factor of the scores, 1 / sqrt(head_dim) by default.
        diagonal: Query i sees key j only where j <= i + diagonal: 0 for causal attention, None for no such limit.
        mask: Broadcastable to ``(B, H, T, S)``: bool (True may look) or a number that is added to the scores, which
            hides the key where it is ``HIDDEN`` or less.
        rows: Positions ``(R,)`` of the query rows to measure, all by default.
        block: Rows of a block; by default as many as ``ENTRIES`` scores allow.

    A query of self-attention (T = S) is padding where the mask hides its own key from every measured row.

    Returns:
        ``(H, 7)``, the columns of ``TOTALS``: number of rows measured, rows left out because a score is not finite
        (a hidden one as well), and then the largest value of ``max_logit`` and the sums of the others.
    """
    (batch, heads, length, width), keys = q.shape, k.shape[-2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(width) if scale is None else scale
    rows = torch.arange(length, device=q.device) if rows is None else rows
    hidden, bias = _split_mask(mask, rows, dtype)
    padded = hidden.all(-2)[..., rows] if hidden is not None and length == keys else None  # (B, H, R)
    sequences = max(1, min(batch, ENTRIES // max(1, len(rows) * heads * keys)))
    block = block or max(1, ENTRIES // max(1, sequences * heads * keys))
    found = [q.new_zeros(heads, len(TOTALS), dtype=dtype)]
    for some in (slice(i, i + sequences) for i in range(0, batch, sequences)):
        some_keys = k[some].to(dtype)
        for part in (slice(i, i + block) for i in range(0, len(rows), block)):
            z = _products(q[some].index_select(-2, rows[part]).to(dtype), some_keys).mul_(scale)  # (b, H, r, S)
            unseen = _part(hidden, some, part)
            if diagonal is not None:
                later = torch.arange(keys, device=q.device) > (rows[part] + diagonal)[:, None]  # (r, S)
                unseen = later if unseen is None else unseen | later
            left_out = None if padded is None else _part(padded[..., None], some, part)
            values, usable = _row_values(z, unseen, _part(bias, some, part))
            if left_out is not None:
                usable = usable & ~left_out[..., 0]
            found.append(_totals(values, usable))
    return merge_totals(torch.stack(found))


def merge_totals(totals: Tensor) -> Tensor:
    """Merges totals of several sets of rows, ``(n, ..., 7)`` -> ``(..., 7)``: sums, and the largest ``max_logit``."""
    merged = totals.sum(0)
    merged[..., MAX_LOGIT] = totals[..., MAX_LOGIT].amax(0)
    return merged


def head_values(totals: Tensor) -> dict[str, Tensor]:
    """Returns the value of each of ``ROW_MEASURES``, ``(...)``, from totals ``(..., 7)``; NaN where no row counts."""
    count = totals[..., 0]
    values = {}
    for name in ROW_MEASURES:
        total = totals[..., TOTALS.index(name)]
        values[name] = (total if name == "max_logit" else total / count).masked_fill(count == 0, math.nan)
    return values


@full_precision()
def logit_scale(wq: Tensor, wk: Tensor, heads: int, key_heads: int) -> Tensor:
    """sigma(Wq) sigma(Wk) / sqrt(head_dim) of each head, ``(heads,)``; NaN where a weight is not finite.

    Args:
        wq: ``(heads * head_dim, D)``, heads one after the other.
        wk: ``(key_heads * head_dim, D)``; each of its heads serves heads / key_heads adjacent heads of q.
        heads: Number of heads of q.
        key_heads: Number of heads of k.
    """
    sigma_q, sigma_k = _sigma_max(wq.unflatten(0, (heads, -1))), _sigma_max(wk.unflatten(0, (key_heads, -1)))
    return sigma_q * sigma_k.repeat_interleave(heads // key_heads) / math.sqrt(len(wq) / heads)


def summarise_heads(values: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """Reduces measure -> values of the heads of each layer, ``(H,)`` each, to the keys of a row.

    Returns:
        ``{measure}/layer_00`` ..: mean over the heads of a layer (of ``max_logit`` the largest, as it is a maximum);
        ``{measure}/mean``: the mean of those; ``{measure}/worst_head``: over all layers and heads the largest value, of
        ``entropy`` and ``jacobian`` the smallest. What has no value takes no part.
    """
    row = {}
    for name, layers in values.items():
        per_layer, worst = [], []
        for number, heads in enumerate(layers):
            finite = [value for value in heads.tolist() if math.isfinite(value)]
            if finite:
                per_layer.append(max(finite) if name == "max_logit" else sum(finite) / len(finite))
                worst.append(min(finite) if name in WORST_IS_SMALLEST else max(finite))
                row[f"{name}/layer_{number:02d}"] = per_layer[-1]
        if per_layer:
            row[f"{name}/mean"] = sum(per_layer) / len(per_layer)
            row[f"{name}/worst_head"] = min(worst) if name in WORST_IS_SMALLEST else max(worst)
    return row


def _products(q: Tensor, k: Tensor) -> Tensor:
    """<q_i, k_j> of ``(b, H, r, d)`` and ``(b, H_kv, S, d)`` -> ``(b, H, r, S)``."""
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # (b, H_kv, H / H_kv * r, d)
    return (grouped @ k.mT).view(*q.shape[:-1], k.shape[-2])


def _split_mask(mask: Tensor | None, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Returns which keys a mask hides from the measured rows and what it adds, ``(1 or B, 1 or H, 1 or R, S)`` each."""
    if mask is None:
        return None, None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[-2] > 1:
        mask = mask.index_select(-2, rows)
    if mask.dtype == torch.bool:
        return ~mask, None
    return mask <= HIDDEN, mask.to(dtype)


def _part(mask: Tensor | None, sequences: slice, rows: slice) -> Tensor | None:
    if mask is None:
        return None
    mask = mask if len(mask) == 1 else mask[sequences]
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]


def _row_values(z: Tensor, hidden: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the measures of rows of scores ``(b, H, r, S)``, as ``(5, b, H, r)``, and which rows have two keys.

    Everything is computed from what is beside the top entry, so that a saturated row loses no digits: its probability a
    is 1 / (1 + rest), and with o2, o3 the sums of squares and cubes of the other probabilities
    ||diag(p) - p p^T||^2 = a^2 (1 - a)^2 + o2 (1 + 2 a^2 + o2) - 2 o3.
    """
    if hidden is None:
        enough = torch.full_like(z[..., 0], z.shape[-1] >= 2, dtype=torch.bool)
        log_count: Tensor | float = math.log(max(2, z.shape[-1]))
        smallest = z.amin(-1)
    else:
        count = (~hidden).sum(-1).expand(z.shape[:-1])
        enough, log_count = count >= 2, count.clamp(min=2).to(z.dtype).log()
        wall = torch.zeros_like(hidden, dtype=z.dtype).masked_fill_(hidden, math.inf)
        smallest = (z + wall).amin(-1)
        z = z.sub_(wall)  # faster than masked_fill_, as are floor and amax than what would name the top entry
    max_logit = torch.maximum(z.amax(-1), -smallest)  # the larger of two that are not both negative
    if bias is not None:
        z += bias
    e = z.sub_(z.amax(-1, keepdim=True)).clamp_(min=FLOOR).exp()
    tops = e.floor()  # 1 at the top entry and its equals
    e.sub_(tops)
    equals = tops.sum(-1) - 1
    square = e.square()
    rest = e.sum(-1) + equals
    top_probability = 1 / (1 + rest)
    o2 = (square.sum(-1) + equals) * top_probability**2
    o3 = (torch.linalg.vecdot(square, e) + equals) * top_probability**3
    entropy = (rest.log1p() - torch.linalg.vecdot(e, z) * top_probability) / log_count
    a2 = top_probability.square()
    jacobian = (a2 * (rest * top_probability).square() + o2 * (1 + 2 * a2 + o2) - 2 * o3).clamp(min=0).sqrt()
    saturated = (top_probability > SATURATED).to(z.dtype)
    return torch.stack([max_logit, entropy, top_probability, saturated, jacobian]), enough


def _totals(values: Tensor, usable: Tensor) -> Tensor:
    """Sums measures ``(5, b, H, r)`` over the usable rows ``(b, H, r)`` that are finite -> ``(H, 7)``."""
    finite = values.isfinite().all(0)
    kept = values.masked_fill(~(usable & finite), 0)
    sums = kept.sum((1, 3))
    sums[0] = kept[0].amax((0, 2))
    counts = torch.stack([(usable & finite).sum((0, 2)), (usable & ~finite).sum((0, 2))]).to(values.dtype)
    return torch.cat([counts, sums]).mT


def _sigma_max(w: Tensor) -> Tensor:
    """Largest singular value of matrices ``(H, head_dim, D)`` -> ``(H,)``; NaN where one is not finite."""
    w = w.to(torch.promote_types(w.dtype, torch.float32))
    size = w.abs().amax((-2, -1))  # squares of 1e-25 vanish
    bad = ~size.isfinite()
    w = (w / size.clamp(min=torch.finfo(w.dtype).tiny)[:, None, None]).masked_fill(bad[:, None, None], 0)
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    sigma = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt() * size
    return sigma.masked_fill(bad, math.nan)

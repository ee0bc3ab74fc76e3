"""AttentionWatch: sees the queries and keys of every softmax attention that runs, in any model, and sums up."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode, has_torch_function

from geocont.measures.attention import head_totals, sampled_rows


@dataclass(frozen=True)
class Call:
    """One attention: q ``(B, H, T, head_dim)``, k ``(B, H_kv, S, head_dim)``, and what its scores go through."""

    q: Tensor
    k: Tensor
    scale: float | None = None
    diagonal: int | None = None
    mask: Tensor | None = None  # broadcastable to (B, H, T, S)


@dataclass
class Layer:
    """What was seen of one layer: totals ``(H, 7)`` of each forward pass, and its last shapes."""

    totals: list[Tensor]
    heads: int
    key_heads: int
    head_dim: int


class AttentionWatch(TorchFunctionMode):
    """Measures sampled query rows of every call of ``scaled_dot_product_attention`` while it is entered.

    Results of the calls stay the same. Seen as well is the attention within ``nn.MultiheadAttention``, with and without
    ``need_weights``. Not seen are attentions that a model writes out itself, fused kernels of other libraries, and
    FlexAttention.

    Each call is measured right away and only sums over rows are kept. Nothing draws random numbers, waits for a device
    or raises.

    Args:
        rows: Measure at most so many query rows of a sequence, evenly spaced, the last one among them.
        sequences: Measure at most so many sequences of a batch, the first ones.

    Attributes:
        layers: What was seen, in order of the calls within a forward pass.
        calls: Number of attentions in the forward pass that is watched.
        failures: Reasons for calls that could not be measured.
        seconds: Time that measuring took.
    """

    def __init__(self, rows: int, sequences: int) -> None:
        super().__init__()
        self.rows, self.sequences = rows, sequences
        self._within: int | None = None  # heads of the nn.MultiheadAttention that runs, until its scores are seen
        self._stance: Any = None
        self._entered = False
        self.reset()

    def reset(self) -> None:
        """Forgets what was seen."""
        self.layers: list[Layer] = []
        self.failures: list[str] = []
        self.seconds = 0.0
        self.calls = 0

    def start(self) -> None:
        """Begins to watch a forward pass; its first attention is layer 0. Compiled code runs eagerly meanwhile."""
        self.stop()
        self.calls, self._within = 0, None
        self._stance = torch.compiler.set_stance("force_eager")  # a compiled graph calls no function that a mode sees
        self.__enter__()
        self._entered = True

    def stop(self) -> None:
        """Ends watching, if it goes on."""
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)
            self._stance.__exit__(None, None, None)  # back to the stance that was there

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the function as it would have run, then measures it if it is an attention."""
        kwargs = kwargs or {}
        if not self._entered:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._within = None
            self._measure(_of_scaled_dot_product, args, kwargs)
        elif self._within is not None and func in (torch.bmm, torch.baddbmm):
            heads, self._within = self._within, None  # the second product, with the values, is none of ours
            self._measure(_of_batched_product, (heads, *args), kwargs)
        return result

    def _multi_head(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs ``multi_head_attention_forward`` with its inner calls seen.

        It hands itself to the mode whenever one is entered, so that entering the mode again would never end: it runs
        from its own code, for which no mode and no subclass is there to be asked.
        """
        tensors = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        names = getattr(getattr(func, "__code__", None), "co_names", ())
        if has_torch_function(tensors) or "has_torch_function" not in names:
            return func(*args, **kwargs)
        own = {**func.__globals__, "has_torch_function": lambda _: False}
        inner = types.FunctionType(func.__code__, own, func.__name__, func.__defaults__, func.__closure__)
        inner.__kwdefaults__ = func.__kwdefaults__
        self._within = kwargs.get("num_heads", args[4] if len(args) > 4 else None)
        try:
            with self:
                return inner(*args, **kwargs)
        finally:
            self._within = None

    def _measure(self, read: Callable[..., Call], args: tuple, kwargs: dict[str, Any]) -> None:
        started = time.perf_counter()
        number, self.calls = self.calls, self.calls + 1
        try:
            with torch.no_grad():
                self._add(number, read(*args, **kwargs))
        except Exception as error:  # a failed measurement never kills a run
            self.failures.append(f"layer {number}: {type(error).__name__}: {error}")
        self.seconds += time.perf_counter() - started

    def _add(self, number: int, call: Call) -> None:
        n = self.sequences
        totals = head_totals(
            call.q[:n].detach(),
            call.k[:n].detach(),
            scale=call.scale,
            diagonal=call.diagonal,
            mask=None if call.mask is None else call.mask[:n].detach(),
            rows=sampled_rows(call.q.shape[-2], self.rows, call.q.device),
        )
        while len(self.layers) <= number:
            self.layers.append(Layer([], 0, 0, 0))
        layer = self.layers[number]
        layer.totals.append(totals)
        layer.heads, layer.key_heads, layer.head_dim = call.q.shape[1], call.k.shape[1], call.q.shape[-1]


def _of_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """Reads a call of ``scaled_dot_product_attention``, whose tensors may have any number of leading dimensions."""
    diagonal = 0 if is_causal else None
    if isinstance(attn_mask, CausalBias):
        lower_right = attn_mask.variant == CausalVariant.LOWER_RIGHT
        diagonal, attn_mask = key.shape[-2] - query.shape[-2] if lower_right else 0, None
    if not enable_gqa:  # then all leading dimensions are broadcast
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        query, key = query.expand(*lead, -1, -1), key.expand(*lead, -1, -1)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (query.dim() - attn_mask.dim())]
        if query.dim() > 4:
            attn_mask = attn_mask.expand(*query.shape[:-2], -1, -1)
        attn_mask = _four_dimensions(attn_mask)
    return Call(_four_dimensions(query), _four_dimensions(key), scale, diagonal, attn_mask)


def _of_batched_product(heads: int, *args: Tensor, **kwargs: Any) -> Call:
    """Reads the scores that ``nn.MultiheadAttention`` computes itself: ``bmm(q, k)`` or ``baddbmm(mask, q, k)``.

    q ``(B H, T, head_dim)`` is scaled already, k is ``(B H, head_dim, S)``, the mask ``(B H or 1, T or 1, S)``.
    """
    *masks, q, k = args
    mask = None
    if masks:
        mask = masks[0].unflatten(0, (-1, heads)) if len(masks[0]) == len(q) else masks[0][None]
    return Call(q.unflatten(0, (-1, heads)), k.mT.unflatten(0, (-1, heads)), scale=1.0, mask=mask)


def _four_dimensions(x: Tensor) -> Tensor:
    """Returns ``(..., T, d)`` as ``(B, H, T, d)``: without heads H is 1, further dimensions count as heads."""
    if x.dim() < 4:
        return x[(None,) * (3 - x.dim())].unsqueeze(1)
    return x.flatten(1, -3)

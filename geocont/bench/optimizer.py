"""Optimizer steps on a layer of GPT-2: time, memory, and how good the steps are."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from geocont.bench.timing import interleave
from geocont.data import Text
from geocont.errors import UserError
from geocont.linalg import msign
from geocont.manifolds import Manifold, as_manifold
from geocont.models import GPT2, GPT2Config
from geocont.optim import ManifoldMuon, ModuleWise, MuonOptions, NamedParameters
from geocont.optim.solvers import Solution, certify, dual_ascent, long_solve, projected, reweighted
from geocont.weights import WeightMap

SMALL = GPT2Config(layers=12, heads=4, width=128, context=128, vocabulary=257, bias=False)
GPT2_SMALL = GPT2Config(layers=1, heads=12, width=768, context=128, vocabulary=257, bias=False)  # 12 would take hours
SPECTRA = ("logarithmic", "rank_16", "spike", "power", "gaussian")
MANIFOLDS = ("stiefel", "dgram")
TRAINING_STEPS, BATCH, CLIP = 40, 4, 1.0  # of the run that gives the real gradients
LR = 0.02
PATIENCE = 5.0  # seconds from which a step is taken once only

Solve = Callable[[Tensor, Tensor, Manifold, Tensor | None], Solution]


class _InFloat32(Optimizer):
    """Steps in float32 what is made for bfloat16: torch.optim.Muon or, on a manifold, the published solver."""

    def __init__(self, parameter: Parameter, manifold: str | None) -> None:
        super().__init__([parameter], {"manifold": manifold})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if group["manifold"] is None:
                    p.sub_(LR * msign(p.grad, "muon"))
                    continue
                manifold = as_manifold(group["manifold"])
                w, g = (p, p.grad) if p.shape[0] >= p.shape[1] else (p.mT, p.grad.mT)
                update = dual_ascent(w[None], g[None], manifold, dtype=torch.float32).update[0]
                w.copy_(manifold.retr(w, -LR * update))


@dataclass(frozen=True)
class Arm:
    """One optimizer: how it is built for a parameter and, if it has a solver, how that is called."""

    build: Callable[[Parameter, str], Optimizer]
    solve: Solve | None = None


def _manifold_muon(solver: Any, iterations: int | None = None) -> Callable[[Parameter, str], Optimizer]:
    return lambda p, manifold: ManifoldMuon([p], lr=LR, manifold=manifold, solver=solver, iterations=iterations)


def _reweighted(iterations: int | None) -> Arm:
    return Arm(
        _manifold_muon("reweighted", iterations),
        lambda w, g, manifold, start: reweighted(w, g, manifold, iterations=iterations, start=start),
    )


def _dual_ascent(iterations: int) -> Arm:
    return Arm(
        _manifold_muon("dual_ascent", iterations),
        lambda w, g, manifold, start: dual_ascent(w, g, manifold, iterations=iterations),
    )


ARMS: dict[str, Arm] = {
    "adamw": Arm(lambda p, manifold: torch.optim.AdamW([p], lr=1e-3)),
    "muon": Arm(lambda p, manifold: torch.optim.Muon([p], lr=LR)),
    "muon_float32": Arm(lambda p, manifold: _InFloat32(p, None)),
    "dual_ascent": _dual_ascent(20),
    "dual_ascent_float32": Arm(
        lambda p, manifold: _InFloat32(p, manifold),
        lambda w, g, manifold, start: dual_ascent(w, g, manifold, dtype=torch.float32),
    ),
    "projected": Arm(_manifold_muon("projected"), lambda w, g, manifold, start: projected(w, g, manifold)),
    "reweighted": _reweighted(None),
}
#: Further points of the curves of quality against time.
CURVE: dict[str, Arm] = {f"reweighted@{k}": _reweighted(k) for k in (0, 1, 2, 3, 5, 8)} | {
    f"dual_ascent@{k}": _dual_ascent(k) for k in (5, 10, 40, 80)
}


@dataclass(frozen=True)
class Case:
    """One matrix and its momentum, tall, and what the solver may start from."""

    gradients: str
    manifold: str
    shape: str
    w: Tensor
    g: Tensor
    start: Tensor | None = None


def measure_optimizers(
    small: bool,
    repeats: int,
    names: Sequence[str] | None = None,
    gradients: Sequence[str] | None = None,
    curve: bool = False,
) -> list[dict[str, Any]]:
    """Returns rows ``name gradients manifold shape ms_per_step peak_mb gflop tangent_residual certified_ratio ...``.

    The matrices are those of one layer, fused q, k and v whole. ``real`` gradients are Nesterov momenta of a short
    training on the standard library's text, solved warm, from what the step before left, those of the middle layer of
    twelve (at full size there is one, whose gradients are larger); the others are synthetic spectra, solved cold.
    ``certified_ratio`` is exact: float64, over the least bound of a long solve.
    ``tangent_residual`` and ``manifold_residual`` are of the update as the optimizer takes it. ``peak_mb`` is what the
    tensors of a step take beyond parameters and state; ``gflop`` counts matrix products, not eigenvalues. A row
    ``total`` for each name sums the layer's times, averaged over manifolds and gradients, and holds its worst quality.
    """
    arms = ARMS | (CURVE if curve else {})
    wanted = _chosen("--names", names, arms)
    kinds = _chosen("--gradients", gradients, ["real", *SPECTRA])
    config = SMALL if small else GPT2_SMALL
    rows = []
    for manifold in MANIFOLDS:
        cases = _real(config, manifold) if "real" in kinds else []
        cases += [case for kind in kinds if kind != "real" for case in _synthetic(config, manifold, kind)]
        for case in cases:
            rows += _compare(case, {name: arms[name] for name in wanted}, repeats)
    return rows + [_total(name, [row for row in rows if row["name"] == name]) for name in wanted]


def _chosen(option: str, given: Sequence[str] | None, valid: Sequence[str] | dict[str, Any]) -> list[str]:
    for name in given or ():
        if name not in valid:
            raise UserError(f"{option}: {name!r} is none of {', '.join(valid)}")
    return [name for name in valid if given is None or name in given]


def _real(config: GPT2Config, manifold: str) -> list[Case]:
    """Trains for a few steps and returns the matrices of the middle layer, their momenta and the solver's state."""
    torch.manual_seed(0)
    data = Text(tokenizer="bytes", context=config.context, batch_size=BATCH, seed=0)
    data.setup("fit")
    model = GPT2(config)
    weights = WeightMap.from_patterns(model.weight_patterns(), {name: p.shape for name, p in model.named_parameters()})
    named = NamedParameters(model.named_parameters(), weights)
    optimizer = ModuleWise(named, manifold, "whole", MuonOptions(lr=LR))
    batches = iter(data.train_dataloader())
    for step in range(TRAINING_STEPS + 1):
        x, y = next(batches)
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if step < TRAINING_STEPS:
            optimizer.step()
    cases = []
    parameters = dict(model.named_parameters())
    middle = {layers[config.layers // 2].parameter for layers in weights.projections.values()}
    for name in filter(middle.__contains__, weights.parameters):
        p, state = parameters[name], optimizer.state[parameters[name]]
        assert p.grad is not None
        momentum = 0.95 * state["momentum_buffer"] + p.grad
        w, g = p.detach(), p.grad + 0.95 * momentum
        tall = w.shape[0] >= w.shape[1]
        w, g = (w, g) if tall else (w.mT, g.mT)
        cases.append(Case("real", manifold, _shape(p), w.clone(), g.clone(), state.get("carry_0")))
    return cases


def _synthetic(config: GPT2Config, manifold: str, spectrum: str) -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    d = config.width
    cases = []
    for rows, columns in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d)):
        m, n = max(rows, columns), min(rows, columns)
        w = as_manifold(manifold).projx(torch.randn(m, n, generator=generator) / m**0.5)
        g = gradient_with(spectrum, m, n, generator)
        cases.append(Case(spectrum, manifold, f"{rows}x{columns}", w, g))
    return cases


def gradient_with(spectrum: str, m: int, n: int, generator: torch.Generator) -> Tensor:
    """Returns ``(m, n)`` with random singular vectors and a spectrum.

    ``logarithmic`` falls from 1 to 1e-6, ``rank_16`` is exact, ``spike`` is one value over 1e-3 of noise, ``power``
    falls like 1 / i, ``gaussian`` is a Gaussian matrix.
    """
    index = torch.arange(1, n + 1, dtype=torch.float64)
    if spectrum == "gaussian":
        return torch.randn(m, n, generator=generator)
    values = {
        "logarithmic": torch.logspace(0, -6, n, dtype=torch.float64),
        "rank_16": (index <= 16).double(),
        "spike": torch.where(index == 1, 1.0, 1e-3),
        "power": 1 / index,
    }[spectrum]
    u, v = (torch.linalg.qr(torch.randn(k, n, generator=generator, dtype=torch.float64))[0] for k in (m, n))
    return ((u * values) @ v.mT).float()


def _compare(case: Case, arms: dict[str, Arm], repeats: int) -> list[dict[str, Any]]:
    manifold = as_manifold(case.manifold)
    w, g = case.w[None], case.g[None]
    _, bound = long_solve(w, g, manifold)
    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    for name, arm in arms.items():
        parameter = Parameter(case.w.clone())
        parameter.grad = case.g.clone()
        optimizer = arm.build(parameter, case.manifold)
        for group in optimizer.param_groups:  # so that the direction is the gradient itself
            if "nesterov" in group:
                group.update(nesterov=False, momentum=0.0)
        started = time.perf_counter()
        with FlopCounterMode(display=False) as counter, _LiveMemory() as memory:
            optimizer.step()
        first[name] = time.perf_counter() - started
        steps[name] = optimizer.step
        row: dict[str, Any] = {"name": name, "gradients": case.gradients, "manifold": case.manifold}
        row |= {"shape": case.shape, "ms_per_step": 0.0, "peak_mb": memory.peak / 1e6}
        row |= {"gflop": counter.get_total_flops() / 1e9}
        rows.append(row | _quality(arm, case, manifold, w, g, bound))
    seconds = _time(steps, first, repeats)
    for row in rows:
        row["ms_per_step"] = 1e3 * statistics.median(seconds[row["name"]])
    return rows


def _quality(arm: Arm, case: Case, manifold: Manifold, w: Tensor, g: Tensor, bound: Tensor) -> dict[str, float | None]:
    if arm.solve is None:
        return dict.fromkeys(("tangent_residual", "certified_ratio", "manifold_residual"))
    start = None if case.start is None else case.start[None]
    update = arm.solve(w, g, manifold, start).update
    reached = certify(w, g, manifold, update) * _nuclear_norm(g) / bound
    return {
        "tangent_residual": float(manifold.tangent_residual(w, update)),
        "certified_ratio": float(reached),
        "manifold_residual": float(manifold.residual(manifold.retr(w, -LR * update))),
    }


def _nuclear_norm(g: Tensor) -> Tensor:
    """The bound that ``certify`` has when it is given no dual variable."""
    g = g.double()
    return torch.linalg.eigvalsh(g.mT @ g).clamp_min(0).sqrt().sum(-1)


def _time(steps: dict[str, Callable[[], Any]], first: dict[str, float], repeats: int) -> dict[str, list[float]]:
    """Interleaves, but for what took seconds at first, which is not taken again."""
    fast = {name: step for name, step in steps.items() if first[name] < PATIENCE}
    return {name: [seconds] for name, seconds in first.items()} | interleave(fast, repeats)


class _LiveMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make and that are still there; what LAPACK takes is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, list[int]] = {}  # storage -> [bytes, tensors that use it]
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                key = tensor.untyped_storage()._cdata
                if key in self.live:
                    self.live[key][1] += 1
                elif key not in known:
                    self.live[key] = [tensor.untyped_storage().nbytes(), 1]
                    self.now += self.live[key][0]
                else:
                    continue
                weakref.finalize(tensor, self._forget, key)
        self.peak = max(self.peak, self.now)
        return result

    def _forget(self, key: int) -> None:
        self.live[key][1] -= 1
        if not self.live[key][1]:
            self.now -= self.live.pop(key)[0]


def _total(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums a layer's matrices: times and products averaged over manifolds and gradients, the worst of the rest."""
    layers = len({(row["gradients"], row["manifold"]) for row in rows})

    def worst(key: str, choose: Callable[[list[float]], float]) -> float | None:
        values = [row[key] for row in rows if row[key] is not None]
        return choose(values) if values else None

    return {
        "name": name,
        "gradients": "all",
        "manifold": "all",
        "shape": "total",
        "ms_per_step": sum(row["ms_per_step"] for row in rows) / layers,
        "peak_mb": worst("peak_mb", max),
        "gflop": sum(row["gflop"] for row in rows) / layers,
        "tangent_residual": worst("tangent_residual", max),
        "certified_ratio": worst("certified_ratio", min),
        "manifold_residual": worst("manifold_residual", max),
    }


def _shape(p: Tensor) -> str:
    return "x".join(map(str, p.shape))

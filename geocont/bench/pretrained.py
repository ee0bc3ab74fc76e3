"""The analysis of checkpoints: leading measures against dense decompositions, in time, error and memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from geocont.bench.timing import interleave, median_ratio
from geocont.pretrained.analysis import find_model
from geocont.pretrained.layers import analyse_matrix

#: Layer shapes of Llama-3.1-8B, out x in, that differ: o has q's, up has gate's.
SHAPES = {"q": (4096, 4096), "k": (1024, 4096), "gate": (14336, 4096), "down": (4096, 14336)}
GAP = 1.05
DECAY = 0.5  # of the power law of singular values
PLANTED = 128  # directions of the power law; a Gaussian bulk follows them
LAYERS = 3
DEFINED, TOP_K = 1.02, 5
#: Peak memory in kB: Linux counts that of the parent in getrusage, too.
CODE = """
import re, resource, sys
from pathlib import Path
from geocont.pretrained import analyze
analyze(sys.argv[1], own_map=sys.argv[2] or None, light=sys.argv[3] == "light")
status = Path("/proc/self/status")
found = re.search(r"VmHWM:\\s+(\\d+)", status.read_text()) if status.exists() else None
print(int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def measure_pretrained(repeats: int, model: str | None = None, small: bool = False) -> list[dict[str, Any]]:
    """Returns rows ``name shape ms dense_ms speedup error peak_mb limit_mb``.

    ``matrix``: leading directions and values (v1, u1, topk) of one matrix of Llama-3.1-8B's shapes with a planted
    power-law spectrum, before and after one ``torch.linalg.svd`` and one Gram matrix plus ``eigh``, which take most of
    a minute; error is 1 - |cos| to the planted vectors. ``file``: light and full analysis of a
    file with such layers, in a process of its own; limit is three times the largest matrix in float32 plus 0.5 GB.
    ``model``: all matrices of a checkpoint, light, against Gram plus ``eigh`` of the same; error is the largest
    difference of a mean v1 or u1, over pairs with s1/s2 >= 1.02, to a float64 SVD.
    """
    shapes = {name: (m // 8, n // 8) if small else (m, n) for name, (m, n) in SHAPES.items()}
    generator = torch.Generator().manual_seed(0)
    rows = [_matrix(name, shape, repeats, generator) for name, shape in shapes.items()]
    with tempfile.TemporaryDirectory() as folder:
        rows += _file(Path(folder), shapes["gate"], generator)
    if model is not None:
        rows.append(_model(model, repeats))
    return rows


def planted(shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a matrix ``(m, n)`` with singular values i^-DECAY, s1/s2 = GAP, then a bulk; its u1 and its v1."""
    m, n = shape
    count = min(PLANTED, min(shape) // 2)
    s = torch.arange(1, count + 1).float() ** -DECAY
    s[0] = GAP * s[1]
    u, v = (torch.linalg.qr(torch.randn(d, count, generator=generator))[0] for d in (m, n))
    bulk = torch.randn(m, n, generator=generator)
    bulk -= u @ (u.mT @ bulk)
    bulk -= (bulk @ v) @ v.mT
    bulk *= s[-1] / (m**0.5 + n**0.5)
    return torch.addmm(bulk, u * s, v.mT), u[:, 0], v[:, 0]


def _matrix(name: str, shape: tuple[int, int], repeats: int, generator: torch.Generator) -> dict[str, Any]:
    w, u, v = planted(shape, generator)
    reads = name != "down"
    rows = w if w.shape[0] <= w.shape[1] else w.mT
    light_arm: dict[str, Callable[[], Any]] = {"light": lambda: analyse_matrix(w, reads, True)}
    dense: dict[str, Callable[[], Any]] = {
        "gram": lambda: torch.linalg.eigh(rows @ rows.mT),
        "svd": lambda: torch.linalg.svd(w, full_matrices=False),
    }
    layer = analyse_matrix(w, reads, True)  # warms libraries up
    before = interleave(light_arm, repeats)["light"]
    once = {arm: seconds[0] for arm, seconds in interleave(dense, 1).items()}
    light = statistics.median(before + interleave(light_arm, repeats)["light"])
    error = 1 - min(float((layer.u[:, 0] @ u).abs()), float((layer.v[:, 0] @ v).abs()))
    row = _row(f"matrix {name}", shape, light, once["svd"], once["svd"] / light, error)
    return row | {"gram_speedup": once["gram"] / light}


def _file(folder: Path, shape: tuple[int, int], generator: torch.Generator) -> list[dict[str, Any]]:
    """Peak memory of whole analyses, which must not depend on the number of layers."""
    tensors = {f"layers.{i}.w": planted(shape, generator)[0].bfloat16() for i in range(LAYERS)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "map.yaml").write_text("gate: layers\\.(\\d+)\\.w\n")
    limit = 3 * shape[0] * shape[1] * 4 / 1e6 + 500
    rows = []
    for kind in ("light", "full"):
        peak: list[float] = []
        arms = {kind: lambda kind=kind, peak=peak: peak.append(_peak(str(folder), str(folder / "map.yaml"), kind))}
        seconds = interleave(arms, 1)[kind][0]
        row = _row(f"file, {LAYERS} layers, {kind}", shape, seconds, None, None, None)
        rows.append(row | {"peak_mb": peak[0], "limit_mb": limit})
    return rows


def _peak(path: str, own_map: str, kind: str) -> float:
    """Returns the peak resident memory of an analysis in its own process, MB."""
    done = subprocess.run([sys.executable, "-c", CODE, path, own_map, kind], capture_output=True, text=True, check=True)
    return float(done.stdout) / 1e3


def _model(model: str, repeats: int) -> dict[str, Any]:
    device = torch.device("cpu")
    table, name = find_model(model)
    sequences = [[(e.matrix.side == "reads", e.numbers(e.pieces(), device)) for e in s] for s in table.sequences]

    def light() -> list[list[tuple[Tensor, Tensor, float]]]:
        found = []
        for sequence in sequences:
            start, one = None, []
            for reads, w in sequence:
                layer = analyse_matrix(w, reads, True, start)
                start = layer.start
                one.append((layer.v[:, 0], layer.u[:, 0], float(layer.s[0] / layer.s[1])))
            found.append(one)
        return found

    def dense() -> None:
        for sequence in sequences:
            for _, w in sequence:
                rows = w if w.shape[0] <= w.shape[1] else w.mT
                left = torch.linalg.eigh(rows @ rows.mT)[1][:, -TOP_K - 1 :]
                rows.mT @ left

    found = light()
    seconds = interleave({"light": light, "dense": dense}, repeats)
    error = max(_mean_error(one, [w for _, w in s]) for one, s in zip(found, sequences, strict=True))
    largest = max((tuple(w.shape) for s in sequences for _, w in s), key=lambda shape: shape[0] * shape[1])
    speedup = 1 / median_ratio(seconds["light"], seconds["dense"])
    times = statistics.median(seconds["light"]), statistics.median(seconds["dense"])
    row = _row(f"model {name}", (largest[0], largest[1]), *times, speedup, error)
    return row | {"peak_mb": _peak(model, "", "light"), "limit_mb": 1500.0, "gram_speedup": speedup}


def _mean_error(found: list[tuple[Tensor, Tensor, float]], matrices: list[Tensor]) -> float:
    """Largest error of the mean v1 and u1 over pairs that are defined, to a float64 SVD."""
    exact = [torch.linalg.svd(w.double(), full_matrices=False) for w in matrices]
    defined = [bool(s[0] / s[1] >= DEFINED) for _, s, _ in exact]
    errors: list[list[float]] = [[], []]
    for i in range(len(matrices) - 1):
        if defined[i] and defined[i + 1]:
            truths = (exact[i][2][0] @ exact[i + 1][2][0], exact[i][0][:, 0] @ exact[i + 1][0][:, 0])
            for side, truth in enumerate(truths):
                one, other = found[i][:2][side], found[i + 1][:2][side]
                errors[side].append(float((one @ other).abs()) - float(truth.abs()))
    return max(abs(statistics.fmean(side)) for side in errors) if errors[0] else 0.0


def _row(
    name: str,
    shape: tuple[int, int],
    seconds: float,
    dense: float | None,
    speedup: float | None,
    error: float | None,
) -> dict[str, Any]:
    return {
        "name": name,
        "shape": f"{shape[0]}x{shape[1]}",
        "ms": 1e3 * seconds,
        "dense_ms": None if dense is None else 1e3 * dense,
        "speedup": speedup,
        "gram_speedup": None,
        "error": error,
        "peak_mb": None,
        "limit_mb": None,
    }

"""The numbers of an analysis: those of whole stacks, certified where iterated, within bars where estimated."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from geocont.errors import UserError
from geocont.measures.continuity import full_table, light_table
from geocont.pretrained import analysis as analysis_module
from geocont.pretrained import analyze
from geocont.pretrained import engine as engine_module
from geocont.pretrained.advisor import ErrorCurve, advise, rank_layers, saved
from geocont.pretrained.analysis import Analysis, baselines, find_model
from geocont.pretrained.cache import ResultCache
from geocont.pretrained.layers import analyse_matrix, compare
from tests.pretrained.planted import Planted, attention_shapes, llama, llama_tensors, mlp_shapes, sizes, write

FULL_NAMES = ("v1", "u1", "topk_in", "topk_out", "cosine", "sigma2_in", "sigma2_out", "gram_in", "gram_out")


def spectrum(m: int, n: int, decay: float, generator: torch.Generator, shared: Tensor | None = None) -> Tensor:
    """Returns ``(m, n)`` with singular values i^-decay, s1 / s2 = 1.05, right vectors leaning on ``shared``."""
    r = min(m, n)
    s = torch.arange(1, r + 1, dtype=torch.float64) ** -decay
    s[0] = 1.05 * s[1]
    u = torch.linalg.qr(torch.randn(m, r, generator=generator, dtype=torch.float64))[0]
    v = torch.randn(n, r, generator=generator, dtype=torch.float64)
    v = torch.linalg.qr(v if shared is None else v + 3 * shared[:, :r])[0]
    return ((u * s) @ v.mT).float()


def a_pair(m: int, n: int, decay: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(n, min(m, n), generator=generator, dtype=torch.float64)
    return spectrum(m, n, decay, generator, shared), spectrum(m, n, decay, generator, shared)


@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (80, 80)])
def test_measures_are_those_of_a_stack(shape: tuple[int, int]) -> None:
    """Two matrices at a time must give what the callbacks give for all layers at once."""
    pair = a_pair(*shape, 0.7)
    stack = torch.stack(pair)
    wanted = light_table(stack).values | full_table(stack)
    found = compare(*(analyse_matrix(w, True, False) for w in pair), light=False)
    for name in FULL_NAMES:
        assert found[name] == pytest.approx(float(wanted[name]), abs=2e-4), name


@pytest.mark.parametrize(("shape", "decay"), [((500, 300), 0.5), ((300, 500), 0.3), ((400, 400), 1.0)])
def test_estimates_lie_within_their_error_bars(shape: tuple[int, int], decay: float) -> None:
    """An estimate without a bar that holds is a guess."""
    pair = a_pair(*shape, decay)
    large = [analyse_matrix(w, True, False, exact_side=64) for w in pair]
    exact = [analyse_matrix(w, True, False) for w in pair]
    assert not large[0].complete
    assert exact[0].complete
    found, wanted = compare(*large, light=False), compare(*exact, light=False)
    for name in ("v1", "u1", "topk_in", "topk_out", "cosine"):
        assert found[name] == pytest.approx(wanted[name], abs=2e-3), name
    for name in ("sigma2_in", "sigma2_out", "gram_in", "gram_out"):
        value, error, truth = found[name], found[f"{name}_error"], wanted[name]
        assert value is not None
        assert error is not None
        assert truth is not None
        assert abs(value - truth) < 4 * error + 2e-4, name
        assert wanted[f"{name}_error"] == 0
    assert found["gram_in_error"] < 0.01
    for one, other in zip(large, exact, strict=True):
        rank, error = one.spectrum["effective_rank"], one.spectrum["effective_rank_error"]
        assert isinstance(rank, float)
        assert isinstance(error, float)
        assert abs(rank / other.spectrum["effective_rank"] - 1) < 0.05  # type: ignore[operator]
        assert one.spectrum["stable_rank"] == pytest.approx(other.spectrum["stable_rank"], rel=1e-3)
        assert np.allclose(one.spectrum["singular_values"], other.spectrum["singular_values"], rtol=1e-2)


def test_leading_directions_are_certified_and_warm_started(tmp_path: Path) -> None:
    """A neighbour's directions are a start, never an answer: they may be orthogonal to the right ones."""
    generator = torch.Generator().manual_seed(0)
    layers = [spectrum(300, 400, 0.5, generator) for _ in range(4)]
    write(tmp_path, {f"x.{i}.w": w for i, w in enumerate(layers)}, None)
    (tmp_path / "map.yaml").write_text("down: x\\.(\\d+)\\.w")
    rows = analyze(tmp_path, own_map=tmp_path / "map.yaml", light=True).rows
    triplets = [torch.linalg.svd(w.double(), full_matrices=False) for w in layers]
    for row, one, other in zip(rows, triplets, triplets[1:], strict=False):
        assert row["v1"] == pytest.approx(abs(float(one[2][0] @ other[2][0])), abs=5e-3)
        assert row["u1"] == pytest.approx(abs(float(one[0][:, 0] @ other[0][:, 0])), abs=5e-3)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_sizes_whose_squares_vanish_do_not_matter(size: float, tmp_path: Path) -> None:
    model, path = llama(tmp_path)
    tensors = {name: tensor * size for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors")
    found = analyze(path)
    model.check(found.rows)
    assert found.spectra[0]["sigma_max"] == pytest.approx(3 * size, rel=1e-4)


def test_rows_spectra_and_summary_say_what_they_should(tmp_path: Path) -> None:
    model, path = llama(tmp_path)
    found = analyze(path)
    first = found.rows[0]
    assert list(first)[:5] == ["model", "projection", "layer", "v1", "u1"]
    assert (first["layer"], first["theory"], first["status"]) == (0, "v1", "ok")
    assert len(found.rows) == 7 * (model.layers - 1)
    assert len(found.spectra) == 7 * model.layers
    assert found.spectra[0]["s01"] == pytest.approx(3, rel=1e-4)
    assert found.spectra[0]["gap"] > 1.5
    assert set(found.summary) == {"q", "k", "v", "o", "gate", "up", "down"}
    down = found.summary["down"]
    assert (down["rows"], down["columns"], down["theory"], down["pairs"]) == (64, 96, "u1", 2)
    assert down["v1"] == pytest.approx(np.mean([model.expected("down", i)[0] for i in range(2)]), abs=1e-4)
    assert down["chance_u1"] == pytest.approx(math.sqrt(2 / (math.pi * 64)))
    assert found.vectors["q"]["v1"].shape == (3, 64)


def test_baselines_of_vectors_that_turn_slowly() -> None:
    angles = np.linspace(0, 1.5, 16)
    vectors = np.zeros((16, 400))
    vectors[:, 3], vectors[:, 200] = np.cos(angles), np.sin(angles)
    permuted, distant = baselines(vectors)
    assert permuted is not None
    assert distant is not None
    assert permuted < 0.05
    assert 0.5 < distant < 0.95  # below the cosine of adjacent ones, 0.995
    assert baselines(np.zeros((3, 5))) == (None, None)


def test_a_stopped_analysis_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished is neither computed again nor lost, and a changed tensor is."""
    _, path = llama(tmp_path / "model")
    real, count = engine_module.analyse_matrix, [0]

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == 8:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(engine_module, "analyse_matrix", counted)
    with pytest.raises(KeyboardInterrupt):
        analyze(path, cache=tmp_path / "cache")
    rows = analyze(path, cache=tmp_path / "cache").rows
    assert count[0] == 8 + 15  # 21 matrices less 7, and the one below the first that was missing
    fresh = analyze(path).rows
    for row, other in zip(rows, fresh, strict=True):
        assert row["v1"] == pytest.approx(other["v1"], abs=1e-5)
    count[0] = 100
    assert analyze(path, cache=tmp_path / "cache").rows == rows
    assert count[0] == 100
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.weight"] += 1
    save_file(tensors, path / "model.safetensors")
    for file in list((tmp_path / "cache").glob("*.npz"))[:3]:
        file.write_bytes(file.read_bytes()[:50])  # a damaged result is computed again
    assert len(analyze(path, cache=tmp_path / "cache").rows) == 14
    assert 101 < count[0] < 110


def test_options_are_part_of_what_is_kept(tmp_path: Path) -> None:
    _, path = llama(tmp_path / "model")
    light = analyze(path, cache=tmp_path / "cache", light=True).rows
    assert "gram_in" not in light[0]
    assert analyze(path, cache=tmp_path / "cache").rows[0]["gram_in"] is not None
    assert ResultCache(None).get("x") is None


def test_two_checkpoints_are_compared_by_their_difference(tmp_path: Path) -> None:
    """What fine-tuning added has directions of its own, which the sum hides."""
    base, _ = llama(tmp_path / "base")
    shapes = attention_shapes() | mlp_shapes()
    added = Planted(shapes, seed=7)
    tuned = Planted(shapes)
    for seat, w in tuned.matrices.items():
        tuned.matrices[seat] = w + 0.01 * added.matrices[seat]
    write(tmp_path / "tuned", llama_tensors(tuned), {"model_type": "llama", **sizes()})
    found = analyze(tmp_path / "tuned", against=tmp_path / "base")
    added.check(found.rows, 1e-3)
    assert found.model == "tuned - base"
    same = analyze(tmp_path / "base", against=tmp_path / "base")
    assert {row["status"].split(":")[0] for row in same.rows} == {"zero"}
    llama(tmp_path / "short", layers=2)
    with pytest.raises(UserError, match=r"--against: --against has no down of layer 2"):
        analyze(tmp_path / "base", against=tmp_path / "short")
    assert base.layers == 3


def test_projections_can_be_chosen(tmp_path: Path) -> None:
    _, path = llama(tmp_path)
    assert set(analyze(path, projections=["down", "q"]).summary) == {"q", "down"}
    with pytest.raises(UserError, match=r"--projections: .* has no 'gat', only q k v o gate up down"):
        analyze(path, projections=["gat"])
    with pytest.raises(UserError, match=r"--device: cuda:99 is not there"):
        analyze(path, device="cuda:99")


def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    """An analysis that keeps its layers would be the one that needs the whole model in memory."""
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    code = (
        "import re, sys; from geocont.pretrained import analyze\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024\n"
        "analyze(sys.argv[1], own_map=sys.argv[3], light=True); before = peak()\n"
        "analyze(sys.argv[2], own_map=sys.argv[3], light=True); print(peak() - before)"
    )
    generator = torch.Generator().manual_seed(0)
    for layers, name in ((2, "few"), (20, "many")):
        tensors = {f"x.{i}.w": torch.randn(1500, 1400, generator=generator) for i in range(layers)}
        write(tmp_path / name, tensors, None)
    (tmp_path / "map.yaml").write_text("gate: x\\.(\\d+)\\.w")
    done = subprocess.run(
        [sys.executable, "-c", code, *(str(tmp_path / name) for name in ("few", "many", "map.yaml"))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 40  # MiB; a layer has 8, the eighteen more of the larger one 144


# -- advisor ---------------------------------------------------------------------------------------------------------


def test_a_basis_that_layers_share_is_found(tmp_path: Path) -> None:
    """Planted: readers of all layers live in 8 common dimensions of 64, writers in 8 common outputs."""
    generator = torch.Generator().manual_seed(0)
    common = torch.linalg.qr(torch.randn(64, 8, generator=generator))[0]
    model = Planted(attention_shapes() | mlp_shapes(), layers=4)
    for (projection, layer), w in model.matrices.items():
        projector = common @ common.T
        model.matrices[projection, layer] = projector @ w if projection in ("o", "down") else w @ projector
    write(tmp_path, llama_tensors(model), {"model_type": "llama", **sizes(), "num_hidden_layers": 4})
    analysis = analyze(tmp_path)
    table, _ = find_model(tmp_path)
    advice = advise(table, analysis, torch.device("cpu"))
    assert len(advice.bases) == 7
    for row in advice.bases:
        assert row["rank"] == 8
        assert row["error"] < 1e-5
        assert row["error_wrong_side"] > 0.1
        assert row["error_random"] == pytest.approx(1 - 8 / 64)
        other = {"q": 64, "k": 32, "v": 32, "o": 64}.get(row["projection"], 96)
        needed = row["saved_at_0.01"]
        assert needed >= 1 - 8 * (64 + 4 * other) / (4 * 64 * other) - 1e-9
        assert row["saved_at_0.01"] <= row["saved_at_0.05"] <= row["saved_at_0.1"]


def test_sketched_bases_are_those_of_the_whole_gram_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from geocont.pretrained import advisor

    generator = torch.Generator().manual_seed(0)
    layers = {f"x.{i}.w": spectrum(400, 320, 0.6, generator) for i in range(3)}
    write(tmp_path, layers, None)
    (tmp_path / "map.yaml").write_text("gate: x\\.(\\d+)\\.w")
    table, _ = find_model(tmp_path, own_map=tmp_path / "map.yaml")
    exact = advisor._curve(table.sequences[0], "in", torch.device("cpu"))
    monkeypatch.setattr(advisor, "EXACT_SIZE", 100)
    sketched = advisor._curve(table.sequences[0], "in", torch.device("cpu"))
    assert exact is not None
    assert sketched is not None
    assert len(sketched.errors) == 257
    for rank in (1, 10, 40, 100, 200):
        assert sketched.errors[rank] == pytest.approx(exact.errors[rank], abs=0.02)
        assert sketched.errors[rank] >= exact.errors[rank] - 1e-5


def test_savings_count_the_basis_once() -> None:
    curve = ErrorCurve([1.0, 0.2, 0.04, 0.0], size=100, other=50)
    assert saved(curve, 0.05, layers=4) == pytest.approx(1 - 2 * (100 + 4 * 50) / (4 * 100 * 50))
    assert saved(ErrorCurve([1.0, 0.5], 10, 10), 0.1, 4) is None


def test_layers_are_ranked_by_what_their_neighbours_have() -> None:
    analysis = Analysis("m")
    for layer, value in enumerate((0.1, 0.9, 0.8)):
        analysis.rows.append({"layer": layer, "theory": "v1", "topk_in": value, "topk_out": 0.0})
    assert [row["layer"] for row in rank_layers(analysis)] == [2, 3, 1, 0]


# -- the hub, without a network --------------------------------------------------------------------------------------


def test_only_what_is_needed_is_fetched() -> None:
    from geocont.pretrained.hub import needed_files

    files = ["README.md", "config.json", "model.safetensors.index.json", "pytorch_model.bin", "tf_model.h5"]
    assert needed_files("a/b", files) == ["config.json", "model.safetensors.index.json"]
    assert needed_files("a/b", ["config.json", "pytorch_model.bin"]) == ["config.json", "pytorch_model.bin"]
    parts = ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
    assert needed_files("a/b", parts) == parts
    with pytest.raises(UserError, match=r"a/b has several GGUF files"):
        needed_files("a/b", ["x.Q4.gguf", "x.Q8.gguf"])
    with pytest.raises(UserError, match=r"no safetensors, GGUF or PyTorch weights"):
        needed_files("a/b", ["tf_model.h5"])


def test_a_model_on_the_hub_is_fetched_shard_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token must come from the environment alone, and a revision must reach every file."""
    import huggingface_hub
    from huggingface_hub import constants

    from tests.pretrained.test_hostile import sharded

    source, asked = sharded(tmp_path / "source"), []

    class Api:
        def __init__(self, token: Any) -> None:
            assert token == "from-the-environment"

        def model_info(self, name: str, revision: str, timeout: float) -> Any:
            files = [type("File", (), {"rfilename": file.name})() for file in source.iterdir()]
            return type("Info", (), {"siblings": files, "sha": f"commit-of-{revision}"})()

    def download(name: str, file: str, revision: str, token: Any) -> str:
        asked.append((file, revision))
        return str(source / file)

    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: None)
    found = analyze("owner/model", revision="v2")
    assert found.model == "owner/model"
    assert len(found.rows) == 14
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert [file for file, _ in asked] == ["config.json", "model.safetensors.index.json", *shards]
    assert {revision for _, revision in asked} == {"commit-of-v2"}


def test_what_is_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    model, path = llama(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"owner/model is not whole in the local cache, and HF_HUB_OFFLINE is set"):
        analyze("owner/model")

    def cached(name: str, file: str, revision: str | None = None) -> str | None:
        return str(path / file) if (path / file).exists() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    model.check(analyze("owner/model").rows)
    assert analysis_module.is_hub_name("owner/model")
    assert not analysis_module.is_hub_name("./owner/model")

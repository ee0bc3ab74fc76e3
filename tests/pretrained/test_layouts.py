"""Which numbers of a file are q of layer 7: planted vectors come back from every layout and real files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from geocont.errors import UserError
from geocont.pretrained import analyze, open_checkpoint
from geocont.pretrained.matrices import MatrixTable, find_matrices
from tests.pretrained.planted import (
    GGUF,
    LAYERS,
    LAYOUTS,
    LLAMA,
    Planted,
    attention_shapes,
    gguf_llama_tensors,
    llama,
    llama_tensors,
    mlp_shapes,
    sizes,
    write,
    write_gguf,
)

CPU = torch.device("cpu")


def matrices_of(path: Path, **options: Any) -> dict[tuple[str, int], Tensor]:
    """Returns the matrices of a checkpoint by (projection, layer)."""
    table: MatrixTable = find_matrices(open_checkpoint(path), **options)
    return {(e.projection, e.depth): e.numbers(e.pieces(), CPU) for sequence in table.sequences for e in sequence}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planted_vectors_come_back(layout: str, tmp_path: Path) -> None:
    """A third of a fused tensor is no projection where heads are grouped or interleaved, and nothing else complains."""
    model, path = LAYOUTS[layout](tmp_path)
    analysis = analyze(path)
    model.check(analysis.rows)
    assert all(row["status"] == "ok" and row["defined"] for row in analysis.rows)


def test_gguf_gives_the_very_matrices_of_safetensors(tmp_path: Path) -> None:
    """Wrongly ordered rows of q and k keep every singular value: only comparing numbers finds them."""
    model, path = llama(tmp_path / "hf")
    gguf = write_gguf(tmp_path / "x.gguf", "llama", gguf_llama_tensors(model))
    ours, theirs = matrices_of(path), matrices_of(gguf)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[seat], theirs[seat]) for seat in ours)
    rows, others = analyze(path).rows, analyze(gguf).rows
    for row, other in zip(rows, others, strict=True):
        numbers = {key: value for key, value in row.items() if key not in ("model", "theory", "status")}
        assert numbers == pytest.approx({key: other[key] for key in numbers}, abs=1e-5)


def test_rows_of_other_gguf_architectures_are_left_in_order(tmp_path: Path) -> None:
    """llama.cpp interleaves halves of heads for Llama, not for Qwen."""
    model = Planted(attention_shapes() | mlp_shapes())
    tensors = {f"blk.{i}.{GGUF[p]}.weight": w for (p, i), w in model.matrices.items()}
    found = matrices_of(write_gguf(tmp_path / "x.gguf", "qwen2", tensors))
    assert all(torch.equal(found[seat], w) for seat, w in model.matrices.items())


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-3), ("Q8_0", 1e-2), ("Q4_1", 0.12)])
def test_quantised_tensors_are_numbers_again(kind: str, tolerance: float, tmp_path: Path) -> None:
    """The library reports shapes in the other order and quantised data as bytes."""
    model = Planted(attention_shapes() | mlp_shapes())
    path = write_gguf(tmp_path / "x.gguf", "llama", gguf_llama_tensors(model), kind)
    model.check(analyze(path).rows, tolerance)
    for seat, w in matrices_of(path).items():
        assert (w - model.matrices[seat]).norm() < tolerance * w.norm()


def test_fused_tensors_and_experts_of_gguf(tmp_path: Path) -> None:
    model = Planted(attention_shapes(kv_heads=1, head_dim=32) | mlp_shapes())
    tensors = {}
    for layer in range(LAYERS):
        w = {p: model.matrices[p, layer] for p in model.shapes}
        tensors[f"blk.{layer}.attn_qkv.weight"] = torch.cat([w["q"], w["k"], w["v"]])
        tensors[f"blk.{layer}.ffn_up.weight"] = torch.cat([w["gate"], w["up"]])
        tensors |= {f"blk.{layer}.{GGUF[p]}.weight": w[p] for p in ("o", "down")}
    sizes = {"kv_heads": 1, "attention__key_length": 32}
    model.check(analyze(write_gguf(tmp_path / "phi.gguf", "phi3", tensors, **sizes)).rows)

    mixture = Planted(attention_shapes() | {f"{p}@{e}": s for e in range(2) for p, s in mlp_shapes(48).items()})
    tensors = gguf_llama_tensors(Planted(attention_shapes()))
    tensors = {f"blk.{i}.{GGUF[p]}.weight": w for (p, i), w in mixture.matrices.items() if "@" not in p}
    for layer in range(LAYERS):
        for p in mlp_shapes():
            both = torch.stack([mixture.matrices[f"{p}@{e}", layer] for e in range(2)])
            tensors[f"blk.{layer}.{GGUF[p]}_exps.weight"] = both
    mixture.check(analyze(write_gguf(tmp_path / "moe.gguf", "qwen3moe", tensors, expert_count=2)).rows)


def test_half_precision_is_the_same_as_its_float32_copy(tmp_path: Path) -> None:
    """NumPy has no bfloat16, and PyTorch no SVD of it."""
    model, path = llama(tmp_path / "a")
    halves = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    config = json.loads((path / "config.json").read_text())
    a = analyze(write(tmp_path / "b", halves, config))
    b = analyze(write(tmp_path / "c", {name: tensor.float() for name, tensor in halves.items()}, config))
    assert [row["v1"] for row in a.rows] == [row["v1"] for row in b.rows]
    model.check(a.rows, 0.01)


def test_a_map_of_ones_own(tmp_path: Path) -> None:
    model = Planted({"q": (32, 64), "w_out": (64, 32)})
    tensors = {}
    for layer in range(LAYERS):
        tensors[f"net.{layer}.fused"] = torch.cat([torch.randn(16, 64), model.matrices["q", layer]]).T
        tensors[f"net.{layer}.out"] = model.matrices["w_out", layer]
    write(tmp_path, tensors, None)
    lines = [r"q: {pattern: net\.(\d+)\.fused, rows: [16, 48], transposed: true}"]
    lines += [r"w_out: {pattern: net\.(\d+)\.out, side: writes}"]
    (tmp_path / "map.yaml").write_text("\n".join(lines))
    analysis = analyze(tmp_path, own_map=tmp_path / "map.yaml")
    model.check(analysis.rows)
    assert [analysis.summary[p]["theory"] for p in ("q", "w_out")] == ["v1", "u1"]
    (tmp_path / "map.yaml").write_text("q: {patern: x}")
    with pytest.raises(UserError, match=r"--map: .*map\.yaml: q must be a regular expression or have keys pattern"):
        analyze(tmp_path, own_map=tmp_path / "map.yaml")
    with pytest.raises(UserError, match=r"--map: .*nowhere\.yaml cannot be read"):
        analyze(tmp_path, own_map="nowhere.yaml")


# -- norms ------------------------------------------------------------------------------------------------------------

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def with_norms(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[str, int], Tensor]]:
    generator = torch.Generator().manual_seed(5)
    norms = {
        f"model.layers.{i}.{name}.weight": torch.rand(64, generator=generator) for i in range(LAYERS) for name in NORMS
    }
    return tensors | norms, lambda name, layer: norms[f"model.layers.{layer}.{name}.weight"]


@pytest.mark.parametrize(
    ("family", "offset", "columns", "rows"),
    [
        ("llama", 0, {"q": NORMS[0], "v": NORMS[0], "gate": NORMS[1], "up": NORMS[1]}, {}),
        ("gemma", 1, {"q": NORMS[0], "v": NORMS[0], "gate": NORMS[1], "up": NORMS[1]}, {}),
        ("gemma2", 1, {"k": NORMS[0], "gate": NORMS[2], "up": NORMS[2]}, {"o": NORMS[1], "down": NORMS[3]}),
        ("gemma3_text", 1, {"k": NORMS[0], "up": NORMS[2]}, {"o": NORMS[1], "down": NORMS[3]}),
        ("olmo2", 0, {}, {"o": NORMS[1], "down": NORMS[3]}),
    ],
)
def test_norms_are_folded_where_the_family_has_them(
    family: str, offset: int, columns: dict[str, str], rows: dict[str, str], tmp_path: Path
) -> None:
    """Gemma stores w of 1 + w: adding it twice or never changes every direction."""
    model = Planted(attention_shapes() | mlp_shapes())
    tensors, norm = with_norms(llama_tensors(model))
    found = matrices_of(write(tmp_path, tensors, {"model_type": family, **sizes()}), fold_norms=True)
    for (projection, layer), w in model.matrices.items():
        if projection in columns:
            w = w * (norm(columns[projection], layer) + offset)
        elif projection in rows:
            w = w * (norm(rows[projection], layer) + offset)[:, None]
        elif projection in ("q", "k", "v", "gate", "up") and family != "olmo2":
            continue  # folded as well, seen in the other projections
        assert torch.allclose(found[projection, layer], w), projection


def test_norms_of_a_gguf_gemma_have_the_one_already(tmp_path: Path) -> None:
    model = Planted(attention_shapes() | mlp_shapes())
    tensors = {f"blk.{i}.{GGUF[p]}.weight": w for (p, i), w in model.matrices.items()}
    names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    tensors |= {f"blk.{i}.{name}.weight": torch.full((64,), 1.5) for i in range(LAYERS) for name in names}
    found = matrices_of(write_gguf(tmp_path / "x.gguf", "gemma2", tensors), fold_norms=True)
    assert all(torch.allclose(found[seat], 1.5 * w) for seat, w in model.matrices.items())


def test_post_norm_encoders_read_from_the_layer_below(tmp_path: Path) -> None:
    model, path = LAYOUTS["bert"](tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["embeddings.LayerNorm.weight"] = torch.full((64,), 2.0)
    for layer in range(LAYERS):
        tensors[f"encoder.layer.{layer}.attention.output.LayerNorm.weight"] = torch.full((64,), 3.0)
        tensors[f"encoder.layer.{layer}.output.LayerNorm.weight"] = torch.full((64,), 5.0 + layer)
    save_file(tensors, path / "model.safetensors")
    found = matrices_of(path, fold_norms=True)
    factors = {("q", 0): 2, ("q", 1): 5, ("v", 2): 6, ("up", 1): 3, ("o", 1): 1, ("down", 2): 1}
    for seat, factor in factors.items():
        assert torch.allclose(found[seat], factor * model.matrices[seat]), seat


# -- files of the libraries themselves -------------------------------------------------------------------------------

SMALL = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 16, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Llama", "Mistral", "Qwen2", "SmolLM3", "Olmo2", "Phi3", "GPTNeoX", "Bert")},
    **{name: {"head_dim": 32} for name in ("Qwen3", "Gemma", "Gemma2", "Gemma3Text")},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "Mixtral": {"num_local_experts": 2},
    "Qwen2Moe": {"num_experts": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "Qwen3Moe": {"num_experts": 2, "moe_intermediate_size": 32, "head_dim": 32},
}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_names_are_those_that_transformers_writes(family: str, tmp_path: Path) -> None:
    """Names and configuration keys change between versions of the library; what it writes must be found whole."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**(SMALL | TRANSFORMERS[family]))
    kind = transformers.AutoModelForMaskedLM if family == "Bert" else transformers.AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    table = find_matrices(open_checkpoint(tmp_path), fold_norms=True)
    projections = {sequence[0].projection for sequence in table.sequences}
    gated = family not in ("GPT2", "GPTNeoX", "Bert")
    assert {*"qkvo", "up", "down"} | ({"gate"} if gated else set()) <= projections
    assert all(len(sequence) == 2 for sequence in table.sequences)
    head = TRANSFORMERS[family].get("head_dim", 16)
    kv = 4 if family in ("GPT2", "GPTNeoX", "Bert") else 2
    wanted = {"q": (4 * head, 64), "k": (kv * head, 64), "v": (kv * head, 64), "o": (64, 4 * head)}
    for sequence in table.sequences:
        for entry in sequence:
            shape = tuple(entry.numbers(entry.pieces(), CPU).shape)
            assert shape == wanted.get(entry.projection, shape)
            assert shape[1 if entry.matrix.side == "reads" else 0] == 64
    covered = {e.view.tensor for sequence in table.sequences for e in sequence}
    names = (*LLAMA.values(), "c_attn.weight", "query_key_value.weight", "dense.weight", "w1.weight")
    forgotten = [n for n in open_checkpoint(tmp_path).tensors if n.endswith(names) and n not in covered]
    assert not [n for n in forgotten if "pooler" not in n and "predictions" not in n]


def test_checkpoints_of_geocont_itself(fit: Callable[..., Path]) -> None:
    """A run's folder, and its checkpoint alone, are models like any other."""
    run = fit("run", "--trainer.max_epochs=1", "--trainer.limit_train_batches=2")
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for path in (run, run / "checkpoints/last.ckpt"):
        found = matrices_of(path)
        assert list(found) == [("hidden", layer) for layer in range(4)]
        assert torch.equal(found["hidden", 3], state["model.hidden.3.linear.weight"])
    assert {row["theory"] for row in analyze(run).rows} == {"v1 u1"}


def test_models_of_geocont_in_lightning_checkpoints(tmp_path: Path) -> None:
    """geocont's GPT-2 stores matrices out x in, unlike Hugging Face's: the run's configuration tells them apart."""
    from geocont.models import GPT2, GPT2Config

    model = GPT2(GPT2Config(layers=2, heads=2, width=32, context=8, vocabulary=16))
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": state, "global_step": 3}, tmp_path / "checkpoints/last.ckpt")
    network = "{layers: 2, heads: 2, width: 32}"
    text = f"model: {{class_path: geocont.modules.GPT2Module, init_args: {{network: {network}}}}}"
    (tmp_path / "config.yaml").write_text(text)
    found = matrices_of(tmp_path)
    fused = state["model.h.1.attn.c_attn.weight"]
    assert torch.equal(found["k", 1], fused[32:64])
    model.save_safetensors(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32}))
    assert torch.equal(matrices_of(tmp_path / "model.safetensors")["k", 1], fused[32:64])

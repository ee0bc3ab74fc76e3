"""WeightMap: patterns, slices, and what is said where they do not fit."""

from __future__ import annotations

import pytest
import torch

from geocont.errors import UserError
from geocont.weights import WeightMap, WeightPattern, canonical_name

SHAPES = {
    "embed.weight": (50, 8),
    "layers.0.attn.qkv.weight": (24, 8),
    "layers.1.attn.qkv.weight": (24, 8),
    "layers.0.mlp.down.weight": (8, 16),
    "layers.1.mlp.down.weight": (8, 16),
    "layers.0.norm.weight": (8,),
    "layers.1.norm.weight": (8,),
}


def test_slices_of_a_fused_parameter_are_views_in_order_of_depth() -> None:
    qkv = r"layers\.(\d+)\.attn\.qkv\.weight"
    found = WeightMap.from_patterns(
        {"q": WeightPattern(qkv, rows=(0, 8)), "k": {"pattern": qkv, "rows": [8, 16]}}, SHAPES
    )
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    k = found.gather("k", tensors)
    assert [matrix.depth for matrix in found.projections["k"]] == [0, 1]
    assert torch.equal(k[1], tensors["layers.1.attn.qkv.weight"][8:16])
    assert k[1].data_ptr() == tensors["layers.1.attn.qkv.weight"][8:16].data_ptr()
    assert found.projections["q"][0].side == "reads"
    assert found.unmatched == ("embed.weight", "layers.0.mlp.down.weight", "layers.1.mlp.down.weight")


def test_transposed_parameters_are_turned_to_out_x_in() -> None:
    found = WeightMap.from_patterns({"down": WeightPattern(r"down\.weight", transposed=True, rows=(0, 4))}, SHAPES)
    tensor = torch.randn(8, 16)
    assert torch.equal(found.projections["down"][0].of(tensor), tensor.T[:4])
    assert found.projections["down"][0].side == "writes"


def test_names_do_not_depend_on_compilation() -> None:
    compiled = {f"model._orig_mod.{name}": shape for name, shape in SHAPES.items()}
    found = WeightMap.from_patterns({"down": r"layers\.(\d+)\.mlp\.down\.weight"}, compiled)
    assert found.parameters == ("model.layers.0.mlp.down.weight", "model.layers.1.mlp.down.weight")
    assert canonical_name("_orig_mod.a._orig_mod.b") == "a.b"


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"q": r"layers\.(\d+)\.atn\.qkv\.weight"}, "nearest matrices are layers.0.attn.qkv.weight"),
        ({"q": r"layers\.(\d+\.attn"}, "not a regular expression"),
        ({"q": r"norm\.weight"}, "only matrices have singular vectors"),
        ({"q": r"qkv\.weight", "k": r"qkv\.weight"}, "layers.0.attn.qkv.weight is matched twice, by q and k"),
        ({"q": r"layers\.\d+\.(\w+)\.qkv\.weight"}, "must be a depth, got 'attn'"),
        ({"q": r"layers\.\d+\.attn.(?:qkv|x)\.weight", "o": r"lay(?:e)rs\.(9)\.x"}, "weights.o: no parameter"),
        ({"q": {"pattern": r"qkv\.weight", "rows": [16, 32]}}, "rows [16, 32] do not lie within the 24"),
        ({"q": {"patern": "x"}}, "must be a regular expression or have keys pattern"),
        ({"q": r"l(?:ayers)\.[01]\.attn\.qkv\.(?:weight)|layers\.(\d+)\.never"}, "must be a depth"),
    ],
)
def test_patterns_that_do_not_fit_are_named(patterns: dict, message: str) -> None:
    with pytest.raises(UserError, match=".*") as caught:
        WeightMap.from_patterns(patterns, SHAPES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_layers_cannot_have_one_depth() -> None:
    shapes = {"enc.0.q.weight": (4, 4), "dec.0.q.weight": (4, 4)}
    with pytest.raises(UserError, match="both have depth 0"):
        WeightMap.from_patterns({"q": r"(\d+)\.q\.weight"}, shapes)

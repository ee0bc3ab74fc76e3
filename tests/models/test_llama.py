"""Llama against Hugging Face's, its files, its ablations, and what the measures rely on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geocont.errors import UserError
from geocont.models import Llama, LlamaConfig, ScaledDotProduct
from geocont.models.attention import LinearAttention
from geocont.weights import WeightMap

L, H, D, T, V = 3, 4, 32, 12, 61
SHAPE = {"layers": L, "heads": H, "width": D, "hidden": 48, "context": T, "vocabulary": V}


def tiny(**options: Any) -> LlamaConfig:
    return LlamaConfig(**{**SHAPE, **options})


def tokens(rows: int = 2, length: int = T) -> Tensor:
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(1))


def disturbed(model: Any, scale: float = 0.2) -> Any:
    """Moves every parameter, so that no norm is the identity."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()


def hugging_face(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": V, "max_position_embeddings": T, "hidden_size": D, "num_hidden_layers": L}
    shape |= {"num_attention_heads": H, "intermediate_size": 48, "rms_norm_eps": 1e-5}
    return disturbed(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **options)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
)
def test_logits_are_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    """Protects the whole forward pass, the shape from config.json, and the reader: grouped heads, either head."""
    theirs = hugging_face(**options)
    theirs.save_pretrained(tmp_path)
    ours = Llama.from_safetensors(tmp_path).eval()
    with torch.no_grad():
        expected, got = theirs(tokens()).logits, ours(tokens())
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_qk_norm_is_that_of_qwen3(tmp_path: Path) -> None:
    """Protects the place of the norm of q and k: on each head, before the rotation."""
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": V,
        "max_position_embeddings": T,
        "hidden_size": D,
        "num_hidden_layers": L,
        "head_dim": D // H,
    }
    shape |= {"num_attention_heads": H, "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-5}
    theirs = disturbed(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, tie_word_embeddings=False)))
    theirs.save_pretrained(tmp_path)
    ours = Llama.from_safetensors(tmp_path, tiny(kv_heads=2, qk_norm=True, tied=False)).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, atol=1e-5, rtol=0)


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    """Protects the way back: a saved model is a Hugging Face model, and loads again bit for bit."""
    theirs, ours = hugging_face(num_key_value_heads=2), disturbed(Llama(tiny(kv_heads=2, tied=False)))
    theirs.config.save_pretrained(tmp_path)
    ours.save_safetensors(tmp_path / "model.safetensors")
    with torch.no_grad():
        again = type(theirs).from_pretrained(tmp_path).eval()(tokens()).logits
        torch.testing.assert_close(again, ours(tokens()), atol=1e-5, rtol=0)
    loaded = Llama.from_safetensors(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), ours.parameters(), strict=True))


ABLATIONS: list[dict[str, Any]] = [
    {"activation": "gelu"},
    {"activation": "relu"},
    {"activation": "none"},
    {"activation": "radial"},
    {"gate": False},
    {"attention_residual": False},
    {"mlp_residual": False},
    {"norm": False},
    {"qk_norm": True},
    {"attention": "linear"},
    {"attention": "linear", "kv_heads": 2},
]


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_every_ablation_changes_the_function_and_stays_causal(options: dict[str, Any]) -> None:
    """Protects the ablations: each computes something else, gives every parameter a gradient, and sees no future."""
    model, plain = disturbed(Llama(tiny(**options))), disturbed(Llama(tiny(kv_heads=options.get("kv_heads"))))
    plain.load_state_dict(model.state_dict(), strict=False)
    logits = model(tokens())
    assert (logits - plain(tokens())).abs().max() > 1e-2
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    later = tokens().clone()
    later[:, 7:] = (later[:, 7:] + 1) % V
    difference = (model(later) - logits).abs().amax((0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0


def test_linear_attention_is_its_formula() -> None:
    """Protects the ablation of softmax: linear in q, k and v, grouped heads shared as by scaled dot products."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 5, 6), torch.randn(2, 2, 5, 6)
    core = LinearAttention()
    out = core(q, k, v)
    expected = sum((q[1, 3, 4] @ k[1, 1, s]) * v[1, 1, s] for s in range(5)) / (5 * 6**0.5)
    torch.testing.assert_close(out[1, 3, 4], expected)
    torch.testing.assert_close(core(2 * q, 3 * k, v), 6 * out)
    assert not any(isinstance(module, ScaledDotProduct) for module in Llama(tiny(attention="linear")).modules())


def test_seven_projections_with_their_roles() -> None:
    """Protects the weight map: grouped heads have fewer rows, and without a gate there are six projections."""
    model = Llama(tiny(kv_heads=2))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights = WeightMap.from_patterns(model.weight_patterns(), shapes)
    assert {name: len(layers) for name, layers in weights.projections.items()} == dict.fromkeys(
        ("q", "k", "v", "o", "gate", "up", "down"), L
    )
    assert weights.gather("k", dict(model.named_parameters()))[1].shape == (16, D)
    assert weights.projections["down"][2].side == weights.projections["o"][0].side == "writes"
    assert weights.unmatched == ("embed_tokens.weight",)
    assert "gate" not in Llama(tiny(gate=False)).weight_patterns()


def test_the_default_has_34_million_parameters() -> None:
    """Protects the size of the paper's model, the tied head counted once."""
    with torch.device("meta"):
        model = Llama(LlamaConfig())
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 34


def test_no_deviation_depends_on_the_context() -> None:
    """Protects a shorter batch, and rotary positions in half precision, which must be of float32's angles."""
    model = disturbed(Llama(tiny()))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens())[:, :5], model(tokens()[:, :5]), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match=r"network\.context is 12, but a batch has 13"):
        model(tokens(length=13))
    assert not [name for name in model.state_dict() if "rotary" in name]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"heads": 3}, r"network\.width must be a multiple of twice network\.heads \(3\), got 32"),
        ({"width": 20}, r"network\.width must be a multiple of twice network\.heads \(4\), got 20"),
        ({"kv_heads": 3}, r"network\.kv_heads must divide network\.heads \(4\), got 3"),
        ({"kv_heads": 0}, r"network\.kv_heads must divide"),
        ({"layers": 0}, r"network\.layers must be at least 1, got 0"),
        ({"rope_theta": 0.0}, r"network\.rope_theta must be above 0"),
        ({"activation": "swish"}, r"network\.activation must be one of silu, gelu, relu, none, radial, got 'swish'"),
        ({"attention": "flash"}, r"network\.attention must be one of softmax, linear, got 'flash'"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, Any], match: str) -> None:
    """Protects the user from an error deep in the forward pass."""
    with pytest.raises(UserError, match=match):
        tiny(**options)


def test_strange_configurations_are_refused_in_one_line(tmp_path: Path) -> None:
    """Protects from silently other numbers: what this model does not have is named, and so is what is missing."""
    Llama(tiny(tied=False)).save_safetensors(tmp_path / "model.safetensors")
    config = hugging_face().config.to_dict()

    def refuses(match: str, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
        changed = dict(config)
        change(changed)
        (tmp_path / "config.json").write_text(json.dumps(changed, default=str))
        with pytest.raises(UserError, match=match) as caught:
            Llama.from_safetensors(tmp_path)
        assert "\n" not in str(caught.value)

    with pytest.raises(UserError, match=r"config\.json cannot be read .*; give network\.\* instead"):
        Llama.from_safetensors(tmp_path)
    refuses("has model_type 'mistral'", lambda c: c.update(model_type="mistral"))
    refuses("has rope_type 'llama3'", lambda c: c.update(rope_parameters={"rope_type": "llama3", "factor": 8.0}))
    refuses("has rope_type 'linear'", lambda c: c.update(rope_scaling={"type": "linear", "factor": 2.0}))
    refuses("has head_dim 16", lambda c: c.update(head_dim=16))
    refuses("has attention_bias True", lambda c: c.update(attention_bias=True))
    refuses("has no hidden_size", lambda c: c.pop("hidden_size"))
    refuses("cannot be understood", lambda c: c.update(num_hidden_layers="many"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="has no num_attention_heads"):
        Llama.from_safetensors(tmp_path)
    name = r"lacks layers\.2\.input_layernorm\.weight; network\.layers"
    Llama(tiny(tied=False, layers=2)).save_safetensors(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=name):
        Llama.from_safetensors(tmp_path, tiny(tied=False))

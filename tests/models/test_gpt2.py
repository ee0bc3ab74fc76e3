"""GPT-2 against Hugging Face's, its files, and what the measures rely on: names, slices and the hook point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from geocont.errors import UserError
from geocont.models import GPT2, GPT2Config, ScaledDotProduct
from geocont.weights import WeightMap

L, H, D, T, V = 3, 4, 32, 12, 61


def tiny(**options: object) -> GPT2Config:
    return GPT2Config(**{"layers": L, "heads": H, "width": D, "context": T, "vocabulary": V, **options})  # type: ignore[arg-type]


def tokens(rows: int = 2, length: int = T) -> Tensor:
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(1))


def disturbed(model: torch.nn.Module, scale: float = 0.2) -> torch.nn.Module:
    """Moves every parameter, so that no bias is 0 and no LayerNorm the identity."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def hugging_face() -> Callable[[bool], torch.nn.Module]:
    transformers = pytest.importorskip("transformers")

    def build(bias: bool = True) -> torch.nn.Module:
        config = transformers.GPT2Config(vocab_size=V, n_positions=T, n_embd=D, n_layer=L, n_head=H)
        model = disturbed(transformers.GPT2LMHeadModel(config))
        if not bias:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith(".bias"):
                        parameter.zero_()
        return model

    return build


@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_those_of_transformers(hugging_face: Callable, bias: bool, tmp_path: Path) -> None:
    """Protects the whole forward pass and the reader: a file that transformers wrote gives the logits it gives."""
    theirs = hugging_face(bias)
    theirs.save_pretrained(tmp_path)
    ours = GPT2.from_safetensors(tmp_path, tiny(bias=bias)).eval()
    with torch.no_grad():
        expected, got = theirs(tokens()).logits, ours(tokens())
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_the_shape_is_read_from_the_file(hugging_face: Callable, tmp_path: Path) -> None:
    """Protects loading without a configuration, where the number of heads stands only in config.json."""
    hugging_face().save_pretrained(tmp_path)
    assert GPT2.from_safetensors(tmp_path / "model.safetensors").config == tiny()
    (tmp_path / "config.json").unlink()
    assert GPT2.from_safetensors(tmp_path).config == tiny(heads=1)


def test_transformers_reads_what_is_written(hugging_face: Callable, tmp_path: Path) -> None:
    """Protects the way back: a saved model is a Hugging Face model, and loads again bit for bit."""
    theirs, ours = hugging_face(), disturbed(GPT2(tiny()))
    theirs.config.save_pretrained(tmp_path)
    ours.save_safetensors(tmp_path / "model.safetensors")
    with torch.no_grad():
        again = type(theirs).from_pretrained(tmp_path).eval()(tokens()).logits
        torch.testing.assert_close(again, ours(tokens()), atol=1e-5, rtol=0)
    loaded = GPT2.from_safetensors(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), ours.parameters(), strict=True))


def written(path: Path, model: GPT2, change: Callable[[dict[str, Tensor]], object] = lambda _: None) -> Path:
    model.save_safetensors(path)
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_old_files_and_half_precision_load(dtype: torch.dtype, tmp_path: Path) -> None:
    """Protects the layouts found on the hub: no prefix, masks as tensors, a copy of the embedding, half precision."""
    model = disturbed(GPT2(tiny()))

    def age(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name).to(dtype)
        for layer in range(L):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, T, T).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    loaded = GPT2.from_safetensors(written(tmp_path / "old.safetensors", model, age), tiny())
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, model.get_parameter(name).to(dtype).float()), name


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    """Protects models with a head of their own, and says so where a file and a model disagree about it."""
    untied = disturbed(GPT2(tiny(tied=False)))
    path = written(tmp_path / "untied.safetensors", untied)
    assert torch.equal(GPT2.from_safetensors(path, tiny(tied=False)).lm_head.weight, untied.lm_head.weight)
    assert not GPT2.from_safetensors(path).config.tied
    with pytest.raises(UserError, match=r"has lm_head\.weight, which the network does not have; network\.tied"):
        GPT2.from_safetensors(path, tiny())
    tied = written(tmp_path / "tied.safetensors", GPT2(tiny()))
    with pytest.raises(UserError, match=r"lacks lm_head\.weight; network\.tied"):
        GPT2.from_safetensors(tied, tiny(tied=False))


def test_wrong_files_are_refused_in_one_line(tmp_path: Path) -> None:
    """Protects the user from a stack trace, and the model from half a file: it stays as it was."""
    model = GPT2(tiny())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def refuses(path: Path, match: str) -> None:
        with pytest.raises(UserError, match=match) as caught:
            model.load_safetensors(path)
        assert "\n" not in str(caught.value)
        assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())

    def file(change: Callable[[dict[str, Tensor]], object]) -> Path:
        return written(tmp_path / "w.safetensors", disturbed(GPT2(tiny())), change)

    name = "transformer.h.1.attn.c_attn.weight"
    refuses(tmp_path / "none.safetensors", r"none\.safetensors is not there")
    (tmp_path / "text.safetensors").write_text("these are not the weights you are looking for")
    refuses(tmp_path / "text.safetensors", "cannot be read as a safetensors file")
    refuses(file(lambda t: t.pop(name)), r"lacks h\.1\.attn\.c_attn\.weight")
    refuses(
        file(lambda t: t.update({name: t[name].T})),
        r"h\.1\.attn\.c_attn\.weight has shape \(96, 32\) in .*, but the network needs \(32, 96\)",
    )
    refuses(file(lambda t: t.update(extra=torch.ones(1))), "has extra, which the network does not have")
    refuses(file(lambda t: t.update({"lm_head.weight": torch.ones(V, D)})), r"network\.tied")
    refuses(file(lambda t: t.update({"transformer.wte.weight": torch.ones(V, D).int()})), r"holds torch\.int32")
    (tmp_path / "config.json").write_text('{"n_head": 8}')
    refuses(file(lambda t: None), r"network\.heads is 4, .* with 8; set --model\.network\.heads=8")
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"has h\.\d\..*\.bias|has ln_f\.bias"):
        GPT2(tiny(bias=False)).load_safetensors(file(lambda t: None))


def test_no_logit_depends_on_a_later_token() -> None:
    """Protects causality, without which every loss would be too good."""
    model, changed = disturbed(GPT2(tiny())), tokens()
    changed[:, 7] = (changed[:, 7] + 1) % V
    a, b = model(tokens()), model(changed)
    torch.testing.assert_close(a[:, :7], b[:, :7], atol=1e-6, rtol=0)
    assert ((a - b)[:, 7:].abs().amax(-1) > 1e-3).all()
    torch.testing.assert_close(model(tokens()[:, :5]), a[:, :5], atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gradient_reaches_every_parameter(tied: bool, bias: bool) -> None:
    """Protects against a parameter that is there but takes no part, and pins which parameters there are."""
    model = disturbed(GPT2(tiny(tied=tied, bias=bias)))
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    names = [name for name, _ in model.named_parameters()]
    assert all(model.get_parameter(name).grad.norm() > 0 for name in names)
    assert ("lm_head.weight" in names) is not tied
    assert any(name.endswith(".bias") for name in names) is bias
    assert names[0] == "wte.weight"
    assert len(names) == 2 + L * (12 if bias else 6) + (2 if bias else 1) + (not tied)


def test_a_tied_head_is_the_embedding() -> None:
    """Protects tying: one parameter, listed and saved once, that acts at both ends."""
    model = GPT2(tiny())
    assert [name for name in model.state_dict() if model.state_dict()[name].shape == (V, D)] == ["wte.weight"]
    with torch.no_grad():
        model.wte.weight[5] = 0
    assert (model(tokens())[..., 5] == 0).all()


def test_bfloat16_autocast_stays_near_float32() -> None:
    """Protects mixed precision."""
    model = disturbed(GPT2(tiny()), 0.05)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mixed = model(tokens())
    exact = model(tokens())
    assert mixed.dtype == torch.bfloat16
    assert (mixed - exact).norm() < 0.03 * exact.norm()


def test_initial_scales_are_those_of_gpt2() -> None:
    """Protects the start of training: N(0, 0.02), less for what is added to the residual stream, no biases."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=8, heads=2, width=128, context=64, vocabulary=256, tied=False))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 2:
            expected = 0.02 / 4 if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
        else:
            assert (parameter == 1).all(), name


def test_a_hook_sees_q_k_and_v_of_the_weight_map() -> None:
    """Protects the measures: the map's slices are the matrices that attention uses, and one hook sees their output."""
    model = disturbed(GPT2(tiny()))
    parameters = dict(model.named_parameters())
    weights = WeightMap.from_patterns(model.weight_patterns(), {name: p.shape for name, p in parameters.items()})
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (4 * D, D), "down": (D, 4 * D)}
    gathered = {projection: weights.gather(projection, parameters) for projection in weights.projections}
    assert {projection: [tuple(m.shape) for m in found] for projection, found in gathered.items()} == {
        projection: [shape] * L for projection, shape in shapes.items()
    }
    assert set(weights.unmatched) == {"wte.weight", "wpe.weight"}

    seen: list[tuple[Tensor, ...]] = []
    inputs: list[Tensor] = []
    attention = model.h[1].attn
    attention.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    attention.core.register_forward_hook(lambda module, args, out: seen.append((*args, out)))
    model(tokens())
    *qkv, out = seen[0]
    for i, projection in enumerate("qkv"):
        bias = attention.c_attn.bias[i * D : (i + 1) * D]
        by_hand = (inputs[0] @ gathered[projection][1].T + bias).view(2, T, H, D // H).transpose(1, 2)
        torch.testing.assert_close(qkv[i], by_hand, atol=1e-5, rtol=0)
    scores = qkv[0] @ qkv[1].mT / (D // H) ** 0.5
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    torch.testing.assert_close(scores.masked_fill(later, -torch.inf).softmax(-1) @ qkv[2], out, atol=1e-5, rtol=0)


def test_grouped_heads_equal_repeated_ones() -> None:
    """Protects grouped keys and values: each head serves adjacent heads of q."""
    core = ScaledDotProduct()
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    repeated = core(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(core(q, k, v), repeated)


def test_dropout_acts_in_training_only() -> None:
    """Protects evaluation from noise, and dropout from being an option without effect."""
    model = GPT2(tiny(dropout=0.5))
    attention = ScaledDotProduct(0.5)
    q = torch.randn(1, 2, 6, 8)
    used: list[object] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, args, out: used.append(module))
    model(tokens())
    assert len(used) == len(set(used)) == 1 + 2 * L  # of embeddings and of each sublayer
    assert not torch.equal(model(tokens()), model(tokens()))
    assert not torch.equal(attention(q, q, q), attention(q, q, q))
    assert torch.equal(model.eval()(tokens()), model(tokens()))
    assert torch.equal(attention.eval()(q, q, q), attention(q, q, q))


def test_values_out_of_range_are_named() -> None:
    """Protects the user from a shape error deep inside."""
    with pytest.raises(UserError, match=r"network\.layers must be at least 1, got 0"):
        tiny(layers=0)
    with pytest.raises(UserError, match=r"network\.width must be a multiple of network\.heads \(4\), got 30"):
        tiny(width=30)
    with pytest.raises(UserError, match=r"network\.dropout must be in \[0, 1\), got 1"):
        tiny(dropout=1.0)
    with pytest.raises(UserError, match=r"network\.context is 12, but a batch has 13 tokens .*context=13"):
        GPT2(tiny())(tokens(length=13))

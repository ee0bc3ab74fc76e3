"""Small checkpoints whose leading singular vectors are known, in every layout that the readers must take apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS = 3
WIDTH = 64


def planted(m: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a matrix ``(m, n)``, its first left and its first right singular vector; s1 / s2 is above 1.5."""
    u = torch.nn.functional.normalize(torch.randn(m, generator=generator, dtype=torch.float64), dim=0)
    v = torch.nn.functional.normalize(torch.randn(n, generator=generator, dtype=torch.float64), dim=0)
    rest = torch.randn(m, n, generator=generator, dtype=torch.float64) / (m**0.5 + n**0.5)
    rest -= torch.outer(u, u @ rest)
    rest -= torch.outer(rest @ v, v)
    return (3 * torch.outer(u, v) + rest).float(), u, v


@dataclass
class Planted:
    """A model's matrices by (projection, layer), the vectors planted in them, and its norms by (name, layer)."""

    shapes: dict[str, tuple[int, int]]
    layers: int = LAYERS
    seed: int = 0
    matrices: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    vectors: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for projection, (m, n) in self.shapes.items():
            for layer in range(self.layers):
                w, u, v = planted(m, n, generator)
                self.matrices[projection, layer], self.vectors[projection, layer] = w, (u, v)

    def expected(self, projection: str, layer: int) -> tuple[float, float]:
        """Returns v1 and u1 of a layer and the next."""
        (u, v), (u_next, v_next) = self.vectors[projection, layer], self.vectors[projection, layer + 1]
        return abs(float(v @ v_next)), abs(float(u @ u_next))

    def check(self, rows: list[dict[str, Any]], tolerance: float = 2e-5) -> None:
        """Compares rows of an analysis with what was planted."""
        found = {}
        for row in rows:
            name = row["projection"] if row.get("expert") is None else f"{row['projection']}@{row['expert']}"
            found[name, row["layer"]] = (row["v1"], row["u1"])
        wanted = {(p, layer) for p, layer in self.matrices if layer < self.layers - 1}
        assert found.keys() == wanted
        for seat in wanted:
            assert np.allclose(found[seat], self.expected(*seat), atol=tolerance), seat


def attention_shapes(heads: int = 4, kv_heads: int = 2, head_dim: int = 16, width: int = WIDTH) -> dict[str, Any]:
    q, kv = heads * head_dim, kv_heads * head_dim
    return {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}


def mlp_shapes(inner: int = 96, gated: bool = True, width: int = WIDTH) -> dict[str, Any]:
    gate = {"gate": (inner, width)} if gated else {}
    return gate | {"up": (inner, width), "down": (width, inner)}


def sizes(heads: int = 4, kv_heads: int = 2, inner: int = 96, **more: Any) -> dict[str, Any]:
    """Returns the sizes of a config.json."""
    return {
        **{"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": heads},
        **{"num_key_value_heads": kv_heads, "intermediate_size": inner},
        **more,
    }


LLAMA = {
    **{p: f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{p: f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}


def llama_tensors(model: Planted, prefix: str = "model.layers.") -> dict[str, Tensor]:
    return {f"{prefix}{layer}.{LLAMA[p]}": w for (p, layer), w in model.matrices.items()}


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None) -> Path:
    """Writes a folder in Hugging Face's manner."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def llama(folder: Path, **options: Any) -> tuple[Planted, Path]:
    model = Planted(attention_shapes() | mlp_shapes(), **options)
    config = {"model_type": "llama", **sizes(), "num_hidden_layers": model.layers}
    return model, write(folder, llama_tensors(model), config)


def llama_of_another_prefix(folder: Path) -> tuple[Planted, Path]:
    """A multimodal model: text sizes nested, a vision tower whose layers also count from 0, compiled and wrapped."""
    model = Planted(attention_shapes(head_dim=32) | mlp_shapes())
    tensors = llama_tensors(model, "module._orig_mod.language_model.model.layers.")
    other = Planted(attention_shapes(), seed=1)
    tensors |= llama_tensors(other, "module._orig_mod.vision_tower.vision_model.encoder.layers.")
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **sizes(head_dim=32)}}
    return model, write(folder, tensors, config)


def phi3(folder: Path) -> tuple[Planted, Path]:
    """Grouped q, k, v packed as 128, 32, 32 rows: heads of 32 where width / heads is 16."""
    model = Planted(attention_shapes(kv_heads=1, head_dim=32) | mlp_shapes())
    tensors = {}
    for layer in range(LAYERS):
        w = {p: model.matrices[p, layer] for p in model.shapes}
        stem = f"model.layers.{layer}."
        tensors[stem + "self_attn.qkv_proj.weight"] = torch.cat([w["q"], w["k"], w["v"]])
        tensors[stem + "mlp.gate_up_proj.weight"] = torch.cat([w["gate"], w["up"]])
        tensors |= {stem + LLAMA[p]: w[p] for p in ("o", "down")}
    return model, write(folder, tensors, {"model_type": "phi3", **sizes(kv_heads=1, head_dim=32)})


def gpt2(folder: Path) -> tuple[Planted, Path]:
    """Conv1D: every matrix in x out, q, k and v beside each other in its columns."""
    model = Planted(attention_shapes(kv_heads=4) | mlp_shapes(gated=False))
    tensors = {}
    for layer in range(LAYERS):
        w = {p: model.matrices[p, layer].T for p in model.shapes}
        stem = f"transformer.h.{layer}."
        tensors[stem + "attn.c_attn.weight"] = torch.cat([w["q"], w["k"], w["v"]], 1)
        names = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
        tensors |= {f"{stem}{name}.weight": w[p] for p, name in names.items()}
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4}
    return model, write(folder, tensors, config)


def gpt_neox(folder: Path) -> tuple[Planted, Path]:
    """Rows of one head's q, then its k, then its v, then the next head's."""
    model = Planted(attention_shapes(kv_heads=4) | mlp_shapes(gated=False))
    tensors = {}
    for layer in range(LAYERS):
        w = {p: model.matrices[p, layer] for p in model.shapes}
        heads = [w[p][head * 16 : head * 16 + 16] for head in range(4) for p in "qkv"]
        stem = f"gpt_neox.layers.{layer}."
        tensors[stem + "attention.query_key_value.weight"] = torch.cat(heads)
        names = {"o": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
        tensors |= {f"{stem}{name}.weight": w[p] for p, name in names.items()}
    return model, write(folder, tensors, {"architectures": ["GPTNeoXForCausalLM"], **sizes(kv_heads=4)})


def bert(folder: Path) -> tuple[Planted, Path]:
    model = Planted(attention_shapes(kv_heads=4) | mlp_shapes(gated=False))
    names = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value"}
    names |= {"o": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"}
    tensors = {f"encoder.layer.{i}.{names[p]}.weight": w for (p, i), w in model.matrices.items()}
    return model, write(folder, tensors, {"architectures": ["BertModel"], "model_type": "bert", **sizes()})


def mixtral(folder: Path) -> tuple[Planted, Path]:
    experts = {f"{p}@{e}": shape for e in range(2) for p, shape in mlp_shapes(48).items()}
    model = Planted(attention_shapes() | experts)
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    tensors = {}
    for (p, layer), w in model.matrices.items():
        projection, _, expert = p.partition("@")
        inner = f"block_sparse_moe.experts.{expert}.{names[projection]}.weight" if expert else LLAMA[p]
        tensors[f"model.layers.{layer}.{inner}"] = w
    return model, write(folder, tensors, {"model_type": "mixtral", **sizes(inner=48, num_local_experts=2)})


def qwen_moe_packed(folder: Path) -> tuple[Planted, Path]:
    """Experts as one tensor of three dimensions, gate over up."""
    experts = {f"{p}@{e}": shape for e in range(2) for p, shape in mlp_shapes(48).items()}
    model = Planted(attention_shapes() | experts)
    tensors = {f"model.layers.{i}.{LLAMA[p]}": w for (p, i), w in model.matrices.items() if "@" not in p}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.mlp.experts."
        both = [torch.cat([model.matrices[f"gate@{e}", layer], model.matrices[f"up@{e}", layer]]) for e in range(2)]
        tensors[stem + "gate_up_proj"] = torch.stack(both)
        tensors[stem + "down_proj"] = torch.stack([model.matrices[f"down@{e}", layer] for e in range(2)])
    return model, write(folder, tensors, {"model_type": "qwen3_moe", **sizes(num_experts=2, moe_intermediate_size=48)})


LAYOUTS: dict[str, Callable[[Path], tuple[Planted, Path]]] = {
    **{"llama": llama, "prefixes": llama_of_another_prefix, "phi3": phi3, "gpt2": gpt2, "gpt_neox": gpt_neox},
    **{"bert": bert, "mixtral": mixtral, "packed experts": qwen_moe_packed},
}

GGUF = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
GGUF |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def halves_interleaved(w: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of q and k: those of each head alternate between its two halves."""
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(path: Path, architecture: str, tensors: dict[str, Tensor], kind: str = "F32", **more: int) -> Path:
    """Writes a GGUF file with the gguf library."""
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(more.pop("kv_heads", 2))
    for key, value in more.items():
        writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)
    for name, tensor in tensors.items():
        numbers = tensor.contiguous().numpy()
        if kind in ("F32", "F16"):
            writer.add_tensor(name, numbers.astype(np.float32 if kind == "F32" else np.float16))
        else:
            quantisation = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(numbers, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_llama_tensors(model: Planted) -> dict[str, Tensor]:
    """The tensors of a Llama as llama.cpp's converter writes them."""
    heads = {"q": 4, "k": 2}
    return {
        f"blk.{layer}.{GGUF[p]}.weight": halves_interleaved(w, heads[p]) if p in heads else w
        for (p, layer), w in model.matrices.items()
    }

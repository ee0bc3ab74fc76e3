"""Where the matrices of a family of models lie: regular expressions for names, slices from the configuration.

A family is chosen by the configuration alone (``model_type`` and ``architectures`` of config.json,
``general.architecture`` of a GGUF file, ``model.class_path`` of a geocont run), never by the shapes of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from geocont.errors import UserError
from geocont.weights import WeightPattern

Patterns = dict[str, WeightPattern]

#: More experts than any model has; a corrupt file may ask for billions.
MOST_EXPERTS = 4096


@dataclass(frozen=True)
class Cut:
    """How tensors whose names match are presented as matrices, under the name ``name#part``.

    Attributes:
        pattern: Regular expression for the end of a tensor's name.
        way: ``heads``: rows are (head, q k v, head_dim), as in GPT-NeoX; parts ``q k v``. ``halves``: rows of each head
            alternate between its halves, as llama.cpp stores q and k of Llama; part ``rows``, in Hugging Face's order.
            ``experts``: the first of three dimensions counts experts; parts ``0 1 2 ..``.
        heads: Number of heads.
    """

    pattern: str
    way: Literal["heads", "halves", "experts"]
    heads: int = 1


@dataclass(frozen=True)
class Norm:
    """Which norm a projection reads from or feeds, for folding; names are relative to the layer's.

    Attributes:
        before: Norm whose output the projection reads.
        after: Norm that alone reads the projection's output.
        first: Norm before layer 0 where ``before`` is that of the layer below (post-norm encoders); a whole name's end.
    """

    before: str | None = None
    after: str | None = None
    first: str | None = None


@dataclass(frozen=True)
class Plan:
    """A family with its sizes filled in.

    Attributes:
        family: Its name, for reports.
        layers: Number of layers, None where nobody says.
        patterns: Projection -> pattern; ``gate@3`` is that of expert 3.
        cuts: Tensors that must be cut before patterns apply; patterns name ``tensor#part``.
        exact: Suffix of a fused tensor's name -> rows (or columns of a transposed one) that it must have.
        partial: Projections that some layers, or all, may lack.
        norms: Projection -> its norms.
        norm_offset: What is added to a norm's weight: 1 for Gemma, which stores w of 1 + w.
    """

    family: str
    layers: int | None
    patterns: Patterns
    cuts: tuple[Cut, ...] = ()
    exact: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    norms: Mapping[str, Norm] = field(default_factory=dict)
    norm_offset: float = 0.0


class Sizes:
    """Sizes from a configuration, under whatever names it has them; absent ones are errors that name the key."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def get(self, *keys: str, default: int | None = None) -> int:
        """Returns the first of some keys that is there.

        Raises:
            UserError: None is there and there is no default, or it is not a positive integer.
        """
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, list) and value and all(entry == value[0] for entry in value):
                value = value[0]
            if value is not None:
                if type(value) is not int or not 0 < value < 10**7:
                    raise UserError(f"{self.where}: {key} is {value!r:.80}, not one positive integer")
                return value
        if default is None:
            raise UserError(f"{self.where}: lacks {' or '.join(keys)}, which tells the matrices apart")
        return default

    def heads(self) -> int:
        """Returns the number of query heads."""
        return self.get("num_attention_heads", "n_head", "heads")

    def key_heads(self) -> int:
        """Returns the number of key and value heads: that of the queries where they are not grouped."""
        return self.get("num_key_value_heads", default=self.heads())

    def head_dim(self) -> int:
        """Returns the size of a head: that of the configuration, otherwise the width shared among heads."""
        return self.get("head_dim", default=max(1, self.width() // self.heads()))

    def width(self) -> int:
        """Returns the size of the residual stream."""
        return self.get("hidden_size", "n_embd", "width")

    def layers(self) -> int:
        """Returns the number of layers."""
        return self.get("num_hidden_layers", "n_layer", "layers")


def _fused(name: str, sizes: Mapping[str, int], transposed: bool = False) -> Patterns:
    """Patterns of projections that are consecutive rows of one tensor."""
    patterns, first = {}, 0
    for projection, rows in sizes.items():
        patterns[projection] = WeightPattern(name, rows=(first, first + rows), transposed=transposed)
        first += rows
    return patterns


def _named(layer: str, names: Mapping[str, str], transposed: bool = False) -> Patterns:
    return {
        projection: WeightPattern(rf"{layer}{name}\.weight", transposed=transposed)
        for projection, name in names.items()
    }


LAYER = r"layers\.(\d+)\."
ATTENTION = {name: rf"self_attn\.{name}_proj" for name in ("q", "k", "v", "o")}
MLP = {name: rf"mlp\.{name}_proj" for name in ("gate", "up", "down")}


def _norms(attention: Norm, out: Norm, mlp: Norm, down: Norm) -> dict[str, Norm]:
    return dict.fromkeys(("q", "k", "v"), attention) | {"o": out} | dict.fromkeys(("gate", "up"), mlp) | {"down": down}


PRE_NORMS = _norms(Norm("input_layernorm"), Norm(), Norm("post_attention_layernorm"), Norm())
SANDWICH = _norms(
    Norm("input_layernorm"),
    Norm(after="post_attention_layernorm"),
    Norm("pre_feedforward_layernorm"),
    Norm(after="post_feedforward_layernorm"),
)
POST_NORMS = _norms(Norm(), Norm(after="post_attention_layernorm"), Norm(), Norm(after="post_feedforward_layernorm"))


def _llama(sizes: Sizes, family: str) -> Plan:
    return Plan(family, sizes.layers(), _named(LAYER, ATTENTION | MLP), norms=PRE_NORMS)


def _olmo2(sizes: Sizes, family: str) -> Plan:
    return Plan(family, sizes.layers(), _named(LAYER, ATTENTION | MLP), norms=POST_NORMS)


def _gemma(sizes: Sizes, family: str) -> Plan:
    norms = PRE_NORMS if family == "gemma" else SANDWICH
    return Plan(family, sizes.layers(), _named(LAYER, ATTENTION | MLP), norms=norms, norm_offset=1.0)


def _phi3(sizes: Sizes, family: str) -> Plan:
    head, inner = sizes.head_dim(), sizes.get("intermediate_size")
    q, kv = sizes.heads() * head, sizes.key_heads() * head
    patterns = (
        _fused(LAYER + r"self_attn\.qkv_proj\.weight", {"q": q, "k": kv, "v": kv})
        | _named(LAYER, {"o": ATTENTION["o"]})
        | _fused(LAYER + r"mlp\.gate_up_proj\.weight", {"gate": inner, "up": inner})
        | _named(LAYER, {"down": MLP["down"]})
    )
    exact = {"qkv_proj.weight": q + 2 * kv, "gate_up_proj.weight": 2 * inner}
    return Plan(family, sizes.layers(), patterns, exact=exact, norms=PRE_NORMS)


def _gpt2(sizes: Sizes, family: str, transposed: bool = True) -> Plan:
    width, layer = sizes.width(), r"h\.(\d+)\."
    fused = _fused(layer + r"attn\.c_attn\.weight", dict.fromkeys(("q", "k", "v"), width), transposed)
    names = {"o": r"attn\.c_proj", "up": r"mlp\.c_fc", "down": r"mlp\.c_proj"}
    norms = _norms(Norm("ln_1"), Norm(), Norm("ln_2"), Norm())
    exact = {"attn.c_attn.weight": 3 * width}
    return Plan(family, sizes.layers(), fused | _named(layer, names, transposed), exact=exact, norms=norms)


def _neox(sizes: Sizes, family: str) -> Plan:
    fused, heads = LAYER + r"attention\.query_key_value\.weight", sizes.heads()
    patterns = {part: WeightPattern(rf"{fused}#{part}") for part in ("q", "k", "v")}
    names = {"o": r"attention\.dense", "up": r"mlp\.dense_h_to_4h", "down": r"mlp\.dense_4h_to_h"}
    cuts = (Cut(r"attention\.query_key_value\.weight", "heads", heads),)
    exact = {"query_key_value.weight": 3 * sizes.width()}
    return Plan(family, sizes.layers(), patterns | _named(LAYER, names), cuts, exact, norms=PRE_NORMS)


def _bert(sizes: Sizes, family: str) -> Plan:
    names = {"q": r"attention\.self\.query", "k": r"attention\.self\.key", "v": r"attention\.self\.value"}
    names |= {"o": r"attention\.output\.dense", "up": r"intermediate\.dense", "down": r"output\.dense"}
    read = Norm("output.LayerNorm", first="embeddings.LayerNorm.weight")
    norms = _norms(read, Norm(), Norm("attention.output.LayerNorm"), Norm())
    return Plan(family, sizes.layers(), _named(r"layer\.(\d+)\.", names), norms=norms)


def _moe(sizes: Sizes, family: str) -> Plan:
    """Mixtral and Qwen's mixtures: a matrix for each expert, beside dense layers and experts that all tokens share."""
    count = sizes.get("num_local_experts", "num_experts")
    if count > MOST_EXPERTS:
        raise UserError(f"{sizes.where}: {count} experts, more than {MOST_EXPERTS}; is the file whole?")
    inner = sizes.get("moe_intermediate_size", "intermediate_size")
    names = {"gate": r"(?:gate_proj|w1)", "up": r"(?:up_proj|w3)", "down": r"(?:down_proj|w2)"}
    patterns = _named(LAYER, ATTENTION)
    for expert in range(count):
        for projection, name in names.items():
            separate = rf"{LAYER}(?:mlp|block_sparse_moe)\.experts\.{expert}\.{name}\.weight"
            packed = rf"{LAYER}mlp\.experts\.{'down_proj' if projection == 'down' else 'gate_up_proj'}#{expert}"
            rows = {"gate": (0, inner), "up": (inner, 2 * inner)}.get(projection)
            patterns[f"{projection}@{expert}"] = WeightPattern(separate, module="mlp", side=_side(projection))
            patterns[f"{projection}@{expert}#packed"] = WeightPattern(
                packed, rows, module="mlp", side=_side(projection)
            )
    patterns |= {f"{name}_shared": _mlp(LAYER + rf"mlp\.shared_expert\.{name}_proj\.weight", name) for name in MLP}
    patterns |= _named(LAYER, MLP)  # layers without experts
    cuts = (Cut(r"mlp\.experts\.(gate_up|down)_proj", "experts"),)
    partial = frozenset(name for name in patterns if name not in ATTENTION)
    norms = {name: PRE_NORMS[name.split("@")[0].split("_")[0]] for name in patterns}
    return Plan(family, sizes.layers(), patterns, cuts, partial=partial, norms=norms)


def _mlp(pattern: str, projection: str) -> WeightPattern:
    return WeightPattern(pattern, module="mlp", side=_side(projection))


def _side(projection: str) -> Literal["reads", "writes"]:
    return "writes" if projection.startswith("down") else "reads"


#: ``model_type`` of config.json -> its plan; names without underscores and the end of ``architectures`` agree.
HUGGING_FACE: dict[str, Callable[[Sizes, str], Plan]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "stablelm", "olmo"), _llama),
    **{"olmo2": _olmo2, "gemma": _gemma, "gemma2": _gemma, "gemma3": _gemma, "gemma3_text": _gemma, "phi3": _phi3},
    **{"gpt2": _gpt2, "gpt_neox": _neox, "bert": _bert, "roberta": _bert, "xlm_roberta": _bert, "camembert": _bert},
    **{"mixtral": _moe, "qwen2_moe": _moe, "qwen3_moe": _moe},
}

GGUF_LAYER = r"blk\.(\d+)\."
GGUF_NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
GGUF_NAMES |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
GGUF_PRE = _norms(Norm("attn_norm"), Norm(), Norm("ffn_norm"), Norm())
GGUF_POST = _norms(Norm(), Norm(after="post_attention_norm"), Norm(), Norm(after="post_ffw_norm"))
GGUF_SANDWICH = _norms(
    Norm("attn_norm"), Norm(after="post_attention_norm"), Norm("ffn_norm"), Norm(after="post_ffw_norm")
)
GGUF_BERT = _norms(Norm("layer_output_norm", first="token_embd_norm.weight"), Norm(), Norm("attn_output_norm"), Norm())
#: ``general.architecture`` -> norms. Gemma's are stored as 1 + w there, so nothing is added to any.
GGUF_NORMS: dict[str, dict[str, Norm]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "gemma", "phi3", "gpt2", "gptneox", "granite"), GGUF_PRE),
    **{"qwen2moe": GGUF_PRE, "qwen3moe": GGUF_PRE, "gemma2": GGUF_SANDWICH, "gemma3": GGUF_SANDWICH},
    **{"olmo2": GGUF_POST, "bert": GGUF_BERT},
}
#: Whose q and k llama.cpp stores with the two halves of each head interleaved.
GGUF_HALVES = ("llama", "smollm3", "granite")


def gguf_plan(metadata: Mapping[str, Any], where: str) -> Plan:
    """Returns the plan of a GGUF file.

    Raises:
        UserError: Its architecture is unknown, or a size is missing.
    """
    family = metadata.get("general.architecture")
    if not isinstance(family, str) or family not in GGUF_NORMS:
        raise unknown(where, f"general.architecture {family!r:.80}", GGUF_NORMS)
    sizes = Sizes({key.removeprefix(f"{family}."): value for key, value in metadata.items()}, where)
    heads, width = sizes.get("attention.head_count"), sizes.get("embedding_length")
    key_heads = sizes.get("attention.head_count_kv", default=heads)
    head = sizes.get("attention.key_length", default=max(1, width // heads))
    layers, norms = sizes.get("block_count"), dict(GGUF_NORMS[family])
    patterns, exact = _named(GGUF_LAYER, GGUF_NAMES), dict[str, int]()
    cuts: tuple[Cut, ...] = ()
    partial = frozenset[str]()
    if family in ("phi3", "gpt2", "gptneox"):  # llama.cpp takes the heads of GPT-NeoX apart
        rows = {"q": heads * head, "k": key_heads * head, "v": key_heads * head}
        patterns |= _fused(GGUF_LAYER + r"attn_qkv\.weight", rows)
        exact["attn_qkv.weight"] = sum(rows.values())
    if family == "phi3":
        inner = sizes.get("feed_forward_length")
        patterns |= _fused(GGUF_LAYER + r"ffn_up\.weight", {"gate": inner, "up": inner})
        exact["ffn_up.weight"] = 2 * inner
    if family in ("gpt2", "gptneox", "bert"):
        del patterns["gate"]
    if family in GGUF_HALVES:
        cuts = tuple(
            Cut(rf"blk\.\d+\.attn_{part}\.weight", "halves", number)
            for part, number in (("q", heads), ("k", key_heads))
        )
        patterns |= {part: WeightPattern(rf"{GGUF_LAYER}attn_{part}\.weight#rows") for part in ("q", "k")}
    experts = metadata.get(f"{family}.expert_count")
    if type(experts) is int and 0 < experts <= MOST_EXPERTS:
        cuts += (Cut(r"ffn_(gate|up|down)_exps\.weight", "experts"),)
        mlp = {name: GGUF_NAMES[name] for name in ("gate", "up", "down")}
        routed = {
            f"{name}@{expert}": _mlp(rf"{GGUF_LAYER}{stem}_exps\.weight#{expert}", name)
            for expert in range(experts)
            for name, stem in mlp.items()
        }
        shared = {f"{name}_shared": _mlp(rf"{GGUF_LAYER}{stem}_shexp\.weight", name) for name, stem in mlp.items()}
        patterns |= routed | shared
        partial = frozenset({*mlp, *routed, *shared})
        norms |= {name: norms[name.split("@")[0].split("_")[0]] for name in (*routed, *shared)}
    return Plan(family, layers, patterns, cuts, exact, partial, norms)


def hugging_face_plan(config: Mapping[str, Any], where: str) -> Plan:
    """Returns the plan of a model that a config.json describes.

    Raises:
        UserError: Its architecture is unknown, or a size is missing.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    named = [c.get("model_type") for c in (text, config)]
    classes = config.get("architectures")
    named += [_family_of(name) for name in classes] if isinstance(classes, list) else []
    known = {name.replace("_", ""): name for name in HUGGING_FACE}
    for name in named:
        found = known.get(str(name).lower().replace("_", "").replace("-", ""))
        if found is not None:
            return HUGGING_FACE[found](Sizes({**config, **text}, where), found)
    shown = f"architectures {classes!r:.80} with model_type {config.get('model_type')!r:.80}"
    raise unknown(where, shown, HUGGING_FACE)


def _family_of(name: object) -> str:
    """``LlamaForCausalLM`` -> ``Llama``."""
    return str(name).split("For")[0].removesuffix("LMHeadModel").removesuffix("Model")


def run_plan(config: Mapping[str, Any], where: str) -> Plan:
    """Returns the plan of a geocont run's checkpoint, from its config.yaml.

    Raises:
        UserError: Its module is not one of geocont's.
    """
    model = config.get("model")
    model = model if isinstance(model, dict) else {}
    arguments = model.get("init_args")
    network = arguments.get("network") if isinstance(arguments, dict) else None
    name = str(model.get("class_path", "")).rsplit(".", 1)[-1]
    sizes = Sizes(network if isinstance(network, dict) else {}, where)
    if name == "ResidualMLPModule":
        return Plan(name, sizes.get("depth"), {"hidden": WeightPattern(r"hidden\.(\d+)\.linear\.weight")})
    if name == "GPT2Module":
        return _gpt2(sizes, name, transposed=False)
    if name == "LlamaModule":
        return Plan(name, sizes.layers(), _named(LAYER, ATTENTION | MLP), norms=PRE_NORMS)
    raise unknown(where, f"model.class_path {model.get('class_path')!r:.80}", ("ResidualMLPModule", "GPT2Module"))


def unknown(where: str, found: str, known: Mapping[str, Any] | tuple[str, ...]) -> UserError:
    """Returns the error for an architecture that has no plan; it says how to give one."""
    names = ", ".join(known)
    example = r"q: layers\.(\d+)\.attention\.wq\.weight"
    return UserError(
        f"{where}: {found} is none of {names}; say where its matrices lie with --map map.yaml, a line for each"
        f" projection (q k v o gate up down) such as {example!r}, rows, columns and transposed as in WeightPattern"
    )

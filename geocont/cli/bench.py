"""``geocont bench NAME``: what parts of geocont cost on this machine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from geocont.cli.options import Parser, add_json_option, check_json_path, write_rows

BENCHES = {
    "callbacks": "what callbacks add to a training: of a residual MLP, or of a small GPT-2 on one and more ranks",
    "ddp": "a step of Manifold Muon that ranks share, against one that each of them takes as a whole",
    "optimizer": "steps on a layer of GPT-2 small: AdamW, Muon and the solvers of Manifold Muon, time and quality",
    "training": "Lightning, and geocont with measuring off, against a plain PyTorch loop: a small Llama",
    "pretrained": "the analysis of a checkpoint: leading measures against dense decompositions, time, errors, memory",
    "subspaces": "leading singular subspaces against the Gram matrix plus eigh, with their errors",
}


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs ``geocont bench``."""
    about = "; ".join(f"{name}: {what}" for name, what in BENCHES.items())
    parser = Parser(prog="geocont bench", description="Measure costs as ratios, interleaved in one run.")
    parser.add_argument("name", metavar="NAME", choices=BENCHES, help=about)
    parser.parse_args(arguments[:1])
    name = arguments[0]
    options = _parser(name).parse_args(arguments[1:])
    check_json_path(options.json)
    rows = _rows(name, options)
    print(as_table(rows))
    write_rows(options.json, rows)
    return 0


def _parser(name: str) -> Parser:
    parser = Parser(prog=f"geocont bench {name}", description=BENCHES[name])
    parser.add_argument("--repeats", type=int, default=5, help="repetitions, of which the median counts (default: 5)")
    if name == "callbacks":
        parser.add_argument("--model", default="mlp", help="mlp or gpt2, the small one with all callbacks (mlp)")
        parser.add_argument("--ranks", nargs="+", type=int, default=[1], help="numbers of processes (default: 1)")
        parser.add_argument("--steps", type=int, help="optimizer steps of a training (mlp: 1000; gpt2: 320)")
    if name == "training":
        parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a training (default: 40)")
    if name == "ddp":
        parser.add_argument("--ranks", nargs="+", type=int, help="numbers of processes (default: 1 2 4 8, up to cores)")
        parser.add_argument("--layers", type=int, default=4, help="layers of GPT-2 (default: 4)")
        parser.add_argument("--width", type=int, default=256, help="their width (default: 256)")
    if name == "optimizer":
        parser.add_argument("--small", action="store_true", help="a layer of width 128 instead of 768")
        parser.add_argument(
            "--names",
            nargs="+",
            help="some of adamw muon muon_float32 dual_ascent dual_ascent_float32 projected reweighted (all)",
        )
        parser.add_argument("--gradients", nargs="+", help="real, or some of five synthetic spectra (default: all)")
        parser.add_argument("--curve", action="store_true", help="the solvers at other numbers of iterations, too")
    if name == "pretrained":
        parser.add_argument(
            "--model", help="also a checkpoint: its leading measures against Gram plus eigh and float64"
        )
        parser.add_argument("--small", action="store_true", help="shapes an eighth of those of Llama-3.1-8B")
    add_json_option(parser)
    return parser


def _rows(name: str, options: Namespace) -> list[dict[str, object]]:
    if name == "callbacks":
        from geocont.bench.callbacks import measure_callbacks

        return measure_callbacks(options.model, options.ranks, options.steps, options.repeats)
    if name == "ddp":
        from geocont.bench.ddp import measure_ddp

        return measure_ddp(options.ranks, options.layers, options.width, options.repeats)
    if name == "optimizer":
        from geocont.bench.optimizer import measure_optimizers

        return measure_optimizers(options.small, options.repeats, options.names, options.gradients, options.curve)
    if name == "training":
        from geocont.bench.training import measure_training

        return measure_training(options.steps, options.repeats)
    if name == "pretrained":
        from geocont.bench.pretrained import measure_pretrained

        return measure_pretrained(options.repeats, options.model, options.small)
    from geocont.bench.subspaces import measure_subspaces

    return measure_subspaces(options.repeats)


def as_table(rows: Sequence[dict[str, object]]) -> str:
    """Returns rows of equal keys as an aligned table."""
    lines = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

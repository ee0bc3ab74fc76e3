"""``geocont reproduce EXPERIMENT``: a paper's experiment over variants and seeds, as one table and one figure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from geocont.cli.options import Parser, add_json_option, check_json_path, nearest, words, write_rows
from geocont.errors import UserError

EXPERIMENTS = {
    "mlp": "residual MLPs: what makes adjacent layers line up (arXiv 2605.04971)",
    "drift": "residual MLPs: whether layers turn against each other or their leading directions are ill defined",
    "llama": "Llama and its ablations: continuity of each projection (arXiv 2605.04971)",
    "manifolds": "GPT-2 with a constraint for each module: which belongs where (arXiv 2606.13276)",
}
PRESETS = {
    "mlp": "smoke: a minute; cpu: 3,700 steps a run, three seeds; paper: all of MNIST, five seeds",
    "drift": "smoke: a minute; cpu: 3,700 steps a run, three seeds; paper: all of MNIST, five",
    "llama": "smoke: 10 steps; cpu: eight layers of 128, 400 steps a run, three seeds; paper: 34 million parameters",
    "manifolds": "smoke: 20 steps; cpu: four layers of 128, 320 steps a run, three seeds; paper: GPT-2 small, a seed",
}
DATA = {
    "mlp": "digits, a folder of MNIST as parquet, or a name on the hub",
    "drift": "digits, a folder of MNIST as parquet, or a name on the hub",
    "llama": "stdlib, a folder of text or parquet, or a name on the hub",
    "manifolds": "stdlib, a folder of text or parquet, or a name on the hub",
}
VARIANTS = {
    "mlp": "res_relu res_none res_radial nores_tanh (these by default), and relu none with _pre_norm _post_norm"
    " _small_init _large_init _default_init _beta2_zero _sgd _muon",
    "drift": "none radial relu tanh, each also with _gap, and nores_tanh_gap",
    "llama": "baseline relu gelu identity radial no_gate linear_mlp no_residual no_attention_residual no_mlp_residual"
    " no_norm qk_norm linear_attention linear",
    "manifolds": "unconstrained stiefel dgram hetero hetero_inv adamw, and stiefel hetero hetero_inv with _dual_ascent",
}


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs ``geocont reproduce``."""
    about = "; ".join(f"{name}: {what}" for name, what in EXPERIMENTS.items())
    parser = Parser(prog="geocont reproduce", description="Repeat an experiment of a paper; see EXPERIMENT --help.")
    parser.add_argument("experiment", metavar="EXPERIMENT", choices=EXPERIMENTS, help=about)
    name = parser.parse_args(arguments[:1]).experiment
    return _reproduce(name, _parser(name).parse_args(arguments[1:]))


def _parser(name: str) -> Parser:
    parser = Parser(prog=f"geocont reproduce {name}", description=EXPERIMENTS[name])
    parser.add_argument(
        "--preset", choices=("smoke", "cpu", "paper"), default="cpu", help=f"{PRESETS[name]} (default: cpu)"
    )
    parser.add_argument("--data", help=f"{DATA[name]} (default: the preset's)")
    parser.add_argument("--variants", nargs="+", help=f"all, or some of {VARIANTS[name]}")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the preset's)")
    parser.add_argument("--out", type=Path, help=f"folder of everything (default: runs/reproduce/{name}-PRESET-DATA)")
    parser.add_argument(
        "--jobs", type=int, help="trainings at a time (default: as many as cores; full-size transformers one by one)"
    )
    add_json_option(parser)
    return parser


def _reproduce(name: str, options: Namespace) -> int:
    from rich.console import Console

    from geocont.experiments import drift, llama, manifolds, mlp
    from geocont.experiments.runner import Runner
    from geocont.report.summary import leet_command

    experiment: Any = {"mlp": mlp, "drift": drift, "llama": llama, "manifolds": manifolds}[name]
    check_json_path(options.json)
    default = getattr(experiment, "DEFAULT", experiment.VARIANTS)
    variants = choose(options.variants or default, experiment.VARIANTS)
    source = [Path(options.data).name] if options.data else []
    out = options.out or Path("runs/reproduce") / "-".join([name, options.preset, *source])
    jobs = experiment.jobs(options.preset, options.data, variants, options.seeds)
    size = experiment.PRESETS[options.preset]
    whole = not getattr(size, "small", True)  # a full-size run takes every GPU
    parallel = 1 if whole and options.jobs is None else options.jobs
    runner = Runner(out, experiment.plan(options.preset, options.data), jobs, parallel)
    console = Console(highlight=False)
    console.print(f"{len(jobs)} runs; live: {leet_command(runner.folder(jobs[0]) / 'wandb')}", soft_wrap=True)
    runner.run(console)
    rows = experiment.report(runner, console)
    write_rows(options.json, rows)
    return 0 if len(rows) == len(jobs) else 1


def choose(given: Sequence[str], valid: Iterable[str]) -> list[str]:
    """Returns the chosen variants, in the order of ``valid``.

    Raises:
        UserError: One of them does not exist; the message names the nearest one.
    """
    valid = list(valid)
    wanted = [word for text in given for word in words(text)]
    if not wanted:
        raise UserError(f"--variants: name some of {', '.join(valid)}")
    for word in wanted:
        if word not in valid and word != "all":
            raise UserError(f"--variants: {word!r} is none of {', '.join(valid)}{nearest(word, valid)}")
    return [name for name in valid if name in wanted or "all" in wanted]

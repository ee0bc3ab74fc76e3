"""The saved W&B workspace: which panel shows which keys, and how it is sent or printed."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

from geocont.errors import UserError
from geocont.runs.wandb import STEP, key_configured
from geocont.weights import ROLES

NAME = "geocont"


@dataclass(frozen=True)
class Panel:
    """A line plot over optimizer steps of all keys that match a regular expression.

    Attributes:
        title: Above it.
        pattern: Regular expression for whole keys; runs without such keys are left out.
        limits: Ends of the vertical axis, None for those of the data.
        logarithmic: Whether the vertical axis is.
    """

    title: str
    pattern: str
    limits: tuple[float | None, float | None] = (None, None)
    logarithmic: bool = False


SHARE = (0.0, 1.0)
#: Section -> its panels. Keys of one measure share a panel: a line for each projection, layer or module of each run.
SECTIONS: dict[str, tuple[Panel, ...]] = {
    "continuity": (
        Panel("weights: v1, chance sqrt(2 / (pi d))", "weight/v1/.*", SHARE),
        Panel("weights: u1, chance sqrt(2 / (pi d))", "weight/u1/.*", SHARE),
        Panel("weights: top-5 overlap, chance 5 / d", "weight/topk_(in|out)/.*", SHARE),
        Panel("weights: sigma2, |cos|", "weight/sigma2_(in|out)/.*", SHARE),
        Panel("weights: cosine and Gram cosine", "weight/(cosine|gram_in|gram_out)/.*"),
        Panel("weights: s1 / s2 and share of defined pairs", "weight/(gap|defined)/.*"),
        Panel("updates: v1 and u1", "update/(v1|u1)/.*", SHARE),
        Panel("updates: other measures", "update/(topk_in|topk_out|sigma2_.*|gram_.*|cosine|gap|defined)/.*"),
        Panel("updates: |W - W0| / |W0|", "update/relative_norm/.*"),
    ),
    "gradients": (
        Panel("gradients: v1", "gradient/v1/.*", SHARE),
        Panel("gradients: u1", "gradient/u1/.*", SHARE),
        Panel("gradients: other measures", "gradient/(topk_in|topk_out|sigma2_.*|gram_.*|cosine|gap|defined)/.*"),
        Panel("cumulative gradients: v1 and u1", "cumulative/(v1|u1)/.*", SHARE),
        Panel("cumulative gradients: other measures", "cumulative/(topk_.*|sigma2_.*|gram_.*|cosine|gap|defined)/.*"),
        Panel("v1 of weights and of cumulative gradients", "weight/cumulative_alignment/.*", SHARE),
    ),
    "attention": (
        Panel("entropy, 1 = uniform", "softmax/entropy/.*", SHARE),
        Panel("share of saturated rows", "softmax/saturated/.*", SHARE),
        Panel("largest |logit|", "softmax/max_logit/.*", logarithmic=True),
        Panel("top probability", "softmax/top_probability/.*", SHARE),
        Panel("Jacobian norm of softmax", "softmax/jacobian/.*"),
        Panel("sigma(Wq) sigma(Wk) / sqrt(d)", "softmax/logit_scale/.*", logarithmic=True),
        Panel("guard events so far, and the first one's step", "guard/.*"),
    ),
    "spectra": (
        Panel("largest singular value", "spectrum/sigma_max/.*"),
        Panel("smallest singular value", "spectrum/sigma_min/.*"),
        Panel("condition number", "spectrum/condition/.*", logarithmic=True),
        Panel("stable rank", "spectrum/stable_rank/.*"),
        Panel("off-diagonal norm of the Gram matrix", "spectrum/gram_off_diagonal/.*"),
        Panel("column norms", "spectrum/column_norm_(min|max)/.*"),
        Panel("relative growth of sigma_max a step", "spectrum/growth/.*"),
    ),
    "optimizer": (
        Panel("certified share of the best descent", "optim/certified_ratio/.*", (None, 1.0)),
        Panel("manifold residual", "optim/manifold_residual/.*", logarithmic=True),
        Panel("tangent residual", "optim/tangent_residual/.*", logarithmic=True),
        Panel("RMS of the update", "optim/update_rms/.*"),
        Panel("steps left out so far", "optim/skipped_steps"),
        Panel("learning rate", "lr/.*"),
    ),
    "loss and speed": (
        Panel("training", "train/.*"),
        Panel("validation", "val/.*"),
        Panel("samples and tokens per second", "throughput/.*", logarithmic=True),
        Panel("measuring: milliseconds, and values left out", "measure/.*"),
    ),
}
#: Table of the first section.
PAIRS = "weight/pairs"
#: Images of the first section: the heat map of every projection that geocont knows.
HEAT_MAPS = tuple(f"weight/heat_map/{projection}" for projection in ROLES)


def workspace(project: str, entity: str, name: str = NAME) -> Any:
    """Returns the workspace as an object of wandb-workspaces.

    Raises:
        UserError: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(
            "dashboards need the optional package wandb-workspaces; pip install 'geocont[dashboard]' brings it"
        ) from error
    sections = []
    for title, members in SECTIONS.items():
        drawn: list[Any] = [
            panels.LinePlot(
                title=panel.title,
                title_x="optimizer step",
                x=STEP,
                metric_regex=panel.pattern,
                range_y=panel.limits,
                log_y=panel.logarithmic or None,
            )
            for panel in members
        ]
        if title == "continuity":
            drawn.append(panels.MediaBrowser(title="pairs of layers over training", media_keys=list(HEAT_MAPS)))
            drawn.append(panels.WeavePanelSummaryTable(table_name=PAIRS, layout=panels.Layout(w=24, h=10)))
        settings = workspaces.SectionPanelSettings(x_axis=STEP)
        sections.append(workspaces.Section(name=title, panels=drawn, is_open=True, panel_settings=settings))
    overall = workspaces.WorkspaceSettings(x_axis=STEP)
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections, settings=overall)


def as_plain(found: Any) -> dict[str, Any]:
    """Returns a workspace as what would be sent, in plain values."""
    view = found._to_model()
    spec = view.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"entity": view.entity, "project": view.project, "displayName": view.display_name, "spec": spec}


def save(project: str, entity: str | None, name: str = NAME) -> str:
    """Saves the workspace as a view of the project and returns its address.

    Raises:
        UserError: No API key is configured, or the server refuses.
    """
    import wandb

    draft = workspace(project, entity or "", name)
    if not key_configured(wandb):
        raise UserError("no W&B API key is configured; `wandb login` stores one, and --dry-run needs none")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # wandb-workspaces prints the address itself
            draft.entity = entity or wandb.Api().default_entity
            return str(draft.save().url)
    except Exception as error:
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"W&B did not take the workspace for {draft.entity}/{project}: {told[0][:200]}") from error

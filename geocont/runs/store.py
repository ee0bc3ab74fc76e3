"""The run's local store: every row and every array that a run logged, readable while it goes on.

``metrics.jsonl`` has a line for each row, ``{"step": 50, "train/loss": 0.31, ...}``. ``arrays/part-000.arrow`` is an
Arrow stream of (step, key, shape, values): per-pair values, leading vectors. Both only grow; each resumption starts a
new part and marks the step from which it supersedes what a killed process wrote beyond its last checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

METRICS_FILE = "metrics.jsonl"
ARRAYS_FOLDER = "arrays"
_RESUMED_AT = "resumed_at"


class RunStore(Logger):
    """A Lightning logger that keeps rows and arrays in the run's own directory.

    Values that are not finite are kept as null, so that a diverged loss stays visible.

    Args:
        run_dir: The run's directory; it must exist.
        resumed_at: The optimizer step that a resumed run continues from; rows from there on are superseded.
    """

    def __init__(self, run_dir: str | Path, resumed_at: int | None = None) -> None:
        super().__init__()
        self._run_dir = Path(run_dir)
        # Written once to each kind of file, however often it is opened.
        self._resumed_at = {METRICS_FILE: resumed_at, ARRAYS_FOLDER: resumed_at}
        self._staged: dict[str, Any] = {}
        self._metrics: Any = None  # the open files, on rank 0 only
        self._arrays: Any = None

    @property
    def name(self) -> str:
        """Name of the experiment folder."""
        return self._run_dir.parent.name

    @property
    def version(self) -> str:
        """Name of the run's directory."""
        return self._run_dir.name

    @property
    def save_dir(self) -> str:
        """The run's directory."""
        return str(self._run_dir)

    log_dir = save_dir

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keeps nothing: the run's config.yaml and manifest.json hold them."""

    @rank_zero_only
    def stage(self, metrics: Mapping[str, Any], step: int) -> None:
        """Adds numbers to the row of a step, which the next :meth:`log_metrics` of that step completes."""
        if self._staged.get("step", step) != step:
            self._write()
        self._staged |= {"step": step} | {key: v for key, v in metrics.items() if isinstance(v, int | float)}

    @rank_zero_only
    def commit_staged(self, step: int) -> None:
        """Writes a staged row that nothing has completed."""
        self._write()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Writes a row, together with what was staged for its step."""
        self.stage({key: float(value) for key, value in metrics.items()}, step or 0)
        self._write()

    @rank_zero_only
    def log_arrays(self, arrays: Mapping[str, Tensor], step: int) -> None:
        """Appends arrays of a step; NaN in them marks what has no value."""
        import pyarrow as pa

        if self._arrays is None:
            self._arrays = self._open_arrays()
        values = [array.detach().float().cpu().numpy() for array in arrays.values()]
        batch = pa.record_batch(
            {
                "step": pa.array([step] * len(values), pa.int64()),
                "key": pa.array(list(arrays)),
                "shape": pa.array([list(value.shape) for value in values], pa.list_(pa.int32())),
                "values": pa.array([value.ravel() for value in values], pa.list_(pa.float32())),
            }
        )
        stream, writer = self._arrays
        writer.write_batch(batch)
        stream.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes what is left and closes the files; logging again opens them again."""
        self._write()
        if self._metrics is not None:
            self._metrics.close()
        if self._arrays is not None:
            self._arrays[1].close()
            self._arrays[0].close()
        self._metrics = self._arrays = None

    def _write(self) -> None:
        row, self._staged = self._staged, {}
        if not row:
            return
        if self._metrics is None:
            self._metrics = self._open_metrics()
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._metrics.write(json.dumps(finite) + "\n")
        self._metrics.flush()

    def _open_metrics(self) -> Any:
        path = self._run_dir / METRICS_FILE
        broken_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        file = path.open("a", encoding="utf-8")
        file.write("\n" if broken_off else "")
        resumed_at = self._resumed_at.pop(METRICS_FILE, None)
        if resumed_at is not None:
            file.write(json.dumps({_RESUMED_AT: resumed_at}) + "\n")
        return file

    def _open_arrays(self) -> tuple[Any, Any]:
        import pyarrow as pa

        folder = self._run_dir / ARRAYS_FOLDER
        folder.mkdir(exist_ok=True)
        number = len(list(folder.glob("part-*.arrow")))
        resumed_at = self._resumed_at.pop(ARRAYS_FOLDER, None)
        schema = pa.schema(
            [
                ("step", pa.int64()),
                ("key", pa.string()),
                ("shape", pa.list_(pa.int32())),
                ("values", pa.list_(pa.float32())),
            ],
            metadata={} if resumed_at is None else {_RESUMED_AT: str(resumed_at)},
        )
        stream = (folder / f"part-{number:03d}.arrow").open("wb")
        return stream, pa.ipc.new_stream(stream, schema)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a run in order of step, one for each step, whatever state the run is in.

    Rows that a resumption superseded are left out, as is a line that a kill cut short or that is no row.
    """
    rows: dict[int, dict[str, Any]] = {}
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict):
            continue
        if _RESUMED_AT in row:
            rows = {step: kept for step, kept in rows.items() if step < row[_RESUMED_AT]}
        elif isinstance(row.get("step"), int):
            rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def read_arrays(run_dir: str | Path, key: str) -> dict[int, np.ndarray]:
    """Returns step -> array of one key, e.g. ``weight/v1/hidden`` with a value for each pair of layers."""
    return read_all_arrays(run_dir, {key}).get(key, {})


def read_all_arrays(run_dir: str | Path, keys: Collection[str] | None = None) -> dict[str, dict[int, np.ndarray]]:
    """Returns key -> step -> array in one pass over the store; only some keys if they are given."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for part in sorted((Path(run_dir) / ARRAYS_FOLDER).glob("part-*.arrow")):
        for resumed_at, batch in _batches(part):
            if resumed_at is not None:
                found = {
                    key: {s: array for s, array in steps.items() if s < resumed_at} for key, steps in found.items()
                }
            shapes, values = batch["shape"], batch["values"]
            for i, (step, key) in enumerate(zip(batch["step"].to_pylist(), batch["key"].to_pylist(), strict=True)):
                if keys is None or key in keys:
                    array = values[i].values.to_numpy(zero_copy_only=False)
                    found.setdefault(key, {})[step] = array.astype(np.float32).reshape(shapes[i].as_py())
    return {key: dict(sorted(steps.items())) for key, steps in found.items() if steps}


def _batches(part: Path) -> Iterator[tuple[int | None, Any]]:
    import pyarrow as pa

    with part.open("rb") as stream:
        try:
            reader = pa.ipc.open_stream(stream)
            resumed = (reader.schema.metadata or {}).get(_RESUMED_AT.encode())
            first = None if resumed is None else int(resumed)
            for batch in reader:
                yield first, batch
                first = None
        except (pa.ArrowInvalid, OSError, EOFError):
            return  # a stream that is still growing, or was cut short by a kill

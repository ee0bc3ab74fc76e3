"""README and docs: they build without a warning, their Python runs, and every command in them is one."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from geocont.cli import COMMANDS, main
from geocont.cli.options import Parser
from geocont.models import Llama, LlamaConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Returns (page, command) for every line that a reader is to type, without the comment behind it."""
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in block.splitlines():
                if line.startswith("$ "):
                    found.append((str(page.relative_to(ROOT)), re.sub(r"\s+#.*", "", line[2:])))
    return found


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    """A broken link, a page that nothing leads to or a docstring that does not render fails the build."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "--callbacks.weight_continuity" in (tmp_path / "reference/commands.html").read_text()
    assert "Largest attention score allowed" in (tmp_path / "reference/callbacks.html").read_text()


class Layers(nn.Module):
    """Parameters of the names that the examples use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "self_attn": nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False)}),
                    "mlp": nn.ModuleDict({"down_proj": nn.Linear(16, 8, bias=False)}),
                }
            )
            for _ in range(2)
        )


def save_model(folder: Path) -> None:
    """Writes a small Llama as Hugging Face's library does."""
    folder.mkdir(parents=True)
    Llama(LlamaConfig(3, 2, None, 16, 24, 8, 11)).save_safetensors(folder / "model.safetensors")
    shape = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}
    shape |= {"intermediate_size": 24, "max_position_embeddings": 8, "vocab_size": 11, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_documentation_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example that fails costs a newcomer more than a missing one."""
    monkeypatch.chdir(tmp_path)
    if page.name == "README.md":  # its example is of a module that is the reader's
        monkeypatch.setattr("lightning.pytorch.Trainer.fit", lambda *_: None)
    save_model(tmp_path / "path/to/model")
    names: dict[str, Any] = {"my_module": None, "my_data": None, "model": Layers(), "__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    if "optimizer" in names and page.name == "own-manifold.md":
        assert names["Columns"](2.0).check_point_on_manifold(names["matrices"][0].detach()) == (True, None)
    if page.name == "own-module.md":
        values = {key: names["trainer"].callback_metrics[key].item() for key in names["trainer"].callback_metrics}
        assert 0.9 < values["optim/certified_ratio/attention"] <= 1.01
        assert values["gradient/v1/down"] >= 0
        assert values["softmax/entropy/mean"] <= 1


class Parsed(Exception):
    """Raised once a command's options have been understood."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Parser.parse_args

    def stop(self: Parser, *arguments: Any, **options: Any) -> Any:
        found = parse(self, *arguments, **options)
        if self.prog in ("geocont reproduce", "geocont bench"):
            return found  # the name; the options come next
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", stop)


@pytest.mark.usefixtures("only_parse")
@pytest.mark.parametrize(("page", "command"), [found for found in commands() if found[1].startswith("geocont ")])
def test_commands_in_the_documentation_are_understood(
    page: str, command: str, geocont: Callable[..., tuple[int, str, str]]
) -> None:
    """An option that was renamed must not live on in a page. (What commands do is for their own tests.)"""
    _, name, *words = shlex.split(command.split(" | ")[0].rstrip("&"))
    assert name in COMMANDS, f"{page}: {command}"
    if name not in ("fit", "validate", "test", "predict"):
        with pytest.raises(Parsed):
            main([name, *words])
        return
    if "--resume" in words or any(word.startswith("--resume") or "my.package" in word for word in words):
        return  # needs a run, or a class of the reader's own
    status, _, err = geocont(name, *words, "--print_config")
    assert status == 0, f"{page}: {command}: {err}"


@pytest.mark.parametrize(("page", "command"), [found for found in commands() if not found[1].startswith("geocont ")])
def test_files_in_other_commands_exist(page: str, command: str) -> None:
    """Scripts and configurations that a page names are there."""
    for word in shlex.split(command):
        path = word.split("=")[-1]
        if path.startswith(("bin/", "conf/")):
            assert (ROOT / path).exists(), f"{page}: {command}"

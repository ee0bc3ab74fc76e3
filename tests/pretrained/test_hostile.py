"""Files that are broken or hostile: one line that names file and tensor, nothing executed, nothing left hanging."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from geocont.errors import UserError
from geocont.pretrained import analyze
from tests.pretrained.planted import (
    LLAMA,
    Planted,
    attention_shapes,
    gguf_llama_tensors,
    llama,
    llama_tensors,
    mlp_shapes,
    sizes,
    write,
    write_gguf,
)

Geocont = Callable[..., tuple[int, str, str]]


def sharded(folder: Path, suffix: str = "safetensors") -> Path:
    """A Llama in two shards with an index."""
    model = Planted(attention_shapes() | mlp_shapes())
    tensors = llama_tensors(model)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes()}))
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names, table = sorted(tensors), {}
    for i, part in enumerate((names[:10], names[10:])):
        file = f"{stem}-0000{i + 1}-of-00002.{suffix}"
        shard = {name: tensors[name].clone() for name in part}
        save_file(shard, folder / file) if suffix == "safetensors" else torch.save(shard, folder / file)
        table |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": table}))
    return folder


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


def missing_shard(folder: Path) -> None:
    (sharded(folder) / "model-00002-of-00002.safetensors").unlink()


def truncated_shard(folder: Path) -> None:
    path = sharded(folder) / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def index_of_a_lost_tensor(folder: Path) -> None:
    rewrite_index(sharded(folder), lambda t: t.update({"model.extra.weight": "model-00001-of-00002.safetensors"}))


def tensor_in_two_files(folder: Path) -> None:
    sharded(folder)
    first, second = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file(load_file(second) | dict(list(load_file(first).items())[:1]), second)


def index_that_leaves_the_folder(folder: Path) -> None:
    rewrite_index(sharded(folder), lambda t: t.update({next(iter(t)): "../../../etc/passwd"}))


def absolute_path_in_the_index(folder: Path) -> None:
    rewrite_index(sharded(folder), lambda t: t.update({next(iter(t)): "/etc/passwd"}))


def integers(folder: Path) -> None:
    _, path = llama(folder)
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.1.{LLAMA['up']}"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path / "model.safetensors")


def long_header(folder: Path) -> None:
    _, path = llama(folder)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + content[8:])


def lost_layer(folder: Path) -> None:
    _, path = llama(folder)
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.1.{LLAMA['up']}"]
    save_file(tensors, path / "model.safetensors")


def single_layer(folder: Path) -> None:
    llama(folder, layers=1)


def unknown_architecture(folder: Path) -> None:
    _, path = llama(folder)
    (path / "config.json").write_text(json.dumps({"model_type": "mamba9", "architectures": ["Mamba9Model"]}))


def no_config(folder: Path) -> None:
    (llama(folder)[1] / "config.json").unlink()


def config_without_sizes(folder: Path) -> None:
    (llama(folder)[1] / "config.json").write_text(json.dumps({"model_type": "phi3"}))


def heads_of_another_model(folder: Path) -> None:
    from tests.pretrained.planted import phi3

    (phi3(folder)[1] / "config.json").write_text(json.dumps({"model_type": "phi3", **sizes(kv_heads=4, head_dim=32)}))


def broken_config(folder: Path) -> None:
    (llama(folder)[1] / "config.json").write_text("{")


def empty_folder(folder: Path) -> None:
    folder.mkdir()


CASES: dict[Callable[[Path], None], list[str]] = {
    missing_shard: ["model-00002-of-00002.safetensors is not there", "tensor model.layers."],
    truncated_shard: ["model-00002-of-00002.safetensors: tensor", "should end at byte"],
    index_of_a_lost_tensor: ["index.json: tensor model.extra.weight should be in", "is not there"],
    tensor_in_two_files: ["tensor model.layers.0", "is in two files"],
    index_that_leaves_the_folder: ["index.json: tensor", "'../../../etc/passwd', outside the folder"],
    absolute_path_in_the_index: ["index.json: tensor", "outside the folder"],
    integers: ["model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds I8"],
    long_header: ["model.safetensors: not a whole safetensors file", "1152921504606846976"],
    lost_layer: ["tensor model.layers.1.mlp.up_proj.weight is not there", "3 layers"],
    single_layer: ["single layer"],
    unknown_architecture: ["Mamba9Model", "--map map.yaml", "model.layers.0"],
    no_config: ["config.json", "--map map.yaml"],
    config_without_sizes: ["config.json: lacks hidden_size or n_embd"],
    heads_of_another_model: ["qkv_proj.weight has shape [192, 64]", "make 384"],
    broken_config: ["config.json: cannot be read as JSON"],
    empty_folder: ["holds no checkpoint"],
}


@pytest.mark.parametrize("spoil", CASES, ids=lambda case: case.__name__)
def test_what_is_wrong_is_one_line(spoil: Callable[[Path], None], geocont: Geocont, tmp_path: Path) -> None:
    """A stack trace says nothing to the person whose download broke off."""
    spoil(tmp_path / "model")
    status, _, err = geocont("analyze", str(tmp_path / "model"), "--out", str(tmp_path / "out"))
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    for text in CASES[spoil]:
        assert text in err


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch exploded",))


@pytest.mark.parametrize("content", [{"a": Bomb()}, Bomb()])
def test_a_pickle_that_runs_code_is_refused_unexecuted(content: Any, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes()}))
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: refused: .* nothing of it was executed"):
        analyze(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"pytorch_model\.bin: not a whole PyTorch file"):
        analyze(folder)
    assert not (folder / "exploded").exists()


def test_a_matrix_that_is_not_finite_marks_its_rows(geocont: Geocont, folder: Path) -> None:
    """NaN must neither end an analysis nor pass for a number."""
    model, path = llama(folder / "model")
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.1.{LLAMA['k']}"
    tensors[name][0, 0] = torch.nan
    tensors[f"model.layers.2.{LLAMA['o']}"].zero_()
    save_file(tensors, path / "model.safetensors")
    status, out, _ = geocont("analyze", "model", "--out=out", "--json=rows.json")
    assert status == 1
    assert f"tensor {name} is not finite" in out
    rows = json.loads((folder / "rows.json").read_text())
    marked = {(row["projection"], row["layer"]) for row in rows if row["status"] != "ok"}
    assert marked == {("k", 0), ("k", 1), ("o", 1)}
    assert all(row["v1"] is None for row in rows if row["status"] != "ok")
    good = [row for row in rows if row["status"] == "ok"]
    assert all(abs(row["v1"] - model.expected(row["projection"], row["layer"])[0]) < 1e-4 for row in good)


def test_a_full_disk_keeps_finished_rows(geocont: Geocont, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = llama(folder / "model")
    real, count = Path.write_bytes, [0]

    def full(self: Path, data: bytes) -> int:
        count[0] += 1
        if count[0] > 9:
            raise OSError(28, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    status, _, err = geocont("analyze", "model", "--out=out")
    assert status == 2
    assert "No space left on device" in err
    assert "rows finished before are in out/rows.csv" in err
    assert len(list((folder / "out/cache").glob("*.npz"))) == 9
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    status, out, err = geocont("analyze", "model", "--out=out", "--json=rows.json")
    assert status == 0, out + err
    model.check(json.loads((folder / "rows.json").read_text()))


def test_without_the_gguf_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"pip install 'geocont\[pretrained\]'"):
        analyze(tmp_path / "x.gguf")


def test_a_sharded_bin_is_read_like_safetensors(tmp_path: Path) -> None:
    a, b = analyze(sharded(tmp_path / "a", "bin")), analyze(sharded(tmp_path / "b"))
    assert [row["v1"] for row in a.rows] == [row["v1"] for row in b.rows]


def corrupt(content: bytes, draw: random.Random) -> bytes:
    """Changes a file as broken disks and people of ill will do; mostly near its start, where the header is."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        end = min(len(data), draw.choice((64, 1024, 6000, len(data))))
        place = draw.randrange(max(1, end))
        match draw.randrange(6):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                huge = draw.choice((2**63 - 1, 2**64 - 1, 2**40, 2**31, 0))
                data[place : place + 8] = struct.pack("<Q", huge)
            case 2:
                del data[place:]
            case 3:
                del data[place : place + draw.randrange(1, 64)]
            case 4:
                data[place:place] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 32)))
            case 5:
                digit = draw.choice(b'0123456789-{}[]",:e')
                data[place : place + 1] = bytes([digit])
        if not data:
            break
    return bytes(data)


def fuzz(folder: Path, rounds: int, seed: int) -> int:
    """Corrupts small files, analyses each, and returns how many were refused; raises what is not a UserError."""
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "gate": (12, 8), "up": (12, 8), "down": (8, 12)}
    model = Planted(shapes)
    small = {"num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {"model_type": "llama", "intermediate_size": 12, **small}
    write(folder / "safetensors", llama_tensors(model), config)
    wide = Planted(attention_shapes())
    write_gguf(
        folder / "gguf/model.gguf", "qwen2", {f"blk.{i}.x_{p}": w for (p, i), w in wide.matrices.items()}, "Q8_0"
    )
    plain = write_gguf(
        folder / "llama/model.gguf", "llama", gguf_llama_tensors(Planted(attention_shapes() | mlp_shapes()))
    )
    (folder / "bin").mkdir()
    torch.save(
        {name: tensor.clone() for name, tensor in llama_tensors(model).items()}, folder / "bin/pytorch_model.bin"
    )
    shutil.copy(folder / "safetensors/config.json", folder / "bin/config.json")
    sharded(folder / "sharded")
    targets = [
        folder / "safetensors/model.safetensors",
        folder / "safetensors/config.json",
        folder / "gguf/model.gguf",
        plain,
        folder / "bin/pytorch_model.bin",
        folder / "sharded/model.safetensors.index.json",
    ]
    contents = {target: target.read_bytes() for target in targets}
    own_map = folder / "map.yaml"
    own_map.write_text("q: blk\\.(\\d+)\\.x_q\n")
    draw, refused = random.Random(seed), list[str]()
    for i in range(rounds):
        target = targets[i % len(targets)]
        target.write_bytes(corrupt(contents[target], draw))
        quantised = target.parent.name == "gguf"
        try:
            path = target if target.suffix == ".gguf" else target.parent
            analyze(path, light=True, own_map=own_map if quantised else None, projections=["q"])
        except UserError as error:
            refused.append(str(error))
        target.write_bytes(contents[target])
    assert not [message for message in refused if "\n" in message]
    return len(refused)


def test_random_corruptions_are_refused_or_read(tmp_path: Path) -> None:
    """Counts and offsets of a file must never be trusted: a wrong one would crash, hang or take all memory."""
    assert fuzz(tmp_path, 240, 1) > 60


@pytest.mark.slow
def test_two_thousand_corruptions_stay_within_memory(tmp_path: Path) -> None:
    fuzz(tmp_path / "warm", 12, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    before = resource.getrlimit(resource.RLIMIT_AS)
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    try:
        assert fuzz(tmp_path / "all", 2000, 3) > 600
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

"""The LightningModules of language models: losses, exact evaluation, checks, compilation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from geocont.errors import UserError
from geocont.models import GPT2, GPT2Config
from geocont.modules import GPT2Module
from geocont.modules.mean import ScoredMean
from geocont.optim import Composite, NamedParameters, Rule

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*treespec:FutureWarning")

V, T = 31, 10
NETWORK = GPT2Config(layers=2, heads=2, width=16, context=T, vocabulary=V)


class Tokens(LightningDataModule):
    """Rows of random tokens with targets masked to ragged lengths: a batch may have many scored tokens or none."""

    def __init__(self, vocabulary_size: int = V, context: int = T) -> None:
        super().__init__()
        self.vocabulary_size, self.context = vocabulary_size, context
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randint(V, (12, T), generator=generator)
        self.y = torch.randint(V, (12, T), generator=generator)
        for row, scored in enumerate([10, 10, 10, 9, 0, 1, 2, 0, 0, 0, 0, 0]):
            self.y[row, scored:] = -100

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.x, self.x.roll(-1, 1)), batch_size=4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=4)

    test_dataloader = predict_dataloader = val_dataloader


def trainer(folder: Path, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "default_root_dir": folder}
    return Trainer(**{**quiet, **options})


def module(seed: int = 0, **options: Any) -> GPT2Module:
    torch.manual_seed(seed)
    return GPT2Module(**{"network": NETWORK, "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2), **options})


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    """Protects the training step: what it logs is the cross entropy of the batch, and the optimizer lowers it."""
    model, data = module(), Tokens()
    x, y = data.x, data.x.roll(-1, 1)
    before = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    first = trainer(tmp_path, max_steps=1, limit_val_batches=0)
    first.fit(model, DataLoader(TensorDataset(x, y), batch_size=12))
    assert first.callback_metrics["train/loss"].item() == pytest.approx(before.item(), abs=1e-6)
    trainer(tmp_path, max_steps=3, limit_val_batches=0).fit(model, DataLoader(TensorDataset(x, y), batch_size=4))
    assert F.cross_entropy(model(x).flatten(0, 1), y.flatten()) < before


@pytest.mark.parametrize("stage", ["val", "test"])
def test_evaluation_weighs_every_token_alike(stage: str, tmp_path: Path) -> None:
    """Protects perplexities from the average of batch averages, where few tokens would count as much as many."""
    model, data, run = module(), Tokens(), trainer(tmp_path)
    evaluate = run.validate if stage == "val" else run.test
    evaluate(model, datamodule=data, verbose=False)  # must leave nothing behind
    with torch.no_grad():
        model.model.wte.weight.mul_(20)  # so that tokens, and with them batches, differ in loss
        losses = F.cross_entropy(model(data.x).flatten(0, 1), data.y.flatten(), reduction="none")
    exact = (losses.double().sum() / 42).item()
    (metrics,) = evaluate(model, datamodule=data, verbose=False)
    assert metrics[f"{stage}/loss"] == pytest.approx(exact, rel=1e-6)
    assert metrics[f"{stage}/perplexity"] == pytest.approx(torch.tensor(exact).exp().item(), rel=1e-5)
    batches = [losses[40 * i : 40 * i + 40][data.y[4 * i : 4 * i + 4].flatten() >= 0].mean().item() for i in range(2)]
    assert abs(sum(batches) / 2 - exact) > 0.05


def test_the_mean_loses_nothing_over_many_batches() -> None:
    """Protects long evaluations: a plain float32 sum of so many terms is wrong in the fourth digit."""
    mean = ScoredMean()
    for _ in range(20000):
        mean.update(torch.tensor(33333.3), torch.tensor(1000))
    assert mean.compute().item() == pytest.approx(33.3333, rel=1e-6)
    assert not mean.state_dict()


def test_a_batch_without_targets_gives_no_nan() -> None:
    """Protects the weights from a batch that is all padding."""
    model, data = module(), Tokens()
    loss = model.training_step((data.x, torch.full_like(data.y, -100)), 0)
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_predictions_are_the_likeliest_tokens(tmp_path: Path) -> None:
    """Protects predict: one token for each position, not the logits, which would fill the memory."""
    model, data = module(), Tokens()
    predicted: Any = trainer(tmp_path).predict(model, datamodule=data)
    assert torch.equal(torch.cat(predicted), model(data.x).argmax(-1))


def test_mixed_precision_computes_the_loss_in_float32(tmp_path: Path) -> None:
    """Protects bf16-mixed and bf16-true: cross entropy of bfloat16 logits would be right to two digits only."""
    model, data = module(), Tokens()
    (exact,) = trainer(tmp_path).validate(model, datamodule=data, verbose=False)
    (mixed,) = trainer(tmp_path, precision="bf16-mixed").validate(model, datamodule=data, verbose=False)
    assert mixed["val/loss"] == pytest.approx(exact["val/loss"], rel=2e-3)
    assert module().bfloat16().training_step((data.x, data.y), 0).dtype == torch.float32
    run = trainer(tmp_path, precision="bf16-mixed", max_steps=2)
    run.fit(model, datamodule=data)
    assert run.callback_metrics["train/loss"].isfinite()


def test_a_network_too_small_for_the_data_is_refused(tmp_path: Path) -> None:
    """Protects the user from an index error in mid-training; a larger network is fine."""
    with pytest.raises(UserError, match=r"network\.vocabulary is 31, .* 40 .*set --model\.network\.vocabulary=40"):
        trainer(tmp_path).validate(module(), datamodule=Tokens(vocabulary_size=40), verbose=False)
    with pytest.raises(UserError, match=r"network\.context is 10, .* 11 .*set --model\.network\.context=11"):
        trainer(tmp_path).validate(module(), datamodule=Tokens(context=11), verbose=False)
    trainer(tmp_path).validate(module(), datamodule=Tokens(vocabulary_size=20, context=5), verbose=False)


def test_the_weight_map_reads_the_fused_parameter(tmp_path: Path) -> None:
    """Protects what callbacks and optimizers ask for: six projections a layer, under the module's own names."""
    model = module()
    weights, parameters = model.weight_map(), dict(model.named_parameters())
    assert {name: len(layers) for name, layers in weights.projections.items()} == dict.fromkeys(
        ("q", "k", "v", "o", "up", "down"), 2
    )
    fused = parameters["model.h.1.attn.c_attn.weight"]
    assert torch.equal(torch.cat([weights.gather(name, parameters)[1] for name in "qkv"]), fused)
    assert weights.projections["o"][0].parameter == "model.h.0.attn.c_proj.weight"
    assert weights.projections["down"][1].side == "writes"


def test_training_starts_from_a_file(tmp_path: Path) -> None:
    """Protects fine-tuning: the module's network has the weights of the file before anything is trained."""
    other = GPT2(NETWORK)
    other.save_safetensors(tmp_path / "w.safetensors")
    model = module(seed=1, weights=str(tmp_path / "w.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(model.model.parameters(), other.parameters(), strict=True))
    with pytest.raises(UserError, match=r"weights: .*none\.safetensors is not there"):
        module(weights=str(tmp_path / "none.safetensors"))


def groups(model: GPT2Module) -> dict[str, int]:
    rules = {
        "matrices": Rule(functools.partial(torch.optim.SGD, lr=0.1), "matrices"),
        "others": Rule(functools.partial(torch.optim.SGD, lr=0.1)),
    }
    built = Composite(NamedParameters(model.named_parameters(), model.weight_map()), rules)
    return {group["name"]: len(group["params"]) for group in built.param_groups}


def test_compilation_changes_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects checkpoints, weight map and optimizer groups from torch.compile, on or off (with an eager backend)."""
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        calls.append("compiled")
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    saved = {}
    for compiled in (False, True):
        model = module(compile=compiled)
        run = trainer(tmp_path, max_steps=2, limit_val_batches=0, enable_checkpointing=True)
        run.fit(model, datamodule=Tokens())
        assert bool(calls) is compiled
        run.save_checkpoint(tmp_path / "c.ckpt")
        checkpoint = torch.load(tmp_path / "c.ckpt", weights_only=True)
        saved[compiled] = (checkpoint["state_dict"], model.weight_map().projections, groups(model))
    (plain, *rest), (compiled_state, *compiled_rest) = saved[False], saved[True]
    assert list(plain) == list(compiled_state)
    assert rest == compiled_rest
    for name in plain:
        torch.testing.assert_close(plain[name], compiled_state[name], atol=1e-5, rtol=0, msg=name)
    resumed = trainer(tmp_path, max_steps=3, limit_val_batches=0)
    resumed.fit(module(seed=5), datamodule=Tokens(), ckpt_path=tmp_path / "c.ckpt")
    assert resumed.global_step == 3

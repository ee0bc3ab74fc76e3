"""SoftmaxSaturation on someone else's attention, on GPT-2, and what it must not change."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from callbacks import SoftmaxSaturation, StepMonitor
from callbacks.attention_watch import AttentionWatch
from callbacks.softmax_saturation import SaturationTotals
from geocont.errors import UserError
from geocont.measures.attention import ROW_MEASURES, head_totals, head_values
from geocont.models import GPT2Config
from geocont.modules import GPT2Module
from tests.callbacks.stranger import Rows, Stranger
from tests.callbacks.stranger import train as train_stranger
from tests.conftest import same

WIDTH, LENGTH, HEADS = 12, 6, 3


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        self.seen = q.detach(), k.detach()
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, None, dropout, True).transpose(1, 2).flatten(2)


class Torchs(nn.Module):
    def __init__(self, need_weights: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()  # True may not look, in this class
        return self.inner(x, x, x, attn_mask=hidden, need_weights=self.need_weights)[0]


class Reader(pl.LightningModule):
    """A stranger with attention."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 3)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def sequences(batch_size: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, LENGTH, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0, 0] > 0).long()), batch_size=batch_size)


def train(
    module: pl.LightningModule, callbacks: list[pl.Callback], steps: int = 3, **options: Any
) -> tuple[pl.Trainer, Rows]:
    return train_stranger(module, callbacks, steps, data=sequences, **options)


def every(**options: Any) -> SoftmaxSaturation:
    return SoftmaxSaturation(1, **{"sequences": 99, **options})


def softmax_steps(rows: Rows) -> list[int | None]:
    return [step for step, row in rows.rows if any(key.startswith("softmax/") for key in row)]


def expected(module: Reader, layer: int) -> dict[str, Tensor]:
    """What the first batch says of a layer before any update, from its own q and k."""
    module(next(iter(sequences()))[0])
    return head_values(head_totals(*module.layers[layer].seen, diagonal=0))


def test_rows_hold_the_layers_of_a_strangers_model_before_the_update() -> None:
    module = Reader(Attention(), Attention())
    values = [expected(module, layer) for layer in range(2)]
    _, rows = train(module, [every()])
    assert softmax_steps(rows) == [0, 1, 2]
    for name in ROW_MEASURES:
        layers = [heads[name].max() if name == "max_logit" else heads[name].mean() for heads in values]
        worst = torch.cat([heads[name] for heads in values])
        worst = worst.min() if name in ("entropy", "jacobian") else worst.max()
        for key, value in {
            "layer_00": layers[0],
            "layer_01": layers[1],
            "mean": (layers[0] + layers[1]) / 2,
            "worst_head": worst,
        }.items():
            assert rows.measured(f"softmax/{name}/{key}")[0] == pytest.approx(value.item(), rel=1e-5), (name, key)
    assert not any("logit_scale" in key or "layer_02" in key for _, row in rows.rows for key in row)


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_within_torchs_own_module_is_seen(need_weights: bool) -> None:
    """Calls within a function that a mode handles are invisible to that mode, and with weights none is made at all."""
    own, torchs = Attention(), Torchs(need_weights)
    module = Reader(torchs)
    with torch.no_grad():
        own.qkv.weight.copy_(torchs.inner.in_proj_weight)
        own.qkv.bias.copy_(torchs.inner.in_proj_bias)
        own(next(iter(sequences()))[0])
    values = head_values(head_totals(*own.seen, diagonal=0))
    _, rows = train(module, [every()])
    assert softmax_steps(rows) == [0, 1, 2]
    for name in ("entropy", "top_probability", "jacobian", "saturated"):
        logged = rows.measured(f"softmax/{name}/layer_00")[0]
        assert logged == pytest.approx(values[name].mean().item(), rel=1e-5)
    assert rows.measured("softmax/max_logit/layer_00")[0] == pytest.approx(values["max_logit"].max().item(), rel=1e-5)
    assert "softmax/entropy/layer_01" not in rows.rows[0][1]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("probe", ["current", "fixed"])
@pytest.mark.parametrize("kind", ["sdpa", "weights", "module"])
def test_losses_and_weights_are_the_same_bit_for_bit(kind: str, probe: str, accumulate: int) -> None:
    """A probe that draws random numbers, or computes attention in another way, changes the training it watches."""

    def build() -> Reader:
        layer = {
            "sdpa": lambda: Attention(0.1),
            "weights": lambda: Torchs(True, 0.1),
            "module": lambda: Torchs(False, 0.1),
        }[kind]
        return Reader(layer(), layer())

    plain, watched = build(), build()
    for module, callbacks in ((plain, []), (watched, [every(probe=probe), StepMonitor(1)])):
        torch.manual_seed(3)
        train(module, callbacks, steps=4, batch_size=4, accumulate_grad_batches=accumulate)
    assert plain.losses == watched.losses
    assert same(plain.state_dict(), watched.state_dict())


def test_accumulated_batches_measure_like_one() -> None:
    _, whole = train(Reader(Attention()), [every()], steps=2)
    _, parts = train(Reader(Attention()), [every()], steps=2, batch_size=2, accumulate_grad_batches=4)
    assert softmax_steps(parts) == softmax_steps(whole) == [0, 1]
    for key, value in whole.rows[0][1].items():
        if key.startswith("softmax/"):
            assert parts.measured(key)[0] == pytest.approx(value, rel=1e-5), key


def test_only_measured_steps_are_watched_and_nothing_else_leaves_rows() -> None:
    callback = SoftmaxSaturation(4)
    trainer, rows = train(Reader(Attention()), [callback], steps=9, limit_val_batches=1, num_sanity_val_steps=1)
    assert softmax_steps(rows) == [0, 1, 2, 4, 8]
    assert trainer.callback_metrics["softmax/max_logit/worst_head"] > 0
    assert all(len(layer.totals) == 1 for layer in callback._watch.layers)  # validation was not watched
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_run_that_breaks_off_leaves_no_mode_behind() -> None:
    module = Reader(Attention())

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("broken")

    module.head.forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        train(module, [every()])
    assert torch.overrides._get_current_function_mode_stack() == []
    skipping = Reader(Attention())
    skipping.on_train_batch_start = lambda *_: -1  # type: ignore[method-assign]
    train(skipping, [every()], steps=-1, max_epochs=1)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_failing_measurement_is_said_once_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("callbacks.attention_watch.head_totals", fail)
    with pytest.warns(UserWarning, match="could not measure step 0, layer 0: RuntimeError: no memory") as caught:
        trainer, rows = train(Reader(Attention()), [every()])
    assert trainer.global_step == 3
    assert sum("could not measure" in str(warning.message) for warning in caught) == 1
    assert sum("saw no call" in str(warning.message) for warning in caught) == 0
    assert softmax_steps(rows) == []


def test_a_model_without_attention_gets_one_warning_and_no_keys() -> None:
    with pytest.warns(UserWarning, match="saw no call of scaled_dot_product_attention") as caught:
        _, rows = train_stranger(Stranger(), [every()])
    assert sum("saw no call" in str(warning.message) for warning in caught) == 1
    assert softmax_steps(rows) == []


def test_not_a_number_is_skipped_and_counted() -> None:
    class Bad(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            q = q.clone()
            q[0, 1, 4] = math.nan
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x

    _, rows = train(Reader(Bad()), [every()], steps=1)
    (row,) = [row for _, row in rows.rows if "measure/skipped" in row]
    assert row["measure/skipped"] == 1
    assert all(math.isfinite(value) for value in row.values())
    assert "softmax/entropy/worst_head" in row


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision(precision: str) -> None:
    module = Reader(Attention())
    values = expected(module, 0)
    _, rows = train(module, [every()], steps=1, precision=precision)
    for name in ("entropy", "top_probability"):
        logged = rows.measured(f"softmax/{name}/layer_00")[0]
        assert logged == pytest.approx(values[name].mean().item(), rel=0.05)


def test_compiled_models_run_eagerly_in_measured_steps_only() -> None:
    """A compiled graph calls no function that a mode could see."""
    runs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        def run(*args: Any) -> Any:
            runs.append("compiled")
            return graph.forward(*args)

        return run

    module, plain = Reader(Attention(), Attention()), Reader(Attention(), Attention())
    for layer in module.layers:
        layer.compile(backend=backend)

    class Mark(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
            runs.append(f"step {trainer.global_step}")

    _, rows = train(module, [Mark(), SoftmaxSaturation(2, log_spaced=False)], steps=4)
    torch._dynamo.reset()
    assert softmax_steps(rows) == [0, 2]
    pair = ["compiled", "compiled"]
    assert runs == ["step 0", "step 1", *pair, "step 2", "step 3", *pair]
    _, eager = train(plain, [SoftmaxSaturation(2, log_spaced=False)], steps=4)
    assert rows.measured("softmax/entropy/mean") == pytest.approx(eager.measured("softmax/entropy/mean"), rel=1e-5)


def test_a_fixed_batch_is_measured_at_every_state_without_dropout() -> None:
    module, states = Reader(Attention(0.3), Attention(0.3)), []

    class Spy(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Reader, optimizer: object) -> None:
            states.append({name: value.clone() for name, value in pl_module.state_dict().items()})

    _, rows = train(module, [every(probe="fixed"), Spy()], steps=3)
    assert softmax_steps(rows) == [0, 1, 2]
    for step, state in enumerate(states):
        plain = Reader(Attention(), Attention())
        plain.load_state_dict(state)
        value = expected(plain, 1)["entropy"].mean().item()
        assert rows.measured("softmax/entropy/layer_01")[step] == pytest.approx(value, rel=1e-5)
    assert len(set(rows.measured("softmax/entropy/layer_01").values())) == 3


def test_a_fixed_batch_leaves_modes_and_hooks_as_they_were() -> None:
    module = Reader(Attention(), Attention())
    modes: list[list[bool]] = []

    class Spy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            modes.append([part.training for part in module.modules()])
            assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())

    module.layers[1].eval()
    before = [part.training for part in module.modules()]
    train(module, [every(probe="fixed"), Spy()], steps=2)
    assert modes == [before, before]
    assert False in before


def test_a_forward_pass_that_cannot_be_repeated_is_said_and_the_current_one_watched() -> None:
    """Attention fed with what other layers made of the batch: those inputs are of step 0 for ever."""

    class Direct(Reader):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x = batch[0] * self.head.weight.mean()
            return F.cross_entropy(self.head(self.layers[0](x).mean(1)), batch[1])

    with pytest.warns(UserWarning, match="computes the inputs of its attention itself") as caught:
        _, fixed = train(Direct(Attention()), [every(probe="fixed")], steps=3)
    assert sum("attention itself" in str(warning.message) for warning in caught) == 1
    _, current = train(Direct(Attention()), [every()], steps=3)
    assert fixed.measured("softmax/entropy/mean") == current.measured("softmax/entropy/mean")


def gpt2(**options: Any) -> GPT2Module:
    torch.manual_seed(0)
    network = GPT2Config(layers=3, heads=2, width=16, context=10, vocabulary=31, **options)
    return GPT2Module(network=network, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2))


def test_gpt2_has_a_key_for_each_layer_and_the_scale_of_its_matrices() -> None:
    module, rows = gpt2(dropout=0.1), Rows()
    tokens = torch.randint(31, (8, 11), generator=torch.Generator().manual_seed(0))
    wq, wk = (module.weight_map().gather(name, dict(module.named_parameters()))[1].detach() for name in ("q", "k"))
    norms = [torch.linalg.matrix_norm(wq[h : h + 8], 2) * torch.linalg.matrix_norm(wk[h : h + 8], 2) for h in (0, 8)]
    scale = (sum(norms) / 2 / math.sqrt(8)).item()
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_steps=2, logger=rows, callbacks=[every()], accelerator="cpu", enable_checkpointing=False, **quiet
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4))
    for name in (*ROW_MEASURES, "logit_scale"):
        for place in ("layer_00", "layer_01", "layer_02", "mean", "worst_head"):
            assert set(rows.measured(f"softmax/{name}/{place}")) == {0, 1}, (name, place)
    assert "softmax/entropy/layer_03" not in rows.rows[0][1]
    assert rows.measured("softmax/logit_scale/layer_01")[0] == pytest.approx(scale, rel=1e-5)
    assert 0.99 < rows.measured("softmax/entropy/mean")[0] <= 1  # at initialisation


def test_calls_of_every_shape_are_read() -> None:
    """Without heads, with several dimensions of heads, grouped, over other tokens, with torch's own masks."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def seen(q: Tensor, k: Tensor, **options: Any) -> Tensor:
        watch = AttentionWatch(rows=99, sequences=99)
        watch.start()
        result = F.scaled_dot_product_attention(q, k, k, **options)
        watch.stop()
        assert watch.failures == []
        assert torch.equal(result, F.scaled_dot_product_attention(q, k, k, **options))
        return watch.layers[0].totals[0]

    q, k = draw(2, 4, 5, 8), draw(2, 4, 7, 8)
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(seen(q[:, 0], k[:, 0]), head_totals(q[:, :1], k[:, :1]))
    close(seen(q[0, 0], k[0, 0]), head_totals(q[:1, :1], k[:1, :1]))
    mask = draw(2, 5, 7) > 0
    close(seen(q[:, 0], k[:, 0], attn_mask=mask), head_totals(q[:, :1], k[:, :1], mask=mask[:, None]))
    five, keys = q.unflatten(1, (2, 2)), k.unflatten(1, (2, 2))
    close(seen(five, keys, attn_mask=mask[:, None, None]), head_totals(q, k, mask=mask[:, None]))
    close(seen(q, k[:, :2], enable_gqa=True), head_totals(q, k[:, [0, 0, 1, 1]]))
    close(seen(q, k[:1, :1]), head_totals(q, k[:1, :1].expand(2, 4, -1, -1)))
    close(seen(q, k, attn_mask=causal_lower_right(5, 7)), head_totals(q, k, diagonal=2))
    close(seen(q, k, scale=0.3), head_totals(q, k, scale=0.3))


def test_llama_agrees_with_the_attentions_that_its_authors_return() -> None:
    """After rotary embedding, with grouped heads and padding; asking for attentions would change the computation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 29}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.7)
    model = LlamaForCausalLM(config).eval()
    tokens, keep = torch.randint(29, (3, 9)), torch.ones(3, 9).long()
    keep[1, 5:], keep[2, 2:] = 0, 0
    plain = model(tokens, attention_mask=keep).logits
    watch = AttentionWatch(rows=99, sequences=99)
    watch.start()
    assert torch.equal(model(tokens, attention_mask=keep).logits, plain)
    watch.stop()
    assert watch.failures == []
    model.set_attn_implementation("eager")
    attentions = model(tokens, attention_mask=keep, output_attentions=True).attentions
    assert len(watch.layers) == len(attentions) == 2
    count = torch.arange(1, 10).float()
    rows = keep.bool() & (count > 1)  # (B, T)
    for layer, p in zip(watch.layers, attentions, strict=True):
        values = head_values(layer.totals[0])
        assert layer.totals[0][:, 0].tolist() == [rows.sum()] * 4
        entropy = torch.special.entr(p).sum(-1) / count.log()  # (B, H, T)
        for name, each in {"entropy": entropy, "top_probability": p.amax(-1)}.items():
            mean = torch.stack([each[:, h][rows].mean() for h in range(4)])
            torch.testing.assert_close(values[name], mean, rtol=1e-4, atol=1e-5)


def test_compilers_stance_comes_back() -> None:
    """A user who has set one found it reset to the default."""
    before = torch.compiler.set_stance("eager_on_recompile")
    try:
        watch = AttentionWatch(rows=1, sequences=1)
        watch.start()
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        watch.stop()
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    finally:
        before.__exit__(None, None, None)


def test_padding_of_torchs_own_module_is_left_out() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    padding = torch.zeros(2, LENGTH).bool()
    padding[1, 3:] = True
    for need_weights in (True, False):
        watch = AttentionWatch(rows=99, sequences=99)
        watch.start()
        layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        watch.stop()
        assert watch.failures == []
        assert watch.layers[0].totals[0][:, 0].tolist() == [LENGTH + 3] * HEADS


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="rows must be a whole number of at least 1, got 0"):
        SoftmaxSaturation(rows=0)
    with pytest.raises(UserError, match="probe must be current or fixed, got 'other'"):
        SoftmaxSaturation(probe="other")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no parameter matches"):
        train(Reader(Attention()), [SoftmaxSaturation(weights={"q": r"nothing\.(\d+)"})])


class Ranks(pl.Callback):
    """Leaves what the ranks have logged together; then one of them has seen nothing."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metric, watch = SaturationTotals(), AttentionWatch(rows=99, sequences=99)
        if trainer.global_rank == 1:
            q = torch.ones(1, 2, 4, 3)
            watch.start()
            F.scaled_dot_product_attention(q, q, q)
            watch.stop()
        metric.update(watch.layers)
        assert metric.compute()[0][:, 0].tolist() == [4.0, 4.0]
        if trainer.global_rank == 0:
            torch.save({k: v for k, v in trainer.callback_metrics.items() if "softmax" in k}, self.file)


class Shared(Reader):
    def train_dataloader(self) -> DataLoader:
        data = sequences().dataset
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, sampler=sampler, batch_size=4)


def train_ranks(folder: str) -> None:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    parallel: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": False}
    for probe in ("current", "fixed"):
        callbacks = [every(probe=probe), Ranks(Path(folder, probe))]
        trainer = pl.Trainer(
            max_steps=2, accelerator="cpu", enable_checkpointing=False, callbacks=callbacks, **quiet, **parallel
        )
        trainer.fit(Shared(Attention(), Attention()))


def test_ranks_measure_like_one(tmp_path: Path) -> None:
    """An average of the ranks' worst heads and means is none of the whole; a rank that skips a collective hangs all."""
    code = f"from tests.callbacks.test_softmax_saturation import train_ranks; train_ranks({str(tmp_path)!r})"
    root, alone = Path(__file__).parents[2], {"OMP_NUM_THREADS": "1"}  # forked processes need a parent without threads
    subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, **alone}, check=True, timeout=120)
    for probe in ("current", "fixed"):
        found = torch.load(tmp_path / probe)
        _, rows = train(Reader(Attention(), Attention()), [every(probe=probe)], steps=2)
        assert len(found) == 5 * 4
        for key, value in found.items():
            assert rows.measured(key)[1] == pytest.approx(value.item(), rel=1e-5), key

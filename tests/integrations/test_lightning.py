"""Lightning's Trainer with lowtide's callback: one process, DDP and FSDP2, all with the same bits as without."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Collectives, on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lowtide

lightning = pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402

from lowtide.integrations.lightning import Lowtide, take_over  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SHARE = "85%"
WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Module(LightningModule):
    """A stack of blocks; ``called``: training_step calls the module itself and not its only child."""

    def __init__(self, called: bool = False, sharded: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 8))
        self.called, self.sharded = called, sharded
        self.losses: list[Tensor] = []
        self.validated = 0

    def configure_model(self) -> None:
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            for block in list(self.net)[:-1]:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss = (self(batch) if self.called else self.net(batch)).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, number: int) -> None:
        self.net(batch)
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def data() -> DataLoader[Any]:
    rows = torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(4))
    return DataLoader(rows, batch_size=256)  # type: ignore[arg-type]


def fit(callback: Lowtide | None = None, module: Callable[[], Module] = Module, **settings: Any) -> Module:
    torch.manual_seed(0)
    made = module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, enable_model_summary=False, callbacks=[callback] if callback else [],
        **(quiet | settings),
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(made, data(), data() if "val_check_interval" in settings else None)
    return made


def assert_same(one: Module, other: Module) -> None:
    for ours, theirs in ((one.losses, other.losses), (list(one.parameters()), list(other.parameters()))):
        assert len(ours) == len(theirs)
        pairs = [
            [p.to_local() if hasattr(p, "to_local") else p for p in pair] for pair in zip(ours, theirs, strict=True)
        ]
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("called", [False, True], ids=["the child is called", "the module is called"])
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_one_process_trains_the_same(called: bool, settings: dict[str, Any]) -> None:
    callback = Lowtide(SHARE)
    assert_same(fit(module=lambda: Module(called), **settings), fit(callback, lambda: Module(called), **settings))
    report = callback.report()
    assert report.calls == 8
    assert report.planned_calls >= 6


def test_a_part_may_be_named() -> None:
    callback = Lowtide(policy=lowtide.policies.recompute_all, part="net.1")
    assert_same(fit(), fit(callback))
    assert callback.report().calls == 8


def test_validation_is_not_recorded() -> None:
    callback = Lowtide(SHARE)
    module = fit(callback, val_check_interval=4)
    assert module.validated > 8
    assert callback.report().calls == 8


def test_checkpoint_wrappers_are_taken_over() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    def wrapped() -> Module:
        module = Module()
        apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, Block))
        return module

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's checkpoint was called as well")

    plain = fit(module=wrapped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, "checkpoint", never)
        assert_same(plain, fit(Lowtide(SHARE), wrapped))
    module = wrapped()
    before = module.net[0].checkpoint_fn
    undo = take_over(module)
    assert module.net[0].checkpoint_fn is not before
    undo()
    assert module.net[0].checkpoint_fn is before


def test_an_exception_detaches() -> None:
    class Failing(Module):
        def training_step(self, batch: Tensor, number: int) -> Tensor:
            if number == 2:
                raise ValueError("enough")
            return super().training_step(batch, number)

    with pytest.raises(ValueError, match="enough"):
        fit(Lowtide(SHARE), Failing)
    assert "__call__" not in nn.Sequential.__dict__


def distributed(kind: str) -> list[tuple[bool, dict[str, int], dict[str, int], int]]:
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GROUP_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2"}
    settings: dict[str, Any] = {"devices": 2}
    if kind == "fsdp2":
        settings["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    else:
        settings["strategy"] = DDPStrategy(process_group_backend="gloo", static_graph=kind == "static")
    found = []
    runs = []
    for callback in (None, Lowtide(SHARE), Lowtide()):
        with Collectives() as sent:
            runs.append((fit(callback, lambda: Module(sharded=kind == "fsdp2"), **settings), sent.counts))
        if kind == "fsdp2":
            settings["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        else:
            settings["strategy"] = DDPStrategy(process_group_backend="gloo", static_graph=kind == "static")
        if callback is not None:
            assert_same(runs[0][0], runs[-1][0])
            found.append((True, runs[0][1], runs[-1][1], callback.report().planned_calls))
    return found


@pytest.mark.parametrize("kind", ["ddp", "static", "fsdp2"])
def test_two_processes_train_the_same_and_send_the_same(kind: str) -> None:
    for rank in on_ranks(distributed, kind):
        for _, sent, ours, planned in rank:
            assert sent == ours
            assert planned >= 3

"""timm's models in a plain loop: the same bits, statistics of batch norms that move once, its own switch taken over.

timm and torchvision lie in a folder of their own, see `./run integrations`.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowtide

VISION = str(Path(sys.prefix) / "vision")

# Wheels of torchvision link CUDA; on a CPU build its operators are missing, and importing it looks for two of them.
library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.path.append(VISION)
timm = pytest.importorskip("timm")
sys.path.remove(VISION)  # other processes that are started here must not find torchvision

from lowtide.integrations.timm import Lowtide, take_over  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

MODELS = ["test_vit", "test_resnet", "test_convnext", "test_efficientnet", "test_mambaout"]


def train(name: str, session: Lowtide | None, flag: bool = False) -> list[Tensor]:
    """Losses, weights and buffers of a few steps."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, drop_path_rate=0.1)
    if flag:
        model.set_grad_checkpointing()
    size = model.pretrained_cfg["input_size"][-1]
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    with session.on(model, optimizer) if session is not None else nullcontext():
        for _ in range(3):
            loss = model.train()(torch.randn(2, 3, size, size)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("flag", [False, True], ids=["switch off", "switch on"])
def test_a_plain_loop_trains_the_same(name: str, flag: bool) -> None:
    plain = train(name, None)
    for session in (Lowtide("95%"), Lowtide(policy=lowtide.policies.recompute_all)):
        assert all(torch.equal(a, b) for a, b in zip(plain, train(name, session, flag), strict=True))


def test_the_switch_is_put_back() -> None:
    model = timm.create_model("test_vit")
    model.set_grad_checkpointing()
    undo = take_over(model)
    assert not model.grad_checkpointing
    undo()
    assert model.grad_checkpointing


def test_the_example_trains_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, because torchvision needs help to be imported here."""
    from examples import with_timm

    start = time.process_time()
    with_timm.main()
    assert "the same to the last bit" in capsys.readouterr().out
    assert time.process_time() - start < 60

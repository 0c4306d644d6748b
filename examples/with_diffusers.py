"""A UNet of diffusers in a training loop of one's own, within a budget.

pip install "lowtide[diffusers]"
python -m examples.with_diffusers
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from diffusers import DDPMScheduler, UNet2DModel

from lowtide.integrations.diffusers import Lowtide


def train(session: Lowtide | None) -> list[float]:
    """The losses of a few steps."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    noise_schedule = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(unet.parameters(), 1e-4)
    losses = []
    with session.on(unet, optimizer) if session is not None else nullcontext():
        for _ in range(4):
            images, noise = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)
            steps = torch.randint(0, 1000, (4,))
            noisy = noise_schedule.add_noise(images, noise, steps)
            loss = (unet(noisy, steps).sample - noise).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses


def main() -> None:
    session = Lowtide(budget="85%")
    same = train(None) == train(session)
    print(session.report())
    print("the losses are the same to the last bit" if same else "the losses differ")
    assert same


if __name__ == "__main__":
    main()

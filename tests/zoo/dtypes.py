"""Number kinds: complex with lazy conjugates and signs, half precisions, autocast, chains of casts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Case, Program
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("dtypes")

COMPLEX = torch.complex64

ZOO.flow("fft", lambda x: torch.fft.ifft(torch.fft.fft(x.exp()) * torch.fft.fft(x.sin())).real.sin())
ZOO.flow(
    "rfft_filter",
    lambda x: torch.fft.irfft(torch.fft.rfft(x.exp()) * torch.arange(5.0).exp().neg(), n=8).sin(),
)
ZOO.flow("fft2_shift", lambda x: torch.fft.fftshift(torch.fft.fft2(x.exp(), norm="ortho")).abs().sin())
ZOO.flow("complex_products", lambda x: (x.exp() * x.sin() @ x.T).cos(), dtype=COMPLEX)
ZOO.flow("conjugate_lazy", lambda x: (x.exp().conj() * x.sin()).exp(), dtype=COMPLEX)
ZOO.flow(
    "conjugate_kept_lazy_through_views",
    lambda x: (x.exp().conj().T[1:, :3] @ x.sin()[:3]).cos(),
    dtype=COMPLEX,
)
ZOO.flow(
    "conjugate_resolved",
    lambda x: x.exp().conj().resolve_conj().sin() * x.exp().conj_physical(),
    dtype=COMPLEX,
)
ZOO.flow(
    "conjugate_in_place",
    lambda x: (x * 1.5).conj_physical_().exp() + x.sin().conj().add_(1.0).cos(),
    dtype=COMPLEX,
)
ZOO.flow("adjoint_matmul", lambda x: (x.exp().tanh().mH @ x.sin()).abs().sin(), dtype=COMPLEX)
ZOO.flow("imaginary_part_negated", lambda x: x.exp().conj().imag.sin() * x.sin().imag.exp(), dtype=COMPLEX)
ZOO.flow("negative_bit_saved", lambda x: x.tanh().conj().imag.exp() @ x.sin().conj().imag.T, dtype=COMPLEX)
ZOO.flow("real_part_written", lambda x: _real_part_written(x), dtype=COMPLEX)
ZOO.flow("view_as_real", lambda x: torch.view_as_real(x.exp()).sin().prod(-1), dtype=COMPLEX)
ZOO.flow("view_as_complex_rotary", lambda x: _rotary(x), x=(3, 6, 8))
ZOO.flow("polar_and_angle", lambda x: torch.polar(x.exp(), x.sin()).angle().cos() + torch.complex(x, x.exp()).abs())
ZOO.flow("complex_to_real_cast", lambda x: torch.complex(x.exp(), x.sin()).mul(1j).real.exp())
ZOO.flow("complex128", lambda x: (x.exp().conj() @ x.sin().T).tanh(), dtype=torch.complex128)
ZOO.flow("scalar_type_promotion", lambda x: (x.exp() * torch.tensor(2.5, dtype=torch.float64) + 1j * x.sin()).abs())
ZOO.flow("stft_istft", lambda x: _stft(x), x=(2, 64))
ZOO.flow("float64", lambda x: (x.exp() @ x.sin().T).softmax(1) @ x, dtype=torch.float64)
ZOO.flow("bfloat16", lambda x: (x.exp() @ x.sin().T).softmax(1) @ x, dtype=torch.bfloat16)
ZOO.flow("float16", lambda x: ((x.sin() @ x.cos().T).softmax(1) @ x).exp(), dtype=torch.float16)
ZOO.flow("cast_chain", lambda x: x.bfloat16().exp().float().sin().half().tanh().double().cos().float() * x)
ZOO.flow(
    "cast_to_same",
    lambda x: x.exp().float().to(torch.float32).sin() * x.to("cpu").to(x.dtype, copy=True).exp(),
)
ZOO.flow("cast_of_weights", lambda x, w: (x.bfloat16() @ w.bfloat16()).float().sin() @ w, x=(6, 8), w=(8, 8))
ZOO.flow(
    "cast_for_norm",
    lambda x: (lambda y: y.float() * y.float().pow(2).mean(1, True).rsqrt())(x.exp().bfloat16()).bfloat16(),
)
ZOO.flow("float8_round_trip", lambda x: x.exp().detach().to(torch.float8_e4m3fn).float() * x.sin())
ZOO.flow("integer_arithmetic", lambda x: ((x.detach() * 10).int().remainder(7) // 2).float() * x.exp())
ZOO.flow("booleans_as_numbers", lambda x: (x.sin() > x.cos()).logical_xor(x > 0).sum(1).float()[:, None] * x.exp())
ZOO.flow("bitwise_masks", lambda x: ((x > 0) & ~(x > 1) | (x < -1)).to(x.dtype) * x.exp().sin())
ZOO.flow("fake_quantised", lambda x: torch.fake_quantize_per_tensor_affine(x.exp(), 0.05, 3, -128, 127).sin())
ZOO.flow(
    "quantised_by_hand",
    lambda x: (x.exp() * 16).round().clamp(-127, 127).detach().to(torch.int8).float() / 16 * x.sin(),
)
ZOO.flow("infinities_and_nans", lambda x: _not_finite(x))
ZOO.flow("denormals_and_signed_zeros", lambda x: (x * 1e-40).mul(-0.0).add(x * 1e-30).mul(1e25).sin())
ZOO.flow(
    "python_scalars",
    lambda x: (x**2.5).nan_to_num(0.1) + 2**x + 1 / (x.exp() + 1) - (True * x.detach()) // 0.3,
)
ZOO.flow("default_dtype_changed_inside", lambda x: _default_dtype(x))


def _real_part_written(x: Tensor) -> Tensor:
    y = x.exp() * 1.0
    y.real.mul_(0.3)
    torch.view_as_real(y)[..., 1].add_(0.2)
    return y.sin()


def _rotary(x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(6.0), torch.arange(4.0).mul(-0.5).exp())
    turned = torch.view_as_complex(x.exp().tanh().reshape(3, 6, 4, 2)) * torch.polar(torch.ones(6, 4), angles)
    return torch.view_as_real(turned).flatten(2).sin()


def _stft(x: Tensor) -> Tensor:
    window = torch.hann_window(16)
    spectrum = torch.stft(x.sin(), 16, 4, window=window, return_complex=True)
    sound = torch.istft(spectrum * spectrum.abs().log1p(), 16, 4, window=window)
    return sound.tanh().sum() + spectrum.abs().pow(2).sum(1).log1p()


def _not_finite(x: Tensor) -> Tensor:
    y = torch.where(x > 0.5, torch.inf, x.exp())
    z = torch.where(x < -0.5, torch.nan, y.sin())
    return z.nan_to_num(0.0, 1.0, -1.0) * x + y.clamp(max=3.0) + (x - x.max(1, keepdim=True)[0]).log().clamp(min=-3)


def _default_dtype(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(6, 8) * x.exp() + torch.linspace(0, 1, 8).sin() * x
    finally:
        torch.set_default_dtype(torch.float32)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 8)
    )


def _autocast(enabled: bool = True, dtype: torch.dtype = torch.bfloat16, **options: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, **options)


def _under_autocast(run: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], Program]:
    def build() -> Program:
        model, x = _network(), randn(6, 8)

        def step() -> Tensor:
            with _autocast():
                return weigh(run(model, prepare(x)))

        return Program(step, model=model, leaves={"x": x})

    return build


def _nested(model: nn.Module, x: Tensor) -> Tensor:
    h = model[0](x)
    with _autocast(enabled=False):
        h = model[1](h.float() @ torch.eye(16))
        with _autocast(dtype=torch.float16):
            h = model[3](h)
    return model[5](model[4](h))


def _weights_changed(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    with torch.no_grad():
        model[0].bias.add_(0.0)
    return y * model(x * 2)


AUTOCAST_RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "once": lambda model, x: model(x),
    "cached_weights": lambda model, x: model(model(x)) + model(x * 0.5),
    "nested": _nested,
    "attention": lambda model, x: F.scaled_dot_product_attention(*(model(x)[None, None] for _ in range(3))),
    "softmax_and_loss": lambda model, x: F.cross_entropy(model(x), torch.arange(6)) + model(x).softmax(1).log().mean(),
    "bias_touched_between_calls": _weights_changed,
    "without_gradient_first": lambda model, x: model(model(x).detach()) + x,
}
for _name, _run in AUTOCAST_RUNS.items():
    ZOO.add(f"autocast_{_name}", _under_autocast(_run))


@ZOO.program()
def autocast_without_cache() -> Program:
    model, x = _network(), randn(6, 8)

    def step() -> Tensor:
        with _autocast(cache_enabled=False):
            return weigh(model(model(prepare(x))))

    return Program(step, model=model, leaves={"x": x})


@ZOO.program()
def autocast_backward_inside() -> Program:
    model, x = _network(), randn(6, 8)

    def step() -> Tensor:
        with _autocast():
            loss = weigh(model(prepare(x)))
            loss.backward()
            return weigh(model(prepare(x) * 2))

    return Program(step, model=model, leaves={"x": x})


def _plain_network() -> Program:
    model, x = _network(), randn(6, 8)
    return Program(lambda: weigh(model(prepare(x))), model=model, leaves={"x": x})


ZOO.append(Case("dtypes-autocast_around", _plain_network, around=_autocast))


@ZOO.program()
def bfloat16_weights_with_float32_masters() -> Program:
    model, x = _network().bfloat16(), randn(6, 8)
    masters = {name: p.detach().float() for name, p in model.named_parameters()}

    def descend() -> None:
        for name, parameter in model.named_parameters():
            masters[name] -= 0.1 * parameter.grad.float()
            parameter.data.copy_(masters[name])

    return Program(
        lambda: weigh(model(prepare(x).bfloat16()).float()),
        model=model,
        leaves={"x": x},
        python_state=lambda: masters,
        after_step=descend,
    )

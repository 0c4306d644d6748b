"""Derivatives of derivatives, torch.func, forward mode, and every way to call backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

from harness import Program
from zoo.state import Stack
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("transforms")


def _energy(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).tanh().sum()


ZOO.flow("func_grad", lambda x: grad(_energy)(x.exp()).sin() * x)
ZOO.flow("func_grad_and_value", lambda x: [t.cos() for t in grad_and_value(_energy)(x.exp())])
ZOO.flow("func_grad_of_grad", lambda x: grad(lambda y: grad(_energy)(y).pow(2).sum())(x.sin()).exp())
ZOO.flow("func_vjp", lambda x: vjp(lambda y: y.sin() * y.exp(), x.exp())[1](x.cos())[0].sin())
ZOO.flow("func_jvp", lambda x: jvp(lambda y: y.sin() * y.exp(), (x.exp(),), (x.cos(),))[1].sin())
ZOO.flow("func_vmap", lambda x: vmap(lambda row: (row.exp() * row.sum()).sin())(x.sin()))
ZOO.flow(
    "func_vmap_random",
    lambda x: vmap(lambda row: (row * torch.rand_like(row)).exp(), randomness="different")(x.sin()),
)
ZOO.flow("func_vmap_of_grad", lambda x: vmap(grad(_energy))(x.exp()).sin())
ZOO.flow(
    "func_jacobians",
    lambda x: jacrev(lambda y: y.exp().sum(1))(x).sin() + jacfwd(lambda y: y.sin().sum(1))(x),
)
ZOO.flow("func_hessian", lambda x: hessian(_energy)(x[0, :3].exp()).sin() * x.sum())
ZOO.flow("func_functionalize", lambda x: functionalize(lambda y: y.mul(2).add_(1).sin_() * y)(x).tanh())
ZOO.flow("inner_gradient", lambda x: _force(x, create_graph=False).exp() * x)
ZOO.flow("double_backward", lambda x: _force(x, create_graph=True).pow(2).sum() + x.sin().exp())
ZOO.flow("double_backward_of_matmul", lambda x, w: _matmul_force(x, w), x=(6, 8), w=(8, 8))
ZOO.flow("triple_backward", lambda x: _third(x))
ZOO.flow("hessian_vector_product", lambda x: _hessian_vector(x))
ZOO.flow(
    "functional_jacobian",
    lambda x: (
        torch.autograd.functional.jacobian(lambda y: y.sin().sum(1), x, create_graph=True)
        .exp()
        .sum((0, 2, 1)[:1])
        .tanh()
        * x.exp()
    ),
)
ZOO.flow("forward_mode", lambda x: _forward_mode(x))
ZOO.flow("unrolled_descent", lambda x: _unrolled(x))
ZOO.flow("fixed_point_with_hook", lambda x: _fixed_point(x))


def _force(x: Tensor, create_graph: bool) -> Tensor:
    y = x.exp()
    energy = (y.sin() * y).tanh().sum()
    return torch.autograd.grad(energy, y, create_graph=create_graph, retain_graph=True)[0]


def _matmul_force(x: Tensor, w: Tensor) -> Tensor:
    h = x.sin()
    out = ((h @ w).tanh() @ w.T).softmax(1)
    (force,) = torch.autograd.grad(out[:, 0].log().sum(), h, create_graph=True)
    return (force.norm(dim=1) - 1).pow(2).mean() + out.mean()


def _third(x: Tensor) -> Tensor:
    y = x.exp()
    for _ in range(2):
        (y,) = torch.autograd.grad((y.sin() * y).sum(), y, create_graph=True)
    return y.tanh()


def _hessian_vector(x: Tensor) -> Tensor:
    force = _force(x, create_graph=True)
    return torch.autograd.grad((force * x.detach().sin()).sum(), x, create_graph=True)[0].tanh()


def _forward_mode(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.exp(), x.sin())
        value, tangent = forward_ad.unpack_dual((dual.sin() * dual).tanh())
    return value * tangent.exp()


def _unrolled(x: Tensor) -> Tensor:
    weight = x.sin()
    for _ in range(3):
        (slope,) = torch.autograd.grad((weight.exp() * x.detach()).tanh().sum(), weight, create_graph=True)
        weight = weight - 0.1 * slope
    return weight.exp()


def _fixed_point(x: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(10):
            z = (0.5 * z + x).tanh()
    z = (0.5 * z + x).tanh()
    start = z.detach().clone().requires_grad_()
    again = (0.5 * start + x.detach()).tanh()

    def solve(gradient: Tensor) -> Tensor:
        total = gradient
        for _ in range(5):
            total = torch.autograd.grad(again, start, total, retain_graph=True)[0] + gradient
        return total

    if z.requires_grad:
        z.register_hook(solve)
    return z.exp()


@ZOO.program()
def gradient_penalty() -> Program:
    model, real, fake = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), randn(6, 8), randn(6, 8)

    def step() -> Tensor:
        mix = torch.lerp(prepare(real), prepare(fake), torch.rand(6, 1)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(mix).sum(), mix, create_graph=True)
        return model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()

    return Program(step, model=model, leaves={"real": real, "fake": fake})


@ZOO.program()
def sharpness_aware_second_step() -> Program:
    model, x = Stack(), randn(6, 8)

    def step() -> Tensor:
        weigh(model(prepare(x))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
                parameter.grad = None
        return weigh(model(prepare(x)))

    return Program(step, model=model, leaves={"x": x}, python_state=lambda: model.notes)


@ZOO.program()
def functional_call_with_other_weights() -> Program:
    model, x = Stack(), randn(6, 8)

    def step() -> Tensor:
        scaled = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
        return weigh([functional_call(model, scaled, (prepare(x),)), model(prepare(x))])

    return Program(step, model=model, leaves={"x": x})


@ZOO.program()
def ensemble_by_vmap() -> Program:
    models, x = [nn.Linear(8, 8) for _ in range(3)], randn(6, 8)
    stacked, _ = stack_module_state(models)  # type: ignore[arg-type]

    def step() -> Tensor:
        run = vmap(partial(functional_call, models[0]), in_dims=(0, None))
        return weigh(run(stacked, prepare(x)).sin().exp())

    return Program(step, leaves={"x": x, **stacked})


@ZOO.program()
def per_sample_gradients() -> Program:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), randn(6, 8)

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, weights, (row,)).pow(2).sum()

    def step() -> Tensor:
        h = prepare(x)
        slopes = vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), h)
        return weigh([slope.flatten(1).norm(dim=1) for slope in slopes.values()]) + weigh(model(h))

    return Program(step, model=model, leaves={"x": x})


def _ending(name: str, backward: Callable[[Tensor, nn.Module, Tensor, list[object]], object]) -> None:
    def build() -> Program:
        model, x, notes = Stack(), randn(6, 8), list[object]()
        return Program(
            lambda: weigh(model(prepare(x))),
            model=model,
            leaves={"x": x},
            python_state=lambda: notes,
            backward=lambda loss: backward(loss, model, x, notes),
        )

    ZOO.add(f"backward_{name}", build)


def _twice(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _thrice_scaled(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    for scale in (1.0, -0.5):
        loss.backward(torch.tensor(scale, dtype=loss.dtype), retain_graph=True)
    loss.backward()


def _in_parts(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    parameters = list(model.parameters())
    loss.backward(inputs=parameters[-4:], retain_graph=True)
    loss.backward(inputs=[x, *parameters[:4]])


def _by_grad(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    notes[:] = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)


def _last_only(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    notes[:] = torch.autograd.grad(loss, list(model.parameters())[-2:])


def _with_graph(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    torch.stack([slope.pow(2).sum() for slope in slopes]).sum().backward()


def _batched(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    directions = torch.linspace(0.5, 1.5, 3, dtype=loss.dtype)
    notes[:] = torch.autograd.grad(loss, [x, *model.parameters()], directions, is_grads_batched=True)


def _never(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    notes[:] = [loss.item()]


def _under_anomaly(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        loss.backward()


def _without_multithreading(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()


def _saved_tensors_read(loss: Tensor, model: nn.Module, x: Tensor, notes: list[object]) -> None:
    node, found = loss.grad_fn, 0
    while node is not None:
        found += sum(isinstance(getattr(node, name), Tensor) for name in dir(node) if name.startswith("_saved_"))
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    notes.append(found)
    loss.backward()


for _name, _backward in {
    "twice": _twice,
    "three_times_scaled": _thrice_scaled,
    "in_parts": _in_parts,
    "by_grad": _by_grad,
    "of_last_layer_only": _last_only,
    "with_graph": _with_graph,
    "batched": _batched,
    "never": _never,
    "under_anomaly_mode": _under_anomaly,
    "without_multithreading": _without_multithreading,
    "after_reading_saved_tensors": _saved_tensors_read,
}.items():
    _ending(_name, _backward)


@ZOO.program()
def several_losses_at_once() -> Program:
    model, x, losses = Stack(), randn(6, 8), list[Tensor]()

    def step() -> Tensor:
        h = model(prepare(x))
        losses[:] = [weigh(h.sin()), weigh(h.exp())]
        return losses[0]

    return Program(step, model=model, leaves={"x": x}, backward=lambda loss: torch.autograd.backward(losses))


@ZOO.program()
def generator_and_discriminator() -> Program:
    model = nn.ModuleDict(
        {"generator": nn.Linear(4, 8), "critic": nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))}
    )
    real = randn(6, 8)

    def step() -> Tensor:
        fake = model["generator"](torch.randn(6, 4)).tanh()
        critic_loss = weigh([model["critic"](fake.detach()), -model["critic"](prepare(real))])
        critic_loss.backward(retain_graph=True)
        with torch.no_grad():
            model["critic"][0].bias.sub_(0.0)
        return weigh(-model["critic"](fake))

    return Program(step, model=model, leaves={"real": real})

"""Python around the ops: branches on data, loops, names, hooks, custom functions, inner gradients."""

from __future__ import annotations

from typing import Any

from .drawing import (
    Choice,
    Draw,
    NoChoice,
    Rule,
    among,
    axis,
    broadcasts,
    called,
    dims,
    full,
    learning,
    number,
    one,
    pair,
    real,
    same_shape,
    single,
    small,
)


def _reached(d: Draw) -> Choice:
    """Draw a tensor and another that its gradient may reach."""
    a = d.pick(lambda t: learning(t) and t.grad_fn is not None)
    return (a, d.pick(lambda t: learning(t) and t is not d[a])), ()


def _loss(d: Draw) -> Choice:
    return (d.pick(lambda t: learning(t) and t.grad_fn is not None),), ()


def _leaf(d: Draw) -> Choice:
    leaves = [n for n, t in d.pool.items() if learning(t) and t.is_leaf]
    if not leaves:
        raise NoChoice
    return (d.rng.choice(leaves),), (d.number(),)


def _learning_real(value: Any) -> bool:
    return learning(value) and real(value)


BRANCHES = [
    Rule(
        "branch",
        "if {a}.sum().item() > 0:\n    {r} = {a}.sin()\nelse:\n    {r} = {a} * {x}",
        one(real, number),
        2,
    ),
    Rule("branch rebind", "if {a}.sum().item() > 0:\n    {a} = {a} * {x}", one(real, number), 1),
    Rule("branch turn", "if turn:\n    {r} = {a}.tanh()\nelse:\n    {r} = {a}.exp().clamp_max(3)", one(real), 2),
    Rule("branch skip", "if turn:\n    {a} = {a}.cos() * {a}", one(real), 1),
    Rule("branch write", "if {a}.sum().item() > {x}:\n    {a}.mul_(0.5)", one(real, number), 1, risky=True),
    Rule("loop", "{r} = {a}\nfor _ in range({x}):\n    {r} = ({r} * {y}).tanh()", one(real, small, number), 2),
    Rule("loop turns", "{r} = {a}\nfor i in range(1 + turn):\n    {r} = {r}.sin() + i", one(real), 1),
    Rule("loop while", "{r} = {a}\nwhile {r}.abs().max().item() > 0.9:\n    {r} = {r} * 0.6", one(full), 1),
    Rule("loop rows", "{r} = torch.stack([row.tanh() * i for i, row in enumerate({a})])", one(dims(1)), 1.5),
    Rule(
        "loop carry",
        "{r} = torch.zeros_like({a}[0])\nfor row in {a}:\n    {r} = torch.tanh({r} * 0.5 + row)",
        one(dims(1)),
        1.5,
    ),
    Rule("scalar out", "{r} = {a} * (1 + abs({b}.reshape(-1)[0].item()) % 1)", pair(real, lambda t: full), 1),
    Rule("scalar list", "{r} = {a} + sum({b}.reshape(-1)[:2].tolist()) % 1", pair(real, lambda t: full), 0.5),
    Rule("print shape", "log.append(tuple({a}.shape))", one(real), 0.2),
]

NAMES = [
    Rule("del", "del {a}", one(real), 5, removes=True),
    Rule("retire", "total = total + weigh({a})\ndel {a}", one(learning), 7, removes=True),
    Rule("rename", "{r} = {a}\ndel {a}", one(real), 1, removes=True),
    Rule("forget", "{r} = {a}.sin().mul(2).cos()\ndel {a}", one(real), 2, removes=True),
]

HOOKS = [
    Rule("log number", "log.append({a}.double().sum().item())", one(real), 1),
    Rule("log tensor", "log.append({a}.detach().clone())", one(real), 0.5),
    Rule("hook log", "hook({a}, lambda g: log.append(g.double().sum().item()))", one(_learning_real), 1),
    Rule("hook scale", "hook({a}, lambda g: g * {x})", one(learning, number), 1),
    Rule(
        "hook forward value",
        "hook({a}, lambda g, t={b}: g * t.detach())",
        pair(learning, same_shape),
        1,
    ),
    Rule("retain_grad", "{a}.retain_grad()\nlog.append({a})", one(learning), 0.7),
]

FUNCTIONS = [
    Rule("function exp", "{r} = SavedExp.apply({a})", one(real), 2),
    Rule("function both", "{r} = ScaledProduct.apply({a}, {b}, {x})", pair(real, same_shape, number), 2),
    Rule("function hidden", "{r} = HiddenWork.apply({a})", one(real), 1.5),
    Rule("function attribute", "{r} = OnContext.apply({a})", one(real), 1),
    Rule("function two", "{r}, {s} = WithIndex.apply({a}, {x})", one(dims(1), axis), 1),
    Rule("function dirty", "{r} = Dirty.apply({a})", one(real), 1, risky=True),
    Rule("function declared", "{r} = Declared.apply({a})", one(real), 1.5),
    Rule("function straight", "{r} = StraightThrough.apply({a})", one(real), 1),
    Rule("function random", "{r} = RandomMask.apply({a})", one(real), 1),
    Rule("function identity", "{r} = Reversed.apply({a})", one(real), 1),
]

GRADIENTS = [
    Rule("grad", "({r},) = torch.autograd.grad(weigh({a}), {b}, retain_graph=True)", _reached, 2),
    Rule("double grad", "({r},) = torch.autograd.grad(weigh({a}), {b}, create_graph=True)", _reached, 3),
    Rule("early backward", "weigh({a}).backward(retain_graph=True)", _loss, 1, risky=True),
    Rule(
        "own backward",
        "weigh({a}.detach().requires_grad_().sin() * {b}).backward()",
        pair(single, broadcasts),
        0.7,
        risky=True,
    ),
    Rule("checkpoint", "{r} = checkpoint(work, {a}, use_reentrant=False)", one(full), 0.7),
    Rule("region", "{r} = record.checkpoint(work, {a})", one(full), 1),
    Rule(
        "region function",
        "{r} = record.checkpoint(lambda t, u: (t * {x}).tanh() * u, {a}, {b})",
        pair(full, broadcasts, number),
        1,
    ),
    Rule("region module", "{r} = record.checkpoint({a}, {b})", called, 2, risky=True),
    Rule("checkpoint random", "{r} = checkpoint(F.dropout, {a}, 0.5, use_reentrant=False)", one(full), 0.7),
    Rule("reentrant", "{r} = checkpoint(work, {a}, use_reentrant=True)", one(_learning_real), 0.5),
    Rule("func grad", "{r} = torch.func.grad(lambda t: t.sin().sum())({a}) * {a}", one(full), 0.7),
    Rule("func vjp", "{r} = torch.func.vjp(torch.tanh, {a})[1]({a})[0]", one(full), 0.5),
    Rule("func vmap", "{r} = torch.func.vmap(lambda t: t.softmax(-1))({a})", one(dims(2)), 0.7),
    Rule("func jvp", "{r} = torch.func.jvp(torch.sin, ({a},), ({a},))[1]", one(full), 0.5),
    Rule("leaf update", "{a} -= {x} * 0.1", _leaf, 1, risky=True, scope="torch.no_grad()"),
    Rule("zero leaf grad", "{a}.grad = None", _leaf, 0.3, risky=True),
    Rule(
        "leaf grad use",
        "{r} = {a} * (1 if {b}.grad is None else {b}.grad.sum())",
        pair(real, lambda t: lambda u: _learning_real(u) and u.is_leaf),
        0.7,
    ),
    Rule("assert", "assert {a}.dim() == len({a}.shape)", one(real), 0.1),
    Rule("sub step", "{r} = sub_step({a}, {b})", pair(single, same_shape), 1, risky=True),
    Rule(
        "choice of branch",
        "{r} = ({a} if {x} > turn else {b}).clone()",
        pair(real, same_shape, among(0, 1)),
        1,
    ),
]

RULES = [*BRANCHES, *NAMES, *HOOKS, *FUNCTIONS, *GRADIENTS]

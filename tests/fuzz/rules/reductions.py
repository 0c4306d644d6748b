"""Fewer numbers out than in: sums, norms, order statistics, and losses with a target."""

from __future__ import annotations

from .drawing import Rule, among, axis, dims, full, one, pair, real, same_shape, single, truth, whole

RULES = [
    Rule("sum all", "{r} = {a}.sum()", one(real), 1.5),
    Rule("sum", "{r} = {a}.sum({x}, keepdim={y})", one(dims(1), axis, truth), 3),
    Rule("mean", "{r} = {a}.mean({x}, keepdim={y})", one(dims(1), axis, truth), 2),
    Rule("amax", "{r} = {a}.amax({x}, keepdim={y})", one(dims(1), axis, truth)),
    Rule("aminmax", "{r}, {s} = {a}.aminmax(dim={x})", one(dims(1), axis), 0.5),
    Rule("max", "{r}, {s} = {a}.max({x})", one(dims(1), axis), 2),
    Rule("min", "{r}, {s} = {a}.min({x}, keepdim={y})", one(dims(1), axis, truth)),
    Rule("max all", "{r} = {a}.max()", one(full), 0.7),
    Rule("var", "{r} = {a}.var({x}, unbiased=False)", one(dims(1), axis)),
    Rule(
        "std",
        "{r} = ({a} + torch.arange({a}.shape[0]).view(-1, *[1] * ({a}.dim() - 1))).std(0)",
        one(dims(1)),
        0.7,
    ),
    Rule("var_mean", "{r}, {s} = torch.var_mean({a}, {x}, unbiased=False)", one(dims(1), axis)),
    Rule("norm", "{r} = ({a} + 0.1).norm(dim={x})", one(dims(1), axis)),
    Rule(
        "norm of order",
        "{r} = torch.linalg.vector_norm({a}, {x})",
        one(full, among(1, 3, 'float("inf")')),
        0.7,
    ),
    Rule("prod", "{r} = {a}.prod({x})", one(dims(1), axis)),
    Rule("logsumexp", "{r} = {a}.logsumexp({x})", one(dims(1), axis)),
    Rule("median", "{r}, {s} = {a}.median({x})", one(dims(1), axis), 0.7),
    Rule("kthvalue", "{r}, {s} = {a}.kthvalue(1, {x})", one(dims(1), axis), 0.7),
    Rule("mode", "{r}, {s} = {a}.mode({x})", one(dims(1), axis), 0.4),
    Rule("cummax", "{r}, {s} = {a}.cummax({x})", one(dims(1), axis), 0.7),
    Rule("nansum", "{r} = {a}.nansum()", one(real), 0.4),
    Rule("sort", "{r}, {s} = {a}.sort({x}, descending={y})", one(dims(1), axis, truth), 2),
    Rule("topk", "{r}, {s} = {a}.topk(1, {x})", one(dims(1), axis), 2),
    Rule("argmax", "{r} = {a}.argmax({x})", one(dims(1), axis), 1.5),
    Rule("argsort", "{r} = {a}.argsort(dim={x}, stable=True)", one(dims(1), axis)),
    Rule("quantile", "{r} = {a}.quantile({x})", one(single, among(0.25, 0.5)), 0.4),
    Rule("dist", "{r} = torch.dist({a}, {b} + 1)", pair(full, same_shape), 0.5),
    Rule("cdist", "{r} = torch.cdist({a}, {a} + 1)", one(dims(2, 3, single)), 0.5),
    Rule("trace", "{r} = {a}.trace()", one(dims(2, 2)), 0.5),
    Rule("count", "{r} = ({a} > 0).sum({x})", one(dims(1), axis), 0.5),
    Rule("any", "{r} = ({a} > 0).any({x})", one(dims(1), axis), 0.5),
    Rule("unique", "{r}, {s} = {a}.detach().unique(return_inverse=True)", one(full), 0.3),
    Rule(
        "cross_entropy",
        "{r} = F.cross_entropy({a}, {b}.reshape(-1)[:1].repeat({a}.shape[0]) % {a}.shape[1])",
        pair(dims(2, 2, single), lambda t: lambda u: whole(u) and u.numel() > 0),
    ),
    Rule(
        "nll of argmax",
        "{r} = F.nll_loss(F.log_softmax({a}, 1), {a}.argmax(1), reduction={x})",
        one(dims(2, 2), among('"mean"', '"sum"', '"none"')),
    ),
    Rule(
        "smoothed entropy",
        "{r} = F.cross_entropy({a}, {a}.argmin(1), label_smoothing={x})",
        one(dims(2, 2), among(0.1, 0.3)),
        0.7,
    ),
    Rule("soft entropy", "{r} = F.cross_entropy({a}, {b}.softmax(1))", pair(dims(2, 2), same_shape), 0.7),
    Rule(
        "margin",
        "{r} = F.margin_ranking_loss({a}, {b}, torch.ones(()), margin=0.5)",
        pair(full, same_shape),
        0.3,
    ),
    Rule("einsum self", '{r} = torch.einsum("...i,...i->...", {a}, {a})', one(dims(1))),
    Rule("renorm", "{r} = F.normalize({a} + 0.1, dim={x})", one(dims(1), axis)),
]

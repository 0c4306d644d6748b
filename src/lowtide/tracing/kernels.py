"""What kernels take while they run, for steps on fake tensors: each kind of call is run once on zeros.

Repeated layers make the same calls, so a model of a hundred layers has some tens of kinds. Calls beyond a limit of
bytes or of arithmetic are not tried; of large products of matrices it is known that they take nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from lowtide.tape.buffers import clone_storage, layout_of, place
from lowtide.tape.operators import Operator, tensors_in
from lowtide.tracing.workspaces import device_of, measurable, run_measured

MOST_BYTES = 2**27
"""Of what a call reads and writes, to be tried."""
MOST_FLOPS = 4e9
"""Of a call that is tried: a fraction of a second on one core."""
_TAKE_NOTHING = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.dot", "aten.mv"}

_BYTES = (torch.uint8, torch.int8)
_UNDERSTOOD = {torch.Tag.core, torch.Tag.pointwise}
"""Tags of operators whose arguments mean what they say."""
_TRIED = {
    "_fused_rms_norm", "_grouped_mm", "_log_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu",
    "_softmax", "_unsafe_index", "_weight_norm_interface", "addmm", "all", "amax", "amin", "aminmax", "any", "arange",
    "argmax", "argmin", "baddbmm", "bernoulli", "binary_cross_entropy", "bincount", "bmm", "cat", "col2im",
    "convolution", "copy", "count_nonzero", "cumprod", "dot", "elu", "embedding", "embedding_dense", "fill", "gelu",
    "glu", "hardswish", "hardtanh", "histc", "im2col", "index_add", "index_put", "index_select", "leaky_relu",
    "linspace", "log_sigmoid", "log_sigmoid_forward", "logcumsumexp", "masked_fill", "masked_scatter", "masked_select",
    "max", "max_pool2d_with_indices", "mean", "min", "mkldnn_rnn_layer", "mm", "mse_loss", "multinomial", "mv",
    "native_batch_norm", "native_group_norm", "native_layer_norm", "new_empty_strided", "new_full", "new_ones",
    "new_zeros", "nll_loss", "nll_loss2d", "nll_loss2d_forward", "nll_loss_forward", "nonzero", "normal", "ones",
    "ones_like", "pixel_shuffle", "prod", "rand", "randint", "randn", "randperm", "roll", "select", "sigmoid", "silu",
    "slice", "smooth_l1_loss", "softplus", "sort", "stack", "std_mean", "sum", "tanh", "threshold", "topk", "tril",
    "triu", "unfold", "uniform", "unsafe_split", "var_mean", "zero", "zeros", "zeros_like",
}  # fmt: skip
"""More of them; each of their backwards as well, but of a recurrent layer."""
_TRIED_LIKE = ("upsample_", "_upsample_", "avg_pool", "_adaptive_avg_pool", "adaptive_", "reflection_pad")
"""Beginnings of more names."""

_known: dict[Any, int | None] = {}


def flops_of(op: Operator, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of a product of matrices, a convolution or an attention; 0 for all else."""
    count = flop_registry.get(getattr(op.func, "_overloadpacket", None))
    if count is None and op.name == "aten._scaled_dot_product_flash_attention_for_cpu":
        count = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    if count is None:
        return 0
    kwargs = {} if "scaled_dot_product" in op.name else kwargs
    try:
        return int(count(*args, **kwargs, out_val=out))
    except AssertionError:  # torch 2.9 asks for as many heads of keys and values as of queries
        heads = args[0].shape[1]
        shapes = [torch.Size((a.shape[0], heads, *a.shape[2:])) if _is_heads(a) else a for a in args]
        return int(count(*shapes, **kwargs, out_val=out))


def _is_heads(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4


def bytes_of(args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an operation reads and returns."""
    tensors = (*tensors_in(args, 2), *tensors_in(kwargs, 2), *tensors_in(out, 2))
    return sum(t.numel() * t.element_size() for t in tensors if t.layout is torch.strided and not t.is_mkldnn)


def workspace_of(op: Operator, args: Any, kwargs: Any, *, flops: int, bytes: int) -> int | None:
    """Bytes that ``op`` takes while it runs on arguments like these on the CPU; None if that is unknown.

    ``flops`` and ``bytes`` say how much it computes, reads and writes. Random state is left as it was.
    """
    if op.view or op.blank:
        return 0
    if device_of(args, kwargs).type != "cpu" or op.swaps_memory or not op.name.startswith("aten."):
        return None
    if bytes > MOST_BYTES or flops > MOST_FLOPS:
        return 0 if op.name in _TAKE_NOTHING and all(map(_whole, tensors_in([*args, *kwargs.values()]))) else None
    if not measurable() or not _safe(op, args):
        return None
    key = (op.key, _kind(args), _kind(kwargs))
    if key not in _known:
        _known[key] = _measured(op, args, kwargs)
    return _known[key]


def _safe(op: Operator, args: Any) -> bool:
    """Whether ``op`` can do with zeros for all that is not known. Bytes that only another kernel understands it cannot:
    what a recurrent layer sets aside for its backward, packed weights."""
    if op.name == "aten.mkldnn_rnn_layer_backward" or any(t.dtype in _BYTES for t in tensors_in(args)):
        return False
    if op.name in ("aten._ctc_loss", "aten._ctc_loss_backward"):  # with lengths that are known
        return all(type(t) is Tensor or t.is_floating_point() for t in tensors_in(args))
    short = op.name.removeprefix("aten.").removesuffix("_backward").removesuffix("_backward_data").rstrip("_")
    return bool(_UNDERSTOOD & set(op.func.tags)) or short in _TRIED or short.startswith(_TRIED_LIKE)


def _whole(tensor: Tensor) -> bool:
    """Whether products read the tensor as it lies there."""
    return tensor.dtype in (torch.float32, torch.float64) and 0 not in tensor.stride()


def _kind(value: Any) -> Any:
    """What calls have in common that run alike."""
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return value.dtype, tuple(value.shape), strides
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    return type(value), repr(value)


def _measured(op: Operator, args: Any, kwargs: Any) -> int | None:
    with _disable_current_modes(), torch.no_grad():
        state = torch.default_generator.get_state()
        try:
            own = [_real(value) for value in args], {name: _real(value) for name, value in kwargs.items()}
            return run_measured(partial(op.call, *own[0], **own[1]), torch.device("cpu"))[1]
        except Exception:  # zeros are not for every operation
            return None
        finally:
            torch.default_generator.set_state(state)


def _real(value: Any) -> Any:
    """A tensor of zeros for every tensor; a generator is a new one."""
    if isinstance(value, Tensor):
        if type(value) is Tensor and not value.dtype.is_floating_point:  # it has values
            return place(clone_storage(value), layout_of(value))
        reach = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        zeros = torch.zeros(reach if value.numel() else 0, dtype=value.dtype)
        return zeros.as_strided(value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return [_real(item) for item in value]
    return torch.Generator() if isinstance(value, torch.Generator) else value

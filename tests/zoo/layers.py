"""The layers and losses of torch.nn: recurrent, attention, convolution, pooling, resampling, losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.table import Zoo

ZOO = Zoo("layers")

CLASSES = torch.tensor([0, 3, 7, 2, 2, 5])
IGNORED = torch.tensor([0, -100, 7, 2, -100, 5])


def _sequence(layer: nn.RNNBase, x: Tensor) -> list[Tensor]:
    out, state = layer(x.exp().tanh())
    states = state if isinstance(state, tuple) else (state,)
    return [out.sin(), *(s.exp() for s in states)]


def _packed(layer: nn.LSTM, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x.exp(), torch.tensor([5, 4, 2]), batch_first=True)
    out, lengths = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
    return out.sin() * lengths[:, None, None]


ZOO.module("rnn", lambda: nn.RNN(4, 6, 2, nonlinearity="relu"), 5, 3, 4, call=_sequence)
ZOO.module("gru_dropout", lambda: nn.GRU(4, 6, 2, dropout=0.3), 5, 3, 4, call=_sequence)
ZOO.module("gru_bidirectional", lambda: nn.GRU(4, 6, bidirectional=True, batch_first=True), 3, 5, 4, call=_sequence)
ZOO.module("lstm", lambda: nn.LSTM(4, 6), 5, 3, 4, call=_sequence)
ZOO.module(
    "lstm_dropout_bidirectional",
    lambda: nn.LSTM(4, 6, 2, dropout=0.3, bidirectional=True),
    5,
    3,
    4,
    call=_sequence,
)
ZOO.module("lstm_projected", lambda: nn.LSTM(4, 6, proj_size=3), 5, 3, 4, call=_sequence)
ZOO.module("lstm_packed", lambda: nn.LSTM(4, 6, batch_first=True), 3, 5, 4, call=_packed)
ZOO.module("lstm_frozen", lambda: nn.LSTM(4, 6).requires_grad_(False), 5, 3, 4, call=_sequence)
ZOO.module("lstm_without_grad_first", lambda: nn.LSTM(4, 6), 5, 3, 4, call=lambda m, x: _warmed_up(m, x))

ZOO.module(
    "multihead_attention",
    lambda: nn.MultiheadAttention(8, 2),
    5,
    3,
    8,
    call=lambda m, x: m(x.exp(), x, x.sin()),
)
ZOO.module(
    "multihead_attention_dropout_masked",
    lambda: nn.MultiheadAttention(8, 2, dropout=0.2, add_bias_kv=True),
    5,
    3,
    8,
    call=lambda m, x: m(x, x, x, need_weights=False, attn_mask=torch.ones(5, 5).triu(1).bool())[0].sin(),
)
ZOO.module("transformer_encoder", lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, 5, 8)
ZOO.module("transformer_encoder_norm_first", lambda: nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), 5, 3, 8)
ZOO.module(
    "transformer_decoder",
    lambda: nn.TransformerDecoderLayer(8, 2, 16, activation="gelu"),
    5,
    3,
    8,
    call=lambda m, x: m(x, x.exp()),
)


def _attend(x: Tensor, **options: object) -> Tensor:
    q, k, v = x.exp().tanh(), x.sin(), x.cos()
    return F.scaled_dot_product_attention(q, k, v, **options).exp()  # type: ignore[arg-type]


HEADS = (2, 4, 5, 8)
ZOO.flow("attention", lambda x: _attend(x), x=HEADS)
ZOO.flow("attention_causal", lambda x: _attend(x, is_causal=True), x=HEADS)
ZOO.flow("attention_dropout", lambda x: _attend(x, dropout_p=0.3), x=HEADS)
ZOO.flow("attention_boolean_mask", lambda x: _attend(x, attn_mask=torch.ones(5, 5).tril().bool()), x=HEADS)
ZOO.flow("attention_learned_bias", lambda x, b: _attend(x, attn_mask=b.sin()), x=HEADS, b=(4, 5, 5))
ZOO.flow("attention_dropout_causal_scaled", lambda x: _attend(x, dropout_p=0.2, is_causal=True, scale=0.7), x=HEADS)
ZOO.flow("attention_bfloat16", lambda x: _attend(x.bfloat16(), is_causal=True).float(), x=HEADS)
ZOO.flow(
    "attention_grouped_queries",
    lambda x, k: F.scaled_dot_product_attention(x.exp(), k.sin(), k, enable_gqa=True).exp(),
    x=HEADS,
    k=(2, 2, 5, 8),
)
ZOO.flow("attention_math_backend", lambda x: _math_attention(x), x=HEADS)
ZOO.flow("attention_by_hand", lambda x: F.dropout((x.exp() @ x.mT).softmax(-1), 0.2) @ x.sin(), x=HEADS)


def _math_attention(x: Tensor) -> Tensor:
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return _attend(x, is_causal=True)


def _warmed_up(layer: nn.LSTM, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        state = layer(x)[1]
    out, last = layer(x.sin(), state)
    return [out.exp(), *last]


IMAGES = (2, 3, 8, 8)
ZOO.module(
    "convolutions_1d",
    lambda: nn.Sequential(nn.Conv1d(3, 4, 3, dilation=2), nn.SiLU(), nn.Conv1d(4, 4, 1, groups=4)),
    2,
    3,
    9,
)
ZOO.module(
    "convolutions_2d",
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ELU(), nn.Conv2d(4, 2, 2, 2)),
    *IMAGES,
)
ZOO.module("convolutions_3d", lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Conv3d(3, 2, 2)), 2, 2, 4, 4, 4)
ZOO.module(
    "convolutions_transposed",
    lambda: nn.Sequential(nn.ConvTranspose1d(3, 4, 3, 2), nn.GELU(), nn.ConvTranspose1d(4, 2, 2)),
    2,
    3,
    5,
)
ZOO.module(
    "convolutions_transposed_2d",
    lambda: nn.ConvTranspose2d(3, 4, 3, 2, output_padding=1),
    *IMAGES,
    call=lambda m, x: m(x.exp()).sin(),
)
ZOO.module(
    "convolution_circular_padding",
    lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    *IMAGES,
    call=lambda m, x: m(x.exp()).sin(),
)
ZOO.module(
    "convolution_bfloat16",
    lambda: nn.Conv2d(3, 4, 3).bfloat16(),
    *IMAGES,
    call=lambda m, x: m(x.bfloat16().exp()).float().sin(),
)
ZOO.flow("max_pool", lambda x: F.max_pool2d(x.exp(), 2).sin(), x=IMAGES)
ZOO.flow(
    "max_pool_unpool",
    lambda x: F.max_unpool2d(*F.max_pool2d(x.exp(), 2, return_indices=True), 2).sin(),
    x=IMAGES,
)
ZOO.flow(
    "max_pool_1d_3d",
    lambda x: F.max_pool1d(x[:, :, 0].exp(), 2).sin().sum() * F.max_pool3d(x.sin(), 2).exp(),
    x=IMAGES,
)
ZOO.flow(
    "average_and_power_pool",
    lambda x: F.avg_pool2d(x.exp(), 3, 2, 1).sin().sum() + F.lp_pool2d(x.exp(), 2, 2).cos(),
    x=IMAGES,
)
ZOO.flow(
    "adaptive_pools",
    lambda x: F.adaptive_avg_pool2d(x.exp(), (3, 5)).sin() + F.adaptive_max_pool2d(x.exp(), (3, 5)).cos(),
    x=IMAGES,
)
ZOO.flow(
    "interpolate_nearest_bilinear",
    lambda x: F.interpolate(F.interpolate(x.exp(), scale_factor=2), (5, 7), mode="bilinear").sin(),
    x=IMAGES,
)
ZOO.flow(
    "interpolate_bicubic_antialiased",
    lambda x: F.interpolate(x.exp(), (5, 11), mode="bicubic", antialias=True).sin(),
    x=IMAGES,
)
ZOO.flow(
    "interpolate_area_trilinear",
    lambda x: F.interpolate(x.exp()[None], (2, 4, 5), mode="trilinear").sin() + F.interpolate(x, 4, mode="area").sum(),
    x=IMAGES,
)
ZOO.flow(
    "grid_sample",
    lambda x, t: F.grid_sample(
        x.exp(), F.affine_grid(t.tanh(), [2, 3, 5, 5], align_corners=False), align_corners=False
    ).sin(),
    x=IMAGES,
    t=(2, 2, 3),
)
ZOO.flow(
    "activations",
    lambda x: [
        f(x.exp() - 1).sin()
        for f in (
            F.gelu,
            F.silu,
            F.mish,
            F.selu,
            F.celu,
            F.softplus,
            F.hardswish,
            F.relu6,
            F.logsigmoid,
            F.softsign,
            F.tanhshrink,
            F.softshrink,
        )
    ],
)
ZOO.flow(
    "gelu_tanh_threshold",
    lambda x: F.gelu(x.exp(), approximate="tanh").sin() * F.threshold(x, 0.1, 0.2) + F.hardsigmoid(x.exp()),
)

ZOO.flow("cross_entropy", lambda x: F.cross_entropy(x.exp(), CLASSES))
ZOO.flow("cross_entropy_smoothed_ignoring", lambda x: F.cross_entropy(x.exp(), IGNORED, label_smoothing=0.1))
ZOO.flow(
    "cross_entropy_weighted_probabilities",
    lambda x, w: F.cross_entropy(x.exp(), x.detach().softmax(1), w.detach().exp()),
    x=(6, 8),
    w=(8,),
)
ZOO.flow(
    "cross_entropy_per_element",
    lambda x: (F.cross_entropy(x.exp(), CLASSES, reduction="none") * x[:, 0].sin()).exp(),
)
ZOO.flow("nll_of_sequence", lambda x: F.nll_loss(x.exp().log_softmax(1), CLASSES.view(2, 3)), x=(2, 8, 3))
ZOO.flow(
    "ctc",
    lambda x: F.ctc_loss(x.exp().log_softmax(2), torch.tensor([[1, 2, 2], [3, 1, 0]]), (6, 5), (3, 2)),
    x=(6, 2, 5),
)
ZOO.flow("kl_divergence", lambda x: F.kl_div(x.exp().log_softmax(1), x.sin().softmax(1), reduction="batchmean"))
ZOO.flow(
    "binary_cross_entropies",
    lambda x: (
        F.binary_cross_entropy(x.sigmoid(), x.detach().sin().abs())
        + F.binary_cross_entropy_with_logits(x.exp(), x.detach().cos().abs(), pos_weight=torch.tensor(2.0))
    ),
)
ZOO.flow(
    "regression_losses",
    lambda x: (
        F.mse_loss(x.exp(), x.sin())
        + F.smooth_l1_loss(x.exp(), x.cos())
        + F.huber_loss(x.sin(), x)
        + F.l1_loss(x, x.exp())
    ),
)
ZOO.flow(
    "likelihood_losses",
    lambda x: F.gaussian_nll_loss(x.sin(), x.cos(), x.exp()) + F.poisson_nll_loss(x.exp(), x.exp().detach()),
)
ZOO.flow(
    "ranking_losses",
    lambda x: (
        F.triplet_margin_loss(x, x.exp(), x.sin())
        + F.margin_ranking_loss(x[0], x[1], x.detach()[2].sign())
        + F.cosine_embedding_loss(x, x.exp(), torch.tensor([1, -1, 1, -1, 1, 1]))
    ),
)
ZOO.flow(
    "margin_losses",
    lambda x: (
        F.multi_margin_loss(x.exp(), CLASSES)
        + F.soft_margin_loss(x, x.detach().sign())
        + F.hinge_embedding_loss(x.exp(), x.detach().sign())
    ),
)
ZOO.flow(
    "focal_loss",
    lambda x: (lambda p: -((1 - p) ** 2 * p.log()).mean())(x.exp().softmax(1).gather(1, CLASSES[:, None])),
)
ZOO.flow(
    "contrastive_loss",
    lambda x: F.cross_entropy(
        F.normalize(x.exp(), dim=1) @ F.normalize(x.sin(), dim=1).T * x.detach().exp().mean(), torch.arange(6)
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""fla.modules.fused_linear_cross_entropy: the loss of a linear head without all logits at once.

The rows are taken in num_chunks pieces whose logits are made again in the backward pass.
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .fused_cross_entropy import shaped
from .l2warp import L2Wrap

__all__ = ["FusedLinearCrossEntropyLoss", "fused_linear_cross_entropy_loss"]


def _piece(x, target, weight, bias, ignore_index, label_smoothing, logit_scale, logit_softcapping, total, pull):
    """The losses of some rows, summed and divided by `total`; `pull` is l2warp's factor, None: none."""
    logits = F.linear(x, weight, bias)
    loss = F.cross_entropy(shaped(logits, logit_scale, logit_softcapping), target, ignore_index=ignore_index,
                           label_smoothing=label_smoothing, reduction="sum") / total
    return loss if pull is None else L2Wrap.apply(loss, logits.unsqueeze(0), pull)


def fused_linear_cross_entropy_loss(x, target, weight, bias=None, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0,
                                    logit_softcapping=None, num_chunks=8, reduction="mean", use_l2warp=False, l2_penalty_factor=1e-4,
                                    accumulate_grad_in_fp32=True):
    """x [rows,D], target [rows], weight [V,D], bias [V] -> the loss, a number in float32: "mean" over the rows that count, or "sum".

    use_l2warp adds l2warp's gradient, a mean over all rows. accumulate_grad_in_fp32 is accepted; torch adds the pieces in the
    weight's dtype.
    """
    del accumulate_grad_in_fp32
    rows = x.shape[0]
    total = (target != ignore_index).sum() if reduction == "mean" else 1
    size = max(1, -(-rows // num_chunks))
    parts = []
    for at in range(0, rows, size):
        piece, wanted = x[at:at + size], target[at:at + size]
        pull = l2_penalty_factor * piece.shape[0] / rows if use_l2warp else None  # L2Wrap divides by the rows of its piece
        how = (piece, wanted, weight, bias, ignore_index, label_smoothing, logit_scale, logit_softcapping, total, pull)
        parts.append(checkpoint(_piece, *how, use_reentrant=False) if torch.is_grad_enabled() else _piece(*how))
    return sum(parts)


class FusedLinearCrossEntropyLoss(nn.Module):
    """fused_linear_cross_entropy_loss of [B,T,D] and [B,T]."""

    def __init__(self, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, logit_softcapping=None, num_chunks=8, reduction="mean",
                 use_l2warp=False, l2_penalty_factor=1e-4, accumulate_grad_in_fp32=True):
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise AssertionError(f"reduction: {reduction} is not supported, allowed 'mean' and 'sum'")
        self.options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "logit_scale": logit_scale,
                        "logit_softcapping": logit_softcapping, "num_chunks": num_chunks, "reduction": reduction, "use_l2warp": use_l2warp,
                        "l2_penalty_factor": l2_penalty_factor, "accumulate_grad_in_fp32": accumulate_grad_in_fp32}
        for name, value in self.options.items():
            setattr(self, name, value)

    def forward(self, x, target, weight, bias=None):
        options = {name: getattr(self, name) for name in self.options}
        return fused_linear_cross_entropy_loss(x.reshape(-1, x.shape[-1]), target.reshape(-1), weight, bias, **options)

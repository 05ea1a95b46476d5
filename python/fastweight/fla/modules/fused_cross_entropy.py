# SPDX-License-Identifier: Apache-2.0
"""fla.modules.fused_cross_entropy: cross entropy of scaled, capped logits, in float32, with a penalty of the log normaliser."""
import torch
import torch.nn.functional as F
from torch import nn

from .._adaptor import wide

__all__ = ["FusedCrossEntropyLoss", "cross_entropy_loss"]


def shaped(logits, logit_scale, logit_softcapping):
    """logit_scale logits in float32 (float64 for float64), then softcap tanh(. / softcap)."""
    found = wide(logits)
    found = found if logit_scale == 1 else found * logit_scale
    return found if logit_softcapping is None else logit_softcapping * torch.tanh(found / logit_softcapping)


def cross_entropy_loss(logits, target, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, logit_softcapping=None,
                       ignore_index=-100, inplace_backward=False, process_group=None):
    """logits [rows,V], target [rows] -> (losses, z_losses) [rows] float32; z is lse_square_scale lse^2 and part of the loss, both 0 where
    the target is ignore_index. inplace_backward is accepted and the logits stay as they are. NotImplementedError with a process_group.
    """
    del inplace_backward
    if process_group is not None:
        raise NotImplementedError("cross_entropy_loss: process_group is given, allowed None: the vocabulary is not split over ranks here")
    found = shaped(logits, logit_scale, logit_softcapping)
    losses = F.cross_entropy(found, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    if not lse_square_scale:
        return losses, torch.zeros_like(losses)
    z = (lse_square_scale * found.logsumexp(-1).square()).masked_fill(target == ignore_index, 0)
    return losses + z, z.detach()


class FusedCrossEntropyLoss(nn.Module):
    """cross_entropy_loss reduced: "mean" over the rows that count, "sum" or "none"; with return_z_loss also the z part."""

    def __init__(self, ignore_index=-100, reduction="mean", label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
                 logit_softcapping=None, inplace_backward=False, process_group=None, return_z_loss=False):
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(f"FusedCrossEntropyLoss: reduction is {reduction!r}, allowed 'mean', 'none' and 'sum'")
        self.ignore_index, self.reduction, self.label_smoothing, self.logit_scale = ignore_index, reduction, label_smoothing, logit_scale
        self.lse_square_scale, self.logit_softcapping, self.inplace_backward = lse_square_scale, logit_softcapping, inplace_backward
        self.process_group, self.return_z_loss = process_group, return_z_loss

    def forward(self, input, target):
        """input [rows,V], target [rows]."""
        losses = cross_entropy_loss(input, target, self.label_smoothing, self.logit_scale, self.lse_square_scale, self.logit_softcapping,
                                    self.ignore_index, self.inplace_backward, self.process_group)
        if self.reduction == "mean":
            count = (target != self.ignore_index).sum()
            losses = tuple(x.sum() / count for x in losses)
        elif self.reduction == "sum":
            losses = tuple(x.sum() for x in losses)
        return losses if self.return_z_loss else losses[0]

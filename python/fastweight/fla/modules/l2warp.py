# SPDX-License-Identifier: Apache-2.0
"""fla.modules.l2warp: a pull of the largest logit towards 0 that changes gradients and not the loss."""
import torch

__all__ = ["L2Wrap", "l2_warp"]


class L2Wrap(torch.autograd.Function):
    """loss -> loss; d logits gets, at the largest logit of each of B*T rows, that logit times l2_penalty_factor / (B*T) times d loss.

    Source: the training code of RWKV.
    """

    @staticmethod
    def forward(ctx, loss, logits, l2_penalty_factor=1e-4):
        largest, place = logits.max(-1, keepdim=True)
        ctx.save_for_backward(largest * (l2_penalty_factor / (logits.shape[0] * logits.shape[1])), place)
        ctx.shape = logits.shape
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        pull, place = ctx.saved_tensors
        return d_loss, pull.new_zeros(ctx.shape).scatter_(-1, place, pull * d_loss.to(pull.dtype)), None


l2_warp = L2Wrap.apply

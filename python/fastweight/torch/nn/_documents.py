# SPDX-License-Identifier: Apache-2.0
"""A model's call as sequences: padding left out, rows cut where documents start."""
import torch

from ._base import check
from ._sequences import packed_end


def borders(input_ids, attention_mask, cu_seqlens):
    """[B,T-1], where columns t and t + 1 are not two tokens of one sequence; None: nowhere."""
    tokens = input_ids.shape[1]
    if cu_seqlens is not None:
        at = torch.arange(1, tokens, device=input_ids.device)
        return (torch.isin(at, cu_seqlens) | (at >= cu_seqlens[-1]))[None]
    if attention_mask is None:
        return None
    kept = attention_mask[:, attention_mask.shape[1] - tokens:] != 0
    return ~(kept[:, 1:] & kept[:, :-1])


class Pieces:
    """input_ids [B,T] as the blocks see them.

    ids        [B,T], or the kept tokens in one row [1,total]
    cu_seqlens of that row, or None
    source     [N]: the sequence of the cache that each piece continues, -1 for none; None: piece n continues sequence n
    last       [B]: the piece with which each sequence ends; None: piece n
    """

    def __init__(self, input_ids, attention_mask, cu_seqlens, document_token):
        batch, tokens = input_ids.shape
        self.shape, self.ids, self.cu_seqlens, self.indices, self.source, self.last = (batch, tokens), input_ids, cu_seqlens, None, None, None
        kept = None
        if cu_seqlens is not None:
            end = packed_end(cu_seqlens, input_ids, "HybridLM", "input_ids")
            kept = None if end >= tokens else (torch.arange(tokens, device=input_ids.device) < end)[None]
        if cu_seqlens is None and attention_mask is not None:
            check(attention_mask.ndim == 2 and attention_mask.shape[0] == batch and attention_mask.shape[1] >= tokens,
                  f"HybridLM: attention_mask has shape {list(attention_mask.shape)}, allowed [{batch}, {tokens} or more]")
            kept = attention_mask[:, attention_mask.shape[1] - tokens:] != 0
            kept = None if bool(kept.all()) else kept
        starts = None if document_token is None else input_ids == document_token
        if starts is not None and not bool(starts.any()):
            starts = None
        if kept is None and starts is None:
            return
        flat = torch.arange(batch * tokens, device=input_ids.device)
        if kept is not None:
            flat = flat[kept.flatten()]
        self.indices = None if kept is None and batch == 1 else flat
        self.ids = input_ids.flatten()[flat][None]
        if cu_seqlens is None:
            count, row = batch, flat // tokens
        else:
            cu_seqlens = cu_seqlens.to(torch.int64)
            count, row = cu_seqlens.shape[0] - 1, torch.searchsorted(cu_seqlens, flat, right=True) - 1
        fresh = torch.zeros_like(flat, dtype=torch.bool) if starts is None else starts.flatten()[flat]
        leads = torch.ones_like(fresh)
        leads[1:] = row[1:] != row[:-1]
        extra = fresh & ~leads  # starts of a piece within its row; every row has one piece more
        piece = row + extra.cumsum(0)
        added = torch.bincount(row[extra], minlength=count)
        first = torch.arange(count, device=flat.device) + added.cumsum(0) - added
        total = count + int(added.sum())
        self.cu_seqlens = torch.searchsorted(piece, torch.arange(total + 1, device=flat.device))
        if starts is None:
            return
        self.source = torch.full((total,), -1, dtype=torch.int64, device=flat.device)
        self.source[first] = torch.arange(count, device=flat.device)
        self.source[piece[leads & fresh]] = -1
        self.last = first + added

    def back(self, x):
        """[1,total,D] -> [B,T,D], 0 on padding."""
        if self.indices is None:
            return x
        batch, tokens = self.shape
        if self.indices.shape[0] == batch * tokens:
            return x.unflatten(1, (batch, tokens))[0]
        return x.new_zeros(batch * tokens, x.shape[-1]).index_put((self.indices,), x[0]).unflatten(0, (batch, tokens))

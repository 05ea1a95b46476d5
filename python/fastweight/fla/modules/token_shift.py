# SPDX-License-Identifier: Apache-2.0
"""fla.modules.token_shift: x_{t-1} - x_t, what RWKV mixes its inputs with."""
from ...torch.nn._sequences import last_rows, shifted

__all__ = ["token_shift"]


def token_shift(x, cu_seqlens=None, cache=None, output_cache=False, chunk_indices=None):
    """x [B,T,D] (B 1 with cu_seqlens) -> x_{t-1} - x_t, and with output_cache the last row of each sequence [N,D].

    cache [N,D] or [N,1,D] is the row before the first one, None: 0. A sequence without rows hands its cache on.
    """
    del chunk_indices
    if cu_seqlens is not None and (x.dim() != 3 or x.shape[0] != 1):
        raise AssertionError(f"token_shift: x has shape {list(x.shape)}, allowed [1,T,D] with cu_seqlens")
    cache = cache if cache is None or cache.dim() == 2 else cache.squeeze(1)
    y = shifted(x, cu_seqlens, cache) - x
    return (y, last_rows(x, cu_seqlens, cache)) if output_cache else y

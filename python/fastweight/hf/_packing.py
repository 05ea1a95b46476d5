# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a packed batch begin, from what transformers passes: cu_seq_lens_q, seq_idx or position_ids alone."""
import functools
import inspect

import torch


def _starts_to_cu(starts):
    """[B,T] bool, true where a sequence starts -> [N+1] int32 offsets into B*T rows; every row of the batch starts one."""
    starts = starts.clone()
    starts[:, 0] = True
    first = starts.flatten().nonzero().flatten()
    return torch.cat((first, first.new_tensor([starts.numel()]))).to(torch.int32)


def from_position_ids(position_ids):
    """[B,T] positions -> offsets [N+1] int32 into B*T rows; None when each row is one sequence (positions grow by 1)."""
    starts = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1]) != 1
    starts[:, :1] = False
    return _starts_to_cu(starts) if bool(starts.any()) else None


def boundaries_of(kwargs):
    """The offsets that the keywords of a layer or a convolution name, or None."""
    cu = kwargs.get("cu_seq_lens_q")
    if cu is None and kwargs.get("seq_idx") is not None:
        seq_idx = kwargs["seq_idx"]
        cu = _starts_to_cu(torch.diff(seq_idx, dim=-1, prepend=seq_idx[:, :1]) != 0)
    return cu


def _is_cached(model, arguments):
    """Whether this forward has or makes a cache; transformers separates packed sequences only without one."""
    if arguments.get("cache") is not None or arguments.get("past_key_values") is not None:
        return True
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = getattr(model.config, "use_cache", False)
    return bool(use_cache) and not (model.training and getattr(model, "gradient_checkpointing", False))


def model_forward(place):
    """forward of a text model: packed position_ids become the cu_seq_lens_q that the linear layers read.

    On the condition under which transformers' softmax attention separates the sequences too: position_ids, no mask, no cache.
    """
    signature = inspect.signature(place.stock)

    @functools.wraps(place.stock)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return place.stock(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments = {**arguments, **arguments.get("kwargs", {})}
        position_ids = arguments.get("position_ids")
        if position_ids is not None and position_ids.ndim == 3:
            position_ids = position_ids[0] if position_ids.shape[0] == 4 else None  # text, then three axes of a picture
        if position_ids is None or arguments.get("attention_mask") is not None or boundaries_of(arguments) is not None \
                or _is_cached(self, arguments):
            return place.stock(self, *args, **kwargs)
        given = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments["inputs_embeds"]
        cu = from_position_ids(position_ids.expand(given.shape[0], -1))
        if cu is None:
            return place.stock(self, *args, **kwargs)
        place.count()
        return place.stock(self, *args, **{**kwargs, "cu_seq_lens_q": cu})
    return forward

# SPDX-License-Identifier: Apache-2.0
"""Sampling from a model, and going back in what it has read."""
import torch

from ._base import check
from .cache import Cache


def sample(logits, temperature, top_k, top_p, generators):
    """logits [B,vocab_size] -> tokens [B]. Row b draws from generators[b] alone, so a row does not depend on its batch.

    temperature 0 takes the likeliest. top_k: only the k likeliest, 0: all. top_p: the likeliest that together reach p.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, places = logits.sort(-1, descending=True)
        chance = ordered.softmax(-1)
        ordered = ordered.masked_fill(chance.cumsum(-1) - chance >= top_p, float("-inf"))
        logits = torch.full_like(logits, float("-inf")).scatter(-1, places, ordered)
    chance = logits.softmax(-1)
    return torch.cat([torch.multinomial(row.cpu(), 1, generator=g) for row, g in zip(chance, generators, strict=True)]).to(logits.device)


class Generation:
    """generate and cut_back of a model whose forward takes past_key_values and use_cache."""

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens, attention_mask=None, temperature=1.0, top_k=0, top_p=1.0, seed=0, eos_token_id=None,
                 past_key_values=None, streamer=None):
        """input_ids [B,T] -> [B, T + what was written]; rows that ended are filled with eos_token_id.

        attention_mask: 0 on left padding. seed: a number, row b then draws with seed + b; or a list, one a row.
        eos_token_id: ends a row; None: the config's; -1: none does. past_key_values: a Cache that has read what precedes
        input_ids; it is moved on over all but the last token. streamer: called with each step's tokens [B].
        """
        check(input_ids.ndim == 2, f"generate: input_ids has shape {list(input_ids.shape)}, allowed [B,T]")
        batch = input_ids.shape[0]
        seeds = [seed + row for row in range(batch)] if isinstance(seed, int) else list(seed)
        check(len(seeds) == batch, f"generate: seed has {len(seeds)} numbers, allowed {batch}, one a row")
        check(input_ids.shape[1] > 0, "generate: input_ids has 0 tokens, allowed 1 or more")
        check(attention_mask is None or bool((attention_mask[..., -1] != 0).all()),
              "generate: attention_mask is 0 in its last column, allowed on the left of a row only")
        check(max_new_tokens >= 0, f"generate: max_new_tokens is {max_new_tokens}, allowed 0 or more")
        check(top_k >= 0, f"generate: top_k is {top_k}, allowed 0 (all) or more")
        check(temperature >= 0, f"generate: temperature is {temperature}, allowed 0 or more")
        check(0 < top_p <= 1, f"generate: top_p is {top_p}, allowed above 0 to 1")
        generators = [torch.Generator().manual_seed(number) for number in seeds]
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        cache = Cache() if past_key_values is None else past_key_values
        ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
        written, ids, mask = [input_ids], input_ids, attention_mask
        for _ in range(max_new_tokens):
            logits = self(ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            tokens = sample(logits.float(), temperature, top_k, top_p, generators)
            if eos is not None and eos >= 0:
                tokens = tokens.masked_fill(ended, eos)
                ended = ended | (tokens == eos)
            written.append(tokens[:, None])
            if streamer is not None:
                streamer(tokens)
            if bool(ended.all()):
                break
            ids, mask = tokens[:, None], None
        return torch.cat(written, 1)

    @torch.no_grad()
    def cut_back(self, past_key_values, columns):
        """The cache as if only its first `columns` columns had been read, exactly: see Cache.cut_back."""
        def replay(input_ids, attention_mask, cu_seqlens):
            self.hidden(input_ids, attention_mask, past_key_values, True, cu_seqlens)

        past_key_values.cut_back(columns, replay)

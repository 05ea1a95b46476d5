# SPDX-License-Identifier: Apache-2.0
"""One hybrid layer as a language model of 16 tokens, on the C interface alone: convolution, recurrence and linear head, with
states in pools of slots. It stands for a runner where an entry is about continuing, rolling back or sharing states."""
import numpy as np

import c_call
import fastweight_c as fw

VOCABULARY, H, HV, K, V, WIDTH = 16, 2, 4, 16, 12, 4
CHANNELS = 2 * H * K + HV * V


class TinyModel:
    """prefill and decode take [(slot, tokens)] and return the logits [tokens, 16] of each; all arithmetic is the library's."""

    def __init__(self, context, op="gated_delta_rule", slots=4, seed=0, storage="f32"):
        rng = np.random.default_rng(seed)
        self.context, self.op, self.storage = context, op, storage
        self.x = rng.standard_normal((VOCABULARY, CHANNELS)).astype(np.float32)
        self.conv = (0.5 * rng.standard_normal((CHANNELS, WIDTH))).astype(np.float32)
        shape = (VOCABULARY, HV, K) if op in ("kda", "rwkv7") else (VOCABULARY, HV)
        self.g = (-0.2 * np.abs(rng.standard_normal(shape))).astype(np.float32)
        self.beta = rng.uniform(0.2, 1, (VOCABULARY, HV)).astype(np.float32)
        self.head = rng.standard_normal((VOCABULARY, HV * V)).astype(np.float32)
        self.a = rng.standard_normal((VOCABULARY, H, K)).astype(np.float32)
        self.a /= np.linalg.norm(self.a, axis=-1, keepdims=True)
        self.conv_pool = np.zeros((slots, CHANNELS, WIDTH - 1), np.float32)
        self.pool = np.zeros((slots, HV, K, V), fw.STORAGE[storage])
        self.processed = 0

    def _run(self, rows, verb):
        tokens = np.concatenate([np.asarray(part, np.int64).reshape(-1) for _, part in rows])
        lengths = [len(part) for _, part in rows]
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        slots = np.asarray([slot for slot, _ in rows], np.int32)
        self.processed += int(sum(n for n, slot in zip(lengths, slots) if slot >= 0))
        T = len(tokens)
        x = np.ascontiguousarray(self.x[tokens])[None]
        y = fw.Guarded((1, T, CHANNELS), np.float32)
        conv = fw.ShortConv(activation=1, x=x, weight=self.conv, cu_seqlens=cu, y=y.array)
        o = fw.Guarded((1, T, HV, V), np.float32)
        final, conv_final = np.zeros_like(self.pool[:len(rows)], np.float32), np.zeros_like(self.conv_pool[:len(rows)])
        pools = dict(state=self.conv_pool, state_indices=slots)
        if verb == fw.FORWARD:
            pools = dict(initial_state=np.ascontiguousarray(self.conv_pool[slots]), final_state=conv_final)
        for name, value in pools.items():
            conv.set(name, value)
        fw.run(self.context, "short_conv", conv, verb)
        q, k, v = np.split(y.array, [H * K, 2 * H * K], axis=2)
        desc = fw.Recurrence(op=c_call.OPS[self.op], qk_norm=1, cu_seqlens=cu, o=o.array, g=self.g[tokens][None],
                             q=q.reshape(1, T, H, K), k=k.reshape(1, T, H, K), v=v.reshape(1, T, HV, V))
        if self.op == "rwkv7":
            desc.set("a", self.a[tokens][None])
            desc.set("b", -0.5 * self.a[tokens][None])
        else:
            desc.set("beta", self.beta[tokens][None])
        pools = dict(state=self.pool, state_indices=slots)
        if verb == fw.FORWARD:
            pools = dict(initial_state=np.ascontiguousarray(self.pool[slots]), final_state=final)
        for name, value in pools.items():
            desc.set(name, value)
        fw.run(self.context, "recurrence", desc, verb)
        if verb == fw.FORWARD:
            self.conv_pool[slots], self.pool[slots] = conv_final, fw.store(final.astype(np.float64), self.storage)
        logits = fw.Guarded((T, VOCABULARY), np.float32)
        fw.run(self.context, "linear",
               fw.Linear(x=o.array.reshape(T, HV * V), weight=self.head, y=logits.array), fw.FORWARD)
        for x in (y, o, logits):
            x.check("tiny model")
        return [logits.array[cu[n]:cu[n + 1]].copy() for n in range(len(rows))]

    def prefill(self, *rows):
        return self._run(rows, fw.FORWARD)

    def decode(self, *rows):
        return self._run(rows, fw.STEP)

    def reset(self, slot):
        self.conv_pool[slot], self.pool[slot] = 0, 0

    def snapshot(self, slot):
        return self.conv_pool[slot].copy(), self.pool[slot].copy()

    def restore(self, slot, kept):
        self.conv_pool[slot], self.pool[slot] = kept

    def greedy(self, slot, prompt, count):
        """`count` tokens after the prompt, one step each, from an empty slot."""
        self.reset(slot)
        token = int(self.prefill((slot, prompt))[0][-1].argmax())
        out = [token]
        while len(out) < count:
            token = int(self.decode((slot, [token]))[0][-1].argmax())
            out.append(token)
        return out

    def speculative(self, slot, prompt, count, draft):
        """The same tokens by drafting: draft(tokens so far) -> proposed tokens. Rejected ones are rolled back exactly."""
        self.reset(slot)
        out = [int(self.prefill((slot, prompt))[0][-1].argmax())]
        while len(out) < count:
            proposed = draft(list(out))
            kept = self.snapshot(slot)
            logits = self.decode((slot, [out[-1], *proposed]))[0]
            answers = logits.argmax(1)
            accepted = 0
            while accepted < len(proposed) and answers[accepted] == proposed[accepted]:
                accepted += 1
            if accepted < len(proposed):
                self.restore(slot, kept)
                self.decode((slot, [out[-1], *proposed[:accepted]]))
            out += [int(x) for x in answers[:accepted + 1]]
        return out[:count]


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()

# SPDX-License-Identifier: Apache-2.0
"""What a model remembers between calls, with exact snapshot, restore and cut-back.

A layer's part is a dictionary of tensors whose first axis is the sequence, zeros standing for a sequence that has not begun:

    state                    [N,HV,K,V] float32     the fast-weight memory
    conv_q, conv_k, conv_v   [N,D,W-1]              the last inputs of the short convolutions
    shift, ffn_shift         [N,D]                  the last input of RWKV-7's token shifts
    keys, values             [N,rows,HK,D]          a ring of attention's keys (turned) and values, with a window
    all_keys, all_values     [N,rows,HK,D]          the same without a window: row t is token t
    lengths                  [N] int64              tokens so far

Nothing in it has a gradient. The tensors are written in place by the steps of decoding.
"""
from dataclasses import dataclass, field

import torch


@dataclass
class Snapshot:
    """A copy of a cache at one moment. It may be restored any number of times, into any cache."""

    layers: list
    columns: list
    calls: list = field(default_factory=list)
    marks: list = field(default_factory=list)

    @property
    def place(self):
        """Columns read."""
        return max(self.columns, default=0)


RINGS = ("keys", "values", "all_keys", "all_values")


def _copy(layers, without=()):
    """The layers without the tensors named; of the rings the rows in use: layers make them longer again."""
    found = []
    for layer in layers:
        used = int(layer["lengths"].max()) if layer.get("lengths", torch.empty(0)).numel() else 0
        found.append({name: (tensor[:, :used] if name in RINGS else tensor).clone() for name, tensor in layer.items() if name not in without})
    return found


def _gather(layer, index, whole=()):
    """The sequences `index` [M] of each tensor but those named in `whole`; a negative one is a sequence that has not begun."""
    fresh = index < 0
    found = {}
    for name, tensor in layer.items():
        if name in whole:
            found[name] = tensor
            continue
        rows = tensor.index_select(0, index.clamp_min(0).to(tensor.device))
        if bool(fresh.any()):
            rows.masked_fill_(fresh.to(rows.device).view(-1, *[1] * (rows.ndim - 1)), 0)
        found[name] = rows
    return found


class Cache:
    """Of one batch of sequences. Layers find their part by their layer_idx.

    Columns are what the calls so far were long, padding included; `lengths` counts each sequence's own tokens.

    snapshot_every: a model's calls are made in pieces that end at multiples of it, and a snapshot is kept at each for
    cut_back. max_snapshots: how many are kept; those that go leave the rest the closer together the nearer they are to the end.
    keep_calls: without it the calls are not recorded, and cut_back reaches kept snapshots only.
    """

    appended = ("all_keys", "all_values")  # rows that are written once: a kept snapshot needs no copy of them

    def __init__(self, snapshot_every=None, max_snapshots=16, keep_calls=True):
        if snapshot_every is not None and snapshot_every < 1:
            raise ValueError(f"Cache: snapshot_every is {snapshot_every}, allowed 1 or more, or None")
        if max_snapshots < 1:
            raise ValueError(f"Cache: max_snapshots is {max_snapshots}, allowed 1 or more")
        self.snapshot_every, self.max_snapshots, self.keep_calls = snapshot_every, max_snapshots, keep_calls
        self.pieces = None  # during a model's call whose sequences are cut: (source [N], last [B]), see Pieces
        self.layers, self._columns, self._calls, self._marks = [], [], [], []

    def __len__(self):
        """Layers that have been here."""
        return len(self.layers)

    def layer(self, index):
        """The tensors of layer `index`, empty before its first call."""
        while len(self.layers) <= index:
            self.layers.append({})
            self._columns.append(0)
        return self.layers[index]

    def take(self, index, whole=()):
        """The tensors of layer `index` as the sequences of this call continue them; those named in `whole` as they are."""
        layer = self.layer(index)
        return dict(layer) if self.pieces is None or not layer else _gather(layer, self.pieces[0], whole)

    def put(self, index, tensors, columns, whole=()):
        """What take gave, after a call that was `columns` long; those named in `whole` are of the cache's sequences already."""
        found = {name: tensor.detach() for name, tensor in tensors.items()}
        self.layer(index).update(found if self.pieces is None else _gather(found, self.pieces[1], whole))
        self._columns[index] += columns

    def get_seq_length(self, layer_idx=0):
        """Columns that layer has seen."""
        return self._columns[layer_idx] if layer_idx < len(self._columns) else 0

    @property
    def place(self):
        """Columns that the layers have seen."""
        return max(self._columns, default=0)

    def columns_are(self, columns):
        """Every layer has seen that many: a model that leaves out padding calls its layers with fewer."""
        self._columns = [columns] * len(self._columns)

    @property
    def lengths(self):
        """[N] int64: tokens of each sequence; None before the first call."""
        return next((layer["lengths"] for layer in self.layers if "lengths" in layer), None)

    def nbytes(self):
        """Bytes of the tensors held now, kept snapshots included."""
        parts = [self.layers] + [mark.layers for mark in self._marks]
        return sum(tensor.numel() * tensor.element_size() for layers in parts for layer in layers for tensor in layer.values())

    def reset(self):
        """Back to empty."""
        self.layers, self._columns, self._calls, self._marks = [], [], [], []

    def reorder(self, index):
        """Sequence m becomes a copy of what sequence index[m] was (beams, slots); a negative index one that has not begun.

        index [M] int64. Kept snapshots and the record of calls follow; the record of a packed call does not, and what can only
        be reached through it cannot be cut back to.
        """
        index = torch.as_tensor(index, dtype=torch.int64)
        count = self.lengths.shape[0] if self.lengths is not None else 0
        if index.numel() and int(index.max()) >= count:
            raise ValueError(f"Cache.reorder: index has {int(index.max())}, allowed below {count}")
        self.layers = [_gather(layer, index) for layer in self.layers]
        if any(cu_seqlens is not None for _, _, cu_seqlens in self._calls):
            self._calls, self._marks = [], []
            return
        calls = []
        for ids, mask, _ in self._calls:
            rows = index.clamp_min(0).to(ids.device)
            mask = (torch.ones_like(ids) if mask is None else mask)[rows] * (index >= 0).to(ids)[:, None]
            calls.append((ids[rows], mask, None))
        self._calls = calls
        self._marks = [Snapshot([_gather(layer, index) for layer in mark.layers], mark.columns, calls[:len(mark.calls)]) for mark in self._marks]

    # ---- snapshot, restore, cut-back

    def snapshot(self):
        """-> Snapshot. What the model does later does not change it."""
        return Snapshot(_copy(self.layers), list(self._columns), list(self._calls), list(self._marks))

    def restore(self, snapshot):
        """Goes on from the snapshot: the next calls give, bit for bit, what they would have given then."""
        self.layers, self._columns = _copy(snapshot.layers), list(snapshot.columns)
        self._calls, self._marks = list(snapshot.calls), list(snapshot.marks)

    def mark(self):
        """Keeps a snapshot of now for cut_back."""
        self._marks.append(Snapshot(_copy(self.layers, self.appended), list(self._columns), list(self._calls)))
        if len(self._marks) > self.max_snapshots:
            places = [0] + [mark.place for mark in self._marks]
            # the gap that its loss would leave, over its distance from the end: what is far back may lie far apart
            loss = [(places[i + 1] - places[i - 1]) / (places[-1] - places[i] + 1) for i in range(1, len(places) - 1)]
            del self._marks[loss.index(min(loss)) if loss else 0]

    def piece(self, tokens):
        """How many of `tokens` more columns a model reads in one go."""
        return tokens if self.snapshot_every is None else min(tokens, self.snapshot_every - self.place % self.snapshot_every)

    def record(self, input_ids, attention_mask=None, cu_seqlens=None):
        """Notes one call of the model, so that it can be made again. The model does this."""
        if self.keep_calls:
            call = input_ids, attention_mask, cu_seqlens
            self._calls.append(tuple(None if x is None else x.clone() for x in call))
        if self.snapshot_every is not None and (self.place % self.snapshot_every == 0 or cu_seqlens is not None):
            self.mark()

    def cut_back(self, columns, replay=None):
        """Forgets everything after the first `columns` columns, exactly.

        The nearest kept snapshot at or before `columns` (the empty start is always one) is restored, and the calls after
        it are made again with `replay(input_ids, attention_mask, cu_seqlens)`, the last of them cut: the same calls with the
        same data as if the sequences had never gone further, so with the same bits. HybridLM.cut_back gives its forward.
        """
        if not 0 <= columns <= self.place:
            raise ValueError(f"Cache.cut_back: columns is {columns}, allowed 0 to {self.place}")
        fits = [mark for mark in self._marks if mark.place <= columns]
        start = fits[-1] if fits else Snapshot([], [])
        again, at = self._calls[len(start.calls):], start.place
        if at < columns and (replay is None or at + sum(call[0].shape[1] for call in again) < columns):
            known = sorted({0} | {mark.place for mark in self._marks})
            raise ValueError(f"Cache.cut_back: columns is {columns}, allowed {known}: the calls in between are not recorded")
        cut = at
        for ids, _, cu_seqlens in again:
            if cut < columns < cut + ids.shape[1] and cu_seqlens is not None:
                raise ValueError(f"Cache.cut_back: columns is {columns}, allowed {cut} and {cut + ids.shape[1]}: a packed call is not cut")
            cut += ids.shape[1]
        kept = [{name: layer[name] for name in self.appended if name in layer} for layer in self.layers]
        self.layers = [{**copied, **live} for copied, live in zip(_copy(start.layers), kept)]
        self._columns, self._calls, self._marks = list(start.columns), list(start.calls), fits
        for ids, mask, cu_seqlens in again:
            take = min(ids.shape[1], columns - at)
            if take == 0:
                break
            replay(ids[:, :take], None if mask is None else mask[:, :take], cu_seqlens)
            at += take

# SPDX-License-Identifier: Apache-2.0
"""Streams of bytes from a file of documents, each ended by one zero byte."""
import lzma
import os

import numpy as np


def load(path):
    """The bytes of `path`, or of `path`.xz where only that exists."""
    if os.path.exists(path):
        return np.fromfile(path, dtype=np.uint8)
    with lzma.open(path + ".xz") as f:
        return np.frombuffer(f.read(), dtype=np.uint8)


def documents(data):
    """-> (bytes with a zero byte in front, [n+1] places of the zero bytes): document i is bytes[z[i]:z[i+1]]."""
    if len(data) == 0 or data[-1] != 0:
        raise ValueError("the last byte of a corpus file must be zero: it ends the last document")
    framed = np.concatenate([np.zeros(1, np.uint8), data])
    return framed, np.flatnonzero(framed == 0)


def shuffled_rows(framed, places, rows, segment, seed):
    """The documents in a new order as `rows` streams of one length: [rows, n * segment + 1]."""
    order = np.random.default_rng(seed).permutation(len(places) - 1)
    stream = np.concatenate([framed[places[i]:places[i + 1]] for i in order] + [framed[:1]])
    length = (len(stream) - 1) // rows // segment * segment
    if length == 0:
        raise ValueError(f"{len(stream)} bytes do not fill {rows} streams of {segment} bytes; use a smaller --batch")
    return np.stack([stream[i * length:i * length + length + 1] for i in range(rows)])


def packed_rows(framed, places, rows, segment):
    """Whole documents in `rows` streams of about one length: (bytes [rows, n * segment + 1], count [rows]).

    count[i] targets of row i belong to documents; what follows is padding.
    """
    sizes = np.diff(places)
    bins, fill = [[] for _ in range(rows)], np.zeros(rows, np.int64)
    for i in np.argsort(-sizes, kind="stable"):
        j = int(fill.argmin())
        bins[j].append(i)
        fill[j] += sizes[i]
    length = -(-int(fill.max()) // segment) * segment
    out = np.zeros((rows, length + 1), np.uint8)
    for j, ids in enumerate(bins):
        if ids:
            out[j, :fill[j]] = np.concatenate([framed[places[i]:places[i + 1]] for i in ids])
    return out, fill

# SPDX-License-Identifier: Apache-2.0
"""The cache: snapshot, restore and cut-back to the bit, reordering, documents, padding."""
import pytest

from model_cases import model, tokens
from nn_helpers import distance, fnn, holds, torch

CALLS = [13, 1, 1, 20, 1, 1, 1, 5, 17, 1]  # lengths of a row of calls: prompts, single tokens, a few tokens
REORDERED = 1e-5  # eight float32 layers, sums in another order


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def run(net, ids, lengths, cache, mask=None):
    """Logits of the calls."""
    out, at = [], 0
    for n in lengths:
        part = None if mask is None else mask[:, at:at + n]
        out.append(net(ids[:, at:at + n], attention_mask=part, past_key_values=cache, use_cache=True).logits)
        at += n
    return torch.cat(out, 1)


def until(columns):
    """The calls CALLS, cut after `columns`."""
    found = []
    for n in CALLS:
        found.append(min(n, columns - sum(found)))
        if sum(found) == columns:
            return [n for n in found if n]
    return found


def test_snapshot_and_restore_go_on_bit_for_bit():
    net, ids, other = model(), tokens(2, 61), tokens(2, 61, seed=9)
    cache = fnn.Cache()
    run(net, ids, [20, 1], cache)
    kept = cache.snapshot()
    wanted = run(net, ids[:, 21:], [1, 1, 5, 12, 1], cache)
    for fresh in (False, True, False):
        run(net, other, [1, 7], cache)
        cache = fnn.Cache() if fresh else cache
        cache.restore(kept)
        assert cache.get_seq_length() == 21 and cache.lengths.tolist() == [21, 21]
        assert torch.equal(run(net, ids[:, 21:], [1, 1, 5, 12, 1], cache), wanted)


def test_a_snapshot_is_saved_and_loaded(tmp_path):
    net, ids = model(), tokens(1, 30)
    cache = fnn.Cache()
    run(net, ids, [15, 1], cache)
    torch.save(cache.snapshot(), tmp_path / "snapshot.pt")
    wanted = run(net, ids[:, 16:], [1, 13], cache)
    loaded = fnn.Cache()
    loaded.restore(torch.load(tmp_path / "snapshot.pt", weights_only=False))
    assert torch.equal(run(net, ids[:, 16:], [1, 13], loaded), wanted)


@pytest.mark.parametrize("every", [None, 7, 16])
def test_cut_back_gives_the_bits_of_never_having_gone_further(every):
    net, ids, later = model(), tokens(2, sum(CALLS)), tokens(2, 9, seed=3)
    for columns in (0, 1, 13, 14, 20, 36, 60):
        cache, plain = fnn.Cache(snapshot_every=every), fnn.Cache(snapshot_every=every)
        run(net, ids, CALLS, cache)
        net.cut_back(cache, columns)
        if columns:
            run(net, ids, until(columns), plain)
        assert cache.get_seq_length() == columns
        assert torch.equal(run(net, later, [1, 1, 7], cache), run(net, later, [1, 1, 7], plain))
        for a, b in zip(cache.layers, plain.layers):
            for key in b:
                x, y = (c[key][:, :columns + 9] if "keys" in key or "values" in key else c[key] for c in (a, b))  # later rows are of no token
                assert torch.equal(x, y), key


def test_cut_back_twice_and_beyond_the_kept_snapshots():
    net, ids, later = model(["gdn", "sliding", "full"]), tokens(1, sum(CALLS)), tokens(1, 20, seed=4)
    cache = fnn.Cache(snapshot_every=2, max_snapshots=2)
    run(net, ids, CALLS, cache)
    for columns, length in ((58, 4), (55, 3), (20, 5), (3, 2)):
        net.cut_back(cache, columns)
        run(net, later[:, :length], [length], cache)
        assert cache.get_seq_length() == columns + length
    plain = fnn.Cache(snapshot_every=2)
    run(net, torch.cat([ids[:, :3], later[:, :2]], 1), [3, 2], plain)
    assert torch.equal(run(net, later, [1, 4], cache), run(net, later, [1, 4], plain))


def test_dropped_drafts_leave_no_trace():
    net, ids = model(), tokens(1, 9)
    wanted = net.generate(ids, 12, temperature=0)[0, 9:].tolist()
    cache, token, written = fnn.Cache(snapshot_every=8), ids[:, -1:], []
    run(net, ids[:, :-1], [8], cache)
    for wrong in range(12):
        place = cache.get_seq_length()
        draft = torch.tensor([[token.item(), (7 * wrong) % 40, 3]])
        token = net(draft, past_key_values=cache, use_cache=True).logits[:, :1].argmax(-1)
        written.append(token.item())
        net.cut_back(cache, place + 1)
    assert written == wanted


def test_cut_back_with_left_padding():
    net, ids, later = model(), tokens(3, 24), tokens(3, 6, seed=5)
    mask = (torch.arange(24)[None] >= torch.tensor([[0], [9], [15]])).long()
    for columns in (5, 11, 16, 23):
        cache, plain = fnn.Cache(snapshot_every=4), fnn.Cache(snapshot_every=4)
        run(net, ids, [12, 1, 11], cache, mask)
        net.cut_back(cache, columns)
        cut = [n for n in (min(12, columns), min(1, columns - 12), columns - 13) if n > 0]
        run(net, ids, cut, plain, mask)
        assert cache.lengths.tolist() == plain.lengths.tolist() == [max(0, columns - pad) for pad in (0, 9, 15)]
        assert torch.equal(run(net, later, [2, 4], cache), run(net, later, [2, 4], plain))


def test_cut_back_refuses_what_it_cannot_do():
    net, ids = model(["gdn"]), tokens(1, 12)
    cache = fnn.Cache()
    run(net, ids, [8, 4], cache)
    with pytest.raises(ValueError, match="Cache.cut_back: columns is 13, allowed 0 to 12"):
        net.cut_back(cache, 13)
    with pytest.raises(ValueError, match=r"Cache.cut_back: columns is 9, allowed \[0\]: the calls in between are not recorded"):
        cache.cut_back(9)
    cache.mark()
    run(net, ids, [3], cache)
    cache.cut_back(12)
    assert cache.get_seq_length() == 12
    cache.cut_back(0)
    assert cache.get_seq_length() == 0 and cache.lengths is None
    packed = fnn.Cache()
    net(ids, past_key_values=packed, use_cache=True, cu_seqlens=torch.tensor([0, 5, 12]))
    with pytest.raises(ValueError, match="Cache.cut_back: columns is 7, allowed 0 and 12: a packed call is not cut"):
        net.cut_back(packed, 7)
    with pytest.raises(ValueError, match="Cache: snapshot_every is 0, allowed 1 or more, or None"):
        fnn.Cache(snapshot_every=0)


def test_kept_snapshots_are_bounded():
    net, ids = model(["gdn", "sliding"]), tokens(1, 61)
    cache = fnn.Cache(snapshot_every=1, max_snapshots=3)
    sizes = []
    for t in range(40):
        net(ids[:, t:t + 1], past_key_values=cache, use_cache=True)
        sizes.append(cache.nbytes())
    assert sizes[-1] == sizes[9]  # recurrent states and a ring: nothing grows with the text
    with pytest.raises(ValueError, match="Cache: max_snapshots is 0, allowed 1 or more"):
        fnn.Cache(max_snapshots=0)


def test_going_back_reads_no_more_than_a_piece_again():
    net, ids = model(["gdn", "full"]), tokens(1, 500)
    cache, read = fnn.Cache(snapshot_every=32, max_snapshots=6), []
    run(net, ids, [500], cache)
    places = [mark.place for mark in cache._marks]
    assert places[-2:] == [448, 480] and len(places) == 6 and all(place % 32 == 0 for place in places)
    for columns in (490, 470, 455):
        cache.cut_back(columns, lambda part, mask, cu_seqlens: (read.append(part.shape[1]), net.hidden(part, mask, cache, True)))
        assert sum(read) < 32
        read.clear()
    far = [columns - max([0, *(place for place in places if place <= columns)]) for columns in range(500)]
    assert all(replayed <= 32 + (500 - columns) for columns, replayed in enumerate(far))
    for mark in cache._marks:
        assert not set(mark.layers[1]) & set(fnn.Cache.appended)


def test_a_snapshot_brings_its_own_kept_ones():
    """What was kept after a snapshot belongs to a text that is gone; a cache without records cannot tell otherwise."""
    net, ids, other = model(["gdn", "full"]), tokens(1, 30), tokens(1, 30, seed=2)
    for keep_calls in (True, False):
        cache = fnn.Cache(keep_calls=keep_calls)
        run(net, ids[:, :10], [10], cache)
        cache.mark()
        kept = cache.snapshot()
        run(net, ids[:, 10:], [10], cache)
        cache.mark()
        cache.restore(kept)
        run(net, other, [15], cache)
        cache.cut_back(10)
        wanted = fnn.Cache()
        run(net, ids, [10], wanted)
        assert torch.equal(run(net, ids[:, 10:], [1, 4], cache), run(net, ids[:, 10:], [1, 4], wanted))
        run(net, other, [15], cache)
        with pytest.raises(ValueError, match=r"columns is 20, allowed \[0, 10\]"):
            cache.cut_back(20)


def test_what_is_not_a_number_stays_in_its_sequence_and_goes_with_it():
    net, ids, later = model(), tokens(4, 12), tokens(4, 6, seed=3)
    cache, clean = fnn.Cache(), fnn.Cache()
    run(net, ids, [12], cache)
    run(net, ids, [12], clean)
    for layer in cache.layers:
        for name, tensor in layer.items():
            if tensor.is_floating_point():
                tensor[0] = float("nan")
    found, wanted = run(net, later, [1, 5], cache), run(net, later, [1, 5], clean)
    assert torch.equal(found[1:], wanted[1:]) and found[0].isnan().all()
    cache.reorder([-1, 1, 2, 3])
    fresh = fnn.Cache()
    assert distance(run(net, ids, [1, 11], cache)[0], run(net, ids[:1], [1, 11], fresh)[0]) < REORDERED


def test_reorder_moves_sequences_and_starts_others():
    net, ids, later = model(), tokens(3, 18), tokens(4, 7, seed=6)
    cache = fnn.Cache()
    run(net, ids, [11, 1, 6], cache)
    cache.reorder([2, 0, -1, 2])
    assert cache.lengths.tolist() == [18, 18, 0, 18]
    found = run(net, later, [1, 6], cache)
    for row, source in enumerate([2, 0, -1, 2]):
        alone = fnn.Cache()
        if source >= 0:
            run(net, ids[source:source + 1], [11, 1, 6], alone)
        assert distance(found[row], run(net, later[row:row + 1], [1, 6], alone)[0]) < REORDERED
    net.cut_back(cache, 14)
    assert cache.lengths.tolist() == [14, 14, 0, 14]
    found = run(net, later, [1, 6], cache)
    for row, source in enumerate([2, 0, -1, 2]):
        alone = fnn.Cache()
        if source >= 0:
            run(net, ids[source:source + 1, :14], [11, 1, 2], alone)
        assert distance(found[row], run(net, later[row:row + 1], [1, 6], alone)[0]) < REORDERED
    with pytest.raises(ValueError, match="Cache.reorder: index has 4, allowed below 4"):
        cache.reorder([4])


def test_packed_sequences_keep_their_states():
    net, ids, later = model(), tokens(1, 30), tokens(3, 5, seed=8)
    cu_seqlens, cache = torch.tensor([0, 7, 7, 30]), fnn.Cache()
    first = net(ids, past_key_values=cache, use_cache=True, cu_seqlens=cu_seqlens).logits
    found = net(later.flatten()[None], past_key_values=cache, use_cache=True, cu_seqlens=torch.tensor([0, 5, 10, 15])).logits.view(3, 5, -1)
    assert cache.lengths.tolist() == [12, 5, 28]
    for row, (a, b) in enumerate(((0, 7), (7, 7), (7, 30))):
        whole = net(torch.cat([ids[:, a:b], later[row:row + 1]], 1)).logits[0]
        assert distance(torch.cat([first[0, a:b], found[row]]), whole) < REORDERED


def test_documents_do_not_see_each_other_however_the_rows_are_cut():
    net, ids = model(document_token=0), tokens(2, 50)
    starts = ([0, 17, 18, 40], [9, 30])
    for row, places in enumerate(starts):
        ids[row, places] = 0
    whole = net(ids).logits
    for row, places in enumerate(starts):
        edges = sorted({0, *places, 50})
        for a, b in zip(edges, edges[1:]):
            assert distance(whole[row, a:b], net(ids[row:row + 1, a:b]).logits[0]) < REORDERED
    for cuts in ([50], [17, 1, 1, 12, 19], [9, 8, 33], [1] * 50):
        cache = fnn.Cache()
        assert distance(run(net, ids, cuts, cache), whole) < REORDERED
        assert cache.lengths.tolist() == [10, 20] and cache.get_seq_length() == 50
        if len(cuts) == 3:
            net.cut_back(cache, 35)
            assert distance(run(net, ids[:, 35:], [1, 14], cache), whole[:, 35:]) < REORDERED
    cache = fnn.Cache()
    run(net, ids, [25], cache)
    before = cache.snapshot()
    assert distance(net(ids[:, 25:], past_key_values=cache).logits, whole[:, 25:]) < REORDERED
    assert holds(before.layers, cache.layers)


def test_padding_on_the_right_and_within_is_skipped():
    net, ids, later = model(), tokens(3, 20), tokens(3, 5, seed=2)
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[1, 12:] = mask[2, 3:9] = 0
    cache = fnn.Cache()
    found = net(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
    after = run(net, later, [1, 4], cache)
    assert cache.lengths.tolist() == [25, 17, 19]
    for row in range(3):
        kept = mask[row] == 1
        wanted = net(torch.cat([ids[row][kept], later[row]])[None]).logits[0]
        assert distance(torch.cat([found[row][kept], after[row]]), wanted) < REORDERED


def test_padding_and_documents_together():
    net, ids = model(document_token=0), tokens(2, 20)
    ids[0, 12] = ids[1, 8] = 0
    mask = (torch.arange(20)[None] >= torch.tensor([[0], [8]])).long()
    cache = fnn.Cache()
    found = torch.cat([net(ids[:, :15], attention_mask=mask[:, :15], past_key_values=cache, use_cache=True).logits,
                       net(ids[:, 15:], attention_mask=mask, past_key_values=cache, use_cache=True).logits], 1)
    assert distance(found[0], net(ids[:1]).logits[0]) < REORDERED
    assert distance(found[1, 8:], net(ids[1:, 8:]).logits[0]) < REORDERED
    assert cache.lengths.tolist() == [8, 12]

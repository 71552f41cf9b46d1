"""The CPU backend with masks and score functions, compared with the reference and itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.comparisons import assert_all_close, assert_same_bits
from support.gpu.gpu_support import DTYPES, lse_bound

from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu import varlen
from cupy_flash.cpu.forward_pass import compute_dtype
from cupy_flash.cpu.row_results import RowResults
from cupy_flash.mods.keywords import FURTHEST, NAMES
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR
from cupy_flash.problem.tile import Tile
from cupy_flash.reference.dense import (
    attention_reference,
    error_bound,
    formula,
    max_error,
    naive_formula,
)
from cupy_flash.reference.modifications import read_modifications
from cupy_flash.reference.packed import attention_varlen_reference, attention_with_kvcache_reference

KINDS = ("dense", "varlen", "kvcache", "paged")
PAGE = 5
BC = 8
TILE = Tile(4, BC)
HEADS = [(1, 1), (4, 2), (6, 2), (3, 1), (2, 2)]


@dataclass
class Call:
    """Call with sequences in arrays of layout `kind`; rows outside of the sequences are NaN."""

    kind: str
    rng: np.random.Generator = field(repr=False)
    dtype: str = "float32"
    batch: int = 2
    seqlen_q: int = 13
    seqlen_k: int = 30
    heads: tuple[int, int] = (4, 2)
    dim: int = 8
    causal: bool = False
    q_offset: int | None = None
    scale: float | None = None
    same_length: bool = False
    gap: int = 2  # rows after each packed sequence of keys, which belong to none
    modifications: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        rng, (heads_q, heads_kv) = self.rng, self.heads
        dtype = DTYPES[self.dtype]

        def lengths(longest):
            alike = self.kind == "dense" or self.same_length
            return [longest] * self.batch if alike else rng.integers(0, longest + 1, self.batch)

        self.lengths_k = np.array(lengths(self.seqlen_k))
        rows = lengths(self.seqlen_q) if self.kind == "varlen" else [self.seqlen_q] * self.batch
        self.lengths_q = np.array(rows)

        def sequences(all_rows, heads):
            shapes = [(rows, heads, self.dim) for rows in all_rows]
            return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

        self.q_of = sequences(self.lengths_q, heads_q)
        self.k_of = sequences(self.lengths_k, heads_kv)
        self.v_of = sequences(self.lengths_k, heads_kv)
        self.starts_q = np.concatenate([[0], np.cumsum(self.lengths_q)])
        self.starts_k = np.concatenate([[0], np.cumsum(self.lengths_k + self.gap)])
        self.capacity = self.seqlen_k + 3
        self.table = None
        if self.kind == "paged":
            pages = -(-self.capacity // PAGE)
            self.table = rng.permutation(self.batch * pages).reshape(self.batch, pages)
            self.capacity = pages * PAGE
        self.q = self._placed(self.q_of, "q")
        self.k, self.v = self._placed(self.k_of, "k"), self._placed(self.v_of, "v")

    def _placed(self, sequences, name):
        tail, dtype = sequences[0].shape[1:], sequences[0].dtype
        if self.kind == "dense" or (name == "q" and self.kind != "varlen"):
            return np.stack(sequences)
        if self.kind == "varlen":
            starts = self.starts_q if name == "q" else self.starts_k
            array = np.full((starts[-1] + 3, *tail), np.nan, dtype)
            for start, one in zip(starts[:-1], sequences, strict=True):
                array[start : start + len(one)] = one
            return array
        rows = self.capacity if self.table is None else self.table.shape[1] * PAGE
        array = np.full((self.batch, rows, *tail), np.nan, dtype)
        for b, one in enumerate(sequences):
            array[b, : len(one)] = one
        if self.table is None:
            return array
        pages = np.empty((self.table.size, PAGE, *tail), dtype)
        pages[self.table.ravel()] = array.reshape(-1, PAGE, *tail)
        return pages

    @property
    def table_shape(self):
        """Shape of an array that broadcasts to the scores."""
        heads_q = self.heads[0]
        if self.kind == "varlen":
            return heads_q, len(self.q), self.capacity
        columns = self.seqlen_k if self.kind == "dense" else self.capacity
        return self.batch, heads_q, self.seqlen_q, columns

    @property
    def bound_mods(self):
        """Parsed modifications, or None for a plain call."""
        if not self.modifications:
            return None
        return read_modifications(self.modifications, packed=self.kind == "varlen")

    @property
    def own_scale(self):
        return self.dim**-0.5 if self.scale is None else self.scale

    def run(self, *, tile=TILE, threads=1, batch_invariant=False, with_lse=True):
        """Return (out, lse), in buffers that held NaN before."""
        out = np.full(self.q.shape, np.nan, self.q.dtype)
        shape = (self.batch, self.heads[0], self.seqlen_q)
        if self.kind == "varlen":
            shape = (self.heads[0], len(self.q))
        lse = np.full(shape, np.nan, compute_dtype(self.q.dtype)) if with_lse else None
        options = {"causal": self.causal, "softmax_scale": self.own_scale}
        options |= {"tile": tile, "threads": threads, "bound_mods": self.bound_mods}
        arrays = self.q, self.k, self.v, out, RowResults(lse)
        if self.kind == "dense":
            offset = self.seqlen_k - self.seqlen_q if self.q_offset is None else self.q_offset
            cpu_forward.forward(*arrays, q_offset=offset, **options)
            return out, lse
        options["batch_invariant"] = batch_invariant
        if self.kind == "varlen":
            varlen.varlen_forward(*arrays, **self._packed, **options)
        else:
            where = {"cache_batch_idx": None, "block_table": self.table}
            varlen.kvcache_forward(*arrays, lengths=self.lengths_k, **where, **options)
        return out, lse

    @property
    def _packed(self):
        return {
            "cu_seqlens_q": self.starts_q,
            "cu_seqlens_k": self.starts_k,
            "seqused_k": self.lengths_k,
            "max_seqlen_q": self.seqlen_q,
            "max_seqlen_k": self.capacity,
            "block_table": None,
        }

    def truth(self):
        options = {"causal": self.causal, "softmax_scale": self.scale, **self.modifications}
        arrays = self.q, self.k, self.v
        if self.kind == "dense":
            options = {"q_offset": self.q_offset} | options
            return attention_reference(*arrays, return_lse=True, **options)
        if self.kind == "varlen":
            return attention_varlen_reference(*arrays, **self._packed, **options)
        cached = attention_with_kvcache_reference(
            *arrays, cache_seqlens=self.lengths_k, block_table=self.table, **options
        )
        return cached.out, cached.lse

    def check(self, **options):
        """Assert that the result is right, for each sequence separately."""
        out, lse = self.run(**options)
        exact, exact_lse = self.truth()
        bound_mods = self.bound_mods or BoundModifications()
        for b in range(self.batch):
            rows, lse_rows, start = b, b, FIRST_PAIR._replace(b=b)
            if self.kind == "varlen":
                first = int(self.starts_q[b])
                rows = slice(first, first + self.lengths_q[b])
                lse_rows = (slice(None), rows)
                start = start._replace(q_start=first, k_start=int(self.starts_k[b]))
            dense = [x[b][None].swapaxes(1, 2) for x in (self.q_of, self.k_of, self.v_of)]
            same = {"causal": self.causal, "softmax_scale": self.scale, "q_offset": self.q_offset}
            same |= {"bound_mods": bound_mods, "sequence": start}
            true_lse = exact_lse[lse_rows]
            naive = naive_formula(*dense, dtype=self.q.dtype, **same)[0].swapaxes(0, 1)
            allowed = error_bound(naive[None], exact[rows][None], self.q.dtype, lse=true_lse)
            # As in `sequence_support.Part`: of few results, the naive error may be small by chance.
            terms = formula(dense[0], dense[1], np.abs(dense[2]), **same).out
            allowed += error_bound(terms, terms, compute_dtype(self.q.dtype), lse=true_lse)
            assert max_error(out[rows], exact[rows]) <= allowed
            empty = np.isneginf(true_lse.T)
            assert not out[rows][empty].any(), "a row without keys is not exactly 0"
            if lse is not None:
                largest = lse_bound(dense[0], dense[1], true_lse, self.own_scale)
                assert max_error(lse[lse_rows], true_lse) <= largest
        if self.kind == "varlen":
            assert not out[self.starts_q[-1] :].any(), "a row of no sequence is not exactly 0"
            if lse is not None:
                assert (lse[:, self.starts_q[-1] :] == -np.inf).all()
        return out, lse


# Modifications

TABLE = np.random.default_rng(1).standard_normal((7, 64), np.float32)
SCORE_MODS = [
    ScoreMod(lambda score, h, i, j: score - 0.03 * (h + 1) * np.abs(i - j)),
    ScoreMod(lambda score, b, i, j, table: score + table[b, (i + j) % 64], table=TABLE),
    ScoreMod(
        lambda score, i, j, q_start, k_start, table: (
            score + table[(q_start + i) % 7, (k_start + j) % 64]
        ),
        table=TABLE,
    ),
]
MASK_MODS = [
    MaskMod(lambda b, h, i, j: (i + j + b + 2 * h) % 4 != 0),
    MaskMod(lambda i, j: i // 6 == j // 6),
    MaskMod(lambda i, j, q_start, k_start: (q_start + i + k_start + j) % 5 < 3),
]
DISTANCES = [None, -1, 0, 1, BC - 1, BC, BC + 1, 1000]


def a_table(call, rng):
    """Return a shape of a bias or mask; axes may be 1 or, in dense calls, left out."""
    shape = [1 if rng.random() < 0.25 else n for n in call.table_shape[:-1]]
    if call.kind == "varlen":
        # In packed calls, only the axis of heads may have length 1.
        return (shape[0], *call.table_shape[1:])
    return (*shape, call.table_shape[-1])[rng.integers(3) if call.kind == "dense" else 0 :]


def drawn_bias(call, rng):
    bias = rng.standard_normal(a_table(call, rng))
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    bias = bias.astype(np.float32 if rng.random() < 0.5 else call.q.dtype)
    if call.kind != "dense":
        bias[..., call.seqlen_k :] = np.nan
    return bias if rng.random() < 0.5 else np.repeat(bias, 2, axis=-2)[..., ::2, :]


def drawn_mask(call, rng):
    mask = rng.random(a_table(call, rng)) < 0.7
    if rng.random() < 0.5:
        # Some rows attend to no key, or to no key of the first tiles.
        mask[..., rng.integers(mask.shape[-2]), :] = False
        mask[..., rng.integers(mask.shape[-2]), : 2 * BC + 1] = False
    return mask


def drawn_slopes(call, rng):
    shape = (call.batch, call.heads[0])[rng.integers(2) :]
    return (0.3 * rng.random(shape)).astype(np.float32)


def drawn_sinks(call, rng):
    sinks = 3 * rng.standard_normal(call.heads[0])
    sinks[rng.random(sinks.shape) < 0.3] = rng.choice([-np.inf, -100, 30])
    return sinks.astype(np.float32 if rng.random() < 0.5 else call.q.dtype)


DRAW = {
    "window_size": lambda call, rng: tuple(
        DISTANCES[i] for i in rng.integers(len(DISTANCES), size=2)
    ),
    "softcap": lambda call, rng: float(rng.choice([0.5, 3.0, 50.0])),
    "alibi_slopes": drawn_slopes,
    "sinks": drawn_sinks,
    "bias": drawn_bias,
    "mask": drawn_mask,
    "prefix_lens": lambda call, rng: rng.integers(0, call.seqlen_k + 3, call.batch, np.int32),
    "tree_mask": lambda call, rng: rng.integers(
        0, 2**64, (call.batch, call.seqlen_q), np.uint64, endpoint=False
    ),
    "score_mod": lambda call, rng: SCORE_MODS[rng.integers(len(SCORE_MODS))],
    "mask_mod": lambda call, rng: MASK_MODS[rng.integers(len(MASK_MODS))],
    "seqlens_k": lambda call, rng: rng.integers(0, call.seqlen_k + 1, call.batch, np.int32),
    "q_offset": lambda call, rng: rng.integers(-20, 40, call.batch, np.int32),
    "dropout_p": lambda call, rng: float(rng.choice([0.1, 0.5, 0.9])),
}
# Modifications that calls of a kind do not have.
NOT_OF_CACHES = ("seqlens_k", "dropout_p")
NOT_OF = {"varlen": ("seqlens_k",), "kvcache": NOT_OF_CACHES, "paged": NOT_OF_CACHES}


def combinations(kind, rng):
    """Yield each modification, each pair with up to two more, and some sets of 3 and 4."""
    names = [name for name in DRAW if name not in NOT_OF.get(kind, ())]
    yield from ([name] for name in names)
    for pair in itertools.combinations(names, 2):
        yield list({*pair, *rng.choice(names, rng.integers(3))})
    for count in (3, 4) * 4:
        yield list(rng.choice(names, count, replace=False))


def drawn_call(kind, dtype, names, rng):
    call = Call(
        kind,
        rng,
        dtype,
        batch=int(rng.integers(1, 4)),
        seqlen_q=int(rng.choice([1, 3, 13])),
        seqlen_k=int(rng.choice([1, 9, 30])),
        heads=HEADS[rng.integers(len(HEADS))],
        dim=int(rng.choice([4, 9])),
        causal=bool(rng.integers(2)),
        q_offset=[None, int(rng.integers(-20, 40))][rng.integers(2)] if kind == "dense" else None,
        scale=[None, None, 0.0, -0.2, 0.7][rng.integers(5)],
        same_length=bool(rng.integers(2)),
    )
    call.modifications = {name: DRAW[name](call, rng) for name in names}
    if "prefix_lens" in names and {None, -1}.issuperset(call.modifications.get("window_size", ())):
        # prefix_lens are refused unless a causal mask or a window masks keys.
        call.causal = True
    if "dropout_p" in names:
        call.modifications["dropout_seed"] = int(rng.integers(2**63))
    if "seqlens_k" in names:
        for b, length in enumerate(call.modifications["seqlens_k"]):
            call.k[b, length:], call.v[b, length:] = np.nan, np.nan
            call.k_of[b], call.v_of[b] = call.k[b], call.v[b]
    return call


def test_every_modification_is_drawn():
    # tests/api/kvcache/test_used_parts.py covers the other modifications.
    assert DRAW.keys() == NAMES - {"seqused_q", "cache_leftpad", "dropout_seed"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_modifications_together_equal_the_reference(kind, dtype, rng, monkeypatch):
    # With this limit, two threads divide even such small calls.
    monkeypatch.setattr(cpu_forward, "MIN_PAIRS_PER_WORKER", 64)
    count = 0
    for names in combinations(kind, rng):
        call = drawn_call(kind, dtype, names, rng)
        options = {
            "tile": Tile(int(rng.choice([2, 5, 64])), int(rng.choice([3, BC, 64]))),
            "threads": int(rng.choice([1, 1, 2])),
            "batch_invariant": kind != "dense" and bool(rng.integers(2)),
        }
        print(call, names, options)
        call.check(**options)
        count += 1
    assert count >= 63


# Masked keys


def every_way(kind):
    """Return options for tiles of some keys, tiles of all keys and, except dense, single rows."""
    ways = [{"tile": TILE}, {"tile": Tile(64, 64)}]
    return ways + [{"batch_invariant": True, "tile": TILE}] * (kind != "dense")


def hiding(call, key, rows=slice(None)):
    """Yield modifications that mask keys from `key` on for some rows, and no key for others."""
    mask = np.ones(call.table_shape, bool)
    mask[..., rows, key:] = False
    hidden_rows = np.zeros(call.seqlen_q, bool)
    hidden_rows[rows] = True
    same = {"hidden": hidden_rows, "offset": call.seqlen_k - call.seqlen_q, "key": key}

    def hidden_score(score, i, j, hidden, offset, key):
        return np.where((j >= key) & hidden[i - offset], -np.inf, score)

    def is_visible(i, j, hidden, offset, key):
        return (j < key) | ~hidden[i - offset]

    yield {"mask": mask}
    yield {"bias": np.where(mask, np.float32(0.5), -np.inf).astype(np.float32)}
    yield {"mask": mask, "bias": np.where(mask, 0.25, np.nan).astype(np.float32)}
    yield {"mask_mod": MaskMod(is_visible, **same)}
    yield {"score_mod": ScoreMod(hidden_score, **same)}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["dense", "kvcache", "paged"])
def test_hidden_keys_leave_no_trace_not_even_in_the_rounding(kind, poison, rng):
    key = 11
    call = Call(kind, rng, same_length=True)
    others = {"softcap": 2.0, "alibi_slopes": np.full(4, 0.1, np.float32)}
    # A bias of -inf is left out: it is added to the score, so that NaN stays NaN.
    for hidden in (way for way in hiding(call, key) if [*way] != ["bias"]):
        call.modifications = others | hidden
        for way in every_way(kind):
            call.k = call._placed(call.k_of, "k")
            clean = call.run(**way)
            assert np.isfinite(clean[0]).all()
            call.k = call._placed(
                [np.concatenate([k[:key], np.full_like(k[key:], poison)]) for k in call.k_of], "k"
            )
            assert_same_bits(clean, call.run(**way))


@pytest.mark.parametrize("sinks", [None, [-np.inf, -80, 0, 50]])
@pytest.mark.parametrize("kind", ["dense", "kvcache", "paged"])
def test_rows_that_see_nothing_are_zero_whatever_the_values(kind, sinks, rng):
    rows = slice(2, 7)
    call = Call(kind, rng, same_length=True)
    sinks = None if sinks is None else np.array(sinks, np.float32)
    expected = np.full(4, -np.inf, np.float32) if sinks is None else sinks
    call.v[...] = np.nan
    for hidden in hiding(call, 0, rows):
        call.modifications = hidden | {"sinks": sinks}
        for way in every_way(kind):
            out, lse = call.run(**way)
            assert not out[:, rows].any()
            np.testing.assert_array_equal(
                lse[..., rows], np.broadcast_to(expected[:, None], (2, 4, 5))
            )
            assert np.isnan(np.delete(out, rows, axis=1)).all()
            assert np.isfinite(np.delete(lse, rows, axis=2)).all()


@pytest.mark.parametrize(
    ("modifications", "rows"),
    [
        ({"window_size": (3, -1)}, slice(0, 0)),
        ({"window_size": (3, 3)}, slice(0, 7)),
        ({"window_size": (-1, 0)}, slice(0, 10)),
        ({"seqlens_k": np.array([0, 0])}, slice(0, 13)),
        ({"window_size": (3, -1), "seqlens_k": np.array([1, 1])}, slice(0, 13)),
    ],
)
def test_rows_that_see_nothing_by_their_positions_are_zero(modifications, rows, rng):
    offset = {(3, -1): 5, (3, 3): -10, (-1, 0): -10}.get(modifications.get("window_size"), 0)
    for sinks in (None, np.array([-80, 0, -np.inf, 50], np.float32)):
        call = Call("dense", rng, q_offset=offset)
        call.modifications = modifications | {"sinks": sinks}
        for way in every_way("dense"):
            out, lse = call.check(**way)
            assert not out[:, rows].any()
            nothing = np.full(4, -np.inf) if sinks is None else sinks
            assert (lse[..., rows] == nothing[:, None]).all()
            assert out[:, rows.stop :].all()
            assert np.isfinite(lse[..., rows.stop :]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_first_tiles_are_hidden_are_right(kind, rng):
    for seen_from in (BC - 1, BC, 2 * BC, 3 * BC + 1):
        call = Call(kind, rng, same_length=True)
        for k in call.k_of:
            k[:seen_from] = np.nan
        call.k = call._placed(call.k_of, "k")
        mask = np.ones(call.table_shape, bool)
        mask[..., :seen_from] = False
        for modifications in ({"mask": mask}, {"mask": mask, "sinks": np.zeros(4, np.float32)}):
            call.modifications = modifications
            for way in every_way(kind):
                out, _ = call.check(**way)
                assert np.isfinite(out[: call.starts_q[-1]]).all()


def test_keys_outside_of_all_windows_are_not_processed(rng):
    for kind in ("dense", "kvcache", "paged"):
        call = Call(kind, rng, seqlen_q=3, seqlen_k=90, same_length=True)
        # The query rows are at positions 87 to 89.
        seen = slice(87 - 2 * BC, 88 + BC)
        for k, v in zip(call.k_of, call.v_of, strict=True):
            for x in (k, v):
                x[: seen.start] = np.nan
        call.k, call.v = call._placed(call.k_of, "k"), call._placed(call.v_of, "v")
        call.modifications = {"window_size": (2 * BC, BC)}
        ways = [{"tile": TILE}, {"tile": Tile(64, 64)}]
        if kind != "dense":
            # In batch-invariant calls, KV tiles begin at multiples of Bc, so Bc is 1.
            ways.append({"batch_invariant": True, "tile": Tile(4, 1)})
        for way in ways:
            out, _ = call.run(**way)
            assert np.isfinite(out).all()


def test_padding_is_never_touched(rng):
    call = Call("dense", rng, q_offset=0)
    lengths = np.array([7, 22])
    call.modifications = {"seqlens_k": lengths}
    for b, length in enumerate(lengths):
        call.k[b, length:], call.v[b, length:] = np.nan, np.nan
    for way in every_way("dense"):
        out, lse = call.run(**way)
        for b, length in enumerate(lengths):
            alone = Call("dense", rng, batch=1, seqlen_k=int(length), q_offset=0)
            alone.q, alone.k, alone.v = call.q[b : b + 1], call.k[b : b + 1], call.v[b : b + 1]
            alone.k, alone.v = alone.k[:, :length], alone.v[:, :length]
            expected_out, expected_lse = alone.run(**way)
            expected = expected_out[0], expected_lse[0]
            assert_all_close((out[b], lse[b]), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("q_offset", [0, 17, -6, 50])
def test_windows_of_all_widths_about_a_tile_equal_the_reference(q_offset, rng):
    call = Call("dense", rng, heads=(2, 1), batch=1, q_offset=q_offset)
    for call.causal, window in itertools.product(
        (False, True), itertools.product(DISTANCES[1:], repeat=2)
    ):
        call.modifications = {"window_size": window}
        call.check(tile=TILE)


@pytest.mark.parametrize("window", [(0, 0), (BC - 1, 0), (BC, 1), (BC + 1, None), (1000, 0)])
@pytest.mark.parametrize("kind", ["varlen", "paged"])
def test_windows_of_sequences_equal_the_reference_row_by_row(kind, window, rng):
    call = Call(kind, rng, batch=4, modifications={"window_size": window})
    call.check(batch_invariant=True, tile=TILE)


# Sinks, and extreme numbers


@pytest.mark.parametrize("kind", ["dense", "kvcache"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sinks_far_above_and_below_equal_the_reference(kind, dtype, rng):
    call = Call(kind, rng, dtype, heads=(9, 3))
    sinks = np.array([-np.inf, -1e4, -100, -20, 0, 20, 88, 100, 1e4], np.float32)
    call.modifications = {"sinks": sinks}
    for way in every_way(kind):
        out, lse = call.check(**way)
        assert not out[:, :, -1].any()
        np.testing.assert_array_equal(lse[:, -1], 1e4)
        without = call.run(**way, with_lse=False)
        assert_same_bits([out], without[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_are_the_plain_result_times_a_sigmoid(kind, rng):
    call = Call(kind, rng, dtype="float64", causal=True)
    sinks = rng.standard_normal(4)
    for way in every_way(kind):
        call.modifications = {}
        plain, plain_lse = call.run(**way)
        call.modifications = {"sinks": sinks}
        out, lse = call.run(**way)
        by_head = sinks[:, None]
        share = 1 / (1 + np.exp(by_head - plain_lse))
        share = share.T if kind == "varlen" else share.swapaxes(1, 2)
        np.testing.assert_allclose(out, plain * share[..., None], rtol=0, atol=1e-13)
        both = np.logaddexp(plain_lse, by_head)
        if kind == "varlen":
            # Rows that belong to no sequence have no sinks.
            both[:, call.starts_q[-1] :] = -np.inf
        np.testing.assert_allclose(lse, both, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["dense", "kvcache"])
def test_values_up_to_the_largest_number_give_finite_results_beside_sinks(kind, rng):
    call = Call(kind, rng, same_length=True)
    for v in call.v_of:
        v[...] = 3e38
    call.v = call._placed(call.v_of, "v")
    call.modifications = {"sinks": np.array([-3, 0, 3, 30], np.float32)}
    for way in every_way(kind):
        out, _ = call.check(**way)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("kind", ["dense", "kvcache"])
def test_scores_beyond_float32_give_nan_where_only_positions_hide(kind, rng):
    call = Call(kind, rng, same_length=True, seqlen_q=30)
    call.k[:, :5] = np.inf
    call.q[...], call.k[:, 5:30] = 1e20, -1e20
    plain = {"window_size": (4, 0), "sinks": np.zeros(4, np.float32)}
    for way in every_way(kind):
        # Rows from 9 on attend to finite keys only.
        call.modifications = plain
        out, lse = call.run(**way)
        assert np.isnan(out[:, 9:]).all()
        assert np.isnan(lse[..., 9:]).all()
        call.modifications = plain | {"mask": np.zeros(call.table_shape, bool)}
        out, lse = call.run(**way)
        assert not out.any()
        assert not lse.any()


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_what_a_bias_makes_of_a_seen_pair_stays(number, rng):
    for kind in ("dense", "kvcache", "paged"):
        call = Call(kind, rng, same_length=True)
        bias = np.zeros(call.table_shape, np.float32)
        bias[1, 2, 3, 20] = number
        call.modifications = {"bias": bias}
        for way in every_way(kind):
            out, lse = call.check(**way)
            assert np.isnan(out[1, 3, 2]).all()
            assert np.isnan(lse[1, 2, 3])
            assert np.isnan(lse).sum() == 1


# Equivalent arguments


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_is_a_window_that_ends_at_the_query(dtype, rng):
    for q_offset in (None, 0, 9, -4, 33):
        call = Call("dense", rng, dtype, q_offset=q_offset)
        for way in every_way("dense"):
            call.causal, call.modifications = True, {"window_size": (None, None)}
            causal = call.run(**way)
            call.causal, call.modifications = False, {"window_size": (-1, 0)}
            assert_same_bits(causal, call.run(**way))
            call.causal, call.modifications = True, {"window_size": (None, 5)}
            assert_same_bits(causal, call.run(**way))


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_window_looks_back_only(kind, rng):
    call = Call(kind, rng)
    for way in every_way(kind):
        call.causal, call.modifications = True, {"window_size": (6, 6)}
        causal = call.run(**way)
        call.causal, call.modifications = False, {"window_size": (6, 0)}
        assert_same_bits(causal, call.run(**way))


@pytest.mark.parametrize("kind", ["dense", "kvcache", "paged"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_array_says_what_a_function_says(kind, dtype, rng):
    call = Call(kind, rng, dtype, same_length=True)
    shape, offset = call.table_shape, call.seqlen_k - call.seqlen_q
    mask, bias = rng.random(shape) < 0.7, rng.standard_normal(shape).astype(np.float32)
    slopes = np.array([0.3, 0.1, 0.0, 0.5], np.float32)
    rows, keys = np.arange(call.seqlen_q)[:, None] + offset, np.arange(shape[-1])
    alibi = (-slopes[:, None, None] * np.abs(rows - keys).astype(np.float32))[None]
    masked = MaskMod(
        lambda b, h, i, j, mask, offset: mask[b, h, i - offset, j], mask=mask, offset=offset
    )
    biased = ScoreMod(
        lambda score, b, h, i, j, bias, offset: score + bias[b, h, i - offset, j],
        bias=bias,
        offset=offset,
    )
    same = [
        ({"mask": mask}, {"mask_mod": masked}),
        ({"bias": bias}, {"score_mod": biased}),
        ({"bias": alibi}, {"alibi_slopes": slopes}),
        ({"alibi_slopes": slopes}, {"alibi_slopes": np.tile(slopes, (2, 1))}),
        ({"mask": np.broadcast_to(mask[:1, :1], shape)}, {"mask": mask[:1, :1].copy()}),
        ({"bias": np.where(mask, 0, -np.inf).astype(np.float32)}, {"mask": mask}),
        ({"softcap": 1.5}, {"score_mod": ScoreMod(lambda score: 1.5 * np.tanh(score / 1.5))}),
    ]
    for way in every_way(kind):
        results = []
        for one, other in same:
            for call.modifications in (one, other):
                results.append(call.run(**way))
            assert_same_bits(*results[-2:])
        assert len({out.tobytes() for out, _ in results}) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_of_all_keys_undoes_causality_and_one_of_none_does_nothing(kind, rng):
    call = Call(kind, rng, batch=3)
    nothing = {"window_size": (None, None)}
    for way in every_way(kind):
        for causal, prefix in ((True, 0), (False, 1000)):
            call.causal, call.modifications = causal, nothing
            plain = call.run(**way)
            call.causal, call.modifications = True, {"prefix_lens": np.full(3, prefix)}
            assert_all_close(plain, call.run(**way), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [(2, 0), (2, 3), (None, 0), (0, None), (1000, 1000)])
def test_a_prefix_is_seen_in_spite_of_a_window_too(kind, window, rng):
    call = Call(kind, rng, batch=3)
    prefixes = np.array([0, 4, 1000], np.int32)
    left, right = (1000 if bound is None else bound for bound in window)
    for causal in (True, False):
        reach = min(right, 0) if causal else right
        call.causal, call.modifications = causal, {"window_size": window, "prefix_lens": prefixes}
        found = call.run()
        seen = MaskMod(
            lambda b, i, j, prefixes, left, reach: (
                (j < prefixes[b]) | ((j >= i - left) & (j <= i + reach))
            ),
            prefixes=prefixes,
            left=left,
            reach=reach,
        )
        call.causal, call.modifications = False, {"mask_mod": seen}
        assert_all_close(found, call.run(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "kvcache", "paged"])
def test_a_tree_that_is_one_branch_is_causal(kind, rng):
    call = Call(kind, rng)
    bits = np.array([2 ** (row + 1) - 1 for row in range(call.seqlen_q)], np.uint64)
    for way in every_way(kind):
        call.causal, call.modifications = True, {"window_size": (None, None)}
        causal = call.run(**way)
        call.causal, call.modifications = False, {"tree_mask": np.tile(bits, (2, 1))}
        assert_all_close(causal, call.run(**way), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_modifications_that_say_nothing_change_nothing(kind, rng):
    call = Call(kind, rng, causal=True)
    plain = call.run()
    for modifications in (
        {"window_size": (1000, 1000)},
        {"mask": np.ones(call.table_shape, bool)},
        {"bias": np.zeros(call.table_shape, np.float32)},
        {"sinks": np.full(4, -np.inf, np.float32)},
        {"alibi_slopes": np.zeros(4, np.float32)},
        {"prefix_lens": np.zeros(2, np.int32)},
    ):
        call.modifications = modifications
        assert_all_close(plain, call.run(), rtol=0, atol=1e-6)


# Bitwise reproducibility


def modified_of_everything(call, rng):
    """Return modifications that do not depend on where a row lies in the arrays of a call."""
    return {
        "window_size": (2 * BC + 3, 2),
        "softcap": 4.0,
        "score_mod": SCORE_MODS[0],
        "alibi_slopes": drawn_slopes(call, rng)[..., :4].reshape(-1)[:4],
        "mask_mod": MASK_MODS[0],
        "sinks": np.array([-1, 0, 2, 1], np.float32),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant_bits_do_not_depend_on_chunks(dtype, rng):
    seqlen = 41
    whole = Call(
        *("kvcache", rng, dtype), seqlen_q=seqlen, seqlen_k=seqlen, causal=True, same_length=True
    )
    bias = rng.standard_normal((2, 4, seqlen, whole.capacity)).astype(np.float32)
    mask = rng.random(bias.shape) < 0.8
    same = modified_of_everything(whole, rng)
    whole.modifications = same | {"bias": bias, "mask": mask}
    options = {"batch_invariant": True, "tile": TILE}
    out, lse = whole.check(**options)
    for first, stop in itertools.pairwise([0, 17, 18, 19, 30, seqlen]):
        rows = slice(first, stop)
        chunk = Call("kvcache", rng, dtype, seqlen_q=stop - first, seqlen_k=stop, causal=True)
        chunk.q, chunk.k, chunk.v = whole.q[:, rows], whole.k, whole.v
        chunk.lengths_k = np.full(2, stop)
        chunk.modifications = same | {"bias": bias[:, :, rows], "mask": mask[:, :, rows]}
        assert_same_bits((out[:, rows], lse[..., rows]), chunk.run(**options))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_long_work_items_are_cut_without_changing_a_bit(dtype, rng, monkeypatch):
    for kind in ("varlen", "kvcache"):
        call = Call(kind, rng, dtype, heads=(4, 2), same_length=True)
        names = ["bias", "mask", "alibi_slopes", "sinks", "tree_mask", "score_mod", "mask_mod"]
        call.modifications = {name: DRAW[name](call, rng) for name in names}
        call.modifications["window_size"] = (20, 3)
        with monkeypatch.context() as patch:
            whole = call.check(batch_invariant=True)
            patch.setattr(varlen, "MAX_PAIRS_PER_ITEM", 0)
            patch.setattr(varlen, "MAX_ROWS_PER_ITEM", 7)
            assert_same_bits(whole, call.run(batch_invariant=True))


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_whatever_the_number_of_threads(kind, rng, monkeypatch):
    monkeypatch.setattr(cpu_forward, "MIN_PAIRS_PER_WORKER", 1)
    monkeypatch.setattr(varlen, "MIN_PAIRS_FOR_THREADS", 1)
    call = Call(kind, rng, batch=4)
    call.modifications = modified_of_everything(call, rng) | {
        "prefix_lens": np.arange(4),
        "bias": drawn_bias(call, rng),
    }
    for way in every_way(kind):
        first = call.run(**way)
        for threads in (2, 3):
            assert_same_bits(first, call.run(**way, threads=threads))


def test_sequences_of_one_shape_share_steps_whose_masks_differ_or_not(rng):
    for modifications in ({}, {"prefix_lens": np.array([3, 29, 0, 12, 20])}):
        for kind in ("dense", "kvcache"):
            call = Call(kind, rng, batch=5, causal=True, same_length=True)
            call.modifications = {
                **modifications,
                "score_mod": SCORE_MODS[1],
                "bias": rng.standard_normal(call.table_shape).astype(np.float32),
                "alibi_slopes": rng.random((5, 4)).astype(np.float32),
            }
            together, _ = call.check(tile=Tile(64, 64))
            for b in range(5):
                # The modifications differ between sequences, so the results do, too.
                assert max_error(together[b], together[b - 1]) > 0.01


@pytest.mark.parametrize("same_length", [True, False])
def test_packed_sequences_without_gaps_each_count_from_their_own_beginning(same_length, rng):
    # Plain sequences of one shape are computed in one step; short unequal ones are padded.
    call = Call("varlen", rng, batch=9, gap=0, same_length=same_length, causal=True)
    per_row = rng.standard_normal(call.table_shape).astype(np.float32)
    for call.modifications in (
        {"score_mod": SCORE_MODS[1], "alibi_slopes": rng.random((9, 4)).astype(np.float32)},
        {"score_mod": SCORE_MODS[2], "bias": per_row},
        {"prefix_lens": np.arange(9), "sinks": np.zeros(4, np.float32)},
    ):
        call.check(tile=None)


def test_modifications_of_any_strides_are_read_as_they_are(rng):
    call = Call("dense", rng)
    names = ["bias", "mask", "alibi_slopes", "sinks", "tree_mask", "prefix_lens", "seqlens_k"]
    arrays = {name: DRAW[name](call, rng) for name in names}
    call.modifications, call.causal = arrays, True
    contiguous = call.run()
    # Strides of q, k and v stay, because they may change the order of sums in BLAS.
    call.modifications = {name: np.repeat(x, 2, axis=-1)[..., ::2] for name, x in arrays.items()}
    assert_same_bits(contiguous, call.run())


@pytest.mark.parametrize("q_offset", [2**31 - 1, 2**40, -(2**40)])
def test_offsets_beyond_all_numbers_are_as_good_as_far_ones(q_offset, rng):
    far = 4 * FURTHEST
    call = Call("dense", rng, modifications={"window_size": (3, 3)}, q_offset=q_offset)
    out, lse = call.run()
    assert not out.any()
    assert (lse == -np.inf).all()
    call.modifications = {"softcap": 2.0, "window_size": (None, 0)}
    results = [call.run() for call.q_offset in (q_offset, far if q_offset > 0 else -far)]
    assert_same_bits(*results)
    assert results[0][0].any() == (q_offset > 0)

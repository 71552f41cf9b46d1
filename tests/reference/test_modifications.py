"""Modifications in the reference, compared with a formula for each pair of query and key."""

from __future__ import annotations

import functools
import inspect
import itertools
import math

import numpy as np
import pytest
from support.comparisons import assert_all_close, assert_all_equal
from support.gradients import gradient_oracle

from cupy_flash.mods.block_list import BlockList
from cupy_flash.mods.keywords import NAMES
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.reference.dense import attention_naive, attention_reference
from cupy_flash.reference.gradients import attention_backward_reference
from cupy_flash.reference.packed import attention_varlen_reference, attention_with_kvcache_reference
from cupy_flash.reference.packed_gradients import attention_varlen_backward_reference

SEQLEN_Q, SEQLEN_K, HEADS, DIM = 7, 11, (4, 2), 6
SCALE = -0.4
# tests/api/kvcache/test_used_parts.py covers those for packed sequences and caches.
DENSE = NAMES - {"seqused_q", "cache_leftpad"}


def seen(p, j, row, h, b, length, causal, given):
    """Return whether a pair is visible, by one rule after another."""
    if j >= length:
        return False
    left, right = given.get("window_size", (None, None))
    if j >= given.get("prefix_lens", [0] * (b + 1))[b] and (
        (causal and j > p)
        or (left not in (None, -1) and j < p - left)
        or (right not in (None, -1) and j > p + right)
    ):
        return False
    if "tree_mask" in given:
        first = p - row
        bits = int(given["tree_mask"][b, row])
        if j >= first and (j - first >= 64 or not bits >> (j - first) & 1):
            return False
    if "mask" in given and not given["mask"][b, h, row, j]:
        return False
    return "mask_mod" not in given or bool((p + 2 * j + h + b) % 3)


def score(x, p, j, row, h, b, given):
    """Return a scaled score with all modifications, in the order of docs/guide/masks.md."""
    if "softcap" in given:
        x = given["softcap"] * math.tanh(x / given["softcap"])
    if "score_mod" in given:
        x = 0.5 * x + 0.1 * (p - j) + 0.3 * h - 0.2 * b
    if "alibi_slopes" in given:
        slopes = given["alibi_slopes"]
        x -= float(slopes[h] if slopes.ndim == 1 else slopes[b, h]) * abs(p - j)
    if "bias" in given:
        x += float(given["bias"][b, h, row, j])
    return x


def factors(keys, row, h, b, given):
    """Return the factors of dropout on the weights of a row's keys."""
    if "dropout_p" not in given:
        return [1.0] * len(keys)
    at = gradient_oracle.At(b, h, np.array([row]), np.array(keys, int))
    kept = gradient_oracle.random_bytes(at, *given["dropout_seed"]) >= 256 * given["dropout_p"]
    return np.where(kept, 1 / (1 - given["dropout_p"]), 0).tolist()


def by_pairs(q, k, v, *, causal, q_offset, given, first=0):
    """Return (out, lse) for arrays (batch, seqlen, heads, dim), with Python's exact sums.

    `first` is the index of the first sequence in the arguments of `given`.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    group = heads_q // k.shape[2]
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.zeros((batch, heads_q, seqlen_q))
    for index, row, h in np.ndindex(batch, seqlen_q, heads_q):
        b = first + index
        p = row + int(given["q_offset"][b] if "q_offset" in given else q_offset)
        length = int(given["seqlens_k"][b]) if "seqlens_k" in given else k.shape[1]
        keys = [j for j in range(k.shape[1]) if seen(p, j, row, h, b, length, causal, given)]
        products = [math.fsum(q[index, row, h] * k[index, j, h // group]) for j in keys]
        scores = [
            score(SCALE * x, p, j, row, h, b, given) for j, x in zip(keys, products, strict=True)
        ]
        sink = float(given["sinks"][h]) if "sinks" in given else -math.inf
        total = math.fsum(math.exp(x) for x in [*scores, sink])
        lse[index, h, row] = math.log(total) if total else -math.inf
        for j, x, r in zip(keys, scores, factors(keys, row, h, b, given), strict=True):
            out[index, row, h] += r * math.exp(x) / total * v[index, j, h // group]
    return out, lse


def drawn(rng, batch=2, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K):
    """Return random arguments for each modification."""
    table = batch, HEADS[0], seqlen_q, seqlen_k
    mask = rng.random(table) < 0.6
    mask[:, 1, -1] = False
    return {
        "window_size": (4, 2),
        "softcap": 1.5,
        "alibi_slopes": rng.random((batch, HEADS[0])).astype(np.float32),
        "sinks": np.array([-1.0, 0.5, -np.inf, 3.0]),
        "bias": rng.standard_normal(table).astype(np.float32),
        "mask": mask,
        "prefix_lens": np.arange(3, 3 + batch),
        "tree_mask": rng.integers(0, 2**64, (batch, seqlen_q), np.uint64),
        "score_mod": ScoreMod(
            lambda score, b, h, i, j: 0.5 * score + 0.1 * (i - j) + 0.3 * h - 0.2 * b
        ),
        "mask_mod": MaskMod(lambda b, h, i, j: (i + 2 * j + h + b) % 3 != 0),
        "seqlens_k": np.array([seqlen_k - 3, 5]),
        "q_offset": 4 - 3 * np.arange(batch),
        "dropout_p": 77 / 256,
        "dropout_seed": rng.integers(-(2**63), 2**63, 2).tolist(),
    }


def random_qkv(rng, batch=2, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K):
    shapes = [(batch, seqlen_q, HEADS[0], DIM), (batch, seqlen_k, HEADS[1], DIM)]
    return [rng.standard_normal(shape) for shape in (*shapes, (*shapes[1][:-1], 3))]


def check(q, k, v, given, *, causal, q_offset):
    options = {"causal": causal, "q_offset": q_offset, "softmax_scale": SCALE, **given}
    found = attention_reference(q, k, v, return_lse=True, **options)
    expected = by_pairs(q, k, v, causal=causal, q_offset=q_offset, given=given)
    naive = attention_naive(q, k, v, **options)
    assert_all_close((*found, naive), (*expected, expected[0]), rtol=0, atol=1e-13)
    return found


def test_every_modification_is_checked(rng):
    assert drawn(rng).keys() == DENSE


@pytest.mark.parametrize("name", sorted(DENSE - {"dropout_seed"}))
def test_each_modification_equals_the_formula_pair_by_pair(name, rng):
    q, k, v = random_qkv(rng)
    everything = drawn(rng)
    names = (name, "dropout_seed") if name == "dropout_p" else (name,)
    given = {name: everything[name] for name in names}
    largest_change = 0.0
    for causal, q_offset in ((True, SEQLEN_K - SEQLEN_Q), (False, 2), (True, -3), (True, 9)):
        if name == "prefix_lens" and not causal:
            continue
        modified, _ = check(q, k, v, given, causal=causal, q_offset=q_offset)
        plain, _ = by_pairs(q, k, v, causal=causal, q_offset=q_offset, given={})
        largest_change = max(largest_change, float(np.abs(modified - plain).max()))
    assert largest_change > 0.01


def test_modifications_together_come_in_their_order(rng):
    q, k, v = random_qkv(rng)
    everything = drawn(rng)
    check(q, k, v, everything, causal=True, q_offset=4)
    for left_out in everything.keys() - {"dropout_seed"}:
        given = {name: value for name, value in everything.items() if name != left_out}
        check(q, k, v, given, causal="prefix_lens" in given, q_offset=1)


def test_causality_and_windows_meet_at_every_distance(rng):
    q, k, v = random_qkv(rng, batch=1)
    for window in itertools.product((None, 0, 1, 5, 100), repeat=2):
        check(q, k, v, {"window_size": window}, causal=True, q_offset=3)
        check(q, k, v, {"window_size": window}, causal=False, q_offset=3)


def test_arrays_of_fewer_axes_and_of_axes_of_one_serve_all(rng):
    q, k, v = random_qkv(rng)
    for shape in ((11,), (7, 11), (4, 1, 11), (2, 1, 7, 11), (1, 4, 1, 1), (2, 4, 7, 1)):
        bias = rng.standard_normal(shape)
        for name, table in (("bias", bias), ("mask", bias < 0.5)):
            short = attention_reference(q, k, v, **{name: table})
            whole = attention_reference(q, k, v, **{name: np.broadcast_to(table, (2, 4, 7, 11))})
            np.testing.assert_array_equal(short, whole)


def test_packed_arrays_of_fewer_axes_serve_all_heads(rng):
    q, k, v = (x[0] for x in random_qkv(rng, 1))
    starts_q, starts_k = np.array([0, 3, 7]), np.array([0, 5, 11])
    for shape in ((6,), (7, 6), (7, 1)):
        bias = rng.standard_normal(shape)
        for name, table in (("bias", bias), ("mask", bias < 0.5)):
            short, whole = (
                attention_varlen_reference(q, k, v, starts_q, starts_k, 4, 6, **{name: x})[0]
                for x in (table, np.broadcast_to(table, (4, 7, 6)))
            )
            np.testing.assert_array_equal(short, whole)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        # This mask may be meant to be added to scores; taken as booleans, it would mask all pairs.
        ({"mask": np.zeros((SEQLEN_Q, SEQLEN_K), np.float32)}, "expected bool"),
        ({"score_mod": lambda score: score}, r"expected a ScoreMod: ScoreMod\(function\)"),
        ({"window": (1, 0)}, "pass window_size"),
    ],
)
def test_what_would_be_taken_for_something_else_is_refused(given, message, rng):
    with pytest.raises(TypeError, match=message):
        attention_reference(*random_qkv(rng), **given)


# Arguments that do not fit 2 sequences, 4 query heads, 7 queries and 11 keys.
UNFIT = [
    ({"alibi_slopes": np.zeros(3)}, r"alibi_slopes has shape \(3,\); expected \(4,\)"),
    ({"alibi_slopes": np.zeros((1, 4))}, r"expected \(2, 4\)"),
    ({"sinks": np.zeros(1)}, r"sinks has shape \(1,\); expected \(4,\)"),
    ({"bias": np.zeros((2, 1, 1, 3))}, "bias has shape .* that broadcasts to"),
    ({"mask": np.ones((3, 1, 1, 1, 1), bool)}, "mask has shape .* that broadcasts to"),
    ({"prefix_lens": [3], "causal": True}, r"prefix_lens has shape \(1,\); expected \(2,\)"),
    ({"prefix_lens": [3, 3]}, "pass causal=True"),
    ({"tree_mask": np.zeros((1, 7), np.uint64)}, r"expected \(2, 7\)"),
    (
        {"mask_mod": BlockList(np.ones((3, 1, 1, 1), bool), (8, 8))},
        r"expected \(2 or 1, 4 or 1, row blocks",
    ),
]


@pytest.mark.parametrize(("given", "message"), UNFIT, ids=[str(list(g)) for g, _ in UNFIT])
def test_what_does_not_fit_the_call_is_refused(given, message, rng):
    q, k, v = random_qkv(rng)
    dout = np.zeros((*q.shape[:3], 3))
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    lengths = np.array([0, 7, 14]), np.array([0, 11, 22]), 7, 11
    packed_dout = dout.reshape(-1, *dout.shape[2:])
    # A KV cache and packed sequences of the same sizes are refused, too.
    for call in (
        functools.partial(attention_reference, q, k, v),
        functools.partial(attention_naive, q, k, v),
        functools.partial(attention_backward_reference, dout, q, k, v),
        functools.partial(attention_with_kvcache_reference, q, k, v, cache_seqlens=11),
        functools.partial(attention_varlen_reference, *packed, *lengths),
        functools.partial(attention_varlen_backward_reference, packed_dout, *packed, *lengths),
    ):
        with pytest.raises(ValueError, match=message):
            call(**given)


def test_sequences_of_their_own_lengths_take_no_others(rng):
    q, k, v = random_qkv(rng)
    with pytest.raises(ValueError, match="pass cache_seqlens"):
        attention_with_kvcache_reference(q, k, v, cache_seqlens=11, seqlens_k=[3, 4])
    with pytest.raises(ValueError, match="pass seqused_k"):
        attention_varlen_reference(q[0], k[0], v[0], [0, 7], [0, 11], 7, 11, seqlens_k=[3])


@pytest.mark.parametrize(
    "function",
    [
        lambda score: 1.5,
        lambda score, b, h: 0.5 * h + b,
        lambda score, i: 0.1 * i,
        lambda score, j: 0.2 * j,
        lambda score, i, j: 0.1 * i * j,
    ],
)
def test_scores_may_depend_on_less_than_the_pair_and_its_score(function, rng):
    q, k, v = random_qkv(rng)
    b, h, row, j = np.indices((2, HEADS[0], SEQLEN_Q, SEQLEN_K))
    values = {"score": None, "b": b, "h": h, "i": row + SEQLEN_K - SEQLEN_Q, "j": j}
    scores = function(*(values[name] for name in inspect.signature(function).parameters))
    bias = np.broadcast_to(scores, j.shape).astype(np.float64)
    out = attention_reference(q, k, v, score_mod=ScoreMod(function))
    expected = attention_reference(np.zeros_like(q), k, v, bias=bias)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)


def test_slopes_of_heads_serve_all_sequences(rng):
    q, k, v = random_qkv(rng)
    slopes = rng.random(HEADS[0])
    np.testing.assert_array_equal(
        attention_reference(q, k, v, alibi_slopes=slopes),
        attention_reference(q, k, v, alibi_slopes=np.tile(slopes, (2, 1))),
    )


def test_packed_sequences_count_from_their_own_beginning(rng):
    lengths_q, lengths_k = (5, 0, 3), (9, 4, 2)
    starts_q, starts_k = (np.concatenate([[0], np.cumsum(n)]) for n in (lengths_q, lengths_k))
    q, k, v = (x[0] for x in random_qkv(rng, 1, starts_q[-1], starts_k[-1]))
    table = rng.standard_normal((HEADS[0], starts_q[-1], 10))
    given = drawn(rng, batch=3, seqlen_q=5)
    del given["seqlens_k"]
    per_row, per_key = rng.standard_normal(starts_q[-1]), rng.standard_normal(starts_k[-1])
    offsets = given["q_offset"]
    captures = {"offsets": offsets, "per_row": per_row, "per_key": per_key}
    product = ScoreMod(
        lambda score, b, i, j, offsets, q_start, k_start, per_row, per_key: (
            score + per_row[q_start + i - offsets[b]] * per_key[k_start + j]
        ),
        **captures,
    )
    for mod in (given["score_mod"], product):
        packed = given | {"bias": table, "mask": table < 0.8, "score_mod": mod}
        out, lse = attention_varlen_reference(
            *(q, k, v, starts_q, starts_k, 5, 10), causal=True, softmax_scale=SCALE, **packed
        )
        for b in (0, 2):
            rows, keys = (slice(x[b], x[b + 1]) for x in (starts_q, starts_k))
            # The part of this sequence is repeated, so that it has the sequence's index.
            bias = np.repeat(table[None, :, rows, : lengths_k[b]], 3, axis=0)
            own = given | {"bias": bias, "mask": bias < 0.8}
            if mod is product:
                # Only ALiBi, a sum, is applied between score_mod and bias. So the product that
                # score_mod adds can be added to the bias instead.
                del own["score_mod"]
                own["bias"] = bias + np.outer(per_row[rows], per_key[keys])
            one = q[None, rows], k[None, keys], v[None, keys]
            same = {"causal": True, "q_offset": offsets[b], "first": b}
            expected = [x[0] for x in by_pairs(*one, **same, given=own)]
            assert_all_close((out[rows], lse[:, rows]), expected, rtol=0, atol=1e-13)


def test_a_cache_has_tables_of_its_capacity(rng):
    q, k, v = random_qkv(rng, batch=3, seqlen_q=2, seqlen_k=12)
    lengths = np.array([12, 1, 5])
    given = drawn(rng, batch=3, seqlen_q=2, seqlen_k=12)
    for name in ("seqlens_k", "dropout_p", "dropout_seed"):
        del given[name]
    cached = attention_with_kvcache_reference(
        q, k, v, cache_seqlens=lengths, causal=True, softmax_scale=SCALE, **given
    )
    for b, length in enumerate(lengths):
        one = q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length]
        same = {"causal": True, "q_offset": length - 2, "first": b}
        expected = [x[0] for x in by_pairs(*one, **same, given=given)]
        assert_all_close((cached.out[b], cached.lse[b]), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masks_select_after_all_arithmetic(poison, rng):
    q, k, v = random_qkv(rng)
    mask = np.ones((1, 1, 1, SEQLEN_K), bool)
    mask[..., 4:6] = False
    given = drawn(rng) | {"mask": mask}
    call = functools.partial(attention_reference, q, k, v, causal=True, return_lse=True, **given)
    clean = call()
    k[:, 4] = poison
    given["bias"][..., 5] = poison
    assert_all_equal(clean, call())


def test_a_nan_that_a_function_makes_of_a_seen_pair_stays(rng):
    q, k, v = random_qkv(rng)
    mod = ScoreMod(lambda score, b, h, i, j: np.where((b + h == 0) & (i == j), np.nan, score))
    out, lse = attention_reference(q, k, v, score_mod=mod, q_offset=0, return_lse=True)
    assert np.isnan(out[0, :, 0]).all()
    assert np.isnan(lse[0, 0]).all()
    assert np.isnan(lse).sum() == SEQLEN_Q


def test_a_row_without_keys_is_zero_and_its_lse_the_sink(rng):
    q, k, v = random_qkv(rng)
    v[...] = np.nan
    sinks = np.array([-np.inf, -1e4, 0.0, 7.0])
    for hidden in (
        {"mask": np.zeros((1, 1), bool)},
        {"bias": np.full((1, 1), -np.inf)},
        {"window_size": (0, 0), "q_offset": 50},
        {"seqlens_k": [0, 0]},
        {"mask_mod": MaskMod(lambda i, j: i < 0)},
    ):
        out, lse = attention_reference(q, k, v, return_lse=True, sinks=sinks, **hidden)
        assert not out.any()
        np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], lse.shape))
        assert not attention_naive(q, k, v, sinks=sinks, **hidden).any()


VECTORS = {
    "list": [0.5, 0.25, 1, 0], "tuple": (0.1, -2, 0.3, 0), "number": 0.1, "scalar": np.float32(0.3),
    "no axes": np.array(0.1), "beyond float32": np.array([1e-50, 1e300, 0.1, -1e300]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("values", VECTORS.values(), ids=VECTORS)
def test_slopes_and_sinks_are_taken_as_the_functions_take_them(rng, values, dtype):
    q, k, v = (x.astype(dtype) for x in random_qkv(rng))
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    starts = [np.arange(3) * x.shape[1] for x in (q, k)]
    lengths = (*starts, q.shape[1], k.shape[1])
    real = np.float64 if dtype is np.float64 else np.float32
    with np.errstate(all="ignore"):
        array = np.broadcast_to(np.asarray(values, np.float64), (HEADS[0],)).astype(real)
    calls = {
        "dense": lambda x: attention_reference(q, k, v, sinks=x, alibi_slopes=x, return_lse=True),
        "naive": lambda x: [attention_naive(q, k, v, sinks=x, alibi_slopes=x)],
        "packed": lambda x: attention_varlen_reference(*packed, *lengths, sinks=x, alibi_slopes=x),
        "cached": lambda x: attention_with_kvcache_reference(
            q, k, v, cache_seqlens=k.shape[1], sinks=x, alibi_slopes=x
        )[:2],
        "gradients": lambda x: attention_backward_reference(q, q, k, k, sinks=x, alibi_slopes=x),
        "packed gradients": lambda x: attention_varlen_backward_reference(
            packed[0], *packed[:2], packed[1], *lengths, sinks=x, alibi_slopes=x
        ),
    }
    for call in calls.values():
        assert_all_equal(call(values), call(array))


def test_the_gradient_of_one_sink_for_all_heads_is_the_sum_of_theirs(rng):
    q, k, _ = random_qkv(rng)
    call = functools.partial(attention_backward_reference, q, q, k, k, wrt=("sinks",))
    (expected,) = call(sinks=np.full(HEADS[0], 0.5))
    (of_list,) = call(sinks=[0.5] * HEADS[0])
    np.testing.assert_array_equal(of_list, expected)
    for number in (0.5, np.array(0.5)):
        (found,) = call(sinks=number)
        assert np.shape(found) == ()
        np.testing.assert_array_equal(found, expected.sum())


@pytest.mark.parametrize(
    ("values", "message"), [(["a"], "sinks is"), ([0.5] * 3, "sinks has shape")]
)
def test_other_slopes_and_sinks_are_refused(rng, values, message):
    q, k, v = random_qkv(rng)
    with pytest.raises((TypeError, ValueError), match=message):
        attention_reference(q, k, v, sinks=values)

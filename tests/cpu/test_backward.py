"""The CPU backend's backward pass, compared with the reference and with itself."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from support.comparisons import assert_all_close, assert_all_equal, assert_same_bits, peak_memory
from support.draws import few_then_slow
from support.gradients.edge_gradients import (
    EXTREME_SCORES,
    NONE,
    ONE_KEY,
    confident_call,
    gradients_of_padding,
    has_no_digits,
    large_scores_of_one_key,
)
from support.gradients.gradient_calls import KINDS, random_gradient_call
from support.gradients.gradient_rule import check_gradients

from cupy_flash import (
    MaskMod,
    ScoreMod,
    attention_backward_reference,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    plan,
)
from cupy_flash.cpu import batching
from cupy_flash.cpu.backward import gradients as cpu_backward
from cupy_flash.cpu.backward import untiled as untiled_backward
from cupy_flash.cpu.backward.ordered_sum import OrderedSum, Ticket
from cupy_flash.cpu.backward.tiled import _Tile
from cupy_flash.cpu.batching import Run
from cupy_flash.cpu.thread_pool import Stop
from cupy_flash.problem.tile import Tile
from cupy_flash.reference.dense import max_error
from cupy_flash.reference.gradients import backward_naive, gradient_bound, gradient_sizes

DTYPES = ["float16", "bfloat16", "float32", "float64"]
Br, Bc = (1, 5, 16, 64, 300), (7, 32, 100, 512)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", few_then_slow(range(12), 4))
def test_gradients_are_right(kind: str, dtype: str, number: int, rng: Any) -> None:
    call = random_gradient_call(rng, dtype, kind, longest=(70, 160))
    tile = Tile(int(rng.choice(Br)), int(rng.choice(Bc))) if number % 2 else None
    check_gradients(call, call.run(np, backend="cpu", tile=tile))


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k", "dim"),
    [(128, 12, 1, 197, 64), (64, 8, 1, 512, 64), (2048, 1, 1, 256, 4), (64, 32, 2, 128, 128)],
)
def test_short_queries_of_many_sequences_fit_into_scratch(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, dim: int
) -> None:
    q = np.ones((batch, seqlen_q, heads, dim), np.float32)
    k = np.ones((batch, seqlen_k, heads, dim), np.float32)
    lse = np.full((batch, heads, seqlen_q), np.sqrt(dim) + np.log(seqlen_k), np.float32)
    dq, dk, dv = flash_attention_backward(q, q, k, k, q, lse, backend="cpu")
    np.testing.assert_allclose(dq, 0, atol=1e-4)
    np.testing.assert_allclose(dk, 0, atol=1e-4)
    np.testing.assert_allclose(dv, seqlen_q / seqlen_k, rtol=1e-4)


def test_sequences_without_keys_are_one_pass_and_give_sinks_the_gradient_of_lse(
    monkeypatch: Any,
) -> None:
    passes, make = [], cpu_backward.GradientPass.make
    monkeypatch.setattr(
        cpu_backward.GradientPass, "make", lambda *a, **o: passes.append(a) or make(*a, **o)
    )
    count = 2000
    rows, keys = np.zeros((count, 2, 16), np.float32), np.ones((3, 2, 16), np.float32)
    each, none = np.arange(count + 1, dtype=np.int32), np.zeros(count + 1, np.int32)
    sinks, dlse = np.array([1, -2], np.float32), np.ones((2, count), np.float32)
    lse = np.repeat(sinks[:, None], count, axis=1)
    arguments = rows, rows, keys, keys, rows, lse, each, none, 1, 3
    found = flash_attention_varlen_backward(*arguments, sinks=sinks, backend="cpu")
    assert not passes
    assert not any(x.any() for x in found)
    (dsinks,) = flash_attention_varlen_backward(
        *arguments, sinks=sinks, dlse=dlse, wrt=["sinks"], backend="cpu"
    )
    assert len(passes) == 1
    np.testing.assert_array_equal(dsinks, count)


# Small calls


SMALL = [(1, 1, 1), (2, 1, 9), (3, 8, 8), (1, 5, 12), (2, 33, 1), (1, 40, 47), (1, 20, 90)]

# These calls take several steps. They store scores by rows, by keys, or as products of transposed
# queries, and some divide their products.
OF_STEPS = [(9, 130, 65), (3, 9, 3000), (40, 20, 90), (2, 1, 12000), (2, 9, 12000)]


def both_ways(monkeypatch: Any, arguments: tuple[Any, ...], **options: Any) -> tuple[Any, Any]:
    """Return the gradients of a small call, and those of the tiled pass."""
    found = flash_attention_backward(*arguments, **options, backend="cpu")
    with monkeypatch.context() as without:
        without.setattr(cpu_backward, "backward_small", lambda *_: False)
        return found, flash_attention_backward(*arguments, **options, backend="cpu")


def small_call(rng: Any, sizes: tuple[int, int, int], causal: bool) -> tuple[Any, ...]:
    batch, seqlen_q, seqlen_k = sizes
    q, dout = rng.standard_normal((2, batch, seqlen_q, 3, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, batch, seqlen_k, 3, 16)).astype(np.float32)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True, backend="cpu")
    return dout, q, k, v, out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SMALL)
def test_a_small_call_is_one_step(sizes: Any, causal: bool, rng: Any, monkeypatch: Any) -> None:
    arguments = small_call(rng, sizes, causal)
    with monkeypatch.context() as without:
        without.setattr(cpu_backward, "_run", None)
        found = flash_attention_backward(*arguments, causal=causal, backend="cpu")
    check_small(arguments, found, causal)


def check_small(arguments: tuple[Any, ...], found: tuple[Any, ...], causal: bool) -> None:
    dout, q, k, v, out, lse = arguments
    inputs = dout, q, k, v
    truth = attention_backward_reference(*inputs, causal=causal)
    naive = backward_naive(*inputs, out=out, causal=causal)
    sizes = gradient_sizes(*inputs, causal=causal)
    for gradient, right, naively, size in zip(found, truth, naive, sizes, strict=True):
        bound = gradient_bound(naively, right, size, np.float32, lse=lse)
        assert max_error(gradient, right) <= bound


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", OF_STEPS)
def test_steps_of_whole_heads_are_right_and_do_not_depend_on_threads(
    sizes: Any, causal: bool, rng: Any, monkeypatch: Any
) -> None:
    arguments = small_call(rng, sizes, causal)
    monkeypatch.setattr(cpu_backward, "_run", None)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(untiled_backward, "cpus", lambda n=threads: n)
        found.append(flash_attention_backward(*arguments, causal=causal, backend="cpu"))
        assert_same_bits(found[-1], found[0])
    check_small(arguments, found[0], causal)


def test_a_value_that_is_not_finite_leaves_all_steps_to_tiles(rng: Any, monkeypatch: Any) -> None:
    for row in (0, 129):
        arguments = small_call(rng, (9, 130, 65), False)
        arguments[1][4, row, 1, 3] = np.inf
        assert_all_close(*both_ways(monkeypatch, arguments), rtol=1e-4, atol=1e-5)


def test_rows_without_keys_have_no_part_in_gradients(rng: Any) -> None:
    for seqlen_q, seqlen_k in ((8, 5), (700, 400)):
        dout, q, k, v, out, lse = small_call(rng, (2, seqlen_q, seqlen_k), True)
        first = seqlen_q - seqlen_k
        assert not out[:, :first].any()
        assert (lse[:, :, :first] == -np.inf).all()
        seen = dout[:, first:], q[:, first:], k, v, out[:, first:], lse[:, :, first:]
        expected = flash_attention_backward(*seen, causal=True, backend="cpu")
        for array in (dout, q):
            array[:, :first] = np.nan
        dq, dk, dv = flash_attention_backward(dout, q, k, v, out, lse, causal=True, backend="cpu")
        assert not dq[:, :first].any()
        assert_all_equal((dq[:, first:], dk, dv), expected)


def test_empty_sequences_take_no_pass_and_no_record(monkeypatch: Any) -> None:
    count = 20_000
    monkeypatch.setattr(cpu_backward.GradientPass, "make", None)
    made = []
    monkeypatch.setattr(batching, "Run", lambda *of: made.append(of) or Run(*of))
    rows, none = np.ones((count, 2, 16), np.float32), np.zeros(count + 1, np.int32)
    each, lse = np.arange(count + 1, dtype=np.int32), np.zeros((2, count), np.float32)
    for starts_q, starts_k in ((none, none), (each, none), (none, each)):
        arguments = rows, rows, rows, rows, rows, lse, starts_q, starts_k, 4, 4
        found = flash_attention_varlen_backward(*arguments, backend="cpu")
        assert not any(x.any() for x in found)
    assert len(made) <= 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("number", range(6))
def test_values_that_are_not_finite_go_no_further_in_a_small_call(
    number: int, value: float, causal: bool, rng: Any, monkeypatch: Any
) -> None:
    for row in (0, 3, 7):
        arguments = small_call(rng, (2, 8, 8), causal)
        array = arguments[number]
        if number == 5:
            array[1, 2, row] = value
        else:
            array[1, row, 2, 5] = value
        assert_all_close(*both_ways(monkeypatch, arguments, causal=causal), rtol=1e-4, atol=1e-5)


def random_sizes(rng: Any) -> tuple[int, ...]:
    """Return batch, heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v; at most 32 MiB."""
    # Most calls have many short query sequences over many keys, so that blocks hold many heads.
    choices = [(1, 17, 128, 256), (1, 12, 16), (1, 1, 8), (1, 1, 5, 300), (17, 197, 513)]
    choices += [(1, 64, 64, 576), (64, 64, 576)]
    while True:
        batch, heads, group, seqlen_q, seqlen_k, *dims = (int(rng.choice(c)) for c in choices)
        rows, keys = batch * heads * group * seqlen_q, batch * heads * seqlen_k
        if max(rows * max(*dims, seqlen_k), keys * max(dims)) <= 1 << 22:
            return batch, heads, group, seqlen_q, seqlen_k, dims[0], dims[1]


@pytest.mark.slow
def test_what_a_plan_accepts_is_computed_and_the_default_tile_is_accepted(rng: Any) -> None:
    accepted = 0
    for number in range(120):
        batch, heads, group, seqlen_q, seqlen_k, dim, dim_v = random_sizes(rng)
        dtype = rng.choice([np.float16, np.float32, np.float64])
        q, out = (np.ones((batch, seqlen_q, heads * group, n), dtype) for n in (dim, dim_v))
        k, v = (np.ones((batch, seqlen_k, heads, n), dtype) for n in (dim, dim_v))
        lse = np.zeros((batch, heads * group, seqlen_q), np.promote_types(dtype, np.float32))
        options = {"backend": "cpu", "causal": bool(rng.integers(2))}
        if number % 2:
            options["tile"] = {"Br": int(rng.choice(Br)) << 4, "Bc": int(rng.choice(Bc)) << 4}
        try:
            plan(flash_attention_backward, q=q, k=k, v=v, **options)
        except ValueError:
            assert number % 2, (q.shape, v.shape)
            continue
        accepted += 1
        flash_attention_backward(out, q, k, v, out, lse, **options)
        if number % 4:
            continue
        # The first sequence is the longest; the others have at most as many rows.
        lengths = rng.integers(0, seqlen_q + 1, batch)
        lengths[0] = seqlen_q
        cu_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        cu_k = (np.arange(batch + 1) * seqlen_k).astype(np.int32)
        rows, lse = out.reshape(-1, *out.shape[2:])[: cu_q[-1]], lse.swapaxes(0, 1)
        lse = np.ascontiguousarray(lse.reshape(len(lse), -1)[:, : cu_q[-1]])
        flash_attention_varlen_backward(
            *(rows, q.reshape(-1, *q.shape[2:])[: cu_q[-1]]),
            *(x.reshape(-1, *x.shape[2:]) for x in (k, v)),
            *(rows, lse, cu_q, cu_k, seqlen_q, seqlen_k),
            **options,
        )
    assert accepted > 60


BIASES = {
    "of all pairs": (2, 6, 70, 90), "of all sequences": (1, 6, 70, 90),
    "of all heads": (2, 1, 70, 90), "of all rows": (2, 6, 1, 90), "of all keys": (2, 6, 70, 1),
    "of all heads and keys": (1, 1, 70, 1), "of all but keys": (1, 1, 1, 90),
}  # fmt: skip


def random_arrays(rng: Any, *, rows: tuple[int, ...] = (2, 70), keys: tuple[int, ...] = (2, 90)):
    """Return q, k, v and dout, with 6 query heads and 2 KV heads."""
    shapes = [(*rows, 6, 24), (*keys, 2, 24), (*keys, 2, 40), (*rows, 6, 40)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def on_threads(monkeypatch: Any, call: Any) -> None:
    """Assert that a call gives the same bits on one thread and on several."""
    found = []
    monkeypatch.setattr(cpu_backward, "MIN_PAIRS_PER_WORKER", 1)
    monkeypatch.setattr(cpu_backward, "MIN_PAIRS_FOR_THREADS", 1)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(cpu_backward, "cpus", lambda n=threads: n)
        found.append([x.tobytes() for x in call()])
    assert all(each == found[0] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("causal", [False, True])
def test_threads_do_not_change_a_bit(bias: str, causal: bool, rng: Any, monkeypatch: Any) -> None:
    q, k, v, dout = random_arrays(rng)
    table = rng.standard_normal((6, 13)).astype(np.float32)
    options: dict[str, Any] = {
        "causal": causal,
        "bias": rng.standard_normal(BIASES[bias]).astype(np.float32),
        "sinks": rng.standard_normal(6).astype(np.float32),
        "score_mod": ScoreMod(
            lambda score, h, i, j, table: score + table[h, abs(i - j) % 13],
            table=table,
            differentiable=["table"],
        ),
    }
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    wrt = ("q", "k", "v", "bias", "sinks", "score_mod.table")
    options |= {"dlse": lse, "wrt": wrt, "tile": Tile(4, 16)}
    call = functools.partial(flash_attention_backward, dout, q, k, v, out, lse)
    on_threads(monkeypatch, functools.partial(call, **options))


def test_threads_do_not_change_a_bit_of_packed_gradients(rng: Any, monkeypatch: Any) -> None:
    q, k, v, dout = random_arrays(rng, rows=(150,), keys=(130,))
    starts_q = np.array([0, 3, 60, 60, 140], np.int32)
    starts_k = np.array([0, 40, 40, 70, 130], np.int32)
    used = np.array([40, 0, 20, 60], np.int32)
    bias = rng.standard_normal((1, 1, 70)).astype(np.float32)
    options: dict[str, Any] = {"causal": True, "seqused_k": used, "bias": bias}
    lengths = starts_q, starts_k, 80, 70
    out, lse = flash_attention_varlen(q, k, v, *lengths, return_lse=True, **options)
    options |= {"wrt": ("k", "bias", "q", "v"), "tile": Tile(4, 16)}
    call = functools.partial(flash_attention_varlen_backward, dout, q, k, v, out, lse, *lengths)
    on_threads(monkeypatch, functools.partial(call, **options))


def test_a_hidden_value_leaves_no_trace(rng: Any) -> None:
    q, k, v, dout = random_arrays(rng)
    seen = rng.random((1, 1, 70, 90)) < 0.5
    seen[..., ::7] = False
    options: dict[str, Any] = {"mask": seen, "wrt": ("q", "v")}
    exact = attention_backward_reference(dout, q, k, v, **options)
    out, lse = flash_attention(q, k, v, mask=seen, return_lse=True)
    v[:, ::7] = np.nan
    found = flash_attention_backward(dout, q, k, v, out, lse, **options)
    assert_all_close(found, exact, rtol=0, atol=1e-5)


def test_rows_without_keys_leave_no_trace_whatever_they_hold(rng: Any) -> None:
    q, k, v, dout = random_arrays(rng)
    options: dict[str, Any] = {"causal": True, "q_offset": -30}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    exact = attention_backward_reference(dout, q, k, v, **options)
    q[:, :30] = np.nan
    dout[:, :30] = np.inf
    dq, dk, dv = flash_attention_backward(dout, q, k, v, out, lse, **options)
    assert_all_close((dq, dk, dv), exact, rtol=0, atol=1e-5)
    assert not dq[:, :30].any()
    assert not dk[:, 40:].any()
    assert not dv[:, 40:].any()


@pytest.mark.parametrize("size_of_q", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ONE_KEY)
def test_scores_of_a_row_that_sees_one_key_have_no_gradient(
    way: str, dtype: str, size_of_q: float, rng: Any
) -> None:
    call = ONE_KEY[way](rng)
    arrays = call.arrays(dtype, 40, rng, size_of_q)
    dq, dk, dv = call.backward(arrays, call.forward(arrays, np), np, tile=Tile(32, 48))
    assert not dq[:, call.rows].any()
    assert dv.any()
    if call.rows == slice(None):
        assert not dk.any()
    else:
        assert dq.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_lse_leaves_the_scores_of_one_key_no_gradient(dtype: str, rng: Any) -> None:
    arrays = large_scores_of_one_key(dtype, 40, rng)
    call = ONE_KEY["key"](rng)
    out, lse = call.forward(arrays, np)
    for tile in (None, Tile(32, 48)):
        found = call.backward(arrays, (out, lse + 2 * np.spacing(lse)), np, tile=tile)
        assert not found[0].any()
        assert not found[1].any()
        assert found[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_other_keys_with_little_weight_have_gradients(dtype: str, rng: Any) -> None:
    call = confident_call(dtype, 40, rng)
    check_gradients(call, call.run(np, backend="cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", NONE)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_nobody_sees_leaves_no_trace(way: str, dtype: str, value: float, rng: Any) -> None:
    call = NONE[way](rng)
    arrays = call.poisoned(call.arrays(dtype, 40, rng), 0)
    results = call.forward(arrays, np)
    expected = call.backward(arrays, results, np, tile=Tile(32, 48))
    found = call.backward(call.poisoned(arrays, value), results, np, tile=Tile(32, 48))
    assert all(np.isfinite(gradient.astype(np.float32)).all() for gradient in found)
    assert_all_equal(found, expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_some_see_reaches_only_those(name: str, value: float, rng: Any) -> None:
    q, k, v, dout = random_arrays(rng)
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    options: dict[str, Any] = {"causal": True, "q_offset": 0, "tile": Tile(32, 16)}

    def run() -> list[Any]:
        out, lse = flash_attention(*(arrays[n] for n in "qkv"), return_lse=True, **options)
        # In forward, values that are not finite also reach outputs of other rows of the tile.
        out[:, :40] = clean_out[:, :40]
        given = (arrays[n] for n in ("dout", *"qkv"))
        return list(flash_attention_backward(*given, out, lse, **options))

    clean_out = flash_attention(q, k, v, **options)
    expected = run()
    arrays[name][:, 40] = value
    dq, dk, dv = run()
    # Query 40 attends to keys up to 40, and only queries from 40 on attend to key 40.
    np.testing.assert_array_equal(dq[:, :40], expected[0][:, :40])
    assert not np.isfinite(dq[:, 40]).any()
    if name in ("q", "dout"):
        for got, right in ((dk, expected[1]), (dv, expected[2])):
            np.testing.assert_array_equal(got[:, 41:], right[:, 41:])
            assert not np.isfinite(got[:, :41]).any()


def test_rows_of_a_small_dout_are_as_exact_as_others(rng: Any) -> None:
    q, k, v, dout = random_arrays(rng)
    dout[:, 1::2] *= 1e-12
    out, lse = flash_attention(q, k, v, return_lse=True)
    dq = flash_attention_backward(dout, q, k, v, out, lse, wrt=("q",))[0]
    exact = attention_backward_reference(dout, q, k, v, wrt=("q",))[0]
    error = np.abs(dq - exact).max(axis=-1) / np.abs(exact).max(axis=-1)
    assert error.max() < 1e-4


def test_tiles_that_a_mask_hides_are_skipped(rng: Any, monkeypatch: Any) -> None:
    taken: list[int] = []
    of_keys = _Tile._load_keys

    def counted(self: Any, name: str, source: Any, start: int, stop: int) -> Any:
        taken.append(stop - start)
        return of_keys(self, name, source, start, stop)

    monkeypatch.setattr(_Tile, "_load_keys", counted)
    q, k, v, dout = rng.standard_normal((4, 1, 96, 1, 8)).astype(np.float32)
    ways: list[dict[str, Any]] = [
        {"causal": True, "window_size": (0, 0)},
        {"mask_mod": MaskMod(lambda i, j: i // 16 == j // 16)},
    ]
    for options in ways:
        out, lse = flash_attention(q, k, v, return_lse=True, **options)
        taken.clear()
        flash_attention_backward(dout, q, k, v, out, lse, tile=Tile(16, 24), **options)
        # Each tile of rows loads only keys and values that it attends to.
        assert sum(taken) == 2 * 96


def test_memory_does_not_grow_with_the_score_matrix(rng: Any) -> None:
    seqlen = 6000
    q, k, v, dout = rng.standard_normal((4, 1, seqlen, 1, 8)).astype(np.float16)
    out, lse = flash_attention(q, k, v, return_lse=True)
    flash_attention_backward(dout, q, k, v, out, lse)
    peak = peak_memory(lambda: flash_attention_backward(dout, q, k, v, out, lse))
    assert peak < seqlen**2


def test_a_tile_too_large_for_scratch_is_refused(rng: Any) -> None:
    q, k, v, dout = rng.standard_normal((4, 1, 5000, 1, 8)).astype(np.float32)
    lse = np.zeros((1, 1, 5000), np.float32)
    with pytest.raises(ValueError, match="scratch per worker"):
        flash_attention_backward(dout, q, k, v, v, lse, tile=Tile(2000, 5000), backend="cpu")


def test_an_item_waits_until_those_before_it_have_passed() -> None:
    stop = Stop()
    ordered_sum = OrderedSum(stop)
    first, second, other = Ticket(0, "a"), Ticket(1, "a"), Ticket(2, "b")
    for ticket in (first, second, other):
        ordered_sum.enter(ticket)
    assert ordered_sum.wait(first, 10)
    assert ordered_sum.wait(other, 10)
    ordered_sum.release(first, 10)
    assert ordered_sum.wait(second, 10)
    stop.requested = True
    assert not ordered_sum.wait(second, 11)
    added: list[int] = []
    for ticket in (other, second, first):
        ordered_sum.finish(ticket, lambda n=ticket.number: added.append(n))
    assert added == [0, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "score"), [(d, s) for d in DTYPES for s in EXTREME_SCORES if has_no_digits(s, d)]
)
def test_rows_of_extreme_scores_have_no_gradient(dtype: str, score: float, rng: Any) -> None:
    found, zeroed = gradients_of_padding(rng, np, dtype, 24, score)
    assert not found[0][0, :20].any()
    assert not found[0][1, 69].any()
    assert all(gradient.any() for gradient in zeroed)
    assert_all_equal(found, zeroed)


def test_rows_of_extreme_scores_leave_no_trace_if_a_score_of_zero_is_nan(rng: Any) -> None:
    q, k, v, dout = (rng.standard_normal((1, 40, 2, 16), np.float32) for _ in range(4))
    mod = ScoreMod(lambda score, i: score / score * np.where(i < 9, 1e32, 1.0))
    out, lse = flash_attention(q, k, v, return_lse=True, score_mod=mod, backend="cpu")
    assert np.isfinite(lse).all()
    inputs = q, k, v, out, lse
    options: dict[str, Any] = {"score_mod": mod, "backend": "cpu"}
    found = flash_attention_backward(dout, *inputs, **options)
    dout[:, :9] = 0
    expected = flash_attention_backward(dout, *inputs, **options)
    assert all(np.isfinite(gradient).all() for gradient in found)
    assert_all_equal(found, expected)
    assert found[2].any()


@pytest.mark.parametrize("hiding", ["mask", "mask_mod"])
def test_what_only_hides_leaves_gradients_of_extreme_scores(hiding: str, rng: Any) -> None:
    q, k, v, dout = (rng.standard_normal((1, 40, 2, 16), np.float32) for _ in range(4))
    q[..., 0], k[..., 0] = 4000, -4000
    nothing = {"mask": np.ones((1, 1, 40, 40), bool), "mask_mod": MaskMod(lambda i, j: i + j >= 0)}
    found = []
    for options in ({}, {hiding: nothing[hiding]}):
        out, lse = flash_attention(q, k, v, return_lse=True, **options)
        found.append(flash_attention_backward(dout, q, k, v, out, lse, **options))
    assert found[0][2].any()
    for plain, hidden in zip(*found, strict=True):
        np.testing.assert_allclose(hidden, plain, rtol=1e-5, atol=1e-5 * np.abs(plain).max())

"""Functions with flash_attn's names: signatures, results, gradients, written caches, and errors."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.sequence_support import (
    Truth,
    random_kvcache_case,
    random_varlen_case,
)
from support.gpu.gpu_support import DTYPES, lse_bound
from support.libraries import host_array

from cupy_flash import UnsupportedError, attention_reference
from cupy_flash.arrays.kinds import to_torch
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

torch = pytest.importorskip("torch")
fa = pytest.importorskip("cupy_flash.flash_attn")

_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# Parameters of the functions of flash_attn 2.8.3, without annotations, by module.
SIGNATURES = {
    "flash_attn_interface": {
        "flash_attn_func": f"q, k, v, {_OPTIONS}",
        "flash_attn_kvpacked_func": f"q, kv, {_OPTIONS}",
        "flash_attn_qkvpacked_func": f"qkv, {_OPTIONS}",
        "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_OPTIONS}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_OPTIONS}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_OPTIONS}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
        "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
        "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    },
    "bert_padding": {
        "index_first_axis": "input, indices",
        "pad_input": "hidden_states, indices, batch, seqlen",
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    },
}


@pytest.mark.parametrize("module", SIGNATURES)
def test_signatures_are_those_of_flash_attn(module: str) -> None:
    found = importlib.import_module(f"cupy_flash.flash_attn.{module}")
    assert sorted(found.__all__) == sorted(SIGNATURES[module])
    for name, expected in SIGNATURES[module].items():
        signature = inspect.signature(getattr(found, name))
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        bare = signature.replace(parameters=plain, return_annotation=signature.empty)
        assert str(bare) == f"({expected})", name


def test_the_package_holds_the_functions_of_its_interface() -> None:
    assert sorted(fa.__all__) == sorted(SIGNATURES["flash_attn_interface"])
    for name in fa.__all__:
        assert getattr(fa, name) is getattr(fa.flash_attn_interface, name)


def on(device: str, *arrays: Any) -> list[Any]:
    """Return copies of NumPy arrays as tensors; None stays None."""
    return [None if x is None else to_torch(x.copy()).to(device) for x in arrays]


def called(name: str, q: Any, k: Any, v: Any, *lengths: Any, **options: Any) -> Any:
    """Call the function of this name with q, k and v, packed as it expects them."""
    function = getattr(fa, name)
    if "qkvpacked" in name:
        return function(torch.stack([q, k, v], -3), *lengths[::2], **options)
    if "kvpacked" in name:
        return function(q, torch.stack([k, v], -3), *lengths, **options)
    return function(q, k, v, *lengths, **options)


DENSE = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]
VARLEN = [name.replace("attn_", "attn_varlen_") for name in DENSE]


def dense_inputs(
    rng: np.random.Generator, name: str, dtype: Any = np.float64
) -> tuple[np.ndarray, ...]:
    """Return q, k and v with random sizes; with equal sizes for packed qkv."""
    batch, rows, heads, dim = (int(rng.integers(1, n)) for n in (4, 40, 4, 80))
    keys, group = int(rng.integers(1, 60)), int(rng.integers(1, 4))
    if "qkvpacked" in name:
        keys, group = rows, 1
    shapes = (batch, rows, heads * group, dim), *[(batch, keys, heads, dim)] * 2
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DENSE)
def test_results_are_those_of_the_formula(
    name: str, dtype: str, causal: bool, device: str, rng: np.random.Generator
) -> None:
    q, k, v = dense_inputs(rng, name, DTYPES[dtype])
    exact, exact_lse = attention_reference(q, k, v, causal=causal, return_lse=True)
    bound = error_bound(attention_naive(q, k, v, causal=causal), exact, q.dtype, lse=exact_lse)
    out, lse, probabilities = called(
        name, *on(device, q, k, v), causal=causal, return_attn_probs=True
    )
    assert out.dtype == probabilities.dtype == getattr(torch, dtype)
    assert out.device.type == device
    assert max_error(host_array(out), exact) <= bound
    assert max_error(host_array(lse), exact_lse) <= lse_bound(q, k, exact_lse, None)
    # flash_attn returns an empty tensor without dropout.
    assert probabilities.shape == (0,)
    alone = called(name, *on(device, q, k, v), causal=causal, deterministic=True)
    assert torch.equal(alone, out)


def formula(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
) -> tuple[Any, Any]:
    """Compute out and lse by elementary operations, as flash_attn's documentation defines them."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q.transpose(1, 2) @ k.transpose(2, 3) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(rows, device=q.device)[:, None], torch.arange(keys, device=q.device)
    distance = j - (i + keys - rows)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[..., None, None] * distance.abs()
    left, right = (int(x) for x in window_size)
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=q.device)
    hidden |= (distance > 0) if causal else hidden
    hidden |= (distance < -left) if left >= 0 else hidden
    hidden |= (distance > right) if right >= 0 else hidden
    lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    sees_any = (~hidden).any(-1)[:, None]
    shares = (scores - lse.where(sees_any[:, 0], 0)[..., None]).exp().masked_fill(hidden, 0)
    return (shares @ v).transpose(1, 2), lse


# Options of flash_attn, given the sizes of a call.
OPTIONS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "scale": lambda rng, heads: {"softmax_scale": 0.3},
    "causal": lambda rng, heads: {"causal": True},
    "window": lambda rng, heads: {"window_size": tuple(map(int, rng.integers(0, 20, 2)))},
    "list": lambda rng, heads: {"window_size": [int(rng.integers(0, 20)), -1]},
    "tensor": lambda rng, heads: {"window_size": torch.tensor(rng.integers(0, 20, 2))},
    "negative": lambda rng, heads: {"window_size": (-7, int(rng.integers(0, 20)))},
    "causal window": lambda rng, heads: {"causal": True, "window_size": (9, 4)},
    "softcap": lambda rng, heads: {"softcap": 1.5},
    "no softcap": lambda rng, heads: {"softcap": -2.0},
    "alibi": lambda rng, heads: {"causal": True, "alibi_slopes": torch.rand(heads)},
    "alibi of a batch": lambda rng, heads: {"alibi_slopes": torch.rand(3, heads), "softcap": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", DENSE)
def test_options_and_gradients_are_those_of_the_formula(
    name: str, options: str, device: str, rng: np.random.Generator
) -> None:
    q, k, v = (x[:1].repeat(3, 0) for x in dense_inputs(rng, name))
    given = OPTIONS[options](rng, q.shape[2])
    if "alibi_slopes" in given:
        given["alibi_slopes"] = given["alibi_slopes"].double().to(device)
    inputs = [x.requires_grad_() for x in on(device, q, k, v)]
    expected, expected_lse = formula(*inputs, **given)
    out, lse, _ = called(name, *inputs, **given, return_attn_probs=True)
    dout = torch.randn_like(out)
    visible = expected_lse.isfinite()
    dlse = torch.randn_like(lse).where(visible, 0)
    results = []
    for x, y in ((out, lse), (expected, expected_lse)):
        total = (x * dout).sum() + (y.where(visible, 0) * dlse).sum()
        results.append((x, y, *torch.autograd.grad(total, inputs)))
    for found, exact in zip(*results, strict=True):
        # Each element sums at most 60 x 80 products of order 10, in float64.
        torch.testing.assert_close(found, exact, rtol=0, atol=48000 * 2.0**-52)


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences(
    dtype: str, page_size: int, device: str, rng: np.random.Generator
) -> None:
    causal = bool(rng.integers(2))
    problem = random_varlen_case(rng, dtype=dtype, causal=causal, page_size=page_size).problem()
    arguments = problem.arguments()
    names = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table"]
    *tensors, table = on(device, *(arguments[name] for name in names))
    longest = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    for name in VARLEN[: 1 if page_size else 2]:
        paged = {} if table is None else {"block_table": table}
        out, lse, probabilities = called(
            name, *tensors, *longest, causal=causal, return_attn_probs=True, **paged
        )
        problem.check(host_array(out), host_array(lse))
        assert probabilities.shape == (0,)


def test_packed_queries_keys_and_values(device: str, rng: np.random.Generator) -> None:
    problem = random_varlen_case(rng, heads_q=2, causal=True, rows_of_none=0).problem()
    offsets = problem.cu_seqlens_q
    q, k, v = rng.standard_normal((3, int(offsets[-1]), 2, 24), dtype=np.float32)
    *tensors, ends = on(device, q, k, v, offsets)
    lengths = ends, ends, 210, 210
    options = {"causal": True, "window_size": (31, 0)}
    found = called("flash_attn_varlen_qkvpacked_func", *tensors, *lengths, **options)
    assert torch.equal(found, called("flash_attn_varlen_func", *tensors, *lengths, **options))


@pytest.mark.parametrize("name", VARLEN)
def test_packed_sequences_are_differentiable(name: str, device: str) -> None:
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)
    keys = ends if "qkv" in name else torch.tensor([0, 3, 5, 11], dtype=torch.int32, device=device)
    shapes = [(9, 2, 5), *[(int(keys[-1]), 2, 5)] * 2]
    inputs = [
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for shape in shapes
    ]

    def attention(q: Any, k: Any, v: Any) -> Any:
        lengths = ends, keys, 5, 6
        return called(name, q, k, v, *lengths, causal=True, return_attn_probs=True)[0]

    assert torch.autograd.gradcheck(attention, inputs)


def cached(device: str, arguments: dict[str, Any], **options: Any) -> tuple[Any, Any, Any, Any]:
    """Call `flash_attn_with_kvcache`; return out, lse and the caches as NumPy arrays."""
    tensors = {
        name: on(device, x)[0] if isinstance(x, np.ndarray) else x
        for name, x in (arguments | options).items()
    }
    out, lse = fa.flash_attn_with_kvcache(**tensors, return_softmax_lse=True)
    caches = (tensors[name] for name in ("k_cache", "v_cache"))
    return tuple(map(host_array, (out, lse, *caches)))  # type: ignore[return-value]


@pytest.mark.parametrize("seqlen_new", [0, 3])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_are_appended_to_in_place(
    dtype: str, page_size: int, seqlen_new: int, device: str, rng: np.random.Generator
) -> None:
    problem = random_kvcache_case(
        rng,
        dtype=dtype,
        page_size=page_size,
        seqlen_q=3,
        seqlen_new=seqlen_new,
        indexed=page_size == 0,
        causal=bool(rng.integers(2)),
        rotary_dim=32 if seqlen_new else 0,
        rotary_interleaved=bool(rng.integers(2)),
    ).problem()
    out, lse, *caches = cached(device, problem.arguments())
    problem.check(out, lse)
    problem.check_caches(*caches)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (17, 0), "causal": True},
        {"window_size": (9, 4), "softcap": 3.0},
        {"alibi_slopes": np.array([0.5, 0.1, -0.2, 0], np.float32), "num_splits": 2},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_of_cached_calls(
    options: dict[str, Any], device: str, rng: np.random.Generator
) -> None:
    problem = random_kvcache_case(rng, seqlen_q=4, seqlen_new=4).problem()
    arguments = problem.arguments() | options
    out, lse, *caches = cached(device, arguments)
    mods = {name: x for name, x in arguments.items() if name != "num_splits"}
    Truth.of_kvcache(mods).check(out, lse)
    problem.check_caches(*caches)


def test_queries_of_a_windowed_call_rotate_by_their_own_positions(device: str, rng: Any) -> None:
    problem = random_kvcache_case(rng, seqlen_q=3, seqlen_new=3, rotary_dim=16).problem()
    causal = cached(device, problem.arguments() | {"causal": True})
    windowed = cached(device, problem.arguments(), window_size=(-1, 0))
    for found, expected in zip(windowed, causal, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_padding_at_the_left_of_a_cache_is_not_seen(device: str, rng: Any) -> None:
    problem = random_kvcache_case(rng, batch=3, seqlen_q=2, seqlen_new=2, causal=True).problem()
    arguments = problem.arguments()
    # Three rows of large numbers precede each cache; the lengths include them.
    padded = {
        name: np.pad(arguments[name], ((0, 0), (3, 0), (0, 0), (0, 0)), constant_values=99)
        for name in ("k_cache", "v_cache")
    }
    lengths = arguments["cache_seqlens"] + np.int32(3)
    leftpad = np.full(3, 3, np.int32)
    out, lse, *caches = cached(
        device, arguments | padded, cache_seqlens=lengths, cache_leftpad=leftpad
    )
    problem.check(out, lse)
    assert all((cache[:, :3] == 99).all() for cache in caches)
    problem.check_caches(*(cache[:, 3:] for cache in caches))


def test_without_lengths_the_whole_cache_is_seen(device: str, rng: np.random.Generator) -> None:
    for page_size in (0, 16):
        lengths = (96, 96) if page_size else (37, 37)
        case = random_kvcache_case(rng, lengths=lengths, page_size=page_size, slack=0)
        problem = case.problem()
        arguments = problem.arguments() | {"cache_seqlens": None}
        out, lse, *_ = cached(device, arguments)
        problem.check(out, lse)
        tensors = on(device, *(arguments[name] for name in ("q", "k_cache", "v_cache")))
        table = on(device, arguments["block_table"])[0]
        alone = fa.flash_attn_with_kvcache(*tensors, block_table=table)
        np.testing.assert_array_equal(host_array(alone), out)


def test_an_index_selects_rows_of_a_block_table(device: str, rng: np.random.Generator) -> None:
    problem = random_kvcache_case(rng, batch=4, page_size=8, seqlen_new=2).problem()
    arguments = problem.arguments()
    order = rng.permutation(4).astype(np.int32)
    table = np.empty_like(arguments["block_table"])
    table[order] = arguments["block_table"]
    out, lse, *caches = cached(device, arguments, block_table=table, cache_batch_idx=order)
    problem.check(out, lse)
    problem.check_caches(*caches)


@pytest.mark.gpu
def test_an_index_out_of_range_selects_pages_of_zeros(rng: np.random.Generator) -> None:
    problem = random_kvcache_case(rng, lengths=(30, 40), page_size=8, seqlen_new=2).problem()
    arguments, order = problem.arguments(), np.array([0, 2], np.int32)
    expected = cached("cuda", arguments)
    out, _, k_cache, _ = cached("cuda", arguments, cache_batch_idx=order)
    np.testing.assert_array_equal(out[0], expected[0][0])
    assert not out[1].any()
    unwritten = arguments["block_table"][1, 40 // 8]
    np.testing.assert_array_equal(k_cache[unwritten], arguments["k_cache"][unwritten])


def small() -> dict[str, Any]:
    rows = torch.zeros(1, 3, 2, 4)
    return {"q": rows, "k": rows, "v": rows}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"dropout_p": 0.1, "return_attn_probs": True},
            UnsupportedError,
            "return_attn_probs is True and dropout_p is 0.1; expected only one of them",
        ),
        ({"dropout_p": "no"}, TypeError, "dropout_p is 'no'; expected a number"),
        ({"window_size": 3}, TypeError, "window_size is 3, one integer; expected (left, right)"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size is (1, 2, 3); expected a pair"),
        ({"softcap": float("nan")}, ValueError, "softcap is nan"),
        ({"q": np.zeros((1, 3, 2, 4))}, TypeError, "q is a ndarray; expected a tensor"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        fa.flash_attn_func(**(small() | change))


@pytest.mark.parametrize(
    ("name", "inputs", "error", "message"),
    [
        ("flash_attn_qkvpacked_func", [np.zeros((1, 3, 3, 2, 4))], TypeError, "qkv is a ndarray"),
        ("flash_attn_qkvpacked_func", [torch.zeros(1, 3, 2, 2, 4)], ValueError,
         "qkv has shape (1, 3, 2, 2, 4); expected (batch, seqlen, 3, heads, head_dim)"),
        ("flash_attn_kvpacked_func", [torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 3, 2, 4)],
         ValueError, "kv has shape (1, 3, 3, 2, 4); expected (batch, seqlen, 2, heads, head_dim)"),
    ],
)  # fmt: skip
def test_wrong_packed_tensors_are_named(
    name: str, inputs: list[Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        getattr(fa, name)(*inputs)


def test_calls_without_a_backward_pass_say_so_there(device: str, rng: Any) -> None:
    """flash_attn computes such calls, so their results are right, and only gradients an error."""
    rows, cache = on(device, *(rng.standard_normal((1, n, 2, 4)) for n in (3, 8)))
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    ends = torch.tensor([0, 3], dtype=torch.int32, device=device)
    tracked = rows.clone().requires_grad_()

    def cached_call(q: Any, k: Any) -> Any:
        caches = cache.clone(), cache.clone()
        return fa.flash_attn_with_kvcache(q, *caches, k, rows, cache_seqlens=3)

    def paged_call(q: Any, k: Any) -> Any:
        return fa.flash_attn_varlen_func(q[0], cache, cache, ends, ends, 3, 3, block_table=table)

    for call, name in ((cached_call, "with_kvcache"), (paged_call, "varlen_func with block_table")):
        expected = call(rows, rows)
        out = call(tracked, tracked)
        assert torch.equal(out, expected)
        with pytest.raises(NotImplementedError, match=f"flash_attn_{name} has no backward pass"):
            out.sum().backward()
        with torch.no_grad():
            assert not call(tracked, tracked).requires_grad


def test_an_append_needs_the_lengths() -> None:
    cache, rows = torch.zeros(1, 8, 2, 4), torch.zeros(1, 3, 2, 4)
    with pytest.raises(TypeError, match="cache_seqlens is None; expected an integer or"):
        fa.flash_attn_with_kvcache(rows, cache, cache, rows, rows)


# PyTorch's compiler uses deprecated functions of PyTorch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_training_step_is_one_graph(rng: np.random.Generator) -> None:
    qkv = torch.tensor(rng.standard_normal((2, 9, 3, 4, 8)), requires_grad=True)

    def step(qkv: Any) -> Any:
        return fa.flash_attn_qkvpacked_func(qkv * 2, causal=True, window_size=(5, 0)).square().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(qkv), qkv)[0] for f in (compiled, step))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# PyTorch's compiler uses deprecated functions of PyTorch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cached_call_is_part_of_a_compiled_graph(rng: np.random.Generator) -> None:
    q, k_cache = (torch.tensor(rng.standard_normal((2, n, 4, 8))) for n in (2, 20))
    caches = [k_cache.clone() for _ in range(2)]

    def step(cache: Any) -> Any:
        return fa.flash_attn_with_kvcache(q * 2, cache, cache.flip(1), q, q, cache_seqlens=7) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(caches[0]), step(caches[1]))
    assert torch.equal(*caches)
    assert not torch.equal(caches[0], k_cache)

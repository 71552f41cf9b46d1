"""Decoding steps in JAX: updated caches are results, and donated caches are updated in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

BATCH, HEADS, HEADS_KV, DIM = 3, 4, 2, 8


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def step_of(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """Return the arguments of a decoding step as NumPy arrays."""
    new, capacity = int(rng.integers(1, 4)), int(rng.integers(12, 20))
    rows = {n: (BATCH, new, heads, DIM) for n, heads in (("q", HEADS), ("k", 2), ("v", 2))}
    given: dict[str, Any] = {n: normal(rng, *shape) for n, shape in rows.items()}
    given["cache_seqlens"] = rng.integers(2, 8, BATCH).astype(np.int32)
    caches = BATCH
    if name == "one length":
        given["cache_seqlens"] = 5
    if name == "pages":
        caches, capacity = 11, 4
        given["block_table"] = rng.permutation(11)[: BATCH * 3].reshape(BATCH, 3).astype(np.int32)
    if name == "chosen caches":
        caches = BATCH + 2
        given["cache_batch_idx"] = rng.permutation(caches)[:BATCH].astype(np.int32)
    if name == "packed":
        given["cu_seqlens_k_new"] = np.array([0, 2, 2, 3], np.int32)
        given |= {n: normal(rng, 3, 2, DIM) for n in ("k", "v")}
    if name == "rotary":
        given |= {n: normal(rng, 32, DIM // 2) for n in ("rotary_cos", "rotary_sin")}
        given |= {"rotary_interleaved": False, "causal": True}
    if name == "modified":
        given |= {"window_size": (4, 0), "sinks": normal(rng, HEADS), "softcap": 3.0}
        given["cache_leftpad"] = np.array([0, 1, 2], np.int32)
    given |= {n: normal(rng, caches, capacity, HEADS_KV, DIM) for n in ("k_cache", "v_cache")}
    if name in ("int8", "float8"):
        dtype = np.int8 if name == "int8" else jax.numpy.float8_e4m3fn
        given |= {n: np.zeros_like(given[n]).astype(dtype) for n in ("k_cache", "v_cache")}
        given |= {n: np.zeros(given["k_cache"].shape[:3], np.float32) for n in SCALES}
        given["compute_scales"] = True
    if name == "latent":
        given |= {"v": None, "v_cache": None, "head_dim_v": 6}
    if name == "read only":
        given |= {"k": None, "v": None}
    return given


SCALES = ("k_scale", "v_scale")
UPDATED = ("k_cache", "v_cache", *SCALES)
KINDS = (
    *("plain", "one length", "pages", "chosen caches", "packed", "rotary", "modified"),
    *("int8", "float8", "latent", "read only"),
)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_returns_the_output_and_the_updated_caches(
    rng: np.random.Generator, name: str, compiles: bool
) -> None:
    given = step_of(rng, name)
    arrays = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
    options = {n: x for n, x in given.items() if n not in arrays}

    def step(arrays: Any) -> Any:
        return cj.flash_attention_with_kvcache(**arrays, **options)

    found = (jax.jit(step) if compiles else step)(arrays)
    expected = {n: x.copy() for n, x in arrays.items()}
    out, lse = cupy_flash.flash_attention_with_kvcache(
        **expected, **options, return_lse=True, backend="cpu"
    )
    np.testing.assert_array_equal(found.out, out)
    np.testing.assert_array_equal(found.lse, lse)
    for field in UPDATED:
        after = getattr(found, field)
        if field in expected:
            np.testing.assert_array_equal(np.asarray(after), expected[field])
            np.testing.assert_array_equal(given[field], arrays[field])
        else:
            assert after is None


def test_a_donated_cache_is_updated_in_place(rng: np.random.Generator) -> None:
    given = {n: jax.numpy.array(x) for n, x in step_of(rng, "plain").items()}
    caches = {n: given.pop(n) for n in ("k_cache", "v_cache")}
    addresses = {n: x.unsafe_buffer_pointer() for n, x in caches.items()}

    def step(caches: Any, given: Any) -> Any:
        return cj.flash_attention_with_kvcache(**caches, **given)

    kept = jax.jit(step)(caches, given)
    found = jax.jit(step, donate_argnums=0)(caches, given)
    for name, address in addresses.items():
        assert caches[name].is_deleted()
        assert getattr(found, name).unsafe_buffer_pointer() == address
        np.testing.assert_array_equal(getattr(found, name), getattr(kept, name))


def test_generation_is_a_loop_inside_a_compiled_function(rng: np.random.Generator) -> None:
    given = step_of(rng, "one length")
    k_cache, v_cache = (given[n] for n in ("k_cache", "v_cache"))
    q = given["q"][:, :1]

    @jax.jit
    def generate(k_cache: Any, v_cache: Any, q: Any, length: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            caches, x, length = state
            new = x[:, :, :HEADS_KV]
            made = cj.flash_attention_with_kvcache(x, *caches, new, new, cache_seqlens=length)
            return ((made.k_cache, made.v_cache), made.out, length + 1), made.out

        state = (k_cache, v_cache), q, length
        ((caches, _, length), outs) = jax.lax.scan(step, state, None, length=4)
        return caches, outs, length

    caches, outs, length = generate(k_cache, v_cache, q, 3)
    assert length == 7
    expected, x = [k_cache.copy(), v_cache.copy()], q
    for i, out in enumerate(outs):
        new = x[:, :, :HEADS_KV].copy()
        x = cupy_flash.flash_attention_with_kvcache(
            x, *expected, new, new, cache_seqlens=3 + i, backend="cpu"
        )
        np.testing.assert_array_equal(out, x)
    for found, one in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(found, one)


def mapped_of(rng: np.random.Generator, name: str) -> list[set[str]]:
    """Return sets of arguments that are mapped, for the steps of a kind."""
    one = [{"q", "k", "v"}, {"k_cache", "v_cache"}, {"cache_seqlens", "k_cache", "q"}]
    more = {
        "pages": [{"block_table"}, {"block_table", "v_cache"}],
        "chosen caches": [{"cache_batch_idx"}, {"cache_batch_idx", "k_cache"}],
        "packed": [{"cu_seqlens_k_new"}],
        "rotary": [{"rotary_cos", "rotary_sin"}],
        "modified": [{"cache_leftpad"}, {"sinks"}],
        "int8": [{"k_scale"}],
        "read only": [{"v_cache"}],
    }
    return one + more.get(name, [])


def assert_close(found: Any, expected: Any) -> None:
    """Assert that results are close: the CPU backend sums in another order in larger batches."""
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), **close)


@pytest.mark.parametrize("name", KINDS)
def test_steps_are_mapped(rng: np.random.Generator, name: str) -> None:
    given = step_of(rng, name)
    arrays = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
    options = {n: x for n, x in given.items() if n not in arrays}

    def step(arrays: Any) -> Any:
        return cj.flash_attention_with_kvcache(**arrays, **options)

    for chosen in mapped_of(rng, name):
        mapped = chosen & arrays.keys()
        both = {
            n: np.stack([x, rng.permuted(x, axis=0 if n != "cu_seqlens_k_new" else None)])
            if n in mapped
            else x
            for n, x in arrays.items()
        }
        if "cu_seqlens_k_new" in mapped:
            both["cu_seqlens_k_new"] = np.array([[0, 2, 2, 3], [0, 1, 2, 3]], np.int32)
        axes = {n: 0 if n in mapped else None for n in arrays}
        call = jax.vmap(step, (axes,))
        found = jax.jit(call)(both)
        for i in range(2):
            expected = step({n: x[i] if n in mapped else x for n, x in both.items()})
            jax.tree.map(assert_close, jax.tree.map(lambda x, i=i: x[i], found), expected)
        is_looped = bool(mapped & {"cu_seqlens_k_new", "rotary_cos", "sinks"}) or name == "packed"
        assert ("scan[" in str(jax.make_jaxpr(call)(both))) == is_looped


@pytest.mark.parametrize("mapped", [(), ("k_scale",)])
def test_computed_scales_of_one_sequence_are_mapped(
    rng: np.random.Generator, mapped: tuple[str, ...]
) -> None:
    given = step_of(rng, "int8")
    arrays = {n: x[:1] for n, x in given.items() if isinstance(x, np.ndarray)}
    arrays |= {n: np.stack([arrays[n], arrays[n] + 1]) for n in mapped}
    many = np.stack([arrays["k"], 2 * arrays["k"]])

    def step(k: Any, mapped: Any) -> Any:
        given = {**arrays, **mapped, "k": k}
        return cj.flash_attention_with_kvcache(**given, compute_scales=True)

    own = {n: arrays[n] for n in mapped}
    found = jax.jit(jax.vmap(step))(many, own)
    for i in range(2):
        expected = step(many[i], {n: x[i] for n, x in own.items()})
        jax.tree.map(assert_close, jax.tree.map(lambda x, i=i: x[i], found), expected)


def test_caches_of_all_batches_are_not_copied(rng: np.random.Generator) -> None:
    given = step_of(rng, "read only")
    q, k_cache, v_cache = (jax.numpy.array(given[n]) for n in ("q", "k_cache", "v_cache"))

    def step(q: Any) -> Any:
        return cj.flash_attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=[3, 5, 2]).out

    many = jax.numpy.stack([q, q + 1, q + 2])
    text = str(jax.make_jaxpr(jax.vmap(step))(many))
    copies = f"f32[3,{','.join(map(str, k_cache.shape))}]"
    assert copies not in text
    assert text.count("ffi_call[") == 1
    assert_close(jax.vmap(step)(many), np.stack([step(x) for x in many]))


def test_a_step_has_no_gradient(rng: np.random.Generator) -> None:
    given = step_of(rng, "plain")
    q = jax.numpy.array(given.pop("q"))
    with pytest.raises(TypeError, match="flash_attention_with_kvcache is differentiated by JAX"):
        jax.grad(lambda q: cj.flash_attention_with_kvcache(q, **given).out.sum())(q)


def test_arguments_are_checked(rng: np.random.Generator) -> None:
    given = step_of(rng, "plain")
    with pytest.raises(ValueError, match="cache_seqlens has shape"):
        cj.flash_attention_with_kvcache(**given | {"cache_seqlens": [1, 2]})
    with pytest.raises(TypeError, match="cache_seqlens is None"):
        cj.flash_attention_with_kvcache(**given | {"cache_seqlens": None})
    with pytest.raises(Exception, match=r"cache_seqlens\[1\] is 90"):
        cj.flash_attention_with_kvcache(**given | {"cache_seqlens": [1, 90, 2]})

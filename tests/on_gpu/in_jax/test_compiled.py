"""Functions that JAX compiles for a GPU: attention on XLA's stream and in XLA's memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES
from support.gpu import cupy
from support.gradients.gradient_calls import KINDS, random_gradient_call
from support.gradients.gradient_rule import check_gradients
from support.in_jax import run_program, time_limit
from support.in_jax.compiled_call import DIFFERENTIABLE, compiled, in_64_bits

import cupy_flash
from cupy_flash import MaskMod, ScoreMod

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu(capsys: pytest.CaptureFixture[str]) -> Any:
    with time_limit(capsys):
        try:
            (device, *_) = jax.devices("gpu")
        except RuntimeError:
            pytest.skip("JAX has no gpu")
        with jax.default_device(device):
            yield device


def random_arrays(rng: np.random.Generator, dtype: Any, *shapes: tuple[int, ...]) -> list[Any]:
    return [jax.numpy.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (a, b))),
        found,
        expected,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_calls_follow_the_error_rule(
    rng: np.random.Generator, dtype: str, kind: str
) -> None:
    for _ in range(4):
        call = random_gradient_call(rng, dtype, kind)
        call.grad_dtype, call.places = None, {}
        call.wrt = tuple(name for name in call.inputs if name in DIFFERENTIABLE)
        call.forward.mods.get("score_mod", ("", {}))[1].pop("differentiable", None)
        with in_64_bits(dtype):
            (out, lse), gradients = compiled(call)
        positional, named = call.forward.given(cupy)
        function = getattr(cupy_flash, f"flash_attention{'_varlen' * call.is_packed}")
        expected = function(*positional, **named, return_lse=True)
        for found, one in zip((out, lse), expected, strict=True):
            np.testing.assert_array_equal(found, one.get())
        check_gradients(call, gradients)


SHAPES = {
    "short": ((2, 100, 4, 64), (2, 130, 2, 64)),
    "long": ((1, 2048, 8, 128), (1, 2048, 8, 128)),
    # Keys are split, so that the call needs a workspace and counters.
    "split": ((1, 1, 8, 128), (1, 20_000, 2, 128)),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_transformed_functions_have_the_bits_of_eager_calls(
    rng: np.random.Generator, name: str, dtype: str
) -> None:
    of_q, of_k = SHAPES[name]
    inputs = random_arrays(rng, dtype, of_q, of_k, of_k)

    def loss(*xs: Any) -> Any:
        return cj.flash_attention(*xs, causal=True).astype(np.float32).sum()

    expected = jax.value_and_grad(loss, (0, 1, 2))(*inputs)
    for function in (loss, jax.checkpoint(loss)):
        assert_equal(jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*inputs), expected)
    mapped = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1, 2))))
    one = jax.tree.map(lambda x: x[0], mapped(*(x[None] for x in inputs)))
    assert_equal(one, expected)


def test_attention_is_ordered_with_other_operations(rng: np.random.Generator) -> None:
    (x,) = random_arrays(rng, np.float16, (4, 1024, 8, 128))
    (w,) = random_arrays(rng, np.float16, (128, 128))

    def step(x: Any) -> Any:
        return cj.flash_attention(x @ w, x, x) @ w / 128

    found = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: step(x), x))(x)
    expected = x
    for _ in range(20):
        expected = step(expected).block_until_ready()
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (found, expected)), atol=1e-2)


def test_many_calls_are_in_flight_while_threads_use_cupy(rng: np.random.Generator) -> None:
    (q,) = random_arrays(rng, np.float16, (2, 128, 4, 64))
    step = jax.jit(lambda x: cj.flash_attention(x, q, q))
    expected = np.asarray(step(step(q)))

    def noise() -> None:
        for _ in range(500):
            cupy.ones(1000).sum().get()

    found: list[Any] = []

    def work() -> None:
        found.extend(np.asarray(step(step(q))) for _ in range(200))

    threads = [threading.Thread(target=target) for target in (noise, work, work, work, work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 800
    assert_equal(found, [expected] * 800)


def test_float8_arrays_have_scales(rng: np.random.Generator) -> None:
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("float8 attention needs sm_90")
    inputs = random_arrays(rng, jax.numpy.float8_e4m3fn, *[(2, 300, 4, 128)] * 3)
    options = {"q_scale": 0.5, "out_dtype": "float16"}
    found = jax.jit(lambda *xs: cj.flash_attention(*xs, **options))(*inputs)
    assert_equal(found, cupy_flash.flash_attention(*inputs, **options))


def test_a_donated_cache_is_updated_in_place(rng: np.random.Generator) -> None:
    q, k, v = random_arrays(rng, np.float16, (2, 1, 8, 128), *[(2, 1, 2, 128)] * 2)
    caches = random_arrays(rng, np.float16, *[(2, 5000, 2, 128)] * 2)
    lengths = jax.numpy.array([4000, 17], np.int32)

    def step(k_cache: Any, v_cache: Any) -> Any:
        return cj.flash_attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)

    given = [cupy.asarray(np.asarray(x)) for x in (q, *caches, k, v)]
    out, lse = cupy_flash.flash_attention_with_kvcache(
        *given, cache_seqlens=cupy.asarray(np.asarray(lengths)), return_lse=True
    )
    expected = [x.get() for x in (out, lse, *given[1:3])]
    addresses = [x.unsafe_buffer_pointer() for x in caches]
    kept = jax.jit(step)(*caches)
    found = jax.jit(step, donate_argnums=(0, 1))(*caches)
    assert [x.unsafe_buffer_pointer() for x in (found.k_cache, found.v_cache)] == addresses
    for made in (kept, found):
        assert_equal([made.out, made.lse, made.k_cache, made.v_cache], expected)


def test_functions_of_scores_read_arrays_on_the_gpu(rng: np.random.Generator) -> None:
    q, k, v = random_arrays(rng, np.float16, *[(2, 300, 4, 64)] * 3)
    slopes = np.array([0.5, 0.25, 1, 2], np.float32)
    ids = cupy.arange(300, dtype=np.int32) // 100
    options = {
        "score_mod": ScoreMod(lambda score, h, i, j: score - slopes[h] * np.abs(i - j)),
        "mask_mod": MaskMod(lambda i, j: ids[i] == ids[j]),
    }

    def loss(q: Any) -> Any:
        out = cj.flash_attention(q, k, v, **options)
        # The sum itself depends on the order in which XLA adds.
        return out.astype(np.float32).sum(), out

    step = jax.grad(loss, has_aux=True)
    assert_equal(jax.jit(step)(q), step(q))


def test_errors_of_a_handler_are_those_of_the_computation(rng: np.random.Generator) -> None:
    (q,) = random_arrays(rng, np.float32, (1, 8, 2, 64))
    wrong = jax.jit(lambda q: cj.flash_attention(q, q, q, family="hopper", tile=(7, 7)))
    with pytest.raises(Exception, match=r"ValueError|UnsupportedError"):
        wrong(q).block_until_ready()
    assert_equal(jax.jit(cj.flash_attention)(q, q, q), cj.flash_attention(q, q, q))


@pytest.mark.parametrize("others", ["", ",CONDITIONAL"])
def test_recorded_launches_are_replayed_without_a_handler(others: str) -> None:
    flags = f"--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL{others}"
    flags += " --xla_gpu_graph_min_graph_size=1"
    output = run_program("replayed_calls", XLA_FLAGS=flags, JAX_PLATFORMS="cuda")
    print(output)
    assert output.endswith("all right\n")


def test_signals_do_not_end_the_process() -> None:
    assert run_program("interrupted_calls", "gpu", 1000) == "all right\n"


def test_the_process_may_end_before_its_computations() -> None:
    assert run_program("unfinished_calls", "gpu") == "all right\n"


@pytest.mark.parametrize("axes", [(2, 1), (1, 2)])
def test_calls_are_divided_over_two_gpus(rng: np.random.Generator, axes: tuple[int, int]) -> None:
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs two GPUs")
    seed = int(rng.integers(2**31))
    variables = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0,1"}
    output = run_program("divided_calls", seed, *axes, **variables)
    assert output == "all right\n"


def test_calls_with_lists_of_keys_are_those_of_cupy(rng: np.random.Generator) -> None:
    shapes = (2, 5, 8, 64), (2, 300, 2, 64), (2, 300, 2, 64), (2, 5, 8, 64)
    q, k, v, dout = random_arrays(rng, np.float16, *shapes)

    def attention(q: Any, k: Any, v: Any, lists: Any) -> Any:
        return cj.flash_attention(q, k, v, causal=True, key_indices=lists, return_lse=True)

    def gradients(q: Any, k: Any, v: Any, lists: Any, dout: Any) -> Any:
        (out, lse), pullback = jax.vjp(lambda *x: attention(*x, lists), q, k, v)
        return out, lse, *pullback((dout, jax.numpy.zeros_like(lse)))

    compiled_gradients = jax.jit(gradients)
    for _ in range(3):
        lists = rng.integers(-1, 300, (2, 5, 2, 40)).astype(np.int32)
        found = compiled_gradients(q, k, v, jax.numpy.asarray(lists), dout)
        rows = [cupy.asarray(np.asarray(x)) for x in (q, k, v)]
        options = {"causal": True, "key_indices": cupy.asarray(lists)}
        out, lse = cupy_flash.flash_attention(*rows, return_lse=True, **options)
        expected = cupy_flash.flash_attention_backward(
            *(cupy.asarray(np.asarray(dout)), *rows, out, lse),
            dlse=cupy.zeros_like(lse),
            **options,
        )
        assert_equal(found, tuple(x.get() for x in (out, lse, *expected)))

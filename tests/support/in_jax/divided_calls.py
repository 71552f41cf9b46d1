"""Program that divides attention over the devices of JAX, and checks the results.

Arguments: seed of the random arrays, and numbers of devices along the axes x and y of the mesh.
"""

import re
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cupy_flash.jax as cj
from cupy_flash import ScoreMod

rng = np.random.default_rng(int(sys.argv[1]))
axes = tuple(map(int, sys.argv[2:]))
mesh = Mesh(np.array(jax.devices()).reshape(axes), ("x", "y"))
gain = np.array([1, 2, 3, 4], np.float32)
of_heads = ScoreMod(lambda score, h: score * gain[h])


def arrays(*shapes):
    return [jax.numpy.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]


def assert_close(found, expected):
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected)


def assert_divided(array, spec):
    expected = NamedSharding(mesh, spec)
    assert array.sharding.is_equivalent_to(expected, array.ndim), array.sharding


def placed(array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def part(spec, array):
    """Return the shape of a device's part of an array, as the text of a program has it."""
    return ",".join(map(str, NamedSharding(mesh, spec).shard_shape(array.shape)))


def shapes_in(compiled):
    """Return the shapes of q in the library's operations, and the number of gathers."""
    text = compiled.as_text()
    calls = [line for line in text.splitlines() if "cupy_flash" in line and "custom-call(" in line]
    shapes = {re.search(r"f32\[([\d,]+)\]", line).group(1) for line in calls}
    assert len(calls) == 2, calls
    return shapes, text.count("all-gather(") + text.count("all-to-all(")


def check(heads_kv, of_rows, of_keys, divided, **options):
    """Check a call that is divided as `divided` says, for queries that are divided as `of_rows`."""
    q, k, v, bias, sinks = inputs = arrays(
        (4, 6, 4, 8), (4, 8, heads_kv, 8), (4, 8, heads_kv, 8), (1, 4, 6, 8), (4,)
    )

    def loss(q, k, v, bias, sinks):
        out = cj.flash_attention(q, k, v, bias=bias, sinks=sinks, causal=True, **options)
        return (out**2).sum()

    step = jax.value_and_grad(loss, (0, 1, 2, 3, 4))
    given = [placed(q, of_rows), placed(k, of_keys), placed(v, of_keys), bias, sinks]
    compiled = jax.jit(step).lower(*given[:3], placed(bias, P()), placed(sinks, P())).compile()
    assert_close(compiled(*given[:3], placed(bias, P()), placed(sinks, P())), step(*inputs))
    shapes, count = shapes_in(compiled)
    assert shapes == {part(divided, q)}, shapes
    assert (count > 0) == (part(of_rows, q) != part(divided, q)), count


for heads_kv in (4, 2, 1):
    of_heads_kv = "y" if heads_kv > 1 else None
    for spec in (P("x"), P(("x", "y"))):
        check(heads_kv, spec, spec, spec)
    for batch in (None, "x"):
        spec = P(batch, None, "y")
        check(heads_kv, spec, P(batch, None, of_heads_kv), spec)
    check(heads_kv, P(None, "x"), P(None, "x"), P())
# A function of the head sees all heads.
check(2, P("x", None, "y"), P("x", None, "y"), P("x"), score_mod=of_heads)

# Lists of keys are divided as the queries and KV heads to which they belong.
q, k, v = arrays((4, 6, 4, 8), (4, 8, 2, 8), (4, 8, 2, 8))
for of_sequence in (6, 1):
    lists = jax.numpy.asarray(rng.integers(-1, 8, (4, of_sequence, 2, 5)), np.int32)

    def listed(q, k, v, lists):
        return cj.flash_attention(q, k, v, causal=True, key_indices=lists)

    spec = P("x", None, "y")
    found = jax.jit(listed)(*(placed(x, spec) for x in (q, k, v, lists)))
    assert_divided(found, spec)
    assert_close(found, listed(q, k, v, lists))

# Which weights dropout drops depends on the indices of sequence and head.
check(2, P("x"), P("x"), P(), dropout_p=0.3, dropout_seed=7)

# Packed sequences are divided by heads, and caches by sequences and heads.
q, k, v = arrays((9, 4, 8), (9, 2, 8), (9, 2, 8))
ends = jax.numpy.array([0, 4, 9], np.int32)


def packed(q, k, v):
    return cj.flash_attention_varlen(q, k, v, ends, ends, 5, 5, causal=True)


found = jax.jit(packed)(*(placed(x, P(None, "x")) for x in (q, k, v)))
assert_divided(found, P(None, "x"))
assert_close(found, packed(q, k, v))

q, k, v = arrays((2, 1, 4, 8), (2, 1, 2, 8), (2, 1, 2, 8))
caches = arrays((2, 5, 2, 8), (2, 5, 2, 8))


def step(q, k_cache, v_cache, k, v):
    return cj.flash_attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=[2, 4])


spec = P("x", None, "y")
found = jax.jit(step)(*(placed(x, spec) for x in (q, *caches, k, v)))
assert_divided(found.k_cache, spec)
assert_close(found, step(q, *caches, k, v))

# A call on some of the caches, and a mapped axis, which becomes one more batch axis.
more = arrays((3, 5, 2, 8), (3, 5, 2, 8))
found = jax.jit(step)(placed(q, P("x")), *more, placed(k, P("x")), placed(v, P("x")))
assert_close(found, step(q, *more, k, v))

rows = arrays(*[(4, 2, 6, 2, 8)] * 3)
lengths = jax.numpy.asarray(rng.integers(1, 6, (4, 2)), np.int32)


def padded(q, k, v, lengths):
    return (cj.flash_attention(q, k, v, seqlens_k=lengths) ** 2).sum()


mapped = jax.vmap(jax.grad(padded, (0, 1, 2)))
found = jax.jit(mapped)(*(placed(x, P("x")) for x in (*rows, lengths)))
assert_divided(found[0], P("x"))
assert_close(found, mapped(*rows, lengths))

# Calls outside of a compiled function.
q, k, v = arrays(*[(4, 6, 2, 8)] * 3)
found = cj.flash_attention(*(placed(x, P("x")) for x in (q, k, v)))
assert_close(found, cj.flash_attention(q, k, v))
gradients = jax.grad(lambda *xs: (cj.flash_attention(*xs) ** 2).sum(), (0, 1, 2))
assert_close(gradients(*(placed(x, P("x")) for x in (q, k, v))), gradients(q, k, v))

# A query of one sequence with caches, or a bias, of several sequences, which are not divided.
q, caches, new = *arrays((1, 1, 4, 8)), arrays((4, 9, 2, 8), (4, 9, 2, 8)), arrays((1, 1, 2, 8))


def decode(q, k_cache, v_cache, new):
    return cj.flash_attention_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=[3])


found = jax.jit(decode)(q, *(placed(x, P("x")) for x in caches), *new)
assert_close(found, decode(q, *caches, *new))

q, k, v = arrays(*[(1, 4, 6, 2, 8)] * 3)
(bias,) = arrays((4, 2, 6, 6))


def biased(q, k, v, bias):
    return (cj.flash_attention(q, k, v, bias=bias) ** 2).sum()


step = jax.value_and_grad(biased, (0, 1, 2, 3))
assert_close(jax.jit(step)(q, k, v, placed(bias, P("x"))), step(q, k, v, bias))

# Types that say how arrays are divided. In JAX 0.8, sums over devices fail with them.
if jax.__version_info__ >= (0, 9):
    explicit = jax.make_mesh(axes, ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    q, k, v, bias, sinks = inputs = arrays(*[(4, 6, 4, 8)] * 3, (1, 4, 6, 6), (4,))

    def of_types(q, k, v, bias, sinks):
        return (cj.flash_attention(q, k, v, bias=bias, sinks=sinks, causal=True) ** 2).sum()

    step = jax.value_and_grad(of_types, (0, 1, 2, 3, 4))
    expected = step(*inputs)
    for batch, heads in (("x", "y"), (("x", "y"), None)):
        spec = P(batch, None, heads)
        specs = (spec, spec, spec, P(None, heads), P(heads))
        with jax.set_mesh(explicit):
            given = [jax.device_put(x, s) for x, s in zip(inputs, specs, strict=True)]
            compiled = jax.jit(step).lower(*given).compile()
            shapes, count = shapes_in(compiled)
            assert shapes == {part(spec, q)}, shapes
            assert count == 0, count
            found = compiled(*given)
        for gradient, its_spec in zip(found[1], specs, strict=True):
            assert_divided(gradient, its_spec)
        assert_close(found, expected)

    def appended(q, k_cache, v_cache, k, v):
        made = cj.flash_attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=[2, 4])
        return made.out, made.k_cache

    rows = arrays((2, 1, 4, 8), *[(2, 5, 2, 8)] * 2, *[(2, 1, 2, 8)] * 2)
    expected = appended(*rows)
    with jax.set_mesh(explicit):
        found = jax.jit(appended)(*(jax.device_put(x, P("x", None, "y")) for x in rows))
    for array in found:
        assert_divided(array, P("x", None, "y"))
    assert_close(found, expected)

# shard_map, with keys of one sequence that all devices of an axis use.
if hasattr(jax, "shard_map"):
    q, k, v = arrays((4, 6, 4, 8), (1, 7, 4, 8), (1, 7, 4, 8))

    def one(q, k, v):
        k, v = (jax.numpy.repeat(x, q.shape[0], 0) for x in (k, v))
        return cj.flash_attention(q, k, v, causal=True)

    def step(function):
        return jax.grad(lambda *xs: (function(*xs) ** 2).sum(), (0, 1, 2))

    specs = (P("x", None, "y"), P(None, None, "y"), P(None, None, "y"))
    for checks in (True, False):
        divided = jax.shard_map(
            one, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=checks
        )
        assert_close(jax.jit(step(divided))(q, k, v), step(one)(q, k, v))


# Tangents and second derivatives are divided in the same way as the calls.
def moved(q, k, v, t):
    def loss(q, k, v):
        return (cj.flash_attention(q, k, v, causal=True) ** 2).sum()

    out, tangent = jax.jvp(lambda q: cj.flash_attention(q, k, v, causal=True), (q,), (t,))
    products = jax.jvp(jax.grad(loss, (0, 1, 2)), (q, k, v), (t, k, v))
    return out, tangent, products, jax.grad(lambda q: (jax.grad(loss)(q, k, v) ** 2).sum())(q)


q, k, v, t = arrays((4, 6, 4, 8), (4, 8, 2, 8), (4, 8, 2, 8), (4, 6, 4, 8))
expected = moved(q, k, v, t)
for spec in (P("x"), P("x", None, "y"), P(None, "x")):
    given = [placed(x, spec) for x in (q, k, v, t)]
    assert_close(jax.jit(moved)(*given), expected)
    assert_close(moved(*given), expected)
if hasattr(jax, "shard_map"):
    for spec in (P("x"), P("x", None, "y")):
        divided = jax.shard_map(
            lambda *xs: moved(*xs)[1:], mesh=mesh, in_specs=spec, out_specs=spec
        )
        assert_close(jax.jit(divided)(q, k, v, t), expected[1:])


# So are those with respect to modifications, whose gradients are sums over devices.
def moved_modifications(*inputs):
    def loss(q, k, v, bias, sinks):
        return (cj.flash_attention(q, k, v, bias=bias, sinks=sinks) ** 2).sum()

    bias_and_sinks = inputs[3:]
    first = jax.jvp(lambda *x: loss(*inputs[:3], *x), bias_and_sinks, bias_and_sinks)
    return first, jax.jvp(jax.grad(loss, tuple(range(5))), inputs, inputs)[1]


inputs = arrays((4, 6, 4, 8), (4, 8, 2, 8), (4, 8, 2, 8), (4, 6, 8), (4,))
expected = moved_modifications(*inputs)
for spec, of_bias, of_sinks in ((P("x"), P(), P()), (P("x", None, "y"), P("y"), P("y"))):
    given = [placed(x, spec) for x in inputs[:3]]
    given += [placed(inputs[3], of_bias), placed(inputs[4], of_sinks)]
    assert_close(jax.jit(moved_modifications)(*given), expected)
print("all right")

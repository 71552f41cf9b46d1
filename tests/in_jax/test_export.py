"""Functions with attention are exported by JAX, and run in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.in_jax import run_program

from cupy_flash import ScoreMod

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")
export = pytest.importorskip("jax.export")
pytest.importorskip("flatbuffers")


def arrays(rng: np.random.Generator, batch: int = 2) -> list[Any]:
    shapes = (batch, 5, 4, 8), (batch, 7, 2, 8), (batch, 7, 2, 8)
    return [jax.numpy.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]


def loss(q: Any, k: Any, v: Any) -> Any:
    return (cj.flash_attention(q, k, v, causal=True, window_size=(3, 0)) ** 2).sum()


def test_another_process_runs_an_exported_function(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    inputs, step = arrays(rng), jax.jit(jax.value_and_grad(loss))
    exported = export.export(step, platforms=["cpu", "cuda"], disabled_checks=cj.export_checks())(
        *inputs
    )
    assert exported.platforms == ("cpu", "cuda")
    value, gradient = step(*inputs)
    named = dict(zip("qkv", inputs, strict=True)) | {"value": value, "gradient": gradient}
    np.savez(tmp_path / "arrays.npz", **named)
    (tmp_path / "function").write_bytes(exported.serialize())
    output = run_program(
        "exported_call", tmp_path / "function", tmp_path / "arrays.npz", JAX_PLATFORMS="cpu"
    )
    assert output == "all right\n"


def test_the_batch_of_an_exported_function_may_be_symbolic(rng: np.random.Generator) -> None:
    (batch,) = export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in arrays(rng)]
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    exported = export.export(step, disabled_checks=cj.export_checks())(*shapes)
    restored = export.deserialize(exported.serialize())
    for size in (1, 3):
        inputs = arrays(rng, size)
        found, expected = restored.call(*inputs), step(*inputs)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_exported_function_has_its_gradients(rng: np.random.Generator) -> None:
    inputs = arrays(rng)
    exported = export.export(jax.jit(loss), disabled_checks=cj.export_checks())(*inputs)
    restored = export.deserialize(exported.serialize(vjp_order=1))
    found, expected = (jax.grad(f, (0, 1, 2))(*inputs) for f in (restored.call, loss))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_functions_of_scores_belong_to_the_process(rng: np.random.Generator) -> None:
    from cupy_flash.jax import static_call

    mod, inputs = ScoreMod(lambda score: score / 2), arrays(rng)

    def attention(*inputs: Any) -> Any:
        return cj.flash_attention(*inputs, score_mod=mod)

    exported = export.export(jax.jit(attention), disabled_checks=cj.export_checks())(*inputs)
    np.testing.assert_array_equal(exported.call(*inputs), attention(*inputs))
    token = static_call.token_of(mod)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(static_call._functions, token)
        with pytest.raises(Exception, match="score_mod or mask_mod of another process"):
            jax.block_until_ready(exported.call(*inputs))

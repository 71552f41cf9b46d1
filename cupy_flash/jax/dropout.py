"""Seeds of dropout in calls of JAX: integers, arrays of integers, and keys of `jax.random`.

JAX has no 64-bit integers by default, so programs hold seed and offset as two 32-bit words each,
the lower one first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupy_flash.arrays.kinds import is_number_or_list, seed_and_offset
from cupy_flash.arrays.strided import is_cupy, kind_of
from cupy_flash.mods.keywords import DROPOUT_SEED

# Integers of a seed and of its words.
_NUMBERS, _WORDS = 2, 2


def with_words(modifications: Any) -> Any:
    """Return modifications with a seed that is an array, or a key, as words."""
    seed = modifications.get(DROPOUT_SEED)
    if seed is None or is_number_or_list(seed):
        return modifications
    return {**modifications, DROPOUT_SEED: words_of(seed)}


def words_of(seed: Any) -> Any:
    """Return a seed as a uint32 array of shape (2, 2): the words of the seed and of the offset.

    Parameters
    ----------
    seed
        An integer, or a list of a seed and an offset; an array of one or both; or a key of
        `jax.random`. The first two words of a key's data, the higher one first, are the seed, and
        the next two, if any, are the offset. So `jax.random.key(7)` is the seed 7. An array of
        several uint32 is the data of a key.

    Raises
    ------
    TypeError
        If the seed has another type, or an array another dtype.
    ValueError
        If an array has another shape.
    """
    if is_number_or_list(seed) or isinstance(seed, bool):
        pair = seed_and_offset(DROPOUT_SEED, seed, on_host=True)
        return jnp.asarray(pair.view(np.dtype("<u4")).reshape(_NUMBERS, _WORDS))
    seed = seed.get() if is_cupy(seed) else seed
    if not isinstance(seed, (jax.Array, np.ndarray)):
        raise TypeError(
            f"dropout_seed is {kind_of(seed)}; expected an integer, an array of integers, or a key "
            "of jax.random"
        )
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        _require_one_key(seed.shape)
        seed = jax.random.key_data(seed)
    if seed.dtype == np.uint32 and seed.ndim:
        return _words_of_key(seed)
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"dropout_seed has dtype {seed.dtype}; expected int64, int32, or a key of jax.random"
        )
    if seed.shape not in ((), (_NUMBERS,)):
        raise ValueError(
            f"dropout_seed has shape {seed.shape}; expected (2,), the seed and the offset, or ()"
        )
    if isinstance(seed, np.ndarray):
        # JAX would narrow int64 to int32.
        return words_of(seed.tolist())
    if seed.dtype.itemsize == 8:
        # Operations on numbers would narrow them where 64-bit integers are not enabled.
        words = jax.lax.bitcast_convert_type(seed, jnp.uint32).reshape(-1, _WORDS)
    else:
        is_signed = jnp.issubdtype(seed.dtype, jnp.signedinteger)
        low = seed.astype(jnp.int32 if is_signed else jnp.uint32).reshape(-1)
        high = low >> 31 if is_signed else jnp.zeros_like(low)
        words = jnp.stack((low, high), axis=1).astype(jnp.uint32)
    return _with_offset(words)


def _require_one_key(shape: tuple[int, ...]) -> None:
    if shape:
        raise ValueError(
            f"dropout_seed is an array of keys of shape {shape}; expected one key, see "
            "jax.random.split"
        )


def _words_of_key(data: Any) -> Any:
    """Return the words of seed and offset, given the data of a key."""
    if data.ndim != 1 or data.shape[0] not in (_WORDS, _NUMBERS * _WORDS):
        raise ValueError(
            f"dropout_seed has shape {data.shape}; expected that of the data of one key, (2,) or "
            "(4,), or another dtype"
        )
    return _with_offset(jnp.asarray(data).reshape(-1, _WORDS)[:, ::-1])


def _with_offset(words: Any) -> Any:
    """Return the words of a seed and an offset, which is 0 if `words` are those of a seed only."""
    return jnp.pad(words, ((0, _NUMBERS - len(words)), (0, 0)))

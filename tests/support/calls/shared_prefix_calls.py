"""Random calls over paged caches whose sequences begin with the same pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.calls.latent_support import LATENT, latent_arguments
from support.calls.quantized_support import CACHE_DTYPES, SCALES, QuantizedCase
from support.calls.sequence_support import KVCacheCase

Arguments = dict[str, Any]
PAGE_SIZES = (1, 7, 16, 64)
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Number of ranks of random calls of a test; each has another kind of cache or of call.
KINDS = ("plain", "appended", "rotated", "quantized", "latent")


def random_call(
    rng: np.random.Generator,
    kind: str,
    *,
    on_gpu: bool = False,
    choices: np.random.Generator | None = None,
) -> Arguments:
    """Return the arguments of a call with a shared prefix, as new NumPy arrays.

    The prefix may end within a page, which sequences then do not share. `choices` draws what
    determines the kernels, by default `rng`.
    """
    choices = choices or rng
    page_size = int(choices.choice(PAGE_SIZES))
    shape: dict[str, Any] = {"heads_kv": int(choices.integers(1, 3))}
    shape["heads_q"] = shape["heads_kv"] * int(choices.choice([1, 2, 5]))
    shape["head_dim"], shape["head_dim_v"] = (int(x) for x in choices.integers(4, 80, 2) // 4 * 4)
    if kind == "latent":
        shape |= LATENT | {"heads_q": int(choices.choice([4, 16]))}
    appends = kind in ("appended", "rotated") or choices.random() < 0.3
    dtypes = DTYPES
    if kind == "quantized":
        dtypes = DTYPES[:2] if on_gpu else DTYPES[:3]
    dtype, has_softcap, has_sinks = str(choices.choice(dtypes)), *(choices.random(2) < 0.3)
    causal, interleaved = choices.random(2) < 0.5
    stored = str(choices.choice(list(CACHE_DTYPES)))
    scales = str(choices.choice(SCALES[1:-1]))
    rows, batch = int(rng.integers(1, 5)), int(rng.integers(2, 6))
    shared = int(rng.integers(1, 150))
    pages = -(-shared // page_size)
    # At least as many keys follow the prefix as there are queries.
    longest = pages * page_size + rows + rng.integers(0, 90, batch)
    base = KVCacheCase(
        tuple(int(x) for x in longest),
        dtype=dtype,
        seqlen_q=rows,
        seqlen_new=int(rng.integers(1, 6)) if appends else 0,
        causal=bool(causal),
        page_size=page_size,
        rotary_dim=4 if kind == "rotated" else 0,
        rotary_interleaved=bool(interleaved),
        filler=0.0,
        seed=int(rng.integers(2**32)),
        **shape,
    )
    if kind == "quantized":
        found = QuantizedCase(base, stored, scales).arguments()
    elif kind == "latent":
        found = latent_arguments(base, None, "none")
    else:
        found = base.problem().arguments()
    found["block_table"][:, :pages] = found["block_table"][0, :pages]
    if has_softcap:
        found["softcap"] = 7.5
    if has_sinks:
        found["sinks"] = rng.standard_normal(base.heads_q).astype(
            np.float64 if base.dtype == "float64" else np.float32
        )
    return found | {"shared_prefix_len": shared}

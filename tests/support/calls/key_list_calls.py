"""Random calls whose queries attend to listed keys, and their true results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupy_flash
from cupy_flash.reference.dense import attention_naive, error_bound
from support.calls.latent_support import LATENT
from support.comparisons import with_arrays

KINDS = ("dense", "bhsd", "padded", "varlen", "paged varlen", "cache", "pages", "latent")
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


class KeyListCall(NamedTuple):
    """Call with lists of keys.

    Attributes
    ----------
    function, arguments
        Public function, and its arguments by name, without `key_indices`.
    key_indices
        Lists, as the function takes them.
    sequences
        For each sequence the arguments of `attention_reference` by name, and the index of its rows
        in out and in lse.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    key_indices: np.ndarray
    sequences: list[tuple[dict[str, Any], Any, Any]]

    def run(self, xp: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return out, which is filled with NaN before, and lse."""
        given = with_arrays(xp.asarray, self.arguments | {"key_indices": self.key_indices})
        results = self.function(**given | {"return_lse": True} | options)
        out, lse = (x if isinstance(x, np.ndarray) else x.get() for x in results)
        return out.swapaxes(1, 2) if self.arguments.get("layout") == "bhsd" else out, lse

    def modified(self, make: Callable[[Callable[..., Any]], dict[str, Any]]) -> KeyListCall:
        """Return the call with functions of the user, which depend on no sequence.

        `make` returns them by name, given a function that converts captured arrays.
        """
        own = make(np.asarray)
        sequences = [(given | own, rows, lse_rows) for given, rows, lse_rows in self.sequences]
        return self._replace(arguments=self.arguments | own, sequences=sequences)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """Return out and lse of the reference that takes the same arguments."""
        function = getattr(cupy_flash, _REFERENCES[self.function])
        given = self.arguments | {"key_indices": self.key_indices}
        if self.function is cupy_flash.flash_attention:
            given["return_lse"] = True
        if given.get("v_cache", given) is None:
            columns = given.pop("head_dim_v")
            given["v_cache"] = given["k_cache"][..., :columns]
        out, lse, *_ = function(**given)
        return out.swapaxes(1, 2) if given.get("layout") == "bhsd" else out, lse

    def check(self, out: np.ndarray, lse: np.ndarray) -> None:
        """Fail unless the results obey the error rule."""
        found_out, found_lse = np.zeros(out.shape, bool), np.zeros(lse.shape, bool)
        for given, rows, lse_rows in self.sequences:
            exact, exact_lse = cupy_flash.attention_reference(**given, return_lse=True)
            naive = attention_naive(**given)
            bound = error_bound(naive, exact, given["q"].dtype, lse=exact_lse)
            # Few results may have a small naive error by chance.
            terms = cupy_flash.attention_reference(**given | {"v": np.abs(given["v"])})
            bound += error_bound(terms, terms, given["q"].dtype, lse=exact_lse)
            difference = np.abs(out[rows].astype(np.float64) - exact[0])
            assert difference.max(initial=0) <= bound
            hidden = np.isneginf(exact_lse[0])
            assert not out[rows][np.isneginf(exact_lse[0]).T].any()
            assert np.isneginf(lse[lse_rows][hidden]).all()
            size = max(1, np.abs(exact_lse[0][~hidden]).max(initial=0))
            unit = np.finfo(np.float64 if out.dtype == np.float64 else np.float32).eps
            roundoff = 2**-9 if out.dtype.itemsize == 2 else 0
            np.testing.assert_allclose(
                lse[lse_rows][~hidden],
                exact_lse[0][~hidden],
                rtol=0,
                atol=(64 * unit + roundoff) * size,
            )
            found_out[rows], found_lse[lse_rows] = True, True
        assert not out[~found_out].any()
        assert np.isneginf(lse[~found_lse]).all()


_REFERENCES = {
    cupy_flash.flash_attention: "attention_reference",
    cupy_flash.flash_attention_varlen: "attention_varlen_reference",
    cupy_flash.flash_attention_with_kvcache: "attention_with_kvcache_reference",
}


def with_counts(given: dict[str, Any], lists: np.ndarray) -> dict[str, Any]:
    """Return arguments of the reference in which a key counts as often as it is listed.

    `lists` has the shape (seqlen_q, heads, n). The logarithm of a count is a summand of the scores.
    """
    (_, rows, heads_q, _), keys = given["q"].shape, given["k"].shape[1]
    counts = np.zeros((lists.shape[1], rows, keys))
    for i, head, n in np.ndindex(*lists.shape):
        if 0 <= (j := lists[i, head, n]) < keys:
            counts[head, i, j] += 1
    counts = counts.repeat(heads_q // len(counts), 0)[None]
    seen = counts > 0
    bias = np.log(np.where(seen, counts, 1))
    if "bias" in given:
        bias = bias + given["bias"]
    if "mask" in given:
        seen = seen & given["mask"]
    return given | {"bias": bias, "mask": seen}


def random_call(
    rng: np.random.Generator,
    kind: str,
    *,
    most: int = 60,
    choices: np.random.Generator | None = None,
    has_positions: bool = True,
) -> KeyListCall:
    """Return a random call of one kind, with lists in any order, some of whose keys repeat.

    `choices` draws what determines the kernels, by default `rng`. Without `has_positions`, no mask
    or change of scores depends on the position of a key.
    """
    choices = choices or rng
    batch, heads_kv = int(rng.integers(1, 4)), int(choices.integers(1, 3))
    heads_q = heads_kv * int(choices.choice([1, 2, 4]))
    dims = tuple(int(x) for x in choices.integers(1, 9, 2) * 8)
    if kind == "latent":
        heads_kv, heads_q, dims = 1, int(choices.choice([4, 16])), (LATENT["head_dim"], 512)
    dtype = DTYPES[str(choices.choice(list(DTYPES)))]
    options = _options(choices, heads_q, dtype)
    if not has_positions:
        for name in ("causal", "alibi_slopes", "window_size"):
            options.pop(name, None)
    page_size, has_bias, has_mask = int(choices.choice([1, 5, 16])), *(choices.random(2) < 0.3)
    per_head = int(choices.choice([1, heads_kv]))
    lengths_k = rng.integers(0, most, batch)
    lengths_q = rng.integers(0, 8, batch)
    if kind not in ("varlen", "paged varlen"):
        lengths_q[:] = rng.integers(1, 8)
    if kind in ("dense", "bhsd"):
        lengths_k[:] = rng.integers(1, most)
    rows = [
        [rng.standard_normal((n, h, d)).astype(dtype) for n, h, d in shapes]
        for shapes in (
            ((n, heads_q, dims[0]), (m, heads_kv, dims[0]), (m, heads_kv, dims[1]))
            for n, m in zip(lengths_q, lengths_k, strict=True)
        )
    ]
    if kind == "latent":
        rows = [[q, k, k[..., :512]] for q, k, _ in rows]
    count = int(rng.integers(0, 40))
    lists = [
        rng.integers(-1, max(1, m) + int(rng.integers(3)), (n, per_head, count))
        for n, m in zip(lengths_q, lengths_k, strict=True)
    ]
    arguments, places = _arranged(rng, kind, rows, int(lengths_k.max(initial=0)), page_size)
    of_pairs = {}
    if kind in ("dense", "bhsd", "padded"):
        pairs = (1, int(rng.choice([1, heads_q])), len(rows[0][0]), max(1, int(lengths_k.max())))
        if has_bias:
            of_pairs["bias"] = rng.standard_normal(pairs).astype(dtype)
        if has_mask:
            of_pairs["mask"] = rng.random(pairs) < 0.7
    sequences = []
    for b, (q, k, v) in enumerate(rows):
        own = options | {name: x[..., : len(k)] for name, x in of_pairs.items()}
        if kind in ("dense", "bhsd", "padded"):
            own["q_offset"] = _offset(arguments, kind, q)
        given = {"q": q[None], "k": k[None], "v": v[None]} | own
        if len(q):
            sequences.append((with_counts(given, lists[b]), *places[b]))
    packed = "varlen" in kind
    indices = np.concatenate(lists) if packed else np.stack(lists)
    if packed:
        # A row that belongs to no sequence.
        indices = np.concatenate([indices, np.zeros((1, per_head, count), int)])
    if not packed and kind != "bhsd" and indices.shape[1] == 1 and rng.random() < 0.5:
        indices = indices[:, 0]
    function = {
        "dense": cupy_flash.flash_attention,
        "bhsd": cupy_flash.flash_attention,
        "padded": cupy_flash.flash_attention,
        "varlen": cupy_flash.flash_attention_varlen,
        "paged varlen": cupy_flash.flash_attention_varlen,
    }.get(kind, cupy_flash.flash_attention_with_kvcache)
    given = arguments | options | of_pairs
    return KeyListCall(function, given, indices.astype(np.int32), sequences)


def in_pages(call: KeyListCall) -> KeyListCall:
    """Return the call with rows of pages instead of indices in the sequence.

    Indices past the end of a sequence become -1: the rows there hold NaN.
    """
    given, lists = call.arguments, call.key_indices
    table, size = given["block_table"], given["k_cache" if "k_cache" in given else "k"].shape[1]
    if "cu_seqlens_q" in given:
        row = np.arange(len(lists))
        sequence = np.searchsorted(given["cu_seqlens_q"], row, side="right") - 1
        sequence, lengths = sequence.clip(0, len(table) - 1), given["seqused_k"]
    else:
        sequence, lengths = np.arange(len(table)), given["cache_seqlens"]
    sequence = sequence.reshape(-1, *[1] * (lists.ndim - 1))
    keys = lists.clip(0, table.shape[1] * size - 1)
    rows = table[sequence, keys // size] * size + keys % size
    is_key = (lists >= 0) & (lists < lengths[sequence])
    rows = np.where(is_key, rows, -1).astype(np.int32)
    return call._replace(arguments={**given, "key_indices_in": "pages"}, key_indices=rows)


def _options(rng: np.random.Generator, heads_q: int, dtype: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": float(rng.uniform(0.1, 0.6))}
    real = np.float64 if dtype == np.float64 else np.float32
    if rng.random() < 0.5:
        options["causal"] = True
    if rng.random() < 0.3:
        options["softcap"] = float(rng.uniform(1, 20))
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.uniform(0, 0.3, heads_q).astype(real)
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(heads_q).astype(real)
    if rng.random() < 0.3:
        options["window_size"] = (int(rng.integers(30)), int(rng.integers(10)))
    return options


def _offset(arguments: dict[str, Any], kind: str, q: np.ndarray) -> int:
    """Return the position of the first query, which is that of padded arrays."""
    keys = arguments["k"].shape[2 if kind == "bhsd" else 1]
    return int(keys - len(q))


def _arranged(
    rng: np.random.Generator,
    kind: str,
    rows: list[list[np.ndarray]],
    longest: int,
    page_size: int,
) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Return the arrays of the call, and the index of each sequence in out and lse."""
    every = [(b, b) for b in range(len(rows))]
    lengths = np.array([len(k) for _, k, _ in rows], np.int32)
    q, k, v = zip(*rows, strict=True)
    if "varlen" in kind:
        ends = [np.cumsum([0, *map(len, x)]).astype(np.int32) for x in (q, k)]
        bounds = zip(ends[0][:-1], ends[0][1:], strict=True)
        places = [(slice(a, b), (slice(None), slice(a, b))) for a, b in bounds]
        spare = np.full((1, *q[0].shape[1:]), np.nan, q[0].dtype)
        found = {
            "q": np.concatenate([*q, spare]),
            "cu_seqlens_q": ends[0],
            "max_seqlen_q": max(map(len, q)),
            "max_seqlen_k": longest,
        }
        if kind == "varlen":
            found |= {"k": np.concatenate(k), "v": np.concatenate(v), "cu_seqlens_k": ends[1]}
            return found, places
        table, pages = _pages(rng, (k, v), longest, page_size)
        return found | {
            **{"k": pages[0], "v": pages[1], "block_table": table},
            **{"seqused_k": lengths, "cu_seqlens_k": None},
        }, places
    if kind in ("dense", "bhsd", "padded"):
        found = {"q": np.stack(q), "k": _padded(k, longest), "v": _padded(v, longest)}
        if kind == "bhsd":
            found = {name: x.swapaxes(1, 2) for name, x in found.items()} | {"layout": "bhsd"}
        if kind == "padded":
            found["seqlens_k"] = lengths
        return found, every
    found = {"q": np.stack(q), "cache_seqlens": lengths}
    if kind == "latent":
        table, pages = _pages(rng, (k,), longest, page_size)
        found |= {"k_cache": pages[0], "v_cache": None, "head_dim_v": 512, "block_table": table}
    elif kind == "pages":
        table, pages = _pages(rng, (k, v), longest, page_size)
        found |= {"k_cache": pages[0], "v_cache": pages[1], "block_table": table}
    else:
        order = rng.permutation(len(rows)).astype(np.int32)
        caches = [_padded(x, longest + 3) for x in (k, v)]
        placed = [np.empty_like(x) for x in caches]
        for target, cache in zip(placed, caches, strict=True):
            target[order] = cache
        found |= {"k_cache": placed[0], "v_cache": placed[1], "cache_batch_idx": order}
    return found, every


def _padded(rows: Any, longest: int) -> np.ndarray:
    """Return rows of all sequences, followed by NaN."""
    result = np.full((len(rows), max(1, longest), *rows[0].shape[1:]), np.nan, rows[0].dtype)
    for target, x in zip(result, rows, strict=True):
        target[: len(x)] = x
    return result


def _pages(
    rng: np.random.Generator, arrays: Any, longest: int, size: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a block table, and arrays in pages; other rows hold NaN."""
    batch = len(arrays[0])
    most = max(1, -(-longest // size))
    table = rng.permutation(batch * most).reshape(batch, most).astype(np.int32)
    found = []
    for rows in arrays:
        padded = _padded(rows, most * size)
        pages = np.empty((batch * most, size, *padded.shape[2:]), padded.dtype)
        pages[table.ravel()] = padded.reshape(batch * most, size, *padded.shape[2:])
        found.append(pages)
    return table, found

"""Random calls with modifications: their arguments and true results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_flash import (
    MaskMod,
    ScoreMod,
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR
from cupy_flash.reference.dense import attention_naive, error_bound, max_error, naive_formula
from cupy_flash.reference.modifications import read_modifications
from support.gpu.gpu_support import DTYPES, tanh_error

KINDS = ("dense", "padded", "varlen", "kvcache", "paged")
PAGE = 16
HEAD_DIMS = (8, 32, 64, 72, 128)
# Largest numbers of queries and keys of a sequence.
LONGEST = (150, 399)

# Functions of the gallery by name; `random_call` draws what they capture.
SCORE_MODS = {
    "tanh": lambda score: 20 * np.tanh(score / 20),
    "table": lambda score, h, i, j, table: score + table[h, np.clip(i - j, -20, 20) + 20],
    "quadratic": lambda score, b, i, j, weight: score - weight * np.square(i - j) / (1 + b),
    "gain": lambda score, h, j, gain, shift: gain[h] * score + shift[j % 7],
    "relu": lambda score, j: np.where(j % 3 == 0, np.maximum(score, 0), score),
}
MASK_MODS = {
    "documents": lambda b, i, j, doc: doc[b, i] == doc[b, j],
    "dilated": lambda i, j, step: (i - j) % step == 0,
    "heads": lambda h, i, j: (j + h) % 4 != 1,
    "blocks": lambda i, j: (i // 24 == j // 24) | (j < 3),
}


@dataclass
class ModifiedCall:
    """One call with modifications; its arrays are in host memory.

    `mods` has the name and the captures of the functions of score_mod and mask_mod.
    """

    kind: str  # one of `KINDS`
    dtype: str
    arrays: dict[str, np.ndarray]  # arguments that are arrays, including those of modifications
    options: dict[str, Any]  # other arguments
    mods: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)

    def __str__(self) -> str:
        shapes = {n: (a.shape, str(a.dtype)) for n, a in self.arrays.items()}
        mods = {kind: name for kind, (name, _) in self.mods.items()}
        return f"{self.kind} {self.dtype} {self.options} {mods} {shapes}"

    @property
    def function(self) -> Callable[..., Any]:
        """Public function that the call uses."""
        if self.kind == "varlen":
            return flash_attention_varlen
        return flash_attention_with_kvcache if "k_cache" in self.arrays else flash_attention

    def given(self, xp: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the public function, as arrays of `xp`."""
        arrays = {name: xp.asarray(array) for name, array in self.arrays.items()}
        for kind, (name, captures) in self.mods.items():
            captured = {
                n: xp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in captures.items()
            }
            table, made = (SCORE_MODS, ScoreMod) if kind == "score_mod" else (MASK_MODS, MaskMod)
            arrays[kind] = made(table[name], **captured)
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        if self.kind in ("kvcache", "paged"):
            names = ("q", "k_cache", "v_cache")
        positional = [arrays.pop(name) for name in names if name in arrays]
        options = dict(self.options)
        if self.kind == "varlen":
            positional += [options.pop("max_seqlen_q"), options.pop("max_seqlen_k")]
        return tuple(positional), arrays | options

    def run(self, xp: Any, **how: Any) -> tuple[np.ndarray, np.ndarray]:
        """Run the call over an output of NaN; return output and lse in host memory."""
        positional, named = self.given(xp)
        q, v = self.arrays["q"], self.arrays.get("v", self.arrays.get("v_cache"))
        assert v is not None
        out = xp.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
        result, lse = self.function(*positional, **named, return_lse=True, out=out, **how)
        assert result is out
        return (result, lse) if xp is np else (xp.asnumpy(result), xp.asnumpy(lse))

    def truth(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return output and lse of the float64 reference, and output of the naive formula."""
        positional, named = self.given(np)
        for name in ("num_splits", "batch_invariant"):
            named.pop(name, None)
        if self.kind in ("dense", "padded"):
            out, lse = attention_reference(*positional, **named, return_lse=True)
            return out, lse, attention_naive(*positional, **named)
        if self.kind == "varlen":
            out, lse = attention_varlen_reference(*positional, **named)
        else:
            out, lse = attention_with_kvcache_reference(*positional, **named)[:2]
        return out, lse, self._naive(named, out)

    def _naive(self, named: dict[str, Any], out: np.ndarray) -> np.ndarray:
        """Return the output of the naive formula, sequence by sequence."""
        a, packed = self.arrays, self.kind == "varlen"
        plain = ("cache_seqlens", "block_table", "causal", "softmax_scale")
        mods = {n: x for n, x in named.items() if n not in plain}
        bound_mods = read_modifications(mods, packed=packed)
        naive = out.astype(a["q"].dtype)
        sequences = len(a["cu_seqlens_q"]) - 1 if packed else len(a["q"])
        for b in range(sequences):
            if packed:
                (q0, q1), (k0, k1) = (a[n][b : b + 2] for n in ("cu_seqlens_q", "cu_seqlens_k"))
                rows: Any = slice(q0, q1)
                q, k, v = a["q"][rows], a["k"][k0:k1], a["v"][k0:k1]
                at = FIRST_PAIR._replace(b=b, q_start=int(q0), k_start=int(k0))
            else:
                rows, at = b, FIRST_PAIR._replace(b=b)
                length = a["cache_seqlens"][b]
                q, (k, v) = a["q"][b], (a[n] for n in ("k_cache", "v_cache"))
                if "block_table" in a:
                    k, v = (x[a["block_table"][b]].reshape(-1, *x.shape[2:])[None] for x in (k, v))
                    k, v = k[0][:length], v[0][:length]
                else:
                    k, v = k[b, :length], v[b, :length]
            one = naive_formula(
                *(x[None].swapaxes(1, 2) for x in (q, k, v)),
                causal=named["causal"],
                softmax_scale=named.get("softmax_scale"),
                dtype=q.dtype,
                bound_mods=bound_mods,
                sequence=at,
            )
            naive[rows] = one[0].swapaxes(0, 1)
        return naive

    def check(self, xp: Any, **how: Any) -> None:
        """Run the call, and compare its results with the reference."""
        out, lse = self.run(xp, **how)
        self.compare(out, lse)

    def compare(self, out: np.ndarray, lse: np.ndarray) -> None:
        """Fail unless results are as close to the reference as the error rule requires."""
        true_out, true_lse, naive = self.truth()
        bound = error_bound(naive, true_out, DTYPES[self.dtype], lse=true_lse)
        error = max_error(out, true_out)
        assert error <= bound, f"error {error:.3g}, allowed {bound:.3g}: {self}"
        # The scores of 16-bit inputs are summed in float32, the dtype of their lse.
        real = np.finfo(lse.dtype)
        seen = np.isfinite(true_lse)
        assert np.array_equal(np.isfinite(lse), seen), f"lse is finite elsewhere: {self}"
        assert np.array_equal(lse[~seen], true_lse[~seen]), f"lse of rows without keys: {self}"
        # Kernels store scores times log2(e), so a log-sum-exp below ln 2 times the lowest number
        # counts as equal to this product.
        true_lse = np.where(seen, np.maximum(true_lse, -np.log(2) * float(real.max)), true_lse)
        largest = max(1.0, np.abs(true_lse[seen]).max(initial=0), 30.0)
        tolerance = 64 * real.eps * largest + tanh_error(DTYPES[self.dtype], self.caps())
        off = np.abs(lse[seen].astype(np.float64) - true_lse[seen]).max(initial=0)
        assert off <= tolerance, f"lse off by {off:.3g}, allowed {tolerance:.3g}: {self}"

    def caps(self) -> float:
        of_mod = 20 if self.mods.get("score_mod", ("",))[0] == "tanh" else 0
        return float(self.options.get("softcap", 0) + of_mod)


def random_call(
    rng: np.random.Generator,
    dtype: str,
    kind: str,
    *,
    few_rows: bool,
    head_dims: Sequence[int] = HEAD_DIMS,
    longest: tuple[int, int] = LONGEST,
    empty: bool = False,
    sizes: np.random.Generator | None = None,
    dropout: bool = True,
) -> ModifiedCall:
    """Return a call with one to four modifications, and dropout in a quarter of the calls.

    With `few_rows`, sequences have one to four queries, as in decoding. `head_dims` are choices of
    head_dim and head_dim_v, and `longest` the largest numbers of queries and keys of a sequence.
    With `empty`, some sequences have no queries, or no keys. `sizes` draws lengths and array
    values; `rng` draws the rest, which selects the kernel. Without `dropout`, no call has dropout.
    """
    sizes = rng if sizes is None else sizes
    heads_kv = int(rng.integers(1, 3))
    heads_q = heads_kv * int(rng.integers(1, 4))
    dim, dim_v = (int(rng.choice(head_dims)) for _ in range(2))
    batch = int(sizes.integers(1, 4))
    most_q = 4 if few_rows else longest[0]
    lengths_q = sizes.integers(1, most_q + 1, batch)
    lengths_k = sizes.integers(0 if sizes.integers(8) == 0 else 1, longest[1] + 1, batch)
    for lengths in (lengths_q, lengths_k) if empty else ():
        lengths[sizes.integers(0, 4, batch) == 0] = 0
    real = DTYPES[dtype]

    def values(*shape: int) -> np.ndarray:
        return sizes.standard_normal(shape).astype(real)

    causal = bool(rng.integers(2))
    arrays: dict[str, np.ndarray] = {}
    options: dict[str, Any] = {"causal": causal}
    seqlen_q, seqlen_k = int(lengths_q.max()), int(lengths_k.max())
    if kind == "varlen":
        total_q, total_k = int(lengths_q.sum()), int(lengths_k.sum())
        arrays["q"] = values(total_q, heads_q, dim)
        arrays["k"], arrays["v"] = (values(total_k, heads_kv, width) for width in (dim, dim_v))
        for name, lengths in (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k)):
            arrays[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        options |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
        pairs = (heads_q, total_q, seqlen_k)
    else:
        arrays["q"] = values(batch, seqlen_q, heads_q, dim)
        if kind == "paged":
            per_sequence = -(-max(seqlen_k, 1) // PAGE)
            pages = batch * per_sequence
            arrays["k_cache"] = values(pages, PAGE, heads_kv, dim)
            arrays["v_cache"] = values(pages, PAGE, heads_kv, dim_v)
            table = sizes.permutation(pages).reshape(batch, per_sequence)
            arrays["block_table"] = table.astype(np.int32)
            capacity = per_sequence * PAGE
        else:
            capacity = max(seqlen_k, 1)
            names = ("k_cache", "v_cache") if kind == "kvcache" else ("k", "v")
            for name, width in zip(names, (dim, dim_v), strict=True):
                arrays[name] = values(batch, capacity, heads_kv, width)
        if kind in ("kvcache", "paged"):
            arrays["cache_seqlens"] = lengths_k.astype(np.int32)
        elif kind == "padded":
            arrays["seqlens_k"] = lengths_k.astype(np.int32)
        pairs = (batch, heads_q, seqlen_q, capacity)
    call = ModifiedCall(kind, dtype, arrays, options)
    if rng.integers(3) == 0:
        options["softmax_scale"] = float(rng.choice([0.0, -0.2, 0.5, 1.0]))
    if kind in ("dense", "padded") and rng.integers(2):
        options["q_offset"] = int(sizes.integers(-20, pairs[-1] + 20))
    _add_modifications(call, rng, sizes, batch, heads_q, pairs, seqlen_q)
    has_dropout = bool(rng.integers(4) == 0) and dropout
    if has_dropout and kind not in ("kvcache", "paged"):
        add_dropout(call, sizes)
    return call


def add_dropout(call: ModifiedCall, sizes: np.random.Generator) -> None:
    """Add a random probability, seed and offset of dropout to a call without a cache."""
    call.options["dropout_p"] = float(sizes.choice([0.1, 0.5, sizes.uniform(0.01, 0.99)]))
    call.arrays["dropout_seed"] = sizes.integers(-(2**63), 2**63, 2)


def _add_modifications(
    call: ModifiedCall,
    rng: np.random.Generator,
    sizes: np.random.Generator,
    batch: int,
    heads_q: int,
    pairs: tuple[int, ...],
    seqlen_q: int,
) -> None:
    names = ["window", "softcap", "alibi", "sinks", "bias", "mask", "prefix"]
    names += ["score_mod", "mask_mod", "offsets"]
    if seqlen_q <= 64:
        names.append("tree")
    if call.kind == "varlen":
        names.append("used")
    if call.kind in ("kvcache", "paged"):
        names.append("leftpad")
    chosen = set(rng.choice(names, int(rng.integers(1, 5)), replace=False).tolist())
    arrays, options = call.arrays, call.options
    # prefix_lens are refused unless causality or a window hides keys.
    needs_window = "prefix" in chosen and not options["causal"]
    if needs_window:
        chosen.add("window")
    if chosen == {"offsets"}:
        options["causal"] = True
    accumulator = np.float64 if call.dtype == "float64" else np.float32
    either = DTYPES[call.dtype] if rng.integers(2) else np.dtype(accumulator)
    # Some axes have length 1, and are broadcast.
    shape = tuple(1 if rng.integers(4) == 0 else n for n in pairs)
    if "window" in chosen:
        sides = [int(sizes.choice([0, 1, 15, 16, 17, 63, 64, 65, 500])) for _ in range(2)]
        window = tuple(None if rng.integers(4) == 0 else s for s in sides)
        if window == (None, None) and (needs_window or chosen <= {"window", "offsets"}):
            # A q_offset is refused unless a mask depends on positions.
            window = (sides[0], None)
        options["window_size"] = window
    if "softcap" in chosen:
        options["softcap"] = float(sizes.choice([2.0, 30.0]))
    if "alibi" in chosen:
        slopes = sizes.uniform(0, 0.5, (batch, heads_q)).astype(accumulator)
        arrays["alibi_slopes"] = slopes if rng.integers(2) else slopes[0]
    if "sinks" in chosen:
        sinks = sizes.standard_normal(heads_q) * sizes.choice([1, 30])
        sinks = np.where(sizes.integers(0, 5, heads_q) == 0, -np.inf, sinks)
        arrays["sinks"] = sinks.astype(either)
    if "bias" in chosen:
        bias = sizes.standard_normal(shape)
        arrays["bias"] = np.where(sizes.integers(0, 9, shape) == 0, -np.inf, bias).astype(either)
    if "mask" in chosen:
        arrays["mask"] = sizes.random(shape) < sizes.choice([0.05, 0.7])
    if "offsets" in chosen:
        options.pop("q_offset", None)
        arrays["q_offset"] = sizes.integers(-20, pairs[-1] + 20, batch).astype(np.int32)
    if "used" in chosen:
        rows = np.diff(arrays["cu_seqlens_q"])
        arrays["seqused_q"] = sizes.integers(0, rows + 1).astype(np.int32)
    if "leftpad" in chosen:
        padding = sizes.integers(0, arrays["cache_seqlens"] + 1)
        arrays["cache_leftpad"] = padding.astype(np.int32)
    if "prefix" in chosen:
        arrays["prefix_lens"] = sizes.integers(0, 200, batch).astype(np.int32)
    if "tree" in chosen:
        arrays["tree_mask"] = sizes.integers(0, 2**63, (batch, seqlen_q), dtype=np.uint64)
    if "score_mod" in chosen:
        name = str(rng.choice(list(SCORE_MODS)))
        captures: dict[str, Any] = {}
        if name == "table":
            captures["table"] = sizes.standard_normal((heads_q, 41)).astype(either)
        elif name == "gain":
            captures["gain"] = sizes.uniform(0.5, 1.5, heads_q).astype(either)
            captures["shift"] = sizes.standard_normal(7).astype(either)
        elif name == "quadratic":
            captures["weight"] = 0.001
        call.mods["score_mod"] = (name, captures)
    if "mask_mod" in chosen:
        name = str(rng.choice(list(MASK_MODS)))
        captures = {}
        if name == "documents":
            documents = np.sort(sizes.integers(0, 4, (batch, 560)), axis=1)
            captures["doc"] = documents.astype(rng.choice([np.int32, np.int64, np.uint8]))
        elif name == "dilated":
            captures["step"] = int(sizes.integers(1, 5))
        call.mods["mask_mod"] = (name, captures)


# Arguments of `random_call` that change scores or mask pairs.
_MODIFIERS = (
    *("window_size", "softcap", "alibi_slopes", "sinks", "bias", "mask", "prefix_lens"),
    *("tree_mask", "softmax_scale", "q_offset", "dropout_p", "dropout_seed"),
)


def padded_call(rng: np.random.Generator, dtype: str, kind: str, low: float) -> ModifiedCall:
    """Return a call whose bias is `low` for all keys of some rows, and some keys of the others."""
    drawn = random_call(rng, dtype, kind, few_rows=False)
    arrays = {n: x for n, x in drawn.arrays.items() if n not in _MODIFIERS}
    options = {n: x for n, x in drawn.options.items() if n not in _MODIFIERS}
    if kind == "varlen":
        pairs: tuple[int, ...] = (1, len(arrays["q"]), options["max_seqlen_k"])
    else:
        batch, seqlen_q = arrays["q"].shape[:2]
        capacity = arrays.get("k", arrays.get("k_cache")).shape[1]
        if kind == "paged":
            capacity *= arrays["block_table"].shape[1]
        pairs = (batch, 1, seqlen_q, capacity)
    hidden = rng.random(pairs) < 0.5
    hidden |= rng.random((*pairs[:-1], 1)) < 0.3
    arrays["bias"] = np.where(hidden, low, 0).astype(np.float32)
    return ModifiedCall(kind, dtype, arrays, options)

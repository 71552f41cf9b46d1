"""Formula of the tangents of varlen calls, computed sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import Pairs
from cupy_flash.opaque import opaque
from cupy_flash.problem.gradient import ROWS
from cupy_flash.reference.eight_bits import widened
from cupy_flash.reference.modifications import MovingModifications
from cupy_flash.reference.packed import packed_modifications, packed_sequences, part_of
from cupy_flash.reference.rows import precision_of
from cupy_flash.reference.tangents import Tangents, read_all, tangent_formula

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import PackedModifications


@opaque
def attention_varlen_jvp_reference(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    q_tangent: Any = None,
    k_tangent: Any = None,
    v_tangent: Any = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    return_lse: bool = False,
    modification_tangents: Mapping[str, Any] | None = None,
    stream: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute attention on packed sequences and its tangent in float64 by the plain formula.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `cupy_flash.attention_varlen_reference`; pages are not supported.
    q_tangent, k_tangent, v_tangent : arrays, optional
        Tangents of q, k and v, with the shapes and the array type of these arrays and any float
        dtype. A missing tangent counts as zeros, and takes no time.
    causal, softmax_scale, seqused_k, stream
        See `cupy_flash.attention_varlen_reference`.
    return_lse : bool
        Whether to return the log-sum-exp of each query row and its tangent, too.
    modification_tangents : mapping, optional
        Tangents of modifications, see `cupy_flash.flash_attention_jvp`.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`; without seqlens_k.

    Returns
    -------
    out : float64 array, shape (total_q, heads_q, head_dim_v)
        Output. Rows that belong to no sequence are 0.
    out_tangent : float64 array, shape (total_q, heads_q, head_dim_v)
        Tangent of the output. Rows that belong to no sequence are 0.
    lse : float64 array, shape (heads_q, total_q)
        Log-sum-exp, natural logarithm; only with ``return_lse``. It is -inf in rows that belong to
        no sequence.
    lse_tangent : float64 array, shape (heads_q, total_q)
        Tangent of the log-sum-exp; only with ``return_lse``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        See `cupy_flash.attention_jvp_reference`.
    """
    return _packed_call(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        Tangents(q_tangent, k_tangent, v_tangent),
        exact=True,
        causal=causal,
        softmax_scale=softmax_scale,
        seqused_k=seqused_k,
        return_lse=return_lse,
        modification_tangents=modification_tangents,
        stream=stream,
        modifications=modifications,
    )


def packed_in_precision_of_inputs(*arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Compute `attention_varlen_jvp_reference` in float32, or in float64 for float64 inputs.

    Parameters
    ----------
    *arguments
        Arguments up to max_seqlen_k, and `Tangents`. q, k, v and the tangents have one dtype, which
        is that of out and its tangent.
    **options
        Other arguments, with `modifications` as a mapping.

    Raises
    ------
    TypeError
        If the dtypes differ, or are not those of `cupy_flash.flash_attention`.
    """
    return _packed_call(*arguments, exact=False, **options)


def _packed_call(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    tangents: Tangents,
    *,
    return_lse: bool,
    stream: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the results of a public function; see `PackedCall.of` for the options."""
    with on_stream(stream, q):
        convert = result_converter("q", q)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        call = PackedCall.of({"q": q, "k": k, "v": v}, tangents._asdict(), (), lengths, **options)
        q, v, compute = call.arrays["q"], call.arrays["v"], call.options["compute"]
        xp, of_lse = array_module(q), (q.shape[1], q.shape[0])
        out, out_tangent = (xp.zeros((*q.shape[:2], v.shape[-1]), compute) for _ in range(2))
        lse, lse_tangent = xp.full(of_lse, -np.inf, compute), xp.zeros(of_lse, compute)
        for rows, keys, given in call.sequences():
            arrays, moving = call.part(rows, keys)
            results = tangent_formula(
                **arrays, tangents=Tangents(**moving), **call.options, sequence=given
            )
            out[rows], out_tangent[rows] = (x[0].swapaxes(0, 1) for x in results[:2])
            lse[:, rows], lse_tangent[:, rows] = (x[0] for x in results[2:])
        with np.errstate(all="ignore"):
            found = [x.astype(call.dtype, copy=False) for x in (out, out_tangent)]
        if return_lse:
            found += [lse, lse_tangent]
        return tuple(map(convert, found))


class PackedCall(NamedTuple):
    """Checked arrays of a varlen call, with tangents.

    Attributes
    ----------
    inputs
        Arrays q, k and v with their own dtypes, by name.
    arrays, tangents
        Arrays (total, heads, dim) by name, and their tangents by the same names; None for tangents
        of zeros.
    options
        Arguments of a formula, as those of `DenseCall`.
    moving
        Modifications and their tangents.
    dtype
        Dtype of the results.
    lengths, seqused_k
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; and seqused_k.
    """

    inputs: dict[str, Any]
    arrays: dict[str, Any]
    tangents: dict[str, Any]
    options: dict[str, Any]
    moving: MovingModifications
    dtype: np.dtype[Any]
    lengths: tuple[Any, Any, int, int]
    seqused_k: Any

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, Any],
        tangents: Mapping[str, Any],
        wrt: Iterable[str],
        lengths: tuple[Any, Any, int, int],
        *,
        exact: bool,
        causal: bool,
        softmax_scale: float | None,
        seqused_k: Any,
        modification_tangents: Mapping[str, Any] | None,
        modifications: Mapping[str, Any],
    ) -> PackedCall:
        """Return the call of arrays of any type; see `DenseCall.of`.

        `lengths` are cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.

        Raises
        ------
        TypeError, ValueError
            See `cupy_flash.attention_jvp_reference`.
        """
        arrays, tangents = read_all(arrays, tangents, exact=exact)
        inputs = {name: arrays[name] for name in ROWS}
        dtype = np.dtype(np.float64) if exact else arrays["q"].dtype
        wide = {name: widened(x) for name, x in arrays.items()}
        given = {name: None if x is None else widened(x) for name, x in tangents.items()}
        cu_seqlens_q, _, max_seqlen_q, max_seqlen_k = lengths

        def bind(modifications: Mapping[str, Any]) -> BoundModifications:
            return packed_modifications(
                *(modifications, wide["q"], cu_seqlens_q, max_seqlen_q, max_seqlen_k),
                causal=causal,
            )

        moving = MovingModifications.of(modifications, modification_tangents, wrt, bind)
        options = {
            "compute": precision_of(dtype),
            "causal": causal,
            "softmax_scale": softmax_scale,
            "q_offset": None,
            "bound_mods": moving.bound,
            "mod_tangents": moving.tangents,
        }
        return cls(inputs, wide, given, options, moving, dtype, lengths, seqused_k)

    def sequences(self) -> Iterator[tuple[slice, slice, Pairs]]:
        """Yield the rows of each sequence, see `packed_sequences`."""
        q, k = self.arrays["q"], self.arrays["k"]
        return packed_sequences(q, k, *self.lengths, seqused_k=self.seqused_k)

    def part(self, rows: slice, keys: slice) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return arrays and tangents of the sequence with these rows, (1, heads, seqlen, dim)."""
        of_arrays, of_tangents = (
            {n: None if x is None else part_of(n, x, rows, keys) for n, x in arrays.items()}
            for arrays in (self.arrays, self.tangents)
        )
        return of_arrays, of_tangents

"""Masks of transformers models, described by lengths, causality and windows where that suffices.

Models compose a mask from functions of `transformers.masking_utils`. `attention_mask` recognizes
these functions and returns an `AttentionPattern`, which holds nothing of quadratic size. A mask
that they cannot describe becomes a tensor (batch, 1, seqlen_q, seqlen_k), as for "sdpa".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

Window = tuple[int | None, int | None]


class PackedSequences(NamedTuple):
    """Sequences among the rows of all batch entries, consecutively: batch * seqlen rows.

    Attributes
    ----------
    cu_seqlens : int32 Tensor, shape (sequences + 1,)
        Row at which each sequence begins, then the end of the last.
    max_seqlen : int
        Upper bound of the lengths.
    used : int32 Tensor, shape (sequences,), optional
        Number of keys of each sequence that are no padding. They come first.
    has_documents : bool
        Whether these are the documents of a packed batch, or parts of them.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    used: Tensor | None = None
    has_documents: bool = False


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """Mask of a model's layers, without an array of all pairs.

    The methods and attributes of a tensor, indexing, and functions of torch work on the bool tensor
    that `dense` returns, for models that change their mask before they use it. Operators do not.

    Attributes
    ----------
    size : (int, int, int)
        batch, seqlen_q and seqlen_k.
    causal : bool
        Whether a query attends only to keys up to its own position.
    window : (int or None, int or None)
        Bounds of the distance to keys before and after the query; None is no bound.
    q_offset : int, or int32 Tensor, shape (batch,)
        Position of the first query among the keys. A static cache counts on the device.
    keys : bool Tensor, shape (batch, seqlen_k), optional
        Mask of padding: False for keys that no query attends to.
    seqlens_k : int32 Tensor, shape (batch,), optional
        Number of keys of each sequence, if all of its padding follows them.
    packed : PackedSequences, optional
        Sequences that attend only to themselves. It replaces q_offset, keys and seqlens_k.
    dense : callable
        Function that returns the mask as a bool tensor (batch, 1, seqlen_q, seqlen_k).
    """

    size: tuple[int, int, int]
    causal: bool
    window: Window
    q_offset: int | Tensor
    keys: Tensor | None
    seqlens_k: Tensor | None
    packed: PackedSequences | None
    dense: Callable[[], Tensor]

    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that `dense` returns."""
        batch, *lengths = self.size
        return torch.Size((batch, 1, *lengths))

    @property
    def begins_at_first_key(self) -> bool:
        """Whether query i has the position of key i, and attends to no later key."""
        return self.causal and isinstance(self.q_offset, int) and self.q_offset == 0

    @property
    def has_padding(self) -> bool:
        """Whether there may be padding."""
        used = None if self.packed is None else self.packed.used
        return any(x is not None for x in (self.keys, self.seqlens_k, used))

    def to(self, *arguments: Any, **options: Any) -> AttentionPattern | Tensor:
        """Return the pattern with its tensors on another device, for models on several devices.

        With a dtype, the result is a tensor.
        """
        given = (*arguments, *options.values())
        if any(isinstance(x, (torch.dtype, Tensor)) for x in given):
            return self.dense().to(*arguments, **options)
        device = options.get("device", arguments[0] if arguments else None)
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in ("q_offset", "keys", "seqlens_k")
            if isinstance(value := getattr(self, name), Tensor)
        }
        packed = self.packed
        if packed is not None:
            used = None if packed.used is None else packed.used.to(device)
            packed = packed._replace(cu_seqlens=packed.cu_seqlens.to(device), used=used)
        return replace(self, packed=packed, dense=partial(_moved, self.dense, device), **moved)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """Call a function of torch on dense masks."""
        arguments = torch.utils._pytree.tree_map(_as_tensor, arguments)
        options = torch.utils._pytree.tree_map(_as_tensor, options or {})
        return function(*arguments, **options)


def _moved(dense: Callable[[], Tensor], device: Any) -> Tensor:
    return dense().to(device)


def _as_tensor(value: Any) -> Any:
    return value.dense() if isinstance(value, AttentionPattern) else value


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | AttentionPattern | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    config: Any = None,
    **_: Any,
) -> AttentionPattern | Tensor:
    """Return the mask of a model's layers, as `AttentionMaskInterface` of transformers asks for it.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
    allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap, device, config
        See `transformers.masking_utils.sdpa_mask`.

    Returns
    -------
    AttentionPattern or bool Tensor, shape (batch, 1, q_length, kv_length)
        Mask for `cupy_flash.transformers.attention`.
    """
    # A mask that `generate` makes for a static cache passes through the model's own call.
    if isinstance(attention_mask, AttentionPattern):
        return attention_mask
    if isinstance(q_offset, Tensor):
        # The cache advances its own tensor in place before the layers attend.
        q_offset = q_offset.clone()
    sdpa_mask: Any = masking_utils.sdpa_mask
    dense = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    rules = _rules(
        mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, config
    )
    if rules is None:
        return dense()
    first: int | Tensor = q_offset - kv_offset
    if not isinstance(first, Tensor) and first not in (0, kv_length - q_length):
        # A number that changes in each step would make torch.compile compile each step.
        first = torch.tensor(first, device=device)
    if isinstance(first, Tensor):
        first = first.to(torch.int32).expand(batch_size).contiguous()
    pattern = AttentionPattern(
        size=(batch_size, q_length, kv_length),
        causal=rules.causal,
        window=rules.window,
        q_offset=first,
        keys=None,
        seqlens_k=None,
        packed=None,
        dense=dense,
    )
    if rules.document is not None:
        packed = _documents(rules.document, rules.position, rules.chunk)
        return dense() if packed is None else replace(pattern, packed=packed)
    # Without an offset on the host, queries may be in any chunk.
    last = None if isinstance(q_offset, Tensor) else q_offset + q_length
    crosses = rules.chunk is not None and (last is None or last > rules.chunk)
    is_prefill = last == q_length and not kv_offset
    if attention_mask is None:
        if not crosses:
            return pattern
        if not is_prefill:
            return dense()
        return replace(pattern, packed=_chunks(rules, q_length, None))
    padding: Any = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if crosses:
        if not is_prefill or is_tracing(padding) or not bool((_runs(padding) <= 1).all()):
            return dense()
        return replace(pattern, packed=_chunks(rules, q_length, padding))
    if is_tracing(padding):
        return replace(pattern, keys=padding)
    return _with_padding(pattern, padding, attention_mask.shape[1] - kv_offset)


class _Rules(NamedTuple):
    """Parts of a mask function.

    Attributes
    ----------
    causal, window
        See `AttentionPattern`.
    chunk : int, optional
        Length of the chunks that a sequence is divided into, after `leftpad` leading keys.
    leftpad : Tensor, shape (batch,), optional
        Number of leading keys of each sequence that are padding.
    document, position : Tensor, shape (batch, seqlen), optional
        Number of the document that each row belongs to, and its position there.
    """

    causal: bool = False
    window: Window = (None, None)
    chunk: int | None = None
    leftpad: Tensor | None = None
    document: Tensor | None = None
    position: Tensor | None = None


def _rules(
    function: Callable[..., Any],
    local_size: int | None,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
    config: Any,
) -> _Rules | None:
    """Return the parts of a mask function, or None if it has others."""
    if not torch.compiler.is_compiling():
        parts = _parts(function)
        return None if parts is None else _Rules(**parts)
    # In a traced graph the variables of a closure cannot be read. Arguments identify a window: the
    # flags are False if anything was added to the function.
    if function is masking_utils.causal_mask_function:
        return _Rules(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Rules()
    if local_size is None or local_size != getattr(config, "sliding_window", None):
        return None
    if getattr(config, "attention_chunk_size", None) is not None:
        return None
    if allow_is_causal_skip:
        return _Rules(causal=True, window=(local_size - 1, None))
    if allow_is_bidirectional_skip:
        return _Rules(window=(local_size, local_size))
    return None


def _parts(function: Any) -> dict[str, Any] | None:
    """Return the fields of `_Rules` that a mask function of transformers determines, or None."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    match function.__qualname__.partition(".")[0], held:
        case "causal_mask_function", _:
            return {"causal": True}
        case "bidirectional_mask_function", _:
            return {}
        case "sliding_window_overlay", {"sliding_window": size}:
            return {"window": (size - 1, None)}
        case "sliding_window_bidirectional_overlay", {"sliding_window": size}:
            return {"window": (size, size)}
        case "chunked_overlay", {"chunk_size": size, "left_padding": leftpad}:
            return {"chunk": size, "leftpad": leftpad}
        case "packed_sequence_mask_function", {"packed_sequence_mask": document}:
            return {"document": document}
        case "remap_positions_for_packed_sequence", {"mask_function": inner, "position_ids": ids}:
            parts = _parts(inner)
            return None if parts is None else {**parts, "position": ids}
        case "and_masks", {"mask_functions": functions}:
            result: dict[str, Any] = {}
            for part in map(_parts, functions):
                if part is None:
                    return None
                if "window" in part and "window" in result:
                    part["window"] = _narrower(part["window"], result["window"])
                elif not part.keys().isdisjoint(result.keys() - {"causal"}):
                    return None
                result |= part
            return result
    return None


def _narrower(one: Window, other: Window) -> Window:
    """Return the window of the keys that are in both windows."""
    left, right = (
        min((x for x in bounds if x is not None), default=None)
        for bounds in zip(one, other, strict=True)
    )
    return left, right


def _documents(
    document: Tensor, position: Tensor | None, chunk: int | None
) -> PackedSequences | None:
    """Return the documents of a packed batch, divided into chunks, if the host may read them."""
    if is_tracing(document) or position is None:
        return None
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    if chunk is not None:
        begins |= position % chunk == 0
    (rows,) = begins.flatten().nonzero(as_tuple=True)
    cu_seqlens = torch.nn.functional.pad(rows, (0, 1), value=begins.numel()).to(torch.int32)
    return PackedSequences(cu_seqlens, int(cu_seqlens.diff().max()), has_documents=True)


def _chunks(rules: _Rules, seqlen: int, padding: Tensor | None) -> PackedSequences:
    """Return the chunks of all sequences. The chunks before the first one hold left padding."""
    chunk: Any = rules.chunk
    leftpad: Any = rules.leftpad
    count = -(-seqlen // chunk)
    multiples = torch.arange(0 if padding is None else -count, count, device=leftpad.device)
    bounds = (leftpad[:, None] + multiples * chunk).clamp(0, seqlen)
    return _divided(bounds, seqlen, min(chunk, seqlen), padding)


def _divided(
    bounds: Tensor, seqlen: int, max_seqlen: int, padding: Tensor | None
) -> PackedSequences:
    """Return sequences, given the rows (batch, n) at which they begin in their entries.

    The first ones begin at row 0. In each, keys that are no padding come first.
    """
    pad = torch.nn.functional.pad
    entries = torch.arange(len(bounds), device=bounds.device)[:, None] * seqlen
    rows = pad((bounds + entries).flatten(), (0, 1), value=len(bounds) * seqlen)
    used = None
    if padding is not None:
        before = pad(padding[:, :seqlen].flatten().cumsum(0), (1, 0))
        used = before[rows].diff().to(torch.int32)
    return PackedSequences(rows.to(torch.int32), max_seqlen, used)


def _runs(padding: Tensor) -> Tensor:
    """Return the number of runs of keys that are no padding, for each sequence."""
    begins = padding.clone()
    begins[:, 1:] &= ~padding[:, :-1]
    return begins.sum(-1)


def _with_padding(pattern: AttentionPattern, padding: Tensor, given: int) -> AttentionPattern:
    """Return the pattern with padding, described by lengths where they suffice.

    `given` is the number of columns of the model's own mask. Later keys count as padding; they are
    the unused part of a static cache. The host reads four flags from the device.
    """
    _, seqlen_q, seqlen_k = pattern.size
    count, runs = padding.sum(-1), _runs(padding)
    is_first = padding[:, 0] | (count == 0)
    flags = [count.min() >= seqlen_k, count.min() >= given, is_first.all(), (runs <= 1).all()]
    is_full, is_given_full, all_first, all_runs = torch.stack(flags).tolist()
    offset = pattern.q_offset
    is_future = isinstance(offset, Tensor) or offset + seqlen_q <= given
    if is_full or (pattern.causal and is_given_full and is_future):
        return pattern
    if all_first and all_runs:
        # The keys of later rows of a static cache are cut off before the call.
        most = seqlen_q if pattern.begins_at_first_key else seqlen_k
        return replace(pattern, seqlens_k=count.clamp(max=most).to(torch.int32))
    is_prefill = not isinstance(offset, Tensor) and offset == 0 and seqlen_q <= seqlen_k
    if not (all_runs and pattern.causal and is_prefill):
        return replace(pattern, keys=padding)
    # A first sequence holds the left padding of each entry, a second one the rest.
    bounds = torch.stack([torch.zeros_like(count), padding.int().argmax(-1)], 1)
    return replace(pattern, packed=_divided(bounds, seqlen_q, seqlen_q, padding))

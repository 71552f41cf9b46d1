"""Errors for unknown keyword arguments, with advice on the arguments that were probably meant.

Other libraries have their own names for arguments of attention: PyTorch's
``scaled_dot_product_attention`` and FlexAttention, flash_attn, FlashInfer, JAX and xFormers.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, NamedTuple

_NO_HEADS = "leave it out, as the shapes of the arrays determine the heads"
_SAME_BITS = "leave it out, as results are always deterministic"

# Arguments of other libraries for which no function here has a counterpart.
UNSUPPORTED = {
    **dict.fromkeys(
        ("num_heads", "n_heads", "num_kv_heads", "num_key_value_heads", "enable_gqa", "pack_gqa"),
        _NO_HEADS,
    ),
    **dict.fromkeys(("deterministic", "is_deterministic"), _SAME_BITS),
}


class _Counterpart(NamedTuple):
    """Arguments of this library that correspond to another library's argument.

    Attributes
    ----------
    arguments
        Names of the arguments.
    text
        Advice on what to pass, which contains every one of these names.
    """

    arguments: tuple[str, ...]
    text: str


def _counterpart(*arguments: str) -> tuple[_Counterpart, ...]:
    """Return alternatives of one argument each; advice names the first that a function has."""
    return tuple(_Counterpart((argument,), argument) for argument in arguments)


_MASK = (
    _Counterpart(
        ("mask", "bias"),
        "mask, a bool array with True for visible pairs, or bias, which is added to the scores",
    ),
)
_WINDOW = (_Counterpart(("window_size",), "window_size=(left, right)"),)
_PADDING = (
    _Counterpart(("seqlens_k", "mask"), "seqlens_k, or mask of shape (batch, 1, 1, seqlen_k)"),
    _Counterpart(("seqused_k",), "seqused_k, the number of keys of each sequence"),
    _Counterpart(
        ("cache_seqlens", "cache_leftpad"),
        "cache_seqlens, and cache_leftpad if the padding comes first",
    ),
)
_DROPOUT_SEED = (_Counterpart(("dropout_seed",), "dropout_seed, an integer"),)
# Names in other libraries. Advice is the first alternative whose arguments the function has.
INSTEAD: dict[str, tuple[_Counterpart, ...]] = {
    **dict.fromkeys(
        ("scale", "sm_scale", "scaling", "softmax_factor"),
        _counterpart("softmax_scale"),
    ),
    **dict.fromkeys(("is_causal", "causal_mask", "use_causal_mask"), _counterpart("causal")),
    **dict.fromkeys(("attn_mask", "attention_mask"), _MASK),
    **dict.fromkeys(("attn_bias", "attention_bias"), _counterpart("bias")),
    **dict.fromkeys(
        ("window", "sliding_window", "local_window_size", "window_left", "window_right"), _WINDOW
    ),
    **dict.fromkeys(
        ("logits_soft_cap", "soft_cap", "logit_cap", "attn_logits_soft_cap", "softcapping"),
        _counterpart("softcap"),
    ),
    **dict.fromkeys(("alibi", "slopes"), _counterpart("alibi_slopes")),
    **dict.fromkeys(("dropout", "dropout_rate", "attention_dropout"), _counterpart("dropout_p")),
    **dict.fromkeys(("seed", "rng_state", "dropout_rng", "dropout_key"), _DROPOUT_SEED),
    **dict.fromkeys(("sink", "s_aux", "attention_sinks", "learnable_sink"), _counterpart("sinks")),
    **dict.fromkeys(("page_table", "block_tables"), _counterpart("block_table")),
    **dict.fromkeys(
        ("return_softmax_lse", "return_attn_probs", "return_softmax", "return_residual"),
        _counterpart("return_lse"),
    ),
    **dict.fromkeys(
        ("kv_seqlens", "seqlens_kv", "key_value_seq_lengths", "kv_lens"),
        _counterpart("seqlens_k", "seqused_k", "cache_seqlens"),
    ),
    "key_padding_mask": _PADDING,
    "block_mask": (_Counterpart(("mask_mod",), "mask_mod, a MaskMod or a BlockList"),),
    "kernel_options": (_Counterpart(("family", "tile"), "family and tile"),),
    "cu_seqlens_kv": _counterpart("cu_seqlens_k"),
    "max_seqlen_kv": _counterpart("max_seqlen_k"),
    "q_descale": _counterpart("q_scale"),
    "k_descale": _counterpart("k_scale"),
    "v_descale": _counterpart("v_scale"),
}

_PACKAGE = __name__.partition(".")[0]
_ANY = ""
# Modules whose functions are differentiable by another library, with advice for the arguments that
# only the package's functions of the same names have. The advice for `_ANY` names what these lack.
_PLAIN_ONLY = {
    f"{_PACKAGE}.jax": {
        "backend": "leave it out, as attention runs on the device of the arrays; move them with "
        "jax.device_put",
        "out": "leave it out, as JAX arrays are immutable",
        "stream": "leave it out, as JAX chooses the stream",
        "return_lse": "leave it out, as lse is among the results",
        _ANY: "jax.jit and gradients",
    },
    f"{_PACKAGE}.torch": {
        "backend": "leave it out, as attention runs on the device of the tensors; move them with "
        ".cpu() or .cuda()",
        "stream": "leave it out, as attention runs on the current stream of PyTorch; call within "
        "`with torch.cuda.stream(stream)`",
        _ANY: "gradients by autograd",
    },
}
# Least similarity of a misspelled name: "qv" is not "qkv", and "rotary_dim" not "rotary_sin".
_NEAR = 0.85


class _Function(NamedTuple):
    """A public function that takes modifications.

    Attributes
    ----------
    module, name
        Name of the module, and name of the function in it.
    code
        Code object of the function, by which its frame is found on the call stack.
    arguments
        Names of its arguments, including modifications.
    """

    module: str
    name: str
    code: CodeType | None
    arguments: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name of the function in messages."""
        return self.name if self.module == _PACKAGE else f"{self.module}.{self.name}"

    @property
    def direction(self) -> str:
        """Direction at the end of the name, such as "vjp"; empty for forward functions."""
        end = self.name.rpartition("_")[2]
        return end if end in ("backward", "hvp", "jvp", "vjp") else ""


def unexpected(
    name: str, kinds: Mapping[str, Iterable[str]], function: Callable[..., Any] | None = None
) -> TypeError:
    """Return the error for a keyword argument that the called function does not have.

    Parameters
    ----------
    name
        The keyword.
    kinds
        Names of modifications, keyed by the name of the `TypedDict` that declares them.
    function
        Function that was called. If it is None, it is the outermost public function on the call
        stack, so that successful calls spend no time on errors.
    """
    public = _public_functions(kinds)
    running: list[CodeType | None]
    if function is None:
        running = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    else:
        running = [getattr(inspect.unwrap(function), "__code__", None)]
    by_code = {one.code: one for one in public}
    # The outermost frame is last. Without a public function there, take `flash_attention`.
    called = next((by_code[code] for code in reversed(running) if code in by_code), public[0])
    return TypeError(f"unexpected keyword argument {name!r}; {_advice(name, called, public)}")


def _advice(name: str, called: _Function, public: list[_Function]) -> str:
    if name in UNSUPPORTED:
        return UNSUPPORTED[name]
    ways = INSTEAD.get(name, ())
    for way in ways:
        if set(way.arguments) <= set(called.arguments):
            return f"pass {way.text}"
    for way in ways:
        if others := _functions_with(way.arguments, called, public):
            return f"it corresponds to {_listed(way.arguments)} of {others}"
    if left := _left_to_plain_function(name, called, public):
        return left
    if others := _functions_with((name,), called, public):
        return f"it is an argument of {others}"
    if near := difflib.get_close_matches(name.lower(), called.arguments, n=1, cutoff=_NEAR):
        return f"did you mean {near[0]!r}?"
    return f"{called.label} takes {', '.join(called.arguments)}"


def _left_to_plain_function(name: str, called: _Function, public: list[_Function]) -> str | None:
    """Return advice on an argument that only the package's function of the same name has."""
    advice = _PLAIN_ONLY.get(called.module)
    plain = next(f for f in public if f.module == _PACKAGE and f.name == called.name)
    if advice is None or name not in plain.arguments:
        return None
    return advice.get(name) or (
        f"{called.label} does not take it; call {_PACKAGE}.{plain.name}, which does, but without "
        f"{advice[_ANY]}"
    )


def _functions_with(
    arguments: tuple[str, ...], called: _Function, public: list[_Function]
) -> str | None:
    """Return names of functions with these arguments, if possible in the direction of `called`."""
    prefix = "" if called.module == _PACKAGE else f"{_PACKAGE}."
    result = [
        function
        for function in public
        if function.module == _PACKAGE
        and function.name.startswith("flash_attention")
        and set(arguments) <= set(function.arguments)
    ]
    for direction in (called.direction, ""):
        if alike := [function for function in result if function.direction == direction]:
            result = alike
            break
    return _listed([prefix + function.name for function in result]) if result else None


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _public_functions(kinds: Mapping[str, Iterable[str]]) -> list[_Function]:
    """Return the public functions that take modifications, `flash_attention` first."""
    result = []
    # Not imported: the package imports this module, and users import the other modules.
    for name in (_PACKAGE, *_PLAIN_ONLY):
        module = sys.modules.get(name)
        for public in getattr(module, "__all__", ()):
            function = getattr(module, public)
            if not inspect.isfunction(function):
                continue
            parameters = inspect.signature(function).parameters.values()
            others = [p.annotation for p in parameters if p.kind is p.VAR_KEYWORD]
            taken = [kinds[kind] for kind in kinds if others == [f"Unpack[{kind}]"]]
            if taken:
                own = (p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
                code = inspect.unwrap(function).__code__
                result.append(_Function(name, public, code, (*own, *taken[0])))
    return sorted(result, key=lambda function: function.label != "flash_attention")

"""The public classes `ScoreMod` and `MaskMod`, each a user's function with its captures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from cupy_flash.arrays.torch_arrays import outside_transforms, without_history
from cupy_flash.mods.base import Modification
from cupy_flash.mods.captures import CaptureSpec, read_capture, require_differentiable
from cupy_flash.mods.ir.derivative import derivative
from cupy_flash.mods.ir.expression import BOOL, REAL, SCORE, Node
from cupy_flash.mods.ir.operations import cast, operation
from cupy_flash.mods.on_arrays.interpret import Interpreter
from cupy_flash.mods.pickling import AbsentFunction
from cupy_flash.mods.picture import draw
from cupy_flash.mods.trace.traced import Derivable
from cupy_flash.opaque import untraced


class ScoreMod(Modification):
    """Change of every score: ``score`` becomes the result of a function.

    The function is called with symbols when the object is made. The operations on them are
    compiled as CUDA, and evaluated on the host. So the function must use operators and functions of
    NumPy, without ``if``, ``and`` and loops that depend on its parameters. Arrays in the variables
    around it, and around functions that it calls, are captured under the names of these variables.
    All other variables around it are constants from then on.

    Parameters
    ----------
    function
        Function whose first parameter is ``score``, the scaled score. Further parameters are any of
        the following, by name: ``b``, the sequence; ``h``, the query head; ``i``, the position of
        the query among the keys, which is its row plus ``q_offset``; ``j``, the key; ``q_start``
        and ``k_start``, the rows at which a packed sequence begins in q and in k; and the captures.
        Integers have 32 bits and wrap; docs/guide/functions.md defines each operation.
    cuda
        Body of a CUDA C++ function with the same parameters, which kernels use instead. ``Real`` is
        its number type, and a captured array is called to read an element: ``table(h, i - j)``. It
        is compiled as it is, so it must come from a trusted source. The Python function then need
        not be traceable: if it is not, it is called with arrays on the host.
    differentiable
        Names of captured arrays of reals whose gradients a backward pass returns. They may be
        arrays in the variables around the function. The functions of `cupy_flash.torch` need no
        names: captured tensors that require a gradient get it by autograd.
    **captures
        Numbers and arrays that the function reads, by name. Arrays are of NumPy, CuPy or a library
        with DLPack, have 0 to 4 axes, at least one element, and dtype bool, uint8, int32, int64,
        uint64 or a floating-point dtype. An array is indexed with as many integers as it has axes.
        An index outside of the array reads the nearest element; a negative constant index is an
        error. Only the lower 32 bits of int64 are read. Values of a NumPy array are checked to fit
        int32 when the object is made, but not if they are written later, or in other arrays.

    Raises
    ------
    TypeError
        For a function that has other parameters, cannot be traced, computes something else each
        time, or does not return a number; for captures and CUDA source that cannot be used; for
        names in `differentiable` that are not those of captured arrays of reals.
    ValueError
        For captured arrays of a wrong shape, for integers that int32 cannot hold, for a negative
        constant as an index, and for a name that occurs twice in `differentiable`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import ScoreMod
    >>> softcap = ScoreMod(lambda score: 30 * np.tanh(score / 30))
    >>> slopes = np.array([0.5, 0.25], np.float32)
    >>> alibi = ScoreMod(
    ...     lambda score, h, i, j, slope: score - slope[h] * np.abs(i - j), slope=slopes
    ... )
    >>> alibi.evaluate(np.float32(3), b=0, h=1, i=6, j=np.arange(4, dtype=np.int32))
    array([1.5 , 1.75, 2.  , 2.25], dtype=float32)
    """

    __slots__ = ("differentiable",)
    _keyword = "score_mod"
    _first = ("score",)

    differentiable: tuple[str, ...]

    @untraced
    def __init__(
        self,
        function: Callable[..., Any],
        /,
        *,
        cuda: str | None = None,
        differentiable: Iterable[str] = (),
        **captures: Any,
    ) -> None:
        super().__init__(function, cuda=cuda, **captures)
        names = require_differentiable(differentiable, self.specs)
        object.__setattr__(self, "differentiable", names)
        self._set_template()

    @classmethod
    def of_graph(
        cls,
        expression: Node,
        graph: Node,
        captures: Mapping[str, Any],
        differentiable: tuple[str, ...],
    ) -> ScoreMod:
        """Return an object without a Python function.

        Parameters
        ----------
        expression, graph
            Expression that kernels compute, and the one whose derivatives are taken.
        captures
            Arrays and numbers that both read, by name.
        differentiable
            Names of the captured arrays whose gradients a backward pass returns.
        """
        made = object.__new__(cls)
        made._set_options({"differentiable": differentiable})
        made._set(AbsentFunction("graph"), None, captures, expression, graph)
        return made

    def differentiable_in(self, names: tuple[str, ...]) -> ScoreMod:
        """Return an object whose differentiable captures are those of these names."""
        if names == self.differentiable:
            return self
        names = require_differentiable(names, self.specs)
        captures = {**self.captures, **self.tensors}
        parts = self.function, self.cuda, captures, self.expression, self._graph
        return self._made({"differentiable": names}, *parts)

    @property
    def derivable(self) -> Derivable:
        """Traced function and captures for derivatives; raises TypeError as `graph` does."""
        return Derivable(self.graph, self.differentiable)

    def evaluate(
        self,
        score: Any,
        b: Any,
        h: Any,
        i: Any,
        j: Any,
        *,
        q_start: Any = 0,
        k_start: Any = 0,
        xp: Any = np,
        real: Any = None,
    ) -> Any:
        """Return the new scores of arrays of pairs.

        Parameters
        ----------
        score
            Scaled scores, float32 or float64. Reals are computed in this dtype.
        b, h, i, j, q_start, k_start
            Integers, or arrays of them, broadcastable to the scores; taken as int32.
        xp
            Module of the arrays, NumPy or CuPy.
        real
            Dtype in which the problem computes reals: float32, or float64 for float64 inputs.
            Values that are compared, rounded or used as an index are computed in it, even if scores
            are float64. Default: the dtype of the scores.

        Returns
        -------
        array
            New scores of the scores' dtype, broadcastable to the shape of all arguments.
        """
        dtype = score.dtype
        given = {"score": score, "b": b, "h": h, "i": i, "j": j}
        given |= {"q_start": q_start, "k_start": k_start}
        return self._evaluate(given, xp, dtype, dtype, real)

    def derivative(
        self,
        score: Any,
        b: Any,
        h: Any,
        i: Any,
        j: Any,
        *,
        q_start: Any = 0,
        k_start: Any = 0,
        xp: Any = np,
        real: Any = None,
        order: int = 1,
    ) -> Any:
        """Return the derivatives of new scores with respect to scores, for arrays of pairs.

        Where the function is not differentiable, the result is that of PyTorch: 0 for ``abs`` at 0,
        and half for each side of ``minimum`` and ``maximum`` if both are equal.

        Parameters
        ----------
        score, b, h, i, j, q_start, k_start, xp, real
            Arguments as in `evaluate`.
        order
            1 for first derivatives, 2 for second ones.

        Returns
        -------
        array
            Derivatives of the scores' dtype, broadcastable to the shape of all arguments.

        Raises
        ------
        TypeError
            If there is CUDA source, and the Python function cannot be traced.
        """
        positions = {"b": b, "h": h, "i": i, "j": j, "q_start": q_start, "k_start": k_start}
        values = Interpreter(score, positions, self.captures, xp, real)
        return xp.asarray(values.value(derivative(self.graph, SCORE, order)))

    def _read_capture(self, name: str, value: Any) -> tuple[Any, CaptureSpec]:
        # Autograd of `cupy_flash.torch` has gradients of captures. Other calls refuse the tensor.
        with outside_transforms(value):
            return read_capture(name, without_history(value))

    def _options(self) -> dict[str, Any]:
        return {"differentiable": self.differentiable}

    def __repr__(self) -> str:
        plain = super().__repr__()
        named = self.differentiable
        return f"{plain[:-1]}, differentiable={named!r})" if named else plain

    def _result(self, node: Node) -> Node:
        # The user's order of operations is kept, see `cupy_flash.mods.ir.lower`.
        return operation("strict", cast(node, REAL))


class MaskMod(Modification):
    """Mask of pairs: a pair is visible if the result of a function is true.

    Parameters
    ----------
    function
        Function as in `ScoreMod`, without ``score``, that returns a bool.
    cuda
        CUDA source as in `ScoreMod`, that returns a bool.
    **captures
        Captures as in `ScoreMod`.

    Raises
    ------
    TypeError
        As in `ScoreMod`; also for a function that does not return a bool.
    ValueError
        As in `ScoreMod`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import MaskMod
    >>> document = np.array([[0, 0, 1, 1]], np.int32)
    >>> same = MaskMod(
    ...     lambda b, i, j, document: (document[b, i] == document[b, j]) & (j <= i),
    ...     document=document,
    ... )
    >>> positions = np.arange(4, dtype=np.int32)
    >>> same.evaluate(b=0, h=0, i=3, j=positions)
    array([False, False,  True,  True])
    """

    __slots__ = ("_maps",)
    _keyword = "mask_mod"
    _type = BOOL

    # Block masks, keyed by what they depend on in addition to this object. They belong to this
    # object, because equal objects may have captured other values.
    _maps: dict[Any, Any]

    @untraced
    def __init__(
        self, function: Callable[..., Any], /, *, cuda: str | None = None, **captures: Any
    ) -> None:
        super().__init__(function, cuda=cuda, **captures)
        self._set_options({})
        self._set_template()

    @classmethod
    def of_graph(cls, expression: Node, graph: Node, captures: Mapping[str, Any]) -> MaskMod:
        """Return an object without a Python function; see `ScoreMod.of_graph`."""
        return cls._made({}, AbsentFunction("graph"), None, captures, expression, graph)

    def _set_options(self, options: Mapping[str, Any]) -> None:
        super()._set_options({**options, "_maps": {}})

    def _set_template(self) -> None:
        super()._set_template()
        # Graphs find this object, and with it the block masks that calls keep.
        self.template.add(self)

    def refresh(self) -> None:
        """Make calls read the captured arrays again. Call this after writing to one of them.

        Calls on a GPU remember which blocks of the score matrix the mask leaves empty, for later
        calls of the same sizes. Other numbers and new arrays need a new `MaskMod`. This function
        does not wait for the GPU, and calls that were made before are not affected.
        """
        # A new dictionary, because other threads may still add block masks to the old one.
        object.__setattr__(self, "_maps", {})
        # Graphs find this object, and no equal one whose block masks are older.
        self.template.add(self)

    def kept_maps(self) -> dict[Any, Any]:
        """Return the block masks that calls keep in this object."""
        return self._maps

    def evaluate(
        self,
        b: Any,
        h: Any,
        i: Any,
        j: Any,
        *,
        q_start: Any = 0,
        k_start: Any = 0,
        xp: Any = np,
        dtype: Any = np.float32,
    ) -> Any:
        """Return whether pairs are visible.

        Parameters
        ----------
        b, h, i, j, q_start, k_start
            Integers, or arrays of them, broadcastable to one another; taken as int32.
        xp
            Module of the arrays, NumPy or CuPy.
        dtype
            Dtype in which captured reals are read.

        Returns
        -------
        array
            Visibility as bools, broadcastable to the shape of all arguments.
        """
        given = {"b": b, "h": h, "i": i, "j": j, "q_start": q_start, "k_start": k_start}
        return self._evaluate(given, xp, dtype, np.bool_)

    def plot(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        b: int = 0,
        h: int = 0,
        q_offset: int | None = None,
        block: tuple[int, int] | None = None,
        ax: Any | None = None,
    ) -> Any:
        """Draw the visible pairs. `cupy_flash.plot_mask` also draws the other masks of a call.

        Parameters
        ----------
        seqlen_q, seqlen_k
            Number of queries and number of keys.
        b, h
            Index of the sequence and index of the query head.
        q_offset
            Position of the first query; by default the last query has the position of the last key.
        block, ax
            Arguments as in `cupy_flash.plot_mask`.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        offset = seqlen_k - seqlen_q if q_offset is None else q_offset
        i, j = np.arange(seqlen_q)[:, None] + offset, np.arange(seqlen_k)[None]
        seen = np.broadcast_to(self.evaluate(b, h, i, j), (seqlen_q, seqlen_k))
        return draw(seen, block, ax)

    def _result(self, node: Node) -> Node:
        if node.type != BOOL:
            raise TypeError(
                f"MaskMod's function returns a value of type {node.type}; expected a bool: compare "
                "it, as in x != 0"
            )
        return node

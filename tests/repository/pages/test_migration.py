"""Tables of docs/migration/: they name every argument of the other library, and existing ones here.

An argument that a newer release of a library adds fails here until the page names it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT

import cupy_flash
from cupy_flash.mods import keywords

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

FOLDER = CHECKOUT / "docs" / "migration"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
# Headers of columns with names of this library.
OURS = re.compile(r"cupy_flash|`flash_attention")
# Names in these columns that are not arguments or functions of `cupy_flash` itself.
OTHER_NAMES = {"axis", "interleaved", "flax_attention", "dot_product_attention"}


def cells(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each cell of the tables of a page: the header of its column, and its code spans."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        header, _, *rows = (
            re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in table.splitlines()
        )
        for row in rows:
            assert len(row) == len(header), row
            for name, cell in zip(header, row, strict=True):
                yield name, re.findall(r"`([^`]+)`", cell)


def theirs(page: str) -> set[str]:
    """Return the words in the code of columns that show another library."""
    return {
        word
        for header, spans in cells(page)
        if not OURS.search(header) and "remark" not in header
        for span in spans
        for word in re.findall(r"\w+", span)
    }


def arguments() -> set[str]:
    """Return the names of arguments of public functions, and of public names."""
    public = {name: getattr(cupy_flash, name) for name in cupy_flash.__all__}
    found = set(keywords.NAMES) | set(public)
    for value in public.values():
        if callable(value) and not isinstance(value, type):
            found |= set(inspect.signature(value).parameters)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_arguments_of_this_library_exist(page: str) -> None:
    known = arguments() | OTHER_NAMES
    for header, spans in cells(page):
        if OURS.search(header):
            for span in spans:
                names = re.findall(r"(?<![\w.])(\w+)=(?!=)", span)
                names += re.findall(r"^[a-z]+(?:_[a-z]+)+$", span)
                assert set(names) <= known, span


@pytest.mark.parametrize("page", PAGES)
def test_the_first_paragraph_states_axes_and_alignment(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    first = text.split("\n\n")[1]
    assert "(batch, seqlen, heads, head_dim)" in first
    assert re.search(r"aligned\s+at\s+the", first)
    assert re.search(r"bottom\s+right", first)
    assert text.count("\n") <= 300


# Names in flash_attn 2.8, in what FlashAttention-3 and 4 add, and in xFormers.
NAMES = {
    "torch": "query key value attn_mask dropout_p is_causal scale enable_gqa",
    "flash_attn": """
        q k v qkv kv k_cache v_cache dropout_p softmax_scale causal window_size softcap alibi_slopes
        deterministic return_attn_probs cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k
        cu_seqlens max_seqlen block_table rotary_cos rotary_sin cache_seqlens cache_batch_idx
        cache_leftpad rotary_interleaved num_splits return_softmax_lse
        qv q_descale k_descale v_descale attention_chunk pack_gqa sm_margin seqused_q seqused_k
        page_table cu_seqlens_k_new rotary_seqlens scheduler_metadata
        gather_kv_indices learnable_sink score_mod score_mod_bwd mask_mod aux_tensors aux_scalars
        block_sparse_tensors block_sparse_tensors_bwd return_lse min_seqlen_k seqlen_k_per_split
        disable_scheduler_metadata
    """,
    "xformers": """
        query key value attn_bias p scale op output_dtype LowerTriangularMask
        LowerTriangularMaskWithTensorBias LowerTriangularFromBottomRightMask
        LowerTriangularFromBottomRightLocalAttentionMask LocalAttentionFromBottomRightMask
        BlockDiagonalMask BlockDiagonalCausalMask BlockDiagonalCausalFromBottomRightMask
        BlockDiagonalCausalLocalAttentionMask BlockDiagonalCausalLocalAttentionFromBottomRightMask
        BlockDiagonalPaddedKeysMask BlockDiagonalCausalWithOffsetPaddedKeysMask
        BlockDiagonalLocalAttentionPaddedKeysMask BlockDiagonalCausalLocalAttentionPaddedKeysMask
        BlockDiagonalGappyKeysMask BlockDiagonalCausalWithOffsetGappyKeysMask
        BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask PagedBlockDiagonalPaddedKeysMask
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask PagedBlockDiagonalCausalLocalPaddedKeysMask
        PagedBlockDiagonalGappyKeysMask PagedBlockDiagonalCausalWithOffsetGappyKeysMask
    """,
}


@pytest.mark.parametrize("page", NAMES)
def test_every_name_of_a_library_is_in_a_table(page: str) -> None:
    # Two of the libraries are not installed, and PyTorch's function has no signature.
    assert set(NAMES[page].split()) - theirs(page) == set()


@pytest.mark.parametrize(
    ("page", "module", "function", "others"),
    [
        ("torch", "torch.nn", "MultiheadAttention.forward", ""),
        ("torch", "torch.nn", "MultiheadAttention", "embed_dim num_heads bias device dtype"),
        ("torch", "torch.nn.attention.varlen", "varlen_attn", ""),
        ("flex_attention", "torch.nn.attention.flex_attention", "flex_attention", ""),
        ("flex_attention", "torch.nn.attention.flex_attention", "create_block_mask", "_compile"),
        ("jax", "jax.nn", "dot_product_attention", ""),
        ("jax", "flax.linen", "dot_product_attention", ""),
        ("jax", "flax.nnx", "dot_product_attention", ""),
    ],
    ids=str,
)
def test_every_argument_of_a_function_is_in_a_table(
    page: str, module: str, function: str, others: str
) -> None:
    found = pytest.importorskip(module)
    for name in function.split("."):
        found = getattr(found, name)
    names = set(inspect.signature(found).parameters) - {"self", *others.split()}
    assert names - theirs(page) == set()


def test_every_input_attribute_and_output_of_onnx_is_in_a_table() -> None:
    pytest.importorskip("onnx")
    defs = importlib.import_module("onnx.defs")
    schema = defs.get_schema("Attention", max_inclusive_version=25)
    names = {*schema.attributes, *(x.name for x in (*schema.inputs, *schema.outputs))}
    assert names - theirs("onnx") == set()

"""Small models of transformers with random weights, and copies that call cupy_flash."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

VOCABULARY = 61
# Large weights: small ones give almost equal scores, which hide a wrong mask.
_RANGE = 0.3
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": _RANGE,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# All experts of a token are used: a choice among them would depend on the last bits of scores.
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
WINDOW = 7


def _decoder(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **options})
    kind = (
        "Llama4ForCausalLM"
        if name.startswith("Llama4")
        else f"{name.removesuffix('Text')}ForCausalLM"
    )
    return getattr(transformers, kind)._from_config(config)


def _llama4() -> Any:
    return _decoder(
        "Llama4Text",
        intermediate_size_mlp=40,
        num_hidden_layers=4,
        attention_chunk_size=WINDOW,
        **_EXPERTS,
        interleave_moe_layer_step=2,
        layer_types=["chunked_attention", "full_attention"] * 2,
        no_rope_layers=[1, 0, 1, 0],
    )


def _gpt_oss() -> Any:
    model = _decoder(
        "GptOss",
        sliding_window=WINDOW,
        **_EXPERTS,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
DECODERS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: _decoder("Llama"),
    "Mistral": lambda: _decoder("Mistral", sliding_window=WINDOW),
    "Gemma 2": lambda: _decoder(
        "Gemma2", sliding_window=WINDOW, attn_logit_softcapping=2.0, layer_types=LAYERS
    ),
    "Gemma 3": lambda: _decoder("Gemma3Text", sliding_window=WINDOW, layer_types=LAYERS),
    "Qwen 3": lambda: _decoder("Qwen3"),
    "gpt-oss": _gpt_oss,
    "Llama 4": _llama4,
}


def bert() -> Any:
    """Return an encoder."""
    config = transformers.BertConfig(
        **{**_COMMON, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    )
    return transformers.BertForMaskedLM._from_config(config)


def modernbert() -> Any:
    """Return an encoder with layers that attend to a window on both sides."""
    special = dict.fromkeys(("cls_token_id", "sep_token_id", "eos_token_id"), 1)
    options = {**_COMMON, **special, "num_attention_heads": 3, "local_attention": 2 * WINDOW}
    config = transformers.ModernBertConfig(**options, global_attn_every_n_layers=2)
    return transformers.ModernBertForMaskedLM._from_config(config)


def t5() -> Any:
    """Return an encoder and a decoder whose scores have a learned bias."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=16,
        d_ff=40,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        initializer_factor=1.0,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=1,
    )
    model = transformers.T5ForConditionalGeneration._from_config(config)
    for stack in (model.encoder, model.decoder):
        bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias
        torch.nn.init.normal_(bias.weight, std=2.0)
    return model


def whisper() -> Any:
    """Return an encoder of audio features and a decoder."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_source_positions=30,
        max_target_positions=60,
        init_std=_RANGE,
        attention_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration._from_config(config)


def pair(make: Callable[[], Any], rng: np.random.Generator, device: str, dtype: Any) -> Any:
    """Return a model with eager attention, and a copy with cupy_flash's."""
    from cupy_flash.transformers import register

    register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        eager = make().to(device=device, dtype=dtype).eval()
    fused = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    fused.set_attn_implementation("fused_cupy")
    return eager, fused


def tokens(rng: np.random.Generator, *shape: int, device: str = "cpu") -> Any:
    """Return random tokens, none of which is padding."""
    return torch.tensor(rng.integers(2, VOCABULARY, shape), device=device)


def padding(lengths: list[int], total: int, side: str, device: str = "cpu") -> Any:
    """Return the attention mask of a batch that is padded on one side."""
    rows = [[1] * n + [0] * (total - n) for n in lengths]
    if side == "left":
        rows = [row[::-1] for row in rows]
    return torch.tensor(rows, device=device)

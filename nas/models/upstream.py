"""All that we take from fla, imported once and without its notes on machines that have no GPU or no flash-attn."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*Triton is not supported")
    warnings.filterwarnings("ignore", message="Flash Attention is not installed")
    import fla
    from fla.layers import (
        DeltaNet,
        GatedDeltaNet,
        GatedDeltaNet2,
        GatedLinearAttention,
        HGRN2Attention,
        HGRNAttention,
        KimiDeltaAttention,
        MultiScaleRetention,
        RWKV6Attention,
    )
    from fla.layers import Mamba2 as FLAMamba2
    from fla.layers.utils import (
        get_layer_cache,
        get_unpad_indices_and_cu,
        repad_hidden_states,
        unpad_hidden_states,
        update_layer_cache,
    )
    from fla.models.utils import Cache, FLAGenerationMixin
    from fla.modules import GatedMLP, RMSNorm
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

__all__ = [
    "Cache",
    "DeltaNet",
    "FLAGenerationMixin",
    "FLAMamba2",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedLinearAttention",
    "GatedMLP",
    "HGRN2Attention",
    "HGRNAttention",
    "KimiDeltaAttention",
    "MultiScaleRetention",
    "RMSNorm",
    "RWKV6Attention",
    "causal_conv1d",
    "chunk_simple_gla",
    "fla",
    "fused_recurrent_simple_gla",
    "get_layer_cache",
    "get_unpad_indices_and_cu",
    "repad_hidden_states",
    "unpad_hidden_states",
    "update_layer_cache",
]

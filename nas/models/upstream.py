"""All that we take from fla, imported once and without its notes on machines that have no GPU or no flash-attn."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*Triton is not supported")
    warnings.filterwarnings("ignore", message="Flash Attention is not installed")
    from fla.layers import (
        DeltaNet,
        GatedDeltaNet,
        GatedLinearAttention,
        HGRN2Attention,
        HGRNAttention,
        MultiScaleRetention,
    )
    from fla.layers.utils import get_unpad_indices_and_cu, repad_hidden_states
    from fla.models.utils import Cache, FLAGenerationMixin
    from fla.modules import GatedMLP, RMSNorm

__all__ = [
    "Cache",
    "DeltaNet",
    "FLAGenerationMixin",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedMLP",
    "HGRN2Attention",
    "HGRNAttention",
    "MultiScaleRetention",
    "RMSNorm",
    "get_unpad_indices_and_cu",
    "repad_hidden_states",
]

"""Configuration of a hybrid model: the canonical JSON of one architecture and what transformers needs beside it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

_DERIVED = ("vocab_size", "hidden_size", "intermediate_size", "tie_word_embeddings", "initializer_range")


class HybridConfig(PreTrainedConfig):
    """Configuration of `HybridForCausalLM`.

    Args:
        architecture: canonical JSON of `nas.architecture.Architecture` as a plain dict; keys whose value is None are
            absent. It alone fixes every size: `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`,
            `tie_word_embeddings` and `initializer_range` are read from it.
        use_cache: whether a forward pass outside training returns a cache by default.
        bos_token_id, eos_token_id, pad_token_id: as in transformers.
        kwargs: what `PreTrainedConfig` takes.

    Raises:
        ValueError: `architecture` is missing, or a derived size in `kwargs` disagrees with it.
    """

    model_type = "nas_hybrid"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        if architecture is None:
            raise ValueError("architecture=None: give the canonical JSON of an Architecture as a dict")
        derived = {name: architecture[name] for name in _DERIVED}
        derived["num_hidden_layers"] = len(architecture["layers"])
        for name, value in derived.items():
            given = kwargs.pop(name, value)
            if given != value:
                raise ValueError(f"{name}={given!r} disagrees with the architecture; allowed: {value!r}")
        self.architecture = architecture
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        super().__init__(**kwargs)
        for name, value in derived.items():
            setattr(self, name, value)

"""A decoder-only stack that mixes softmax attention and linear mixers layer by layer, on GPU and CPU."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration import HybridConfig
from .cpu_kernels import install
from .mixers import build_mixer, has_lower_bounds
from .routing import RoutingLinear, build_route, build_widening
from .upstream import Cache, FLAGenerationMixin, GatedMLP, RMSNorm

install()


class HybridBlock(GradientCheckpointingLayer):
    """One layer: h += mixer(norm(h)); h += MLP(norm(h)); and what the routing adds (see routing.py)."""

    def __init__(self, config: HybridConfig, layer_idx: int) -> None:
        super().__init__()
        architecture = config.architecture
        layer, size, eps = architecture["layers"][layer_idx], config.hidden_size, architecture["norm_eps"]
        self.attn_norm = RMSNorm(size, eps=eps)
        self.attn = build_mixer(layer, size, layer_idx, eps)
        self.mlp_norm = RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(size, intermediate_size=config.intermediate_size)
        self.widening = build_widening(architecture, layer_idx)
        self.route = build_route(architecture, layer_idx)
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        lower_bound: Tensor | None = None,
        received: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, T, hidden_size] -> the same shape, and under CLER this layer's r [B, T, values].

        `received` is r of the nearest routed layer below. These are arguments and results, never shared state, so
        that gradient checkpointing sees them. `past_key_values` is extended in place.
        """
        call: dict[str, Any] = {} if lower_bound is None else {"lower_bound": lower_bound}
        if cu_seqlens is not None:
            call["cu_seqlens"] = cu_seqlens
        call |= {"attention_mask": attention_mask, "past_key_values": past_key_values, "use_cache": use_cache}
        x = self.attn_norm(hidden_states)

        def mix() -> Tensor:
            return cast(Tensor, self.attn(hidden_states=x, **call)[0])

        route, sent = self.route, None
        if route is None:
            mixed = mix()
        else:
            mixed, sent = route.observe(mix, received, attention_mask, x.shape[1])
        if past_key_values is not None:
            release_storage(past_key_values, self.layer_idx)
        normed, residual = self.mlp_norm(mixed, hidden_states, True)
        hidden = residual + self.mlp(normed)
        if self.widening is not None:
            hidden = hidden + self.widening(normed)
        if route is None:
            return hidden, None
        return route(hidden, sent), sent if route.kind == "cler" else None


def release_storage(cache: Cache, layer_idx: int) -> None:
    """Clone every state of one layer that is a view of something larger, such as RWKV-6's last row of a whole prompt.

    The bytes that decoding keeps alive are then those of its states.
    """

    def owned(state: Any) -> Any:
        if isinstance(state, (tuple, list)):
            return type(state)(owned(x) for x in state)
        if isinstance(state, Tensor) and state.untyped_storage().nbytes() > state.numel() * state.element_size():
            return state.clone(memory_format=torch.contiguous_format)
        return state

    if len(cache) > layer_idx and cache[layer_idx] is not None:
        states = cache[layer_idx]
        states.update({name: owned(state) for name, state in states.items()})


class HybridPreTrainedModel(PreTrainedModel):
    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HybridBlock"]
    _is_stateful = True
    _input_embed_layer = "embeddings"
    _undecayed: frozenset[str] = frozenset()

    def _init_weights(self, module: nn.Module) -> None:
        """Linear N(0, initializer_range), embedding N(0, embedding_std); mixers keep what fla gives them."""
        std = self.config.initializer_range
        if isinstance(module, RoutingLinear):
            module.reset_parameters(std)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.architecture["embedding_std"])
        elif isinstance(module, nn.ParameterDict):
            for parameter in module.values():
                init.zeros_(parameter)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def _remember_decay(self) -> None:
        """Note which parameters the mixers exempt from weight decay: loading replaces parameters and drops the mark."""
        named = self.named_parameters()
        self._undecayed = frozenset(name for name, p in named if getattr(p, "_no_weight_decay", False))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name in model._undecayed:
            setattr(model.get_parameter(name), "_no_weight_decay", True)  # noqa: B010
        return loaded


class HybridModel(HybridPreTrainedModel):
    """Embedding, blocks and final norm; `forward` gives the normed hidden states."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HybridBlock(config, i) for i in range(config.num_hidden_layers))
        self.lower_bounds = nn.ParameterDict()
        specs = config.architecture["layers"]
        for mixer in dict.fromkeys(spec["mixer"] for spec in specs if has_lower_bounds(spec["mixer"])):
            rows = [spec["heads"] * spec["head_dim"] for spec in specs if spec["mixer"] == mixer]
            self.lower_bounds[mixer] = nn.Parameter(torch.zeros(len(rows), rows[0]))
        self.norm = RMSNorm(config.hidden_size, eps=config.architecture["norm_eps"])
        self.gradient_checkpointing = False
        self._remember_decay()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the stack.

        Args:
            input_ids: [B, T]; or give `inputs_embeds` [B, T, hidden_size].
            attention_mask: [B, past + T], 0 at left padding. Padding on the right is exact in one pass, but not when
                decoding goes on from its cache.
            past_key_values: cache to extend; made where `use_cache` is set and none is given.
            use_cache: default: the configuration's, and never in training.
            cu_seqlens: [N + 1] bounds of sequences packed into B = 1; linear mixers only.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`, or shapes that do not fit one another.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:
            if past_key_values is not None:
                raise ValueError("past_key_values does not go with gradient checkpointing in training; allowed: None")
            use_cache = False
        _check_shapes(hidden, attention_mask, past_key_values, cu_seqlens)
        if past_key_values is not None:
            use_cache = True  # a cache that only some layers extended would be wrong from the next call on
        elif use_cache:
            past_key_values = Cache()
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None  # nothing is padded: every layer takes its fast path
        error: Tensor | None = None
        for block, bound in zip(self.layers, self._lower_bounds(), strict=True):
            hidden, sent = block(
                hidden,
                bound,
                error,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                cu_seqlens=cu_seqlens,
            )
            error = error if sent is None else sent
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)

    def _lower_bounds(self) -> list[Tensor | None]:
        """Each layer's lower bound on its forget gates: [heads * head_dim] or None.

        HGRN, arXiv:2311.04823, section 3.2: cumulative softmax over the gated layers, zero (None) at the first. Each
        kind of mixer counts its own layers.
        """
        rows: dict[str, list[Tensor]] = {}
        for mixer, table in self.lower_bounds.items():
            weights = table.softmax(0, dtype=torch.promote_types(table.dtype, torch.float32))
            rows[mixer] = list((weights.cumsum(0) - weights[0]).unbind(0))
        bounds: list[Tensor | None] = []
        seen: dict[str, int] = dict.fromkeys(rows, 0)
        for spec in self.config.architecture["layers"]:
            mixer = spec["mixer"]
            bounds.append(rows[mixer][seen[mixer]] if seen.get(mixer) else None)
            if mixer in seen:
                seen[mixer] += 1
        return bounds


class HybridForCausalLM(HybridPreTrainedModel, FLAGenerationMixin):
    """`HybridModel` with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.model = HybridModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._remember_decay()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits and, with labels, the loss.

        Args:
            labels: [B, T], shifted in here: logits at t predict labels at t + 1; -100 is ignored.
            logits_to_keep: how many last positions get logits (0: all), or an index of positions.
            num_items_in_batch: divides the summed loss instead of the number of labels here (gradient accumulation).
            Others as in `HybridModel.forward`.

        Returns:
            loss (mean nats a label), logits [B, kept, vocab_size], past_key_values.

        Raises:
            ValueError: labels together with logits_to_keep.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need all logits; allowed: logits_to_keep=0")
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None if labels is None else _shifted_loss(logits, labels, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


def _shifted_loss(logits: Tensor, labels: Tensor, items: int | Tensor | None) -> Tensor:
    """Cross entropy of logits [B, T, V] at t against labels [B, T] at t + 1, in at least float32."""
    scores = logits[:, :-1].flatten(0, 1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    target = labels[:, 1:].flatten().to(scores.device)
    if items is None:
        return F.cross_entropy(scores, target, ignore_index=-100)
    return F.cross_entropy(scores, target, ignore_index=-100, reduction="sum") / items


def _check_shapes(
    hidden: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, cu_seqlens: Tensor | None
) -> None:
    batch, length = hidden.shape[:2]
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens with a batch of {batch}; allowed: sequences packed into one row")
    if attention_mask is None:
        return
    past = past_key_values.get_seq_length() if past_key_values is not None else 0
    if tuple(attention_mask.shape) != (batch, past + length):
        raise ValueError(
            f"attention_mask={list(attention_mask.shape)}; allowed: [B, past + T] = [{batch}, {past + length}]"
        )

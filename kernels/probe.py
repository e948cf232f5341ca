"""One look at a loaded model before it serves: what it needs, and whether paging is right for it.

This file owns the refusal of models that would load and run but answer wrongly. Packed, chunked
steps are right only if a token meets other tokens nowhere but in attention, and if it knows no
position but the one that it is given. Both are tried here on two tokens, because a list of
families would be out of date: a recurrent or convolutional part, a rope that moves with the
longest row, positions counted by the model itself all show. It must never touch a KV pool.

Life of a probe: one pass over each of two lines of two tokens, which share one token at one
position, with attention that answers zeros; then the shared token's queries, keys, values and
logits are compared. Called once, at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.attention import LayerCall, Needs
from kernels.model_info import Described
from protocol.errors import ConfigError, InternalError

# Both passes have equal shapes, so a faithful model differs by rounding at most. Relative.
_SAME = 0.02

Forward = Callable[..., torch.Tensor]


class ProbeStep:
    """A step that records what each layer asks for and computes nothing.

    ``token`` is the place in the line of the token whose queries, keys and values are kept.
    """

    def __init__(self, token: int) -> None:
        self.calls: list[LayerCall] = []
        self.kv_shapes: set[tuple[int, int, int]] = set()  # N, D of keys, D of values
        self.seen: list[torch.Tensor] = []
        self._token = token

    def attend(
        self, q_THD: torch.Tensor, k_TND: torch.Tensor, v_TND: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Record and answer zeros of the shape that attention gives: ``[T, H, D of values]``."""
        self.calls.append(call)
        self.kv_shapes.add((k_TND.shape[1], k_TND.shape[2], v_TND.shape[2]))
        self.seen += [x_THD[self._token].float().flatten() for x_THD in (q_THD, k_TND, v_TND)]
        return q_THD.new_zeros(*q_THD.shape[:2], v_TND.shape[2])

    def needs(self) -> Needs:
        """The features that some layer used."""
        return Needs(
            window=any(c.window for c in self.calls),
            softcap=any(c.softcap for c in self.calls),
            sinks=any(c.sinks_H is not None for c in self.calls),
            windows=tuple(c.window for c in self.calls if c.window),
        )


@torch.inference_mode()
def probe(
    forward: Forward, module: Any, described: Described, device: torch.device, ranks: int = 1
) -> Needs:
    """What ``module`` asks of its attention. Raises ``ConfigError`` saying what it cannot do.

    ``forward`` is ``kernels.model.forward``; the sentence starts with the model's type. With
    several ``ranks`` each of them probes, at the same time, and sees its share of the heads.
    """
    kind = described.config.model_type
    if _is_recurrent(module):
        raise ConfigError(f"{kind} keeps a recurrent state besides its KV, which is not supported")
    first, shared = described.vocab_size // 3, described.vocab_size // 2
    last = max(2, described.max_model_len - 1)
    before, logits = _run(forward, module, kind, [first, shared], [0, 1], 1, device)
    if logits.shape != (1, described.vocab_size):
        raise ConfigError(
            f"{kind} gives outputs of shape {tuple(logits.shape)} for one token where paged "
            f"serving needs (1, {described.vocab_size})"
        )
    _check_layers(kind, before, described, ranks)
    _check_windows(kind, before, described)
    after, other_logits = _run(forward, module, kind, [shared, first], [1, last], 0, device)
    pairs = zip([*before.seen, logits[0]], [*after.seen, other_logits[0]], strict=True)
    if any(_differ(a, b) for a, b in pairs):
        raise ConfigError(
            f"in {kind} a token's state depends on its neighbours otherwise than by attention, or "
            f"its position is not the one it is given, so it cannot be computed in packed chunks"
        )
    return before.needs()


def _is_recurrent(module: Any) -> bool:
    """Whether the family keeps another state than KV and this model has such layers.

    A hybrid family may have members that are attention throughout; they are served.
    """
    hybrid = getattr(module, "_is_stateful", False)
    return hybrid and any(isinstance(m, torch.nn.Conv1d) for m in module.modules())


def _run(
    forward: Forward,
    module: Any,
    kind: str,
    tokens: list[int],
    positions: list[int],
    token: int,
    device: torch.device,
) -> tuple[ProbeStep, torch.Tensor]:
    step = ProbeStep(token)
    try:
        logits = forward(
            module,
            torch.tensor(tokens, device=device),
            position_ids=torch.tensor([positions], device=device),
            logits_to_keep=torch.tensor([token], device=device),
            tandem_step=step,
        )
    except InternalError as e:  # our attention's own refusal
        raise ConfigError(f"{kind} does not run with paged attention: {e.message}") from e
    except Exception as e:  # foreign model code: whatever it raises means the same
        raise ConfigError(f"{kind} does not run with paged attention: {reason(e)}") from e
    return step, logits


def _check_layers(kind: str, step: ProbeStep, described: Described, ranks: int) -> None:
    geometry = described.geometry(1)
    if [c.layer for c in step.calls] != list(range(geometry.layers)):
        raise ConfigError(
            f"{kind} has {geometry.layers} layers but paged attention, which needs each of them "
            f"once and in order, was reached by {[c.layer for c in step.calls] or 'none'}"
        )
    own_heads = geometry.kv_heads // ranks
    whole = {(geometry.kv_heads, geometry.head_dim, geometry.head_dim)}
    if ranks > 1 and step.kv_shapes == whole:
        raise ConfigError(
            f"tensor_parallel {ranks}: transformers' plan for cutting {kind} leaves its attention "
            f"whole on every rank, which paged attention does not support",
            field="tensor_parallel",
        )
    if step.kv_shapes != {(own_heads, geometry.head_dim, geometry.head_dim)}:
        shapes = ", ".join(str(s) for s in sorted(step.kv_shapes))
        raise ConfigError(
            f"{kind} has layers of unequal or odd KV shape ({shapes}), which paged attention does "
            f"not support"
        )


def _check_windows(kind: str, step: ProbeStep, described: Described) -> None:
    """Each layer must be told the window that the config gives it.

    Some families put a window, chunk or selection only into the mask, which is never built here.
    What is as wide as the longest sequence changes nothing.
    """
    text, longest = described.config.get_text_config(), described.max_model_len
    layer_types = getattr(text, "layer_types", None)
    declares = layer_types or hasattr(type(text), "sliding_window")  # else a stray entry
    own = (getattr(text, "sliding_window", None) or 0) if declares else 0
    windows = {
        "full_attention": 0,
        "sliding_attention": own,
        "chunked_attention": getattr(text, "attention_chunk_size", None) or 0,
    }
    if not layer_types:
        layer_types = ["sliding_attention" if own else "full_attention"] * len(step.calls)
    for call, layer_type in zip(step.calls, layer_types, strict=False):
        if layer_type not in windows:
            raise ConfigError(f"{kind} has layers of type {layer_type!r}, which is not supported")
        asked, told = windows[layer_type], call.window
        if (asked if asked < longest else 0) != (told if told < longest else 0):
            raise ConfigError(
                f"{kind} has layers of type {layer_type!r} over {asked or 'all'} positions that "
                f"reach paged attention as over {told or 'all'}, which is not supported with "
                f"sequences of {longest} (model.max_model_len)"
            )


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two vectors differ by more than rounding; NaN differs."""
    scale = max(float(a.float().norm()), float(b.float().norm()))
    return not float((a.float() - b.float()).norm()) <= _SAME * scale


def reason(error: Exception) -> str:
    """The first line of what foreign code raised, or its kind when it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

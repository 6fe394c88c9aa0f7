"""Where a target's residual stream is read: in front of chosen layers, as it passes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn


class Taps:
    """Keeps the residual stream after i decoder layers, for each auxiliary layer id i, of the decoder's last pass.

    The stream after i layers is the input of layer i (and, for the last id, of the final norm): transformers' own
    `hidden_states[n]` would be the state AFTER that norm.
    """

    def __init__(self, decoder: nn.Module, layers: Sequence[int]):
        self.layers, self._kept = list(layers), dict[int, Tensor]()
        inputs = [*decoder.layers, decoder.norm]  # type: ignore[misc]
        for layer in self.layers:
            inputs[layer].register_forward_pre_hook(partial(self._keep, layer), with_kwargs=True)

    def _keep(self, layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kept[layer] = args[0] if args else kwargs["hidden_states"]

    def take(self) -> list[Tensor]:
        """The states of the last pass, one for each layer id, in their order; each can be taken once."""
        return [self._kept.pop(layer) for layer in self.layers]

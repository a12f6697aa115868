"""What vLLM's workers can do besides: give a running engine the weights of another checkpoint, all of them or none.

vLLM mixes this class into its own worker (`worker_extension_cls`) and calls it in the worker's process. vLLM's reload
only warns of a parameter that the files did not have, and leaves alone what was made of the old weights elsewhere.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch's modules have what they were given)

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

EXTENSION: Final = "engines.hyperqwen_worker.WeightSwap"
"""Where vLLM finds it."""


class WeightSwap:
    model_runner: Any

    def swap_weights(self, folder: str) -> list[str]:
        """Load the checkpoint in `folder` over the model in place. Returns the parameters that are still the old ones:
        if there are any, or this raises, the model is a mixture and must not be used. Of quantized models nothing can
        be said, since their parameters get other names once they are loaded."""
        model: Any = self.model_runner.get_model()
        load: Any = type(model).load_weights
        parameters: set[str] = {name for name, _ in model.named_parameters()}
        renewed: set[str] = set()

        def load_weights(weights: Iterable[tuple[str, Any]]) -> set[str]:
            renewed.update(load(model, weights) or ())
            return renewed

        model.load_weights = load_weights
        try:
            self.model_runner.reload_weights(weights_path=folder)
        finally:
            del model.load_weights
        for module in model.modules():
            _renew_packed_copy(module)
        quantized = self.model_runner.vllm_config.model_config.quantization is not None
        return [] if quantized else sorted(parameters - renewed)


def _renew_packed_copy(module: Any) -> None:
    """On a CPU an output head multiplies by a packed copy of its weight. Where that weight is the embedding's (they
    are tied), the reload has renewed the weight and not the copy. Layers whose weight is gone have a new copy."""
    weight = getattr(module, "weight", None)
    if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
        module.quant_method.process_weights_after_loading(module)

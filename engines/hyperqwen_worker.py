"""What vLLM's workers do besides: miss a tensor that a checkpoint lacks, and take another's weights in place.

Imported by vLLM, in its workers' processes, before a model is loaded: vLLM mixes `WeightSwap` into its own worker
(`worker_extension_cls`) and loads by `CheckedLoader` (`load_format`). Its own loader asks nothing of a layer whose
weights are made ready after they were read, as those of every linear layer are: what the files lack of them stays what
the memory held before. And its reload only warns of a parameter that the files did not have, and leaves alone what was
made of the old weights elsewhere.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch's modules have what they were given)

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from engines.hyperqwen_args import CHECKED_FORMAT

_EXPERTS: Final = ("w13_weight", "w2_weight")
_WEIGHTS: Final = {UnquantizedLinearMethod: ("weight",), UnquantizedFusedMoEMethod: _EXPERTS}
"""What these make of memory as they find it, and leave to the files."""

_UNWRITTEN: Final = "citadel_unwritten"
"""Where a model has the names that `WeightSwap.unwritten` tells."""


@register_model_loader(CHECKED_FORMAT)
class CheckedLoader(DefaultModelLoader):
    """vLLM's loader, with no number in every weight of a linear layer until the files give one.

    What still has none is not enough to refuse a checkpoint by: a model may make a weight that it does not use (the
    keys of layers that share another's, in some). One that it does use makes its answers no numbers; so the answer to
    our first question decides, and here only what no question need reach: one expert of many that lacks a weight that
    others have. Weights of quantized layers are left alone: the files may have them under other names and types.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        weights = linear_weights(model)
        for weight in weights.values():
            weight.data.fill_(float("nan"))
        super().load_weights(model, model_config)
        unwritten = {name: weight for name, weight in weights.items() if weight.amax().isnan()}
        if lacking := [name for name in unwritten if name.endswith(_EXPERTS) and some_lack(unwritten[name])]:
            raise ValueError(f"its files do not have all of {', '.join(lacking)}")
        setattr(model, _UNWRITTEN, sorted(unwritten))


def linear_weights(model: Any) -> dict[str, Any]:
    """Of those that are padded the padding is nobody's to write: they are left out."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for method, names in _WEIGHTS.items():
            if isinstance(getattr(module, "quant_method", None), method):
                weights = {f"{path}.{name}": getattr(module, name, None) for name in names}
                found |= {name: weight for name, weight in weights.items() if _is_whole(weight)}
    return found


def _is_whole(weight: Any) -> bool:
    return (
        weight is not None
        and weight.numel() > 0
        and not weight.is_meta
        and weight.is_floating_point()
        and getattr(weight, "weight_loader_numel", weight.numel()) == weight.numel()
    )


def some_lack(experts: Any) -> bool:
    """Whether some of the experts in a weight have all of theirs, and some have not."""
    lacking = experts.amax(dim=(1, 2)).isnan()
    return bool(lacking.any()) and not bool(lacking.all())


class WeightSwap:
    model_runner: Any

    def unwritten(self) -> list[str]:
        """The weights of linear layers that the files, when they were loaded, did not have all of."""
        return getattr(self.model_runner.get_model(), _UNWRITTEN, [])

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

"""What a model must be to be trained; found out before any client is."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfl.errors import ModelError
from rayfl.models.anatomy import under
from rayfl.models.classification import ClassificationModel
from rayfl.models.layers.factors import Factorized


def check_model(skeleton: ClassificationModel, everything: Collection[str], trained: Collection[str]) -> None:
    """Refuses a model whose names or layers do not fit the contract of models.

    Args:
        skeleton: the model.
        everything: names of its parameters.
        trained: names of those that require a gradient.

    Raises:
        ModelError: naming the model and the fix.
    """
    model, head_weight = type(skeleton).__name__, f"{skeleton.head_module}.weight"
    has_factors = isinstance(dict(skeleton.named_modules()).get(skeleton.head_module), Factorized)
    if head_weight not in everything and not has_factors:
        why = _why_no_weight(skeleton, everything)
        raise ModelError(f"model {model}: head_module is {skeleton.head_module!r}, but {why}")
    if not trained:
        raise ModelError(
            f"model {model}: no parameter requires a gradient, so that there is nothing to train: leave "
            "requires_grad on for those that are to be trained"
        )
    for module in skeleton.classifier_modules:
        if not under(everything, (module,)):
            raise ModelError(f"model {model}: classifier_modules names {module!r}, which has no parameters")
    if not has_factors and head_weight not in under(everything, skeleton.classifier_modules):
        raise ModelError(f"model {model}: classifier_modules must contain the head {skeleton.head_module!r}")
    if any(isinstance(m, _BatchNorm) and m.track_running_stats and m.momentum is None for m in skeleton.modules()):
        raise ModelError(f"model {model}: batch normalization needs a momentum, a cumulative average has none")


def _why_no_weight(skeleton: ClassificationModel, everything: Collection[str]) -> str:
    """Returns why the head has no weight of its name."""
    layer = dict(skeleton.named_modules()).get(skeleton.head_module)
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or not isinstance(weight, Tensor):
        return "there is no such linear layer"
    shared = [name for name in everything if skeleton.get_parameter(name) is weight]
    if shared:
        return f"its weight is also {shared[0]}: methods work on the head alone, so give it a weight of its own"
    return "its weight is computed of other tensors: give it a plain weight, without parametrization"

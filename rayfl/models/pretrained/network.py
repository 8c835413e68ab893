"""A network whose trees hold adapters and a head alone, over a frozen base that is there once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayfl.models.anatomy import grouped
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.pretrained.adapted_model import AdaptedModel
from rayfl.models.pretrained.feature_adapter import OF_FEATURES
from rayfl.models.pretrained.folding import folded
from rayfl.models.pretrained.initial_values import initial_value, own_shapes
from rayfl.models.pretrained.loading import Source
from rayfl.models.pretrained.magnitudes import MAGNITUDE, row_norms
from rayfl.models.pretrained.mixing import SHARES, delta_name, mixer_name, refuse_other_kinds
from rayfl.models.pretrained.prompts import PROMPTS
from rayfl.models.pretrained.rescaling import FACTORS, Rescaled
from rayfl.models.pretrained.sites import Mixed, Site, matrix_of

_A, _B = ".lora_A.weight", ".lora_B.weight"


class AdaptedNetwork(Network):
    """An :class:`AdaptedModel` as a function of its adapters and head.

    The base is loaded when a tree is first run on a device, and all networks of a process have it in common. Clients
    are folded into the batch (:func:`rayfl.models.pretrained.folding.folded`); one client alone is a fold of one.

    Initial values are functions of the seed and of a tensor's name: A is uniform within 1/sqrt(i), as ``peft`` draws
    it (Kaiming with a = sqrt 5), B is zero, a new head is normal with standard deviation 0.02 and zero bias. Magnitudes
    are the norms of the base's rows, whatever the seed, and vectors that rescale are ones. Virtual tokens: see
    :mod:`rayfl.models.pretrained.prompts`.

    Every call takes, in the place of a tree, several side by side too, and trees with matrices that are added to the
    base's (:mod:`rayfl.models.pretrained.mixing`).

    Args:
        model: the model on the device ``meta``.
        source: where the base is from.
        given: initial values by name, in place of drawn ones.
        tokens: how many rows a sample makes in the base's products.

    Attributes:
        groups: names of trained tensors by kind: ``lora_a``, ``lora_b``, ``magnitudes``, ``ia3``, ``prompt``,
            ``features``, ``adapters`` (all of these), ``head``. Magnitudes belong to outputs as the rows of B do, and
            so to ``lora_b`` too.
        rank: r, of A (r, i) and B (o, r); 0 for adapters of another kind.
        scale: s in W x + s B A x.
    """

    def __init__(
        self, model: AdaptedModel, source: Source, given: Mapping[str, Tensor] | None = None, tokens: int = 1
    ) -> None:
        self.source, self._own_given = source, dict(given or {})
        self.rows_per_sample = tokens
        sites = {f"model.{name}": one for name, one in model.model.named_modules() if isinstance(one, Site)}
        self.sites = {name: one.lora_A.weight.shape[-1] for name, one in sites.items()}
        rescaled = {f"model.{name}" for name, one in model.model.named_modules() if isinstance(one, Rescaled)}
        self._wrapped, self._prompts = {*sites, *rescaled}, model.prompts
        self._mixed = [one for one in model.modules() if isinstance(one, Mixed)]
        self._further = {mixer_name(name): (one, "mixer") for name, one in sites.items()}
        self._further |= {delta_name(name): (one, "delta") for name, one in sites.items()}
        self._mixing: tuple[str, ...] = ()
        self.rank, self.scale = next(((len(one.lora_A.weight), one.scale) for one in sites.values()), (0, 1.0))
        self._own = own_shapes(model)
        if source.attention == "sdpa" and not self.why_differentiable_once:
            self.why_differentiable_once = "fused attention has none: set model.attention=eager"
        self._bases: dict[tuple[torch.device, torch.dtype], nn.Module] = {}
        self._base_type = torch.float32
        self._seed = 0
        self._bound: tuple[Sequence[str], list[Tensor], bool] | None = None
        super().__init__(lambda: model)
        self.stochastic = self.batch_statistics = False
        self.why_not_vectorizable, self.vectorizable = "", True
        self.layers = self.unstacked_layers = grouped(self.parameter_names, self._place_of)
        endings = {
            "lora_a": (_A,),
            "lora_b": (_B, MAGNITUDE),
            "magnitudes": (MAGNITUDE,),
            "ia3": (FACTORS,),
        }
        kinds = {kind: tuple(n for n in self.parameter_names if n.endswith(ends)) for kind, ends in endings.items()}
        beginnings = {"prompt": PROMPTS, "features": OF_FEATURES}
        kinds |= {k: tuple(n for n in self.parameter_names if n.startswith(one)) for k, one in beginnings.items()}
        adapters = {name for names in kinds.values() for name in names}
        kinds["adapters"] = tuple(name for name in self.parameter_names if name in adapters)
        head = tuple(name for name in self.parameter_names if name not in adapters)
        self.groups = {**kinds, "head": head}
        self._decomposed = [one for one in sites.values() if one.lora_magnitude_vector is not None]
        self._blocks = model.blocks
        for block in self._blocks:
            vars(block)["_gradient_checkpointing_func"] = self._checkpointed

    def settle(self, seed: int) -> None:
        """Takes adapters that are not trained from the initial model of a seed."""
        self._seed, self._device = seed, None

    @property
    def fixed_parameters(self) -> dict[str, Tensor]:
        """Adapters and head that are not trained, on the CPU; the base is no part of it."""
        return {name: self._value(self._seed, name) for name in self._own if name not in self.parameter_names}

    @property
    def _own_fixed(self) -> dict[str, Tensor]:
        """All that is fixed and not the base's: parameters, and buffers."""
        return self.fixed_parameters

    def compute_in(self, dtype: torch.dtype) -> None:
        """Has the base stored and computed in another type; features and logits are float32 at least."""
        self._base_type, self._device = dtype, None
        self._bases.clear()

    def save_memory(self) -> bool:
        """See the base class: blocks are computed again in the backward pass."""
        waiting = [block for block in self._blocks if not block.gradient_checkpointing]
        for block in waiting:
            block.gradient_checkpointing = True
        return bool(waiting)

    def release(self) -> None:
        """Lets go of the last tree; the base stays."""
        super().release()
        self._bound = None
        self._mix({})

    def logits(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """See the base class; here and below no sample's outputs depend on others', so that a mask has no effect."""
        found: Tensor = self._call(_logits, tree, x, training)
        return found

    def features_and_logits(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See the base class."""
        features, logits = self._call(_both, tree, x, training)
        return features, logits

    def head_inputs_and_logits(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See the base class; what the head reads are the features."""
        return self.features_and_logits(tree, x, training=training)

    def features(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """See the base class."""
        found: Tensor = self._call(_features, tree, x, training)
        return found

    def classify(self, tree: Mapping[str, Tensor], features: Tensor, *, training: bool = False) -> Tensor:
        """See the base class."""
        found: Tensor = self._call(_classify, tree, features, training)
        return found

    def _call(self, entry: Any, tree: Mapping[str, Tensor], x: Tensor, training: bool) -> Any:
        """Runs the network for one client or, under ``vmap``, for all at once."""
        names = self._tree_names
        if len(tree) > len(names):
            if mixing := tuple(name for name in tree if name == SHARES or name in self._further):
                refuse_other_kinds(names, f"the tensor {mixing[0]!r}")
            names += mixing
        if len(tree) != len(names) or any(name not in tree for name in names):
            raise self._misfit(tree)
        return folded(partial(self._run, entry, training, names), [tree[name] for name in names], x)

    def _run(self, entry: Any, training: bool, names: Sequence[str], leaves: Sequence[Tensor], x: Tensor) -> Any:
        model = self._placed(names, leaves, training)
        self._bound = names, list(leaves), training
        found = entry(model, x.to(self._base_type) if x.is_floating_point() else x)
        return tuple(map(_wide, found)) if isinstance(found, tuple) else _wide(found)

    def _checkpointed(self, run: Any, *args: Any) -> Any:
        """Computes a layer again in the backward pass, with the tensors that it had: others may be bound by then."""
        assert self._bound is not None
        bound = self._bound

        def again(*inner: Any) -> Any:
            self._placed(*bound)
            return run(*inner)

        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=self.stochastic)

    def _placed(self, names: Sequence[str], leaves: Sequence[Tensor], training: bool) -> ClassificationModel:
        """Binds a tree, how models side by side are mixed, and what is added to the base."""
        tensors = dict(zip(names, leaves, strict=True))
        self._mix({name: tensors.pop(name) for name in names[len(self._tree_names) :]})
        return self._bind(tensors, training)

    def _mix(self, mixing: Mapping[str, Tensor]) -> None:
        """Gives the layers their shares, mixers and matrices, and takes away those of another tree."""
        if not mixing and not self._mixing:
            return
        self._mixing = tuple(mixing)
        for layer in self._mixed:
            layer.shares = mixing.get(SHARES)
        for name, (site, kind) in self._further.items():
            setattr(site, kind, mixing.get(name))

    def _bind_fixed(self, device: torch.device) -> None:
        """Puts the base, and adapters that are not trained, in their places."""
        base = self._base_on(device)
        tensors = {**dict(base.named_parameters(remove_duplicate=False)), **dict(base.named_buffers())}
        own = {name: value.to(device) for name, value in self._own_fixed.items()}
        for places, key, name in self._fixed_slots:
            places[key] = own[name] if name in own else tensors[self._name_in_base(name)]
        for site in self._decomposed:
            site.norms = row_norms(matrix_of(site.base))

    def _base_on(self, device: torch.device) -> nn.Module:
        key = (device, self._base_type)
        if key not in self._bases:
            self._bases[key] = self.source.loaded(device, self._base_type)
        return self._bases[key]

    def _name_in_base(self, name: str) -> str:
        owner, _, key = name.rpartition(".")
        layer = owner.removesuffix(".base")
        return f"{layer if layer in self._wrapped else owner}.{key}".removeprefix("model.")

    def _place_of(self, name: str) -> str:
        """The module whose adapter or weights a tensor is part of: both factors are one layer."""
        return name.rpartition(".lora_")[0] or name.rpartition(".")[0]

    def _drawn_for(self, seed: int) -> dict[str, Tensor]:
        if self._drawn is None or self._drawn[0] != seed:
            self._drawn = seed, {name: self._value(seed, name) for name in self._tree_names}
        return self._drawn[1]

    def _fixed_of(self, model: ClassificationModel) -> dict[str, Tensor]:
        return {}

    @cached_property
    def _norms_in_files(self) -> dict[str, Tensor]:
        """Norms of the rows of the layers with adapters: of the folder's own weights, whatever is computed in."""
        base = self.source.loaded(torch.device("cpu"), self.source.own_type)
        return {site: row_norms(matrix_of(base.get_submodule(site.removeprefix("model.")))) for site in self.sites}

    @cached_property
    def _embeddings_in_files(self) -> Tensor:
        """The embeddings of all tokens: the folder's own, whatever is computed in."""
        base: Any = self.source.loaded(torch.device("cpu"), self.source.own_type)
        found: Tensor = base.get_input_embeddings().weight
        return found

    def _value(self, seed: int, name: str) -> Tensor:
        """The initial value of a tensor of our own."""
        if name in self._own_given:
            return self._own_given[name].float().clone()
        if name.endswith(MAGNITUDE):
            return self._norms_in_files[name.removesuffix(MAGNITUDE)].clone()
        if self._prompts is not None and name.startswith(PROMPTS):
            known = self._embeddings_in_files if self._prompts.takes_embeddings else None
            return self._prompts.initial(seed, name, known)
        return initial_value(seed, name, self._own[name])


def _wide(found: Tensor) -> Tensor:
    """Returns what a base of any type has computed in float32 at least."""
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _logits(model: ClassificationModel, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found


def _features(model: ClassificationModel, x: Tensor) -> Tensor:
    return model.features(x)


def _both(model: ClassificationModel, x: Tensor) -> tuple[Tensor, Tensor]:
    features = model.features(x)
    return features, model.classify(features)


def _classify(model: ClassificationModel, features: Tensor) -> Tensor:
    return model.classify(features)

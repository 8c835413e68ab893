"""A module whose parameters and buffers are those of a tree, bound for one call after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from rayfl.errors import ModelError
from rayfl.models.anatomy import slots
from rayfl.models.classification import ClassificationModel
from rayfl.models.forward_pass import ForwardPass, is_stacked
from rayfl.models.layers.recurrent_weights import in_one_block
from rayfl.models.reduced_precision import has_broad_kernels, reduced_precision
from rayfl.models.stackable import make_stackable


class BoundModel:
    """One module for all trees of a model, with what lies between a tree and the module's own arithmetic.

    Binding avoids the cost of ``torch.func.functional_call`` in every call. An instance holds on to the last tree it
    saw (an enclosing ``vmap`` or autograd graph included) until :meth:`release`, and must not be shared between
    threads. What is in no tree, it has once, and this follows the tree from device to device.

    Args:
        skeleton: the module; its own tensors are no longer needed.

    Attributes:
        parameter_names: all parameters that require a gradient, in the order of the model.
        buffer_names: the buffers of the tree in the order of the model.
        head_weight: name of the head's weight matrix, shape (C, f).
    """

    def __init__(self, skeleton: ClassificationModel) -> None:
        self._skeleton = skeleton
        self._forward_pass = ForwardPass()
        make_stackable(skeleton, self._forward_pass)
        everything = dict(skeleton.named_parameters())
        parameters = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
        persistent = skeleton.state_dict().keys()
        buffers = {n: b for n, b in skeleton.named_buffers() if b.is_floating_point() and n in persistent}
        others = {n: t for n, t in (*everything.items(), *skeleton.named_buffers()) if n not in {*parameters, *buffers}}
        self.parameter_names = tuple(parameters)
        self.buffer_names = tuple(buffers)
        self._tree_names = self.parameter_names + self.buffer_names
        self._slots = slots(skeleton, {**parameters, **buffers})
        self._fixed_slots = slots(skeleton, others)
        self._fixed_parameters = tuple(name for name in everything if name not in parameters)
        self.head_weight = f"{skeleton.head_module}.weight"
        self._fixed: dict[str, Tensor] = {}
        self._device: torch.device | None = None
        self._reduced: torch.dtype | None = None
        self._channels_last = skeleton.channels_last
        self._recurrent = tuple(module for module in skeleton.modules() if isinstance(module, nn.RNNBase))
        self._by_library = False  # whether PyTorch's libraries compute recurrent layers of the tree that is bound
        self._broad = has_broad_kernels(skeleton)
        for module in self._recurrent:
            # Without references RNNBase sees no change of weights. Otherwise it would call flatten_parameters,
            # which on CUDA moves the bound tensors to storage of its own and detaches them from the caller's vector.
            module._flat_weight_refs = [None] * len(module._flat_weights_names)

    @property
    def fixed_parameters(self) -> dict[str, Tensor]:
        """The parameters that require no gradient, by name, on the CPU: no part of any tree."""
        return {name: self._fixed[name] for name in self._fixed_parameters}

    def compute_in(self, dtype: torch.dtype) -> None:
        """Has forward and backward passes compute in a narrower type, wherever PyTorch's autocast does so.

        Trees stay what they are, which must be float32, and features and logits are float32.

        Args:
            dtype: such as ``torch.bfloat16``.
        """
        self._reduced = dtype

    @property
    def draws(self) -> int:
        """How many tensors of random numbers the step has had; set back, the next passes have the same ones again."""
        return self._forward_pass.calls

    @draws.setter
    def draws(self, count: int) -> None:
        self._forward_pass.calls = count

    def places(self, rows: int, count: int, among: int, device: torch.device) -> Tensor:
        """Draws places for each row of a mini-batch by the key of the step; see :meth:`ForwardPass.places`."""
        return self._forward_pass.places(rows, count, among, device)

    def replaced(self, tree: Mapping[str, Tensor]) -> list[str]:
        """Names of what the last pass has put tensors with other values in the place of, which no tree has.

        Args:
            tree: that of the pass.
        """
        now = {name: tensors[key] for tensors, key, name in self._slots if tensors[key] is not tree[name]}
        return [name for name, tensor in now.items() if tensor is None or not torch.equal(tensor, tree[name])]

    def batch_norm_inputs(self, tree: Mapping[str, Tensor], x: Tensor) -> list[tuple[str, Tensor]]:
        """What batch normalizations read in evaluation mode, in the order of the calls: name, (b, channels, ...).

        Args:
            tree: tensors by name.
            x: a batch of inputs on the device of the tree.
        """
        model, read = self._bind(tree, training=False), list[tuple[str, Tensor]]()
        hooks = [
            module.register_forward_pre_hook(lambda _, args, name=name: read.append((name, args[0])))
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm)
        ]
        try:
            with self._arithmetic():
                model.forward(self._laid_out(x))
        finally:
            for hook in hooks:
                hook.remove()
        return [(name, self._widened(one)) for name, one in read]

    def walked(
        self,
        tree: Mapping[str, Tensor],
        x: Tensor,
        walk: Callable[[nn.Module, Tensor], Sequence[Tensor]],
        *,
        training: bool = False,
        mask: Tensor | None = None,
    ) -> list[Tensor]:
        """What a function makes of the bound module and its inputs, such as values between its layers.

        Args:
            tree: tensors by name; those of layers that are not run may be left out.
            x: a batch of inputs on the device of the tree.
            walk: the function.
            training: whether dropout is active and batch normalization uses (and records) batch statistics.
            mask: 1 for samples and 0 for padding, shape (b,); None if all are samples.
        """
        nothing = torch.zeros(0, device=x.device)
        model = self._bind({**dict.fromkeys(self._tree_names, nothing), **tree}, training, mask)
        with self._arithmetic():
            return [self._widened(one) for one in walk(model, self._laid_out(x))]

    def release(self) -> None:
        """Lets go of the last tree."""
        for tensors, key, _ in self._slots:
            tensors[key] = None
        for module in self._recurrent:
            module._flat_weights = []
        self._forward_pass.mask = self._forward_pass.key = None
        self._forward_pass.padded = False

    def begin_step(self, key: Tensor, padded: bool = False, call: int | None = 0) -> None:
        """Tells the layers of the random numbers of the next step, and of its padding; until :meth:`release`.

        Args:
            key: of dropout's masks (:func:`rayfl.models.forward_pass.keys_of`), on the device.
            padded: whether its mini-batches have padding; layers that depend on the batch then need a mask.
            call: from where the step's masks are counted; None goes on.
        """
        self._forward_pass.key, self._forward_pass.padded = key, padded
        if call is not None:
            self._forward_pass.calls = call

    def _bind(self, tree: Mapping[str, Tensor], training: bool, mask: Tensor | None = None) -> ClassificationModel:
        if len(tree) != len(self._tree_names):
            raise self._misfit(tree)
        try:
            for tensors, key, name in self._slots:
                tensors[key] = tree[name]
        except KeyError:
            raise self._misfit(tree) from None
        device = tree[self._tree_names[0]].device
        if device != self._device:
            self._bind_fixed(device)
            self._device = device
        if self._reduced is not None and tree[self._tree_names[0]].dtype == torch.float64:
            raise ModelError(f"a model in float64 cannot compute in {self._reduced}: set engine.precision=float32")
        for module in self._recurrent:
            weights: list[Any] = [getattr(module, name) for name in module._flat_weights_names]
            self._by_library = not is_stacked(weights[0])
            if device.type != "cpu" and self._by_library:
                weights = in_one_block(weights)
            module._flat_weights = weights
        if self._skeleton.training != training:
            self._skeleton.train(training)
        self._forward_pass.mask = mask
        return self._skeleton

    def _bind_fixed(self, device: torch.device) -> None:
        """Puts what is fixed in its places."""
        for tensors, key, name in self._fixed_slots:
            tensors[key] = self._fixed[name].to(device)

    def _arithmetic(self) -> AbstractContextManager[object]:
        """Returns the context in which the bound model computes."""
        if self._reduced is None:
            return nullcontext()
        assert self._device is not None  # a tree is bound
        return reduced_precision(self._reduced, self._device, self._by_library, self._broad)

    def _laid_out(self, x: Tensor) -> Tensor:
        """Inputs of the bound model as it reads them fastest."""
        if not self._channels_last or not self._skeleton.training or x.device.type != "cpu" or x.shape[1] == 1:
            return x
        # vmap knows no layouts but one
        return x if is_functorch_wrapped_tensor(x) else x.contiguous(memory_format=torch.channels_last)

    def _widened(self, found: Tensor) -> Tensor:
        return found if self._reduced is None else found.float()

    def _misfit(self, tree: Iterable[str]) -> ModelError:
        missing, extra = sorted(set(self._tree_names).difference(tree)), sorted(set(tree).difference(self._tree_names))
        model = type(self._skeleton).__name__
        fixed = set(extra) & set(self._fixed_parameters)
        old = f"; {len(fixed)} of these require no gradient: an older version of rayfl trained them" if fixed else ""
        return ModelError(f"parameters do not fit the model {model}: missing {missing}, unknown {extra}{old}")

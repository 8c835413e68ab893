"""Part d: clients' adapters over one pretrained base: is a fold right, how fast is it, what does it take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from algorithms.fedavg import FedAvg
from algorithms.superfed import SuPerFed
from checks.bench import DEVICE, REHEARSAL, federation, peak_bytes, play, profiled, samples, scaled, seconds, wait
from checks.running import Check, Record, SkippedError
from rayfl.examples import InputSpec
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.section import PretrainedModel

_VIT: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "image_size": 224, "patch_size": 16, "num_channels": 3,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 5632, "max_position_embeddings": 2048, "vocab_size": 32000, "pad_token_id": 0,
}  # fmt: skip
_SMALL_VIT: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 32,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip
_LESS: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
BASES: dict[str, tuple[str, dict[str, Any], InputSpec]] = {
    "ViT-B/16": ("ViT", _VIT, InputSpec("image", (3, 224, 224), 100)),
    "1.1 B decoder": ("Llama", _LLAMA, InputSpec("tokens", (512,), 4, vocabulary=32000)),
    "small ViT": ("ViT", _SMALL_VIT, InputSpec("image", (3, 32, 32), 10)),
    "many words": (
        "Llama",
        {**_LLAMA, "num_hidden_layers": 2, "vocab_size": 128256},
        InputSpec("tokens", (512,), 128256, 128256, "tokens"),
    ),
}
"""Bases with random weights, of the shapes of published ones."""
_SAVED_MIB = {"ViT-B/16": (38.8, 3.8), "1.1 B decoder": (686.0, 48.0)}
"""What is kept of a sample for the backward pass by arithmetic, without and with checkpointing (docs/adapters.md)."""


@cache
def _folder(name: str) -> str:
    """A base with random weights; in rehearsals a tiny one."""
    if find_spec("transformers") is None:
        raise SkippedError("transformers is not installed")
    from rayfl.models.pretrained.loading import library

    transformers = library()
    family, options, spec = BASES[name]
    if REHEARSAL:
        options = {**options, **_LESS} | ({"num_key_value_heads": 2} if family == "Llama" else {})
    config = getattr(transformers, f"{family}Config")(**options, num_labels=spec.num_classes)
    kind = "ForImageClassification" if family == "ViT" else "ForSequenceClassification"
    kind = "ForCausalLM" if spec.target == "tokens" else kind
    with torch.device(DEVICE):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}{kind}")(config).to(torch.bfloat16)
    _FOLDERS.append(tempfile.TemporaryDirectory())
    folder = Path(_FOLDERS[-1].name) / "base"
    model.save_pretrained(folder)
    return str(folder)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""They are removed when the process ends."""


def _section(name: str, **options: Any) -> PretrainedModel:
    return PretrainedModel.model_validate({"folder": _folder(name), "adapter": {"r": 8, "alpha": 16}, **options})


def _spec(name: str) -> InputSpec:
    """The inputs of a base; in rehearsals small ones."""
    spec = BASES[name][2]
    if not REHEARSAL or spec.kind == "image":
        return spec
    return replace(spec, shape=(16,))


def _network(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> AdaptedNetwork:
    network = _section(name, **options).network(_spec(name))
    network.compute_in(dtype)
    return network


def _stack(network: AdaptedNetwork, clients: int) -> dict[str, Tensor]:
    """Adapters of some clients some way from their initial values, shape (N, ...)."""
    generator = torch.Generator().manual_seed(0)
    initial = network.initialize(0)
    return {
        name: torch.stack([leaf + 0.02 * torch.randn(leaf.shape, generator=generator) for _ in range(clients)]).to(
            DEVICE
        )
        for name, leaf in initial.items()
    }


def _batches(name: str, clients: int, batch: int) -> tuple[Tensor, Tensor]:
    x, y = samples(_spec(name), clients * batch, torch.Generator().manual_seed(1))
    return x.unflatten(0, (clients, batch)).to(DEVICE), y.unflatten(0, (clients, batch)).to(DEVICE)  # type: ignore[no-untyped-call]


def _gradients(
    network: AdaptedNetwork, stack: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Losses of all clients, and the gradients of each."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in stack.items()}

    def loss(tree: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network.logits(tree, x, training=True), y)

    losses = vmap(loss)(leaves, x, y)
    return losses.detach(), torch.autograd.grad(losses.sum(), list(leaves.values()))


def _course(network: AdaptedNetwork, stack: dict[str, Tensor], x: Tensor, y: Tensor, steps: int) -> Tensor:
    """The losses of some steps of gradient descent, shape (steps, N)."""
    found = []
    for _ in range(steps):
        losses, gradients = _gradients(network, stack, x, y)
        stack = {name: leaf - 0.1 * g for (name, leaf), g in zip(stack.items(), gradients, strict=True)}
        found.append(losses)
    return torch.stack(found)


def folds(record: Record) -> None:
    """Twenty steps of four clients in bfloat16, folded and one by one, and in float32.

    A fold must not change a client's loss: each is compared with that client's alone. Against float32 the twenty losses
    are means over the clients: that of one client, of four samples, shows the rounding of few logits, and is noted.
    """
    for name in ("ViT-B/16", "1.1 B decoder"):
        batch = scaled(4, 2)
        x, y = _batches(name, 4, batch)
        narrow = _network(name)
        stack = _stack(narrow, 4)
        folded = _course(narrow, stack, x, y, 20)
        single = [{key: leaf[k : k + 1] for key, leaf in stack.items()} for k in range(4)]
        alone = torch.cat([_course(narrow, tree, x[k : k + 1], y[k : k + 1], 20) for k, tree in enumerate(single)], 1)
        del narrow
        exact = _course(_network(name, torch.float32), stack, x, y, 20)
        by_fold = float(((folded - alone).abs() / alone.abs()).max())
        by_type = float(((folded - exact).mean(1).abs() / exact.mean(1)).max())
        by_client = float(((folded - exact).abs() / exact.abs()).max())
        found = {"losses": folded.mean(1).tolist(), "to one by one": by_fold, "to float32": by_type}
        record.note(name, {**found, "one client's to float32": by_client})
        record.goal(
            f"{name}: mean loss of the clients in each of 20 steps, bfloat16 to float32",
            "within 1 %", by_type, by_type < 0.01,
        )  # fmt: skip
        record.goal(
            f"{name}: each client's loss in each step, folded to one by one", "within 1 %", by_fold, by_fold < 0.01
        )


def steps_by_width(record: Record) -> None:
    """A step by the number of clients in the fold: where samples a second no longer grow fixes rows_per_step."""
    for name, batch in (("ViT-B/16", 10), ("1.1 B decoder", 2)):
        network = _network(name, checkpointing=name != "ViT-B/16")
        taken: dict[int, float] = {}
        for clients in (1, 2, 4, 8, 16, 32, 64):
            if clients > scaled(64, 4) or (name != "ViT-B/16" and clients > 16):
                continue
            stack, (x, y) = _stack(network, clients), _batches(name, clients, scaled(batch, 2))

            def step(stack: Any = stack, x: Tensor = x, y: Tensor = y, net: AdaptedNetwork = network) -> None:
                _gradients(net, stack, x, y)

            taken[clients] = seconds(step, 2)
            record.note(
                f"{name}, {clients} clients",
                {
                    "rows": clients * scaled(batch, 2) * network.rows_per_sample,
                    "s a step": taken[clients],
                    "samples a second": clients * scaled(batch, 2) / taken[clients],
                },
            )
        most = max(taken)
        gain = taken[1] * most / taken[most]
        record.note(f"{name}: one by one to folded, {most} clients", gain)
        if name == "ViT-B/16":
            record.goal("ViT-B/16: folding is no slower than one by one", "at least 1", gain, gain >= 1)
            stack, (x, y) = _stack(network, 8), _batches(name, 8, scaled(batch, 2))
            kernels = profiled(lambda net=network, stack=stack, x=x, y=y: _gradients(net, stack, x, y))  # type: ignore[misc]
            record.note("kernels of a step of 8 clients", kernels)


def fused_attention(record: Record) -> None:
    """Whether forward and backward passes of a fold use fused attention, and never wait for the device."""
    if DEVICE.type != "cuda":
        raise SkippedError("needs a GPU")
    from torch.profiler import ProfilerActivity, profile

    network = _network("ViT-B/16")
    stack, (x, y) = _stack(network, 4), _batches("ViT-B/16", 4, 10)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        _gradients(network, stack, x, y)
        torch.cuda.synchronize()
    names = {row.key for row in found.key_averages() if "attention" in row.key.lower() or "flash" in row.key.lower()}
    record.note("kernels", sorted(names)[:20])
    backward = sum("backward" in name.lower() or "bwd" in name.lower() for name in names)
    record.goal("fused attention in forward and backward passes", "both", len(names), 0 < backward < len(names))
    waits = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        _gradients(network, stack, x, y)
    except RuntimeError as error:
        waits = 1
        record.note("waits", str(error)[-1000:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record.goal("a folded step that waits for the device", "none", waits, waits == 0)


def memory(record: Record) -> None:
    """Bytes that a step takes, with and without checkpointing, against arithmetic."""
    for name, (plain, again) in _SAVED_MIB.items():
        clients, batch = 2, scaled(10 if name == "ViT-B/16" else 2, 2)
        for checkpointing, expected in ((False, plain), (True, again)):
            network = _network(name, checkpointing=checkpointing)
            stack, (x, y) = _stack(network, clients), _batches(name, clients, batch)
            _gradients(network, stack, x, y)
            taken = peak_bytes(lambda net=network, stack=stack, x=x, y=y: _gradients(net, stack, x, y))  # type: ignore[misc]
            what = f"{name}, {'with' if checkpointing else 'without'} checkpointing"
            record.note(what, {"peak bytes": taken, "MiB a sample by arithmetic": expected})
            if taken is not None and not checkpointing:
                mib = taken / clients / batch / 2**20
                record.goal(
                    f"{what}: MiB a sample to arithmetic", "within 15 %", mib / expected, abs(mib / expected - 1) < 0.15
                )


def rounds(record: Record) -> None:
    """Rounds of 16 ViT-B clients, by how many are folded, and the same samples through modules of peft."""
    size, batch = scaled(40, 4), scaled(10, 2)
    for width in (1, 4, 16):
        toy = federation(
            FedAvg(), [size] * scaled(16, 3), _section("ViT-B/16"), _spec("ViT-B/16"), width=width, batch_size=batch
        )
        if not REHEARSAL:
            toy.task.network.compute_in(torch.bfloat16)
        play(toy)
        taken = seconds(lambda toy=toy: play(toy), 1)  # type: ignore[misc]
        record.note(f"{width} at a time", {"s a round": taken, "samples a second": scaled(16, 3) * size / taken})
    if find_spec("peft") is None:
        record.note("peft", "is not installed")
        return
    record.note("bare loop over modules of peft", _with_peft(scaled(16, 3), size // batch, batch))


def _with_peft(clients: int, steps: int, batch: int) -> dict[str, float]:
    """Clients one after the other: each loads its adapter into one module, steps, and takes it out."""
    import peft

    from rayfl.models.pretrained.loading import library

    transformers = library()
    bare = transformers.AutoModelForImageClassification.from_pretrained(_folder("ViT-B/16"), dtype=torch.bfloat16)
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    model = peft.get_peft_model(bare, settings).to(DEVICE).train()
    own = {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad}
    states = [{name: leaf.detach().clone() for name, leaf in own.items()} for _ in range(clients)]
    x, y = _batches("ViT-B/16", clients, batch)
    inputs = x.to(torch.bfloat16)

    def a_round() -> None:
        for k, state in enumerate(states):
            with torch.no_grad():
                for name, leaf in own.items():
                    leaf.copy_(state[name])
            optimizer = torch.optim.SGD(own.values(), lr=0.01)
            for _ in range(steps):
                optimizer.zero_grad()
                F.cross_entropy(model(pixel_values=inputs[k]).logits.float(), y[k]).backward()
                optimizer.step()
            states[k] = {name: leaf.detach().clone() for name, leaf in own.items()}

    taken = seconds(a_round, 1)
    return {"s a round": taken, "samples a second": clients * steps * batch / taken}


def many_clients(record: Record) -> None:
    """5,000 clients of a small ViT with SuPerFed's states: rounds, and a stacked evaluation of all."""
    toy = federation(
        SuPerFed(start=0.0), [4] * scaled(5000, 6), _section("small ViT"), _spec("small ViT"),
        cohort=scaled(500, 3), width=scaled(64, 4), batch_size=4,
    )  # fmt: skip
    taken = seconds(lambda: play(toy), 1)
    record.note("s a round", taken)
    record.note("peak bytes of a round", peak_bytes(lambda: play(toy)))
    begun = time.perf_counter()
    toy.scores()
    wait()
    record.note("s an evaluation of all clients", time.perf_counter() - begun)


CHECKS = (
    Check("adapters_folds", 100, "Folded adapters in bfloat16 against one by one and float32", folds),
    Check("adapters_steps", 110, "A step by the number of clients in the fold", steps_by_width),
    Check("adapters_attention", 40, "Fused attention in both passes, and no waiting", fused_attention),
    Check("adapters_memory", 70, "Bytes of a step against arithmetic", memory),
    Check("adapters_rounds", 80, "Rounds of 16 ViT-B clients, and a loop over peft", rounds),
    Check("adapters_clients", 115, "5,000 clients with SuPerFed's states", many_clients),
)

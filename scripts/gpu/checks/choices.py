"""Part e: what else could be done, in what time: which defaults are right on this GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

import rayfl
from algorithms.fedavg import FedAvg
from algorithms.superfed import SuPerFed
from checks.actors import Watching
from checks.bases import batches, folder_of, gradients_of, network_of, stack_of
from checks.bench import DEVICE, REHEARSAL, federation, peak_bytes, play, reserved_bytes, scaled, seconds
from checks.correct import difference
from checks.running import Check, Record, SkippedError
from rayfl.examples import InputSpec
from rayfl.models.zoo import LeafCNN, ResNet9, TwoCNN, TwoNN
from tests.support.unfolding import convolving

_HERE = Path(__file__).resolve().parents[1]
_DIGITS, _LETTERS = InputSpec("image", (1, 28, 28), 10), InputSpec("image", (1, 28, 28), 62)
_WORKS: dict[str, tuple[Any, Any, InputSpec]] = {
    "fedavg, TwoNN": (FedAvg(), TwoNN(), _DIGITS),
    "superfed, TwoNN": (SuPerFed(start=0.0), TwoNN(), _DIGITS),
    "fedavg, LeafCNN": (FedAvg(), LeafCNN(), _LETTERS),
}


def _with_option(record: Record, option: str, exactly: bool) -> None:
    """Rounds of 100 clients as steps are written, and with an option of the engine.

    Args:
        record: of the check.
        option: of the engine.
        exactly: whether it may change no bit where two rounds as written agree to the bit: some kernels of libraries
            add in another order each time.
    """
    for name, (method, architecture, spec) in _WORKS.items():
        sizes, found, servers = [scaled(100, 10)] * scaled(100, 2), dict[str, Any](), []
        again = federation(method, sizes, architecture, spec)
        if exactly:
            play(again)
        for way, options in (("as written", {}), (option, {option: True})):
            toy = federation(method, sizes, architecture, spec, engine=options)
            begun = time.perf_counter()
            play(toy)
            found[f"{way}: s of the first round"] = time.perf_counter() - begun
            servers.append(toy.server)
            found[f"{way}: s a round"] = seconds(lambda toy=toy: play(toy), 2)  # type: ignore[misc]
            # What is allocated says nothing of the memory that captured graphs keep between their replays.
            found[f"{way}: reserved bytes"] = reserved_bytes(lambda toy=toy: play(toy))  # type: ignore[misc]
        engine = toy.client_hosts[0].engine
        refused = engine._capture.refused if engine._capture else ", ".join(engine._compiler._said)
        assert not refused, f"{name}: engine.{option} was not used: {refused}"
        apart = difference(*servers)
        by_itself = difference(again.server, servers[0]) if exactly else None
        record.note(name, {**found, "differs by": apart, "as written, once more, differs by": by_itself})
        allowed = 0.0 if by_itself == 0 else 1e-4
        assert apart <= allowed, f"{name}: other results with engine.{option}, by {apart:.3g}"


def captured(record: Record) -> None:
    """Rounds with and without engine.capture: the same bits."""
    if DEVICE.type != "cuda":
        raise SkippedError("CUDA graphs need a GPU")
    _with_option(record, "capture", exactly=True)


def compiled(record: Record) -> None:
    """Rounds with and without engine.compile."""
    _with_option(record, "compile", exactly=False)


def convolutions(record: Record) -> None:
    """Rounds of 32 clients whose convolutions are grouped, as they are, or products of unfolded inputs."""
    works: dict[str, tuple[Any, InputSpec]] = {
        "two_cnn": (TwoCNN(), InputSpec("image", (3, 32, 32), 10)),
        "leaf_cnn": (LeafCNN(), _LETTERS),
        "resnet9": (ResNet9(norm="group"), InputSpec("image", (3, 32, 32), 10)),
    }
    for name, (architecture, spec) in works.items():
        found, servers = dict[str, Any](), []
        for way, unfold in (("grouped", False), ("unfolded", True)):
            network = convolving(architecture, spec, unfold)
            toy = federation(FedAvg(), [scaled(50, 10)] * scaled(32, 2), architecture, spec, network=network)
            play(toy)
            servers.append(toy.server)
            found[f"{way}: s a round"] = seconds(lambda toy=toy: play(toy), 2)  # type: ignore[misc]
            found[f"{way}: peak bytes"] = peak_bytes(lambda toy=toy: play(toy))  # type: ignore[misc]
        ratio = found["unfolded: s a round"] / found["grouped: s a round"]
        record.note(name, {**found, "unfolded to grouped": ratio})
        apart = difference(*servers)
        assert apart <= 1e-3, f"{name}: unfolded convolutions give other results, by {apart:.3g}"


def actors_on_a_gpu(record: Record) -> None:
    """Runs whose GPU actors share, each with a stack of its part of 1,000 TwoNN clients of 100 samples."""
    clients, samples = scaled(1000, 8), scaled(100, 20)
    os.environ["CAMPAIGN_CLIENTS"] = json.dumps([clients, samples])
    try:
        import ray
    except ImportError:
        raise SkippedError("Ray is not installed") from None
    ray.init(include_dashboard=False, log_to_driver=False)  # one for all runs
    for name, algorithm in (("fedavg", {"name": "fedavg"}), ("superfed", {"name": "superfed", "start": 0.0})):
        for actors in (1, 2, "auto") if REHEARSAL else (1, 4, "auto"):
            watching, begun = Watching(), time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                settings = {
                    "name": "choice", "storage_path": folder,
                    "dataset": {"name": "custom", "function": "made_up_clients:clients"},
                    "model": {"name": "two_nn"}, "algorithm": algorithm,
                    "train": {"rounds": 4, "clients_per_round": "all", "batch_size": 10, "lr": 0.05},
                    "engine": {"mode": "vectorized", "width": None if actors == "auto" else clients},
                    "evaluation": {"every": 4}, "tracking": {"tensorboard": False}, "storage": {"commit_every": 4},
                    "cluster": {
                        "device": "cpu" if REHEARSAL else "cuda", "num_actors": actors, "probe": actors == "auto",
                        **({} if REHEARSAL else {"actors_per_gpu": actors}),
                    },
                }  # fmt: skip
                rayfl.run(settings, callbacks=[watching])
            about = {"s a round": watching.seconds[1:], "s in all": time.monotonic() - begun, "on it": watching.used}
            planned = {"plan": watching.plan} if actors == "auto" else {}
            record.note(f"{name}, {actors} actors", {**about, "page faults": watching.faults[1:], **planned})


def adapters_without_folds(record: Record) -> None:
    """A step of several clients' adapters: folded, as a plain vmap of grad over a module of peft, and one by one."""
    name, batch = "ViT-B/16", scaled(10, 2)
    folder = folder_of(name)
    if importlib.util.find_spec("peft") is None:
        raise SkippedError("peft is not installed")
    from peft_clients import PeftClients

    base, network = PeftClients(folder, DEVICE.type), network_of(name)

    def loss(tree: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        own = {path: leaf.to(base.own[path].dtype) for path, leaf in tree.items()}  # the head computes in bfloat16
        outputs = functional_call(base.model, own, (), {"pixel_values": x.bfloat16()})
        return F.cross_entropy(outputs.logits.float(), y)

    for clients in (1, 4, scaled(16, 4)):
        x, y = batches(name, clients, batch)
        folds = stack_of(network, clients)
        stack = {path: leaf.expand(clients, *leaf.shape).clone() for path, leaf in base.state().items()}

        def each(stack: Any = stack, x: Tensor = x, y: Tensor = y, clients: int = clients) -> None:
            for k in range(clients):
                grad(loss)({path: leaf[k] for path, leaf in stack.items()}, x[k], y[k])

        def together(stack: Any = stack, x: Tensor = x, y: Tensor = y) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # fused attention has no batching rule: a loop, which this measures
                vmap(grad(loss), randomness="different")(stack, x, y)

        ways = {
            "folded": lambda folds=folds, x=x, y=y: gradients_of(network, folds, x, y),
            "vmap(grad)": together,
            "one by one": each,
        }
        taken = {way: seconds(work, 2) for way, work in ways.items()}  # type: ignore[arg-type]
        bytes_ = {f"{way}: peak bytes": peak_bytes(work) for way, work in ways.items()}  # type: ignore[arg-type]
        record.note(f"{clients} clients", {f"{way}: s a step": each_s for way, each_s in taken.items()} | bytes_)
        ratio = taken["vmap(grad)"] / taken["folded"]
        record.note(f"{clients} clients: vmap(grad) to folded", ratio)
        if clients > 1:
            record.goal(f"{name}, a step of {clients} clients: vmap(grad) to folded", "at least 1", ratio, ratio >= 1)


CHECKS = (
    Check("choice_capture", 50, "engine.capture against steps that are launched", captured),
    Check("choice_compile", 160, "engine.compile against steps as they are written", compiled),
    Check("choice_convolutions", 45, "Grouped convolutions against unfolded products", convolutions),
    Check("choice_actors", 200, "Stacked clients in one actor on the GPU, in four, and as planned", actors_on_a_gpu),
    Check("choice_folds", 60, "Folded adapters against vmap(grad) and one by one", adapters_without_folds),
)

"""Part d: clients' adapters over one pretrained base: is a fold right, how fast is it, what does it take."""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.hosting.memory import Spill
from actors.hosting.state import ClientStates
from algorithms.fedavg import FedAvg
from algorithms.superfed import SuPerFed
from checks.bases import batches, folder_of, gradients_of, network_of, section_of, spec_of, stack_of
from checks.bench import (
    DEVICE,
    REHEARSAL,
    counted,
    federation,
    peak_bytes,
    play,
    profile_rows,
    scaled,
    seconds,
    shares,
    wait,
)
from checks.running import Check, Record, SkippedError
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.engine.engine_section import EngineConfig
from rayfl.engine.stack_sizes import rows_per_step_of
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.params import num_bytes
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage

_SAVED_MIB = {"ViT-B/16": (38.8, 3.8), "1.1 B decoder": (686.0, 48.0)}
"""What is kept of a sample for the backward pass by arithmetic, without and with checkpointing (docs/adapters.md)."""

_BATCH = {"ViT-B/16": scaled(5, 2), "1.1 B decoder": 2}
"""Samples of a client's mini-batch: about a thousand rows of the base, 985 and 1,024."""
_ROWS_PER_STEP = rows_per_step_of(EngineConfig(width=64), DEVICE) or 0
_PARTS = {
    "products a client": ("aten::bmm", "aten::baddbmm"),
    "casts and copies": ("aten::copy_",),
    "products of the base": ("aten::mm", "aten::addmm"),
}
"""Operators by what they are for. Where attention is fused, adapters and heads alone have products a client."""


_RATES = {"ViT-B/16": 1e-3, "1.1 B decoder": 1e-4}
"""Learning rates with which losses fall slowly: small ones, or growing ones, would magnify rounding."""


def _course(
    network: AdaptedNetwork, stack: dict[str, Tensor], x: Tensor, y: Tensor, rate: float, steps: int = 20
) -> Tensor:
    """The losses of some steps of gradient descent, shape (steps, N)."""
    found = []
    for _ in range(steps):
        losses, gradients = gradients_of(network, stack, x, y)
        stack = {name: leaf - rate * g for (name, leaf), g in zip(stack.items(), gradients, strict=True)}
        found.append(losses)
    return torch.stack(found)


def folds(record: Record) -> None:
    """Twenty steps of four clients in bfloat16, folded and one by one, and in float32.

    A fold must not change a client's loss: each is compared with that client's alone. Against float32 the twenty losses
    are means over the clients: that of one client, of four samples, shows the rounding of few logits, and is noted.
    """
    for name in ("ViT-B/16", "1.1 B decoder"):
        batch = scaled(4, 2)
        x, y = batches(name, 4, batch)
        narrow = network_of(name)
        stack, rate = stack_of(narrow, 4), _RATES[name]
        folded = _course(narrow, stack, x, y, rate)
        single = [{key: leaf[k : k + 1] for key, leaf in stack.items()} for k in range(4)]
        alone = torch.cat([_course(narrow, tree, x[k : k + 1], y[k : k + 1], rate) for k, tree in enumerate(single)], 1)
        del narrow
        exact = _course(network_of(name, torch.float32), stack, x, y, rate)
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


def steps_by_rows(record: Record) -> None:
    """A step by the rows of a fold, 1 k to 64 k: where samples a second no longer grow fixes rows_per_step."""
    for name, batch in _BATCH.items():
        network = network_of(name, checkpointing=name != "ViT-B/16")
        speed: dict[int, float] = {}
        for clients in (1, 2, 4, 8, 16, 32, 64):
            if clients > scaled(64, 4):
                break
            stack, (x, y) = stack_of(network, clients), batches(name, clients, batch)
            rows = clients * batch * network.rows_per_sample
            try:
                taken = seconds(lambda s=stack, x=x, y=y, net=network: gradients_of(net, s, x, y), 2)  # type: ignore[misc]
            except Exception as error:
                if not ran_out_of_memory(error) or not speed:
                    raise
                record.note(f"{name}, {clients} clients, {rows} rows", str(error)[:200])
                break
            speed[rows] = clients * batch / taken
            found = {"rows": rows, "s a step": taken, "samples a second": speed[rows]}
            record.note(f"{name}, {clients} clients", found)
        best = max(speed.values())
        record.note(f"{name}: rows with 95 % of the most samples a second", _fewest(speed, 0.95 * best))
        gain = speed[max(speed)] / speed[min(speed)]
        record.note(f"{name}: one by one to folded, {max(speed)} rows", gain)
        if name == "ViT-B/16":
            record.goal("ViT-B/16: folding is no slower than one by one", "at least 1", gain, gain >= 1)
        by_default = [rows for rows in speed if rows <= _ROWS_PER_STEP]
        at_default = speed[max(by_default)] / best
        record.goal(
            f"{name}: samples a second with the default rows_per_step to the most",
            "at least 0.9", at_default, at_default >= 0.9,
        )  # fmt: skip


def _fewest(speed: dict[int, float], enough: float) -> int:
    """The fewest rows that are fast enough."""
    return min(rows for rows, found in speed.items() if found >= enough)


def step_by_operators(record: Record) -> None:
    """What a step of eight clients is made of: kernels, and the shares of adapters' products and of copies."""
    for name, batch in _BATCH.items():
        network = network_of(name, checkpointing=name != "ViT-B/16")
        stack, (x, y) = stack_of(network, scaled(8, 2)), batches(name, scaled(8, 2), batch)

        def step(net: AdaptedNetwork = network, stack: Any = stack, x: Tensor = x, y: Tensor = y) -> None:
            gradients_of(net, stack, x, y)

        step()
        rows = profile_rows(step)
        record.note(f"{name}: a step", counted(rows))
        record.note(f"{name}: shares of the time of operators", shares(rows, _PARTS))


def fused_attention(record: Record) -> None:
    """Whether forward and backward passes of a fold use fused attention, and never wait for the device."""
    if DEVICE.type != "cuda":
        raise SkippedError("needs a GPU")
    from torch.profiler import ProfilerActivity, profile

    network = network_of("ViT-B/16")
    stack, (x, y) = stack_of(network, 4), batches("ViT-B/16", 4, 10)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        gradients_of(network, stack, x, y)
        torch.cuda.synchronize()
    names = {row.key for row in found.key_averages() if "attention" in row.key.lower() or "flash" in row.key.lower()}
    record.note("kernels", sorted(names)[:20])
    backward = sum("backward" in name.lower() or "bwd" in name.lower() for name in names)
    record.goal("fused attention in forward and backward passes", "both", len(names), 0 < backward < len(names))
    waits = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients_of(network, stack, x, y)
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
            network = network_of(name, checkpointing=checkpointing)
            stack, (x, y) = stack_of(network, clients), batches(name, clients, batch)
            gradients_of(network, stack, x, y)
            taken = peak_bytes(lambda net=network, stack=stack, x=x, y=y: gradients_of(net, stack, x, y))  # type: ignore[misc]
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
            FedAvg(), [size] * scaled(16, 3), section_of("ViT-B/16"), spec_of("ViT-B/16"), width=width, batch_size=batch
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
    from peft_clients import PeftClients

    base = PeftClients(folder_of("ViT-B/16"), DEVICE.type)
    states = [base.state() for _ in range(clients)]
    x, y = batches("ViT-B/16", clients, batch)

    def a_round() -> None:
        for k, state in enumerate(states):
            base.load(state)
            base.train(x[k], y[k], steps)
            states[k] = base.state()

    taken = seconds(a_round, 1)
    return {"s a round": taken, "samples a second": clients * steps * batch / taken}


def many_clients(record: Record) -> None:
    """2,000 clients of a small ViT with SuPerFed's states: rounds, and a stacked evaluation of all."""
    toy = federation(
        SuPerFed(start=0.0), [4] * scaled(2000, 6), section_of("small ViT"), spec_of("small ViT"),
        cohort=scaled(250, 3), width=scaled(64, 4), batch_size=4,
    )  # fmt: skip
    taken = seconds(lambda: play(toy), 1)
    record.note("s a round", taken)
    record.note("peak bytes of a round", peak_bytes(lambda: play(toy)))
    begun = time.perf_counter()
    toy.scores()
    wait()
    record.note("s an evaluation of all clients", time.perf_counter() - begun)


def states_of_many(record: Record) -> None:
    """Adapters of 5,000 clients as states, with room in memory for half of them: kept, read again, committed."""
    initial, clients = network_of("small ViT").initialize(0), scaled(5000, 6)
    generator = torch.Generator().manual_seed(0)
    size = num_bytes(initial)
    record.note("bytes of a state", size)
    with tempfile.TemporaryDirectory() as folder:
        spill = Spill(clients * size // 2, folder)
        states = ClientStates(CommitStore(Storage(str(Path(folder) / "run"))), 0, spill)
        taken = 0.0
        for client in range(clients):
            state = {name: leaf + torch.randn(leaf.shape, generator=generator) for name, leaf in initial.items()}
            begun = time.perf_counter()
            states.replace(client, {"model": state}, 0)
            taken += time.perf_counter() - begun
        record.note("s to keep them", taken)
        record.note("states written to files", spill.spilled)
        for name, work in (
            ("s a commit of all", lambda: states.write(1)),
            ("s to read all of them in turn", lambda: [states.checkout(client) for client in range(clients)]),
        ):
            begun = time.perf_counter()
            work()
            record.note(name, time.perf_counter() - begun)
        record.note("bytes in memory to those allowed", spill.held_bytes / (clients * size // 2))
        spill.close()


CHECKS = (
    Check("adapters_folds", 90, "Folded adapters in bfloat16 against one by one and float32", folds),
    Check("adapters_steps", 60, "A step by the rows of a fold, 1 k to 64 k", steps_by_rows),
    Check("adapters_operators", 40, "Shares of adapters' products and of casts in a step", step_by_operators),
    Check("adapters_attention", 40, "Fused attention in both passes, and no waiting", fused_attention),
    Check("adapters_memory", 40, "Bytes of a step against arithmetic", memory),
    Check("adapters_rounds", 70, "Rounds of 16 ViT-B clients, and a loop over peft", rounds),
    Check("adapters_clients", 60, "2,000 clients with SuPerFed's states", many_clients),
    Check("adapters_states", 80, "5,000 clients' adapters spilled to a disk, and committed", states_of_many),
)

"""Part g: every kind of adapter and prompt: as on the CPU, how fast, in whole runs, and as they answer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checks.actors import Watching, run_digits
from checks.bases import batches, folder_of, gradients_of, network_of, stack_of
from checks.bench import DEVICE, REHEARSAL, peak_bytes, profiled, scaled, seconds
from checks.correct import ROOT, compared, difference
from checks.running import Check, Record
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.examples import Examples, InputSpec
from rayfl.models.pretrained.section import PretrainedModel
from rayfl.optimization.optimizers import Rule
from rayfl.params import map_leaves
from rayfl.tasks.classification import Classification

_KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"adapter": {"r": 8, "alpha": 16}},
    "DoRA": {"adapter": {"r": 8, "alpha": 16, "use_dora": True}},
    "(IA)^3": {"adapter": {"name": "ia3"}},
    "virtual tokens": {"adapter": {"name": "prompt", "tokens": 8}},
    "deep virtual tokens": {"adapter": {"name": "prompt", "tokens": 8, "depth": "deep"}},
    "head alone": {"adapter": "none"},
}


def _networks() -> dict[str, tuple[PretrainedModel, InputSpec]]:
    """Small bases with each kind of adapter, and CLIP with each kind of context."""
    from tests.support.bases import IMAGES, TOKENS, section
    from tests.support.clips import clip_section

    found = {f"ViT, {kind}": (section("vit", **options), IMAGES) for kind, options in _KINDS.items()}
    found |= {
        f"{family}, {kind}": (section(family, **_KINDS[kind]), TOKENS)
        for family in ("llama", "gpt2", "bert")
        for kind in ("LoRA", "DoRA", "(IA)^3", "virtual tokens")
        if (family, kind) != ("gpt2", "(IA)^3")
    }
    contexts = {f"CLIP, context {one}": clip_section({"context": one, "length": 4}) for one in ("shared", "by_class")}
    contexts["CLIP, features"] = clip_section({"context": "none"}, adapter="features")
    contexts["CLIP, LoRA"] = clip_section(adapter={"r": 2, "alpha": 4})
    return found | {name: (one, IMAGES) for name, one in contexts.items()}


def adapters_agree(record: Record) -> None:
    """A local update with Adam of each kind of adapter, folded and one by one, against the CPU's, in float64."""
    from tests.support.problems import CPU, examples, request

    found = []
    for name, (section, spec) in _networks().items():
        worst, bad = dict[str, float](), dict[str, str]()
        network = section.network(spec)
        # The norms of DoRA are in float32, whatever the rest is in.
        dtype, limit = (torch.float32, 1e-4) if "DoRA" in name else (torch.float64, 1e-8)
        network.compute_in(dtype)
        task = Classification(network)
        start = map_leaves(lambda leaf, dtype=dtype: leaf.to(dtype), network.initialize(0))
        given = []
        for k in range(3):
            data = examples(12, spec, k)
            data = Examples(data.x.to(dtype) if data.x.is_floating_point() else data.x, data.y)
            one = request(data, start, client=k, epochs=1)
            given.append(replace(one, rule=Rule(0.001, optimizer="adam")))
        moved = [replace(one, examples=Examples(one.examples.x.to(DEVICE), one.examples.y.to(DEVICE))) for one in given]
        for mode in ("looped", "vectorized"):
            expected = Engine(task, CPU, EngineConfig(mode=mode)).execute(given)  # type: ignore[arg-type]
            there = Engine(task, DEVICE, EngineConfig(mode=mode)).execute(moved)  # type: ignore[arg-type]
            if failed := [one for one in (*expected, *there) if isinstance(one, Exception)]:
                bad[f"{name}, {mode}"] = f"{type(failed[0]).__name__}: {failed[0]}"[:300]
                continue
            apart = max(difference(one, other) for one, other in zip(there, expected, strict=True))
            worst[f"{name}, {mode}"] = apart
            if not apart <= limit:
                bad[f"{name}, {mode}"] = f"differs by {apart:.3g}"
        found.append((worst, bad))
        compared(record, found)


def adapters_by_kind(record: Record) -> None:
    """A step of eight clients over ViT-B/16, ten samples each, by the kind of adapter: seconds, bytes, launches."""
    clients, batch = scaled(8, 2), scaled(10, 2)
    x, y = batches("ViT-B/16", clients, batch)
    taken: dict[str, float] = {}
    for kind, options in _KINDS.items():
        network = network_of("ViT-B/16", **options)
        stack = stack_of(network, clients)

        def step(net: Any = network, stack: dict[str, Tensor] = stack) -> None:
            gradients_of(net, stack, x, y)

        taken[kind] = seconds(step)
        record.note(kind, {"s a step": taken[kind], "peak bytes": peak_bytes(step), **profiled(step)})
        record.note(f"{kind} / LoRA", taken[kind] / taken["LoRA"])


def run_as_planned(record: Record) -> None:
    """A whole run over ViT-B/16 in bfloat16, in which nothing is said about widths, rows or actors."""
    base = "digits ViT-B/16"
    sections = {
        "model": {"name": "pretrained", "folder": folder_of(base), "adapter": {"r": 8, "alpha": 16}},
        "algorithm": {"name": "fedavg"},
        "engine": {"precision": "bfloat16"},
        "transform": {"resize": 224, "normalize": {"mean": [0.5], "std": [0.5]}},
        "train": {
            "rounds": 3, "clients_per_round": scaled(10, 2), "local_epochs": 1, "batch_size": 10, "lr": 0.001,
            "optimizer": "adamw",
        },
        "evaluation": {"every": 3},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        watching = Watching()
        run_digits(folder, "planned", watching, sections)
    record.note("plan", watching.plan)
    record.note("processes on the GPU", watching.used or "none")
    record.note("s a round", watching.seconds)


def answers(record: Record) -> None:
    """Language models that a run has adapted answer their clients' prompts, on the GPU as on the CPU."""
    import rayfl
    from rayfl.models.pretrained.making import make

    with tempfile.TemporaryDirectory() as folder:
        base, runs = Path(folder) / "base", Path(folder) / "runs"
        make("tiny-lm", base)
        device = "cpu" if REHEARSAL else "cuda"
        rayfl.run(
            "quickstart-lm", name="lm", storage_path=str(runs), model__folder=str(base), train__rounds=scaled(5, 1),
            cluster__device=device,
        )  # fmt: skip
        said = {}
        for place in ("cpu",) if REHEARSAL else ("cpu", "cuda"):
            command = ["answers", str(runs / "lm"), "--device", place, "--samples", "2", "--json"]
            ran = subprocess.run([sys.executable, "-m", "rayfl", *command], cwd=ROOT, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-2000:]
            said[place] = json.loads(ran.stdout)["scores"]
            record.note(place, said[place])
        # Where two tokens are nearly as likely, rounding may choose.
        apart = max(abs(one["rouge_l"] - said["cpu"]["rouge_l"]) for one in said.values())
        assert apart <= 0.02, f"ROUGE-L differs by {apart:.3g}"


CHECKS = (
    Check("adapters_agree", 100, "Each kind of adapter against the CPU's", adapters_agree),
    Check("adapters_by_kind", 90, "A step over ViT-B/16 by the kind of adapter", adapters_by_kind),
    Check("run_as_planned", 120, "A whole run over ViT-B/16 as it is planned", run_as_planned),
    Check("answers", 120, "Language models of a run answer prompts", answers),
)

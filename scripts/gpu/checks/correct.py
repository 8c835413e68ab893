"""Part a: the same results as on the CPU."""

from __future__ import annotations

import math
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checks.bench import DEVICE, REHEARSAL, spread
from checks.running import Check, Record, SkippedError
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.aggregation.magnitudes import NonFiniteError, check_finite, extremes_of
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.precision import arithmetic
from rayfl.examples import Examples
from rayfl.params import Tree, leaves, map_leaves
from rayfl.tasks.classification import Classification

ROOT = Path(__file__).resolve().parents[3]
_MODES = ("looped", "vectorized")


def brought(tree: Any, device: torch.device = DEVICE) -> Tree:
    """A tree on a device."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def difference(left: Any, right: Any) -> float:
    """The largest difference between numbers of two trees of the same structure; NaN where one of them is NaN."""
    one, other = dict(leaves(left)), dict(leaves(right))
    assert one.keys() == other.keys(), f"{sorted(one)} and {sorted(other)}"
    apart = [_plain(one[path]) - _plain(other[path]) for path in one]
    # Python's max would pass over a NaN.
    return float(torch.cat([torch.zeros(1, dtype=torch.float64), *apart]).abs().max())


def _plain(leaf: Any) -> Tensor:
    return torch.as_tensor(leaf).detach().cpu().double().flatten()


def output_of(*command: str) -> str:
    """What a command prints; the reason where it cannot be run."""
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ran.stdout[-2500:] or ran.stderr[-500:]


def machine(record: Record) -> None:
    """Notes what computes."""
    record.note("python", platform.python_version())
    record.note("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    record.note("cores", os.cpu_count())
    if DEVICE.type == "cuda":
        about = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        record.note("GPU", f"{about.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        query = "--query-gpu=name,driver_version,compute_mode,mig.mode.current,clocks.max.sm"
        record.note("nvidia-smi", output_of("nvidia-smi", query, "--format=csv,noheader"))
    record.note("rayfl doctor", output_of(sys.executable, "-m", "rayfl", "doctor"))


def exact_sums(record: Record) -> None:
    """Sums of trees on the CPU, on the device, of both, and sent as by an actor: equal to the bit."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-8, 1.0, 1e3):
        trees = [
            {
                name: torch.randn(*shape, generator=generator) * scale
                for name, shape in {"a": (50_001,), "b": (7, 3)}.items()
            }
            for _ in range(40)
        ]
        here, there, mixed = ExactSum(), ExactSum(), ExactSum()
        for weight, tree in enumerate(trees, 1):
            here.add(Weighted(tree, weight))
            there.add(Weighted(brought(tree), weight))
            mixed.add(Weighted(brought(tree) if weight % 2 else tree, weight))
        expected = here.mean()
        for found in (there.mean(), pickle.loads(pickle.dumps(mixed)).mean()):  # noqa: S301 -- its own
            assert all(torch.equal(found[name], expected[name]) for name in expected), f"scale {scale:g}: other bits"
    record.note("compared", "3 scales, 40 trees each: the same bits")
    for wrong in (math.nan, math.inf, -math.inf):
        for place in (0, 33_333, 50_000):
            tree = {"a": torch.ones(50_001), "b": torch.ones(7, 3)}
            tree["a"][place] = wrong
            sound, there = brought(trees[0]), brought(tree)
            known = extremes_of([sound, there])
            check_finite(sound, known)
            try:
                check_finite(there, known)
            except NonFiniteError:
                continue
            raise AssertionError(f"{wrong} at {place} was not found")
    record.note("NaN and infinity", "found at three places")


def outcome(toy: Any) -> Tree:
    """What two rounds and an evaluation leave: the server's tree, clients' states, and numbers and losses by client."""
    scores = {
        str(client): {row: torch.from_numpy(one.vector[:2]) for row, one in rows.items()}
        for client, rows in toy.scores().items()
    }
    states = {str(client): state for client, state in toy.states().items()}
    return {"server": toy.server, "states": states, "scores": scores}


def _method(name: str) -> tuple[dict[str, float], dict[str, str]]:
    """How far one method's results on the device are from those on the CPU, by mode, and what is wrong with them."""
    from tests.support.cases import ALGORITHMS, toy_of

    case = ALGORITHMS[name]
    worst, bad = dict[str, float](), dict[str, str]()
    single = toy_of(case)
    for cohort in case.cohorts()[:2]:
        single.step(cohort)
    expected = outcome(single)
    for mode in _MODES:
        try:
            there = toy_of(case, mode=mode, device=DEVICE)
            for cohort in case.cohorts()[:2]:
                there.step(cohort)
            apart = difference(outcome(there), expected)
            worst[f"{name} {mode}"] = apart
            if not apart <= 1e-8:
                bad[f"{name} {mode}"] = f"differs by {apart:.3g}"
        except Exception as error:
            bad[f"{name} {mode}"] = f"{type(error).__name__}: {error}"[:300]
    return worst, bad


def methods(record: Record) -> None:
    """Two rounds and an evaluation of every method, looped and stacked, in float64 against the CPU's."""
    from tests.support.cases import ALGORITHMS

    compared(record, spread(_method, ALGORITHMS))


def compared(record: Record, found: Iterable[tuple[dict[str, float], dict[str, str]]]) -> None:
    """Notes the largest differences and what is wrong, as they come; fails where something is."""
    worst, bad = dict[str, float](), dict[str, str]()
    for apart, wrong in found:
        worst |= {what: max(worst.get(what, 0.0), value) for what, value in apart.items()}
        bad |= wrong
        record.note("largest differences", dict(sorted(worst.items(), key=lambda item: -item[1])[:8]))
        record.note("compared", len(worst))
        record.note("bad", bad)
    assert not bad, f"{len(bad)} differ from the CPU: {', '.join(bad)}"


def _model(name: str) -> tuple[dict[str, float], dict[str, str]]:
    """How far one model's local updates on the device are from those on the CPU, and what is wrong with them."""
    from rayfl.optimization.optimizers import Rule
    from tests.models.test_zoo import SMALL
    from tests.support.problems import CPU, examples, request

    architecture, spec = SMALL[name]
    worst, bad = dict[str, float](), dict[str, str]()
    for what, rule, limit, kind in (
        ("SGD, float32", Rule(0.05, momentum=0.9, weight_decay=1e-4), 1e-3, torch.float32),
        ("SGD, float64", Rule(0.05, momentum=0.9, weight_decay=1e-4), 1e-8, torch.float64),
        ("Adam, float64", Rule(0.001, optimizer="adam"), 1e-8, torch.float64),
    ):
        network = architecture.network(spec)
        task = Classification(network)

        def inputs(x: Tensor, kind: torch.dtype = kind) -> Tensor:
            return x.to(kind) if x.is_floating_point() else x

        data = [examples(12, spec, k) for k in range(3)]
        given = [
            replace(
                request(one, map_leaves(inputs, task.network.initialize(k)), client=k, epochs=1),
                examples=replace(one, x=inputs(one.x)),
                rule=rule,
            )
            for k, one in enumerate(data)
        ]
        for mode in _MODES:
            place = f"{name}, {what}, {mode}"
            expected = Engine(task, CPU, EngineConfig(mode=mode)).execute(given)
            if isinstance(expected[0], Exception):
                if kind == torch.float32:  # constants of a network that are in no tree stay in float32
                    bad[place] = f"not on the CPU either: {expected[0]}"[:300]
                continue
            moved = [replace(one, examples=_moved(one.examples)) for one in given]
            found = Engine(task, DEVICE, EngineConfig(mode=mode)).execute(moved)
            if failed := [one for one in found if isinstance(one, Exception)]:
                bad[place] = f"{type(failed[0]).__name__}: {failed[0]}"[:300]
                continue
            worst[place] = max(difference(one, other) for one, other in zip(found, expected, strict=True))
            # Batch normalization divides by the deviation of few samples, which magnifies rounding without bound: two
            # CPUs would differ in float32, too. In float64 no more than the limit is allowed.
            unbounded = kind == torch.float32 and network.batch_statistics
            if not (worst[place] <= limit or unbounded):
                bad[place] = f"differs by {worst[place]:.3g}"
    return worst, bad


def models(record: Record) -> None:
    """A local update of every model, looped and stacked, with SGD and with Adam, against the CPU's."""
    from tests.models.test_zoo import SMALL

    compared(record, spread(_model, SMALL))


def _moved(data: Examples) -> Examples:
    return Examples(data.x.to(DEVICE), data.y.to(DEVICE))


def precisions(record: Record) -> None:
    """How far local updates in tf32 and in bfloat16 are from those in float32; nothing is demanded but finiteness."""
    from tests.models.test_zoo import SMALL
    from tests.support.problems import examples, request

    for name in ("resnet9 group", "vgg9", "char_lstm one bias"):
        architecture, spec = SMALL[name]
        found: dict[str, list[Tree]] = {}
        for precision in ("float32", "tf32", "bfloat16"):
            task = Classification(architecture.network(spec))
            given = [request(examples(12, spec, k), task.network.initialize(k), client=k) for k in range(2)]
            given = [replace(one, examples=_moved(one.examples)) for one in given]
            with arithmetic(precision):
                config = EngineConfig(mode="looped", precision=precision)
                replies = Engine(task, DEVICE, config).execute(given)
            if failed := [one for one in replies if isinstance(one, Exception)]:
                raise RuntimeError(f"{name} in {precision}") from failed[0]
            found[precision] = replies
        for precision in ("tf32", "bfloat16"):
            apart = [difference(one, other) for one, other in zip(found[precision], found["float32"], strict=True)]
            assert all(map(math.isfinite, apart)), f"{name} in {precision} is not finite"
            record.note(f"{name}, {precision} against float32", max(apart))


def run_pytest(record: Record, arguments: list[str], **environment: str) -> None:
    """Runs tests in a process of their own, and fails as they do."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        raise SkippedError("pytest is not installed: pip install 'rayfl[dev]'") from None
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    record.note("pytest", (ran.stdout.strip().splitlines() or ["no output"])[-1])
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2500:]


def device_tests(record: Record) -> None:
    """The project's own tests of devices, on this one in place of the pretended one."""
    few = ["-k", "elsewhere or come_home"] if REHEARSAL else []
    run_pytest(record, ["tests/devices/test_devices.py", *few], RAYFL_TEST_DEVICE="cpu" if REHEARSAL else "cuda")


def _check(work: Callable[[Record], None], limit_s: float) -> Check:
    return Check(work.__name__, limit_s, (work.__doc__ or "").strip().splitlines()[0].rstrip("."), work)


CHECKS = (
    _check(machine, 40),
    _check(exact_sums, 25),
    _check(methods, 170),
    _check(models, 90),
    _check(precisions, 40),
    _check(device_tests, 75),
)

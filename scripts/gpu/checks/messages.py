"""Part a: clients' messages are changed, compressed, noised and judged as on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from checks.bench import DEVICE
from checks.correct import difference, outcome
from checks.running import Check, Record
from rayfl.messages.aggregators import (
    Bulyan,
    CenteredClipping,
    DivideAndConquer,
    FoolsGold,
    GeometricMedian,
    Krum,
    Median,
    NormBounding,
    TrimmedMean,
)
from rayfl.messages.attack import AttackConfig
from rayfl.messages.compressors import Quantize, RandomK, SecureAggregation, Sign, TopK
from rayfl.messages.forecasting_rule import Flanders
from rayfl.messages.mixing_rules import Bucketing, Flame, NearestNeighborMixing
from rayfl.messages.privacy import PrivacyConfig


def _sections() -> dict[str, dict[str, Any]]:
    rules = [
        Median(), TrimmedMean(malicious=1), Krum(malicious=1, kept=2), Bulyan(malicious=1), GeometricMedian(),
        NormBounding(), CenteredClipping(), DivideAndConquer(malicious=1), FoolsGold(),
        NearestNeighborMixing(malicious=1, then=Median()), Bucketing(then=CenteredClipping()), Flame(),
        Flanders(kept=5, coordinates=40),
    ]  # fmt: skip
    secure = SecureAggregation(clip=0.5, bits=16)
    compressors = [TopK(), RandomK(), RandomK(error_feedback=True), Quantize(), Sign(), secure]
    strengths: dict[Any, float | None] = {
        "sign_flip": None, "gaussian": 1.0, "scaled": 10.0, "alie": None, "ipm": 0.5, "min_max": None, "min_sum": None,
    }  # fmt: skip
    attacks = [AttackConfig(clients=[1], message=name, strength=strength) for name, strength in strengths.items()]
    of_clients, of_samples = (
        {"clip_norm": 0.3, "noise_multiplier": 1.0}, {"example_clip_norm": 0.5, "example_noise_multiplier": 0.8}
    )  # fmt: skip
    private = {
        "of clients": of_clients,
        "of clients, by a quantile": {**of_clients, "target_quantile": 0.5, "count_noise": 1.0},
        "of samples": of_samples,
        "of both": {**of_clients, **of_samples},
    }
    return {
        **{f"privacy {name}": {"privacy": PrivacyConfig(**options)} for name, options in private.items()},
        **{f"aggregator {type(rule).__name__}": {"aggregator": rule} for rule in rules},
        **{
            f"compression {type(one).__name__}, feedback {one.error_feedback}": {"compression": one}
            for one in compressors
        },
        **{f"attack {one.message}": {"attack": one} for one in attacks},
    }


def messages(record: Record) -> None:
    """Two rounds with each attack, compression, privacy and robust rule, in both modes, in float64 against CPUs."""
    from algorithms.fedavg import FedAvg
    from tests.support.cases import toy_of
    from tests.support.cases.base import Case
    from tests.support.toys import random_clients

    case, data = (
        Case(FedAvg(aggregation="uniform"), everyone=True),
        random_clients((9, 12, 6, 10, 7, 8, 11), dtype=torch.float64),
    )
    places = torch.device("cpu"), DEVICE
    worst, bad = dict[str, float](), dict[str, str]()
    for name, section in _sections().items():
        for mode in ("looped", "vectorized"):
            here, there = (toy_of(case, dataset=data, mode=mode, device=one, **section) for one in places)
            clients = list(range(data.num_clients))
            for _ in range(2):
                here.step(clients)
                there.step(clients)
            worst[f"{name}, {mode}"] = apart = difference(outcome(there), outcome(here))
            if not apart <= 1e-8:
                bad[f"{name}, {mode}"] = f"differs by {apart:.3g}"
    record.note("compared", len(worst))
    record.note("largest differences", dict(sorted(worst.items(), key=lambda item: -item[1])[:8]))
    assert not bad, f"{bad}"


CHECKS = (Check("messages", 20, "Attacks, compression, privacy and robust rules against the CPU's", messages),)

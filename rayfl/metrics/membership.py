"""How well a threshold on a model's losses tells samples that it was trained on from others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.metrics import roc_auc_score, roc_curve

_LOW = 0.01


@dataclass(frozen=True)
class Membership:
    """What an attacker gains who calls a sample a member where its loss is below a threshold.

    Attributes:
        members: how many samples were trained on.
        others: how many were not.
        auc: probability that a member has a smaller loss than another sample, ties counted half; 0.5 is guessing.
        advantage: the largest difference of true and false positive rate over all thresholds.
        at_low_rate: the true positive rate of the best threshold whose false positive rate is at most 1 %.

    Source: Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning, CSF 2018 (threshold, advantage);
    Carlini et al.: Membership Inference Attacks From First Principles, S&P 2022 (low false positive rates).
    """

    members: int
    others: int
    auc: float
    advantage: float
    at_low_rate: float


def membership(members: np.ndarray, others: np.ndarray) -> Membership:
    """Returns how far losses tell members from others.

    Args:
        members: losses of samples that were trained on, shape (n,), n > 0.
        others: losses of other samples, shape (m,), m > 0.
    """
    labels = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    scores = -np.concatenate([members, others])
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    return Membership(
        len(members),
        len(others),
        float(roc_auc_score(labels, scores)),
        float((true - false).max()),
        float(true[false <= _LOW].max()),
    )

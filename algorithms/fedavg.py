"""Federated averaging, with or without fine-tuning of the final model."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.base import Averaging
from algorithms.parts.finetuning import FineTuning


class FineTuned(FineTuning, Averaging):
    """Averaging whose final model each client may fine-tune."""

    newcomer: ClassVar[str] = FineTuning.newcomer


class FedAvg(FineTuned):
    """Federated averaging (FedAvg): the mean of models trained locally.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` it is FedAvg-LU
    (FedAvg with fine-tuning): the final model is trained once more by each client for itself.

    References:
        McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
        Decentralized Data, AISTATS 2017, Algorithm 1.
    """

    name: Literal["fedavg"] = "fedavg"
    citation: ClassVar[str] = "McMahan et al., AISTATS 2017"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""

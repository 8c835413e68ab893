"""The section attack of a configuration: which clients are malicious, and what they do."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.errors import ConfigError
from rayfl.messages.backdoor import BackdoorConfig
from rayfl.randomness import RandomStreams

_WITH_STRENGTH = ("sign_flip", "gaussian", "scaled", "alie", "ipm")
_NEEDS_STRENGTH = ("gaussian", "scaled", "ipm")


class AttackConfig(BaseModel):
    """Malicious clients: wrong labels or a backdoor in what they train on, wrong messages in place of its result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(
        0.0, ge=0, lt=1, description="share of the clients that are malicious, drawn by the seed; rounded down"
    )
    clients: list[int] | None = Field(None, min_length=1, description="the malicious clients, in place of a share")
    labels: Literal["honest", "flipped", "random"] = Field(
        "honest",
        description="training labels of malicious clients: flipped: class C - 1 - y; random: any class, all equally "
        "likely",
    )
    backdoor: BackdoorConfig | None = Field(
        None, description="samples of malicious clients that carry a trigger and the label of one class"
    )
    message: Literal["honest", "sign_flip", "gaussian", "scaled", "alie", "ipm", "min_max", "min_sum"] = Field(
        "honest",
        description="what malicious clients send in place of received + change: sign_flip: received - s change; "
        "gaussian: received + N(0, s^2); scaled: received + s change; ipm: received - s mean of the honest changes; "
        "alie: mean - s standard deviations of the honest messages; min_max, min_sum: mean + gamma p of the honest "
        "messages with the largest gamma that is no outlier",
    )
    perturbation: Literal["deviation", "unit", "sign"] | None = Field(
        None,
        description="p of min_max and min_sum: deviation: minus the standard deviations by coordinate; unit: minus "
        "the mean change; sign: minus its signs; null: deviation",
    )
    strength: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="s of the message; null: 1 for sign_flip; for alie what Baruch et al. compute from the number of "
        "clients in the round",
    )

    @property
    def on(self) -> bool:
        """Returns whether any client is malicious."""
        return bool(self.share or self.clients)

    @property
    def on_messages(self) -> bool:
        """Returns whether malicious clients send something else than they trained."""
        return self.on and self.message != "honest"

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> AttackConfig:
        if self.share and self.clients:
            raise ValueError("share and clients both say who is malicious: leave one out")
        if self.on and self.labels == self.message == "honest" and self.backdoor is None:
            raise ValueError(
                "malicious clients would do nothing: set attack.labels or attack.backdoor, attack.message, or both"
            )
        if not self.on and (self.labels != "honest" or self.message != "honest" or self.backdoor is not None):
            raise ValueError(
                "labels, backdoor and message are of malicious clients, and there are none: set attack.share"
            )
        if self.labels != "honest" and self.backdoor is not None:
            raise ValueError("labels and backdoor both say what class malicious clients' samples have: leave one out")
        if self.strength is not None and self.message not in _WITH_STRENGTH:
            found = ", which finds its own" if self.message != "honest" else ": set attack.message, or leave it out"
            raise ValueError(f"strength is of the message{found}")
        if self.perturbation is not None and self.message not in ("min_max", "min_sum"):
            raise ValueError("perturbation is of message=min_max and of message=min_sum: leave it out")
        if self.strength is None and self.message in _NEEDS_STRENGTH:
            raise ValueError(f"message={self.message} needs attack.strength")
        if self.clients is not None and len(set(self.clients)) < len(self.clients):
            raise ValueError("clients names a client twice")
        return self

    def attackers(self, num_clients: int, streams: RandomStreams) -> frozenset[int]:
        """Returns the ids of the malicious clients.

        Args:
            num_clients: K, of those that may take part in training.
            streams: the experiment's randomness; uses the stream ``attackers``.

        Raises:
            ConfigError: the share is not one client, or clients do not exist, or no honest one is left.
        """
        if not self.on:
            return frozenset()
        if self.clients is None:
            count = int(self.share * num_clients + 1e-9)
            if not count:
                raise ConfigError(
                    f"attack.share is {self.share}, which of {num_clients} clients is not a single one: raise it, or "
                    "name them by attack.clients"
                )
            drawn = streams.generator("attackers").choice(num_clients, size=count, replace=False)
            return frozenset(int(client) for client in drawn)
        if unknown := [client for client in self.clients if not 0 <= client < num_clients]:
            raise ConfigError(f"attack.clients: there is no client {unknown[0]}; there are 0 to {num_clients - 1}")
        if len(self.clients) == num_clients:
            raise ConfigError("attack.clients: all clients are malicious, and scores are of honest ones: leave some")
        return frozenset(self.clients)

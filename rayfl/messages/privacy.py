"""The section privacy of a configuration."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_CLIP_LR = 0.2

Noise = Literal["independent", "tree", "honaker", "banded"]
Accountant = Literal["rdp", "prv"]
Mechanism = Literal["gaussian", "discrete_gaussian", "skellam"]


class PrivacyConfig(BaseModel):
    """Differential privacy of clients (McMahan et al., ICLR 2018), and of their samples (Abadi et al., CCS 2016).

    The norm of clients' changes may follow a quantile of these (Andrew, Thakkar, McMahan, Ramaswamy, NeurIPS 2021).
    Rounds may share noise: that of a tree over them (DP-FTRL; Kairouz et al., ICML 2021), or of a banded matrix
    (Kalinin and Lampert, NeurIPS 2024). Each client may add noise of its own to its message (local privacy), or
    integers to what a secure sum is made of (Kairouz, Liu, Steinke, ICML 2021; Agarwal, Kairouz, Liu, NeurIPS 2021).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    clip_norm: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="C, the largest Euclidean norm of what a client's message differs by from what it received; longer "
        "changes are scaled down; null: no limit, and no privacy; with target_quantile the one of the first round",
    )
    noise_multiplier: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="z: the sum of the messages gets normal noise of the standard deviation z C in each element; with "
        "noise_at=clients each message does",
    )
    noise_at: Literal["server", "clients"] = Field(
        "server",
        description="server: it adds noise to the sum of a round's messages, and is trusted with these (central "
        "privacy); clients: each adds noise to its own message before anybody sees it (local privacy)",
    )
    mechanism: Mechanism = Field(
        "gaussian",
        description="gaussian: normal noise, added as noise_at says; discrete_gaussian, skellam: each of n clients "
        "adds integers of the standard deviation z C / sqrt(n) to what it sends to compression=secure_aggregation; the "
        "sum, which is all that the server sees, has noise of z C (distributed privacy)",
    )
    delta: float | None = Field(
        None, gt=0, lt=1, description="of (epsilon, delta)-differential privacy; null: K^-1.1 of K clients"
    )
    accountant: Accountant = Field(
        "rdp",
        description="how epsilon is computed, of clients and of samples: rdp: by Renyi divergences, in milliseconds; "
        "prv: by numerical composition, which is smaller, in some seconds",
    )
    noise: Noise = Field(
        "independent",
        description="independent: every round has noise of its own; tree: sums over rounds have as little noise as a "
        "binary tree over the rounds allows (DP-FTRL), of the standard deviation z C for each of its nodes; honaker: "
        "less, by an estimate from all nodes; banded: each round takes a part of the noise of the rounds before back "
        "(banded square root factorization), of the standard deviation z C before that",
    )
    tree_rounds: int | None = Field(
        None, ge=1, description="a new tree begins after this number of rounds; null: one tree for all rounds"
    )
    bands: int | None = Field(
        None,
        ge=1,
        description="b: a round's noise depends on that of the b - 1 rounds before (banded); null: K / m, rounded "
        "down, the rounds from one of a client's to its next with train.sampling=cyclic",
    )
    target_quantile: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="gamma: C moves until this share of the clients' changes is no longer than it; null: C is fixed",
    )
    clip_lr: float = Field(
        _CLIP_LR,
        gt=0,
        allow_inf_nan=False,
        description="eta_C: a round multiplies C by exp(-eta_C (b - gamma)), b the noised share of changes up to C",
    )
    count_noise: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="sigma_b, standard deviation of the noise of the number of changes up to C; null: m / 20 of m "
        "clients expected in a round, and none where noise_multiplier is 0",
    )

    example_clip_norm: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="largest Euclidean norm of the gradient of one sample's loss in local training (DP-SGD); longer "
        "ones are scaled down, and mini-batches are Poisson samples; null: no limit on samples",
    )
    example_noise_multiplier: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="the sum of a mini-batch's gradients gets normal noise of the standard deviation "
        "example_noise_multiplier example_clip_norm in each element",
    )
    example_delta: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="of (epsilon, delta)-differential privacy of a client's samples; null: 1 / (10 n_k) of n_k samples",
    )

    @property
    def on(self) -> bool:
        """Returns whether messages are limited."""
        return self.clip_norm is not None

    @property
    def local(self) -> bool:
        """Returns whether each message has noise of its own, so that nobody need be trusted with it."""
        return self.noise_at == "clients"

    @property
    def distributed(self) -> bool:
        """Returns whether clients add integers of noise to what a secure sum is made of."""
        return self.mechanism != "gaussian"

    @property
    def of_examples(self) -> bool:
        """Returns whether the gradients of samples are limited."""
        return self.example_clip_norm is not None

    def example_delta_of(self, samples: int) -> float:
        """Returns delta of a client with a number of training samples."""
        return 1 / (10 * samples) if self.example_delta is None else self.example_delta

    def delta_of(self, clients: int) -> float:
        """Returns delta for a number of clients."""
        return clients**-1.1 if self.delta is None else self.delta

    def bands_of(self, clients: int, size: int) -> int:
        """Returns b, for K clients and cohorts of m."""
        return max(clients // size, 1) if self.bands is None else self.bands

    def count_noise_of(self, expected: int) -> float:
        """Returns sigma_b, the standard deviation of the noise of a round's count; 0 without noise.

        Args:
            expected: m, how many clients are expected in a round.
        """
        if not self.noise_multiplier:
            return 0.0
        return expected / 20 if self.count_noise is None else self.count_noise

    def sum_noise_of(self, expected: int) -> float:
        """Returns the noise multiplier of the sum of the changes.

        With a fixed norm it is z. Where a count is released, too, it is z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), so
        that both together cost as much as the sum alone with z (Andrew et al., 2021, Theorem 1).

        Args:
            expected: m, how many clients are expected in a round.

        Raises:
            ValueError: the count has too little noise: 2 sigma_b must be larger than z.
        """
        z = self.noise_multiplier
        if self.target_quantile is None or not z:
            return z
        share = z / (2 * self.count_noise_of(expected))
        if share >= 1:
            raise ValueError(
                f"the count's noise of {self.count_noise_of(expected):g} alone costs more than "
                f"noise_multiplier={z:g} allows: it must be above {z / 2:g}"
            )
        return z / math.sqrt(1 - share**2)

    @model_validator(mode="after")
    def _noise_of_a_limit(self) -> PrivacyConfig:
        if self.clip_norm is None and (self.noise_multiplier or self.delta is not None):
            raise ValueError(
                "noise_multiplier and delta have no meaning without a limit on messages: set privacy.clip_norm"
            )
        if self.delta is not None and not self.noise_multiplier:
            raise ValueError("delta without noise: set privacy.noise_multiplier, or drop delta")
        return self

    @model_validator(mode="after")
    def _accountant_of_noise(self) -> PrivacyConfig:
        if self.accountant != "rdp" and not (self.noise_multiplier or self.example_noise_multiplier):
            raise ValueError(
                f"accountant={self.accountant} without noise: set privacy.noise_multiplier or "
                "privacy.example_noise_multiplier, or drop it"
            )
        return self

    @model_validator(mode="after")
    def _noise_of_several_rounds(self) -> PrivacyConfig:
        if self.tree_rounds is not None and self.noise not in ("tree", "honaker"):
            raise ValueError("tree_rounds is of the noise of a tree: set privacy.noise=tree, or drop it")
        if self.bands is not None and self.noise != "banded":
            raise ValueError("bands is of the noise of a banded matrix: set privacy.noise=banded, or drop it")
        if self.noise == "independent":
            return self
        if not self.noise_multiplier:
            raise ValueError(f"noise={self.noise} is how noise is drawn: set privacy.noise_multiplier, or drop it")
        if self.target_quantile is not None:
            raise ValueError(
                f"noise={self.noise}: what is promised is known for one norm in all rounds: leave target_quantile out"
            )
        return self

    @model_validator(mode="after")
    def _noise_of_clients(self) -> PrivacyConfig:
        if not self.local:
            return self
        if not self.noise_multiplier:
            raise ValueError("noise_at=clients is where noise is added: set privacy.noise_multiplier, or drop it")
        if self.noise != "independent":
            raise ValueError(f"noise={self.noise} is drawn by the server for sums of rounds: drop it, or noise_at")
        if self.target_quantile is not None:
            raise ValueError(
                "target_quantile: each client would say whether its change is short, which has no noise of its own: "
                "drop it, or noise_at"
            )
        return self

    @model_validator(mode="after")
    def _noise_of_sums(self) -> PrivacyConfig:
        if not self.distributed:
            return self
        option = f"mechanism={self.mechanism}"
        if not self.noise_multiplier:
            raise ValueError(f"{option} is what noise is drawn from: set privacy.noise_multiplier, or drop it")
        if self.local:
            raise ValueError(
                f"{option}: each client adds a share of the noise of the sum, and with noise_at=clients that of a "
                "message: drop one of them"
            )
        if self.noise != "independent":
            raise ValueError(f"{option}: noise={self.noise} is drawn by the server, which adds none: drop one of them")
        if self.target_quantile is not None:
            raise ValueError(
                f"{option}: target_quantile counts the changes up to C with normal noise of the server, which adds "
                "none: drop one of them"
            )
        if self.accountant != "rdp":
            raise ValueError(f"{option}: accountant={self.accountant} knows normal noise alone: drop accountant")
        return self

    @model_validator(mode="after")
    def _quantile_of_a_limit(self) -> PrivacyConfig:
        if self.target_quantile is None:
            if self.clip_lr != _CLIP_LR or self.count_noise is not None:
                raise ValueError("clip_lr and count_noise are of a norm that moves: set privacy.target_quantile")
            return self
        if self.clip_norm is None:
            raise ValueError("target_quantile needs a norm to begin with: set privacy.clip_norm")
        if self.count_noise is not None and not self.noise_multiplier:
            raise ValueError("count_noise alone makes nothing private: set privacy.noise_multiplier, or drop it")
        return self

    @model_validator(mode="after")
    def _noise_of_gradients(self) -> PrivacyConfig:
        if self.example_clip_norm is None and (self.example_noise_multiplier or self.example_delta is not None):
            raise ValueError(
                "example_noise_multiplier and example_delta have no meaning without a limit on gradients: set "
                "privacy.example_clip_norm"
            )
        if self.example_delta is not None and not self.example_noise_multiplier:
            raise ValueError("example_delta without noise: set privacy.example_noise_multiplier, or drop example_delta")
        return self

"""The section ``selection`` of a configuration: how the clients of a round are chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rayfl.errors import ConfigError, RayflError, text_of
from rayfl.naming.objects import as_custom, import_object
from rayfl.naming.texts import ObjectPath
from rayfl.selection.clustered import Clustered
from rayfl.selection.divfl import DivFL
from rayfl.selection.known import Known
from rayfl.selection.oort import Oort
from rayfl.selection.strategy import Asked, Strategy, drawn, greatest
from rayfl.selection.tifl import TiFL


class Uniform(BaseModel):
    """At random, as ``train.sampling`` says; nothing is known of clients."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["uniform"] = "uniform"


class PowerOfChoice(Strategy):
    """Those with the greatest losses of some candidates (Cho, Wang, Joshi, AISTATS 2022: pow-d and rpow-d).

    d candidates are drawn without replacement, with probabilities in the ratio of their numbers of samples; those m of
    them with the greatest losses take part. The losses are those of the model that clients would receive (pow-d: all
    candidates receive it, and find their losses before the choice), or the last that each has told (rpow-d).
    """

    name: Literal["power_of_choice"] = "power_of_choice"
    candidates: int = Field(ge=1, description="d, how many clients are drawn, of which clients_per_round are chosen")
    losses: Literal["received", "last"] = Field(
        "received",
        description="received: candidates find the loss of the model that they would train (pow-d); last: that which a "
        "client told when it last took part; one that never did comes first (rpow-d)",
    )

    @property
    def asked(self) -> Asked:
        return "candidates" if self.losses == "received" else "cohort"

    def candidates_of(self, known: Known) -> np.ndarray:
        return drawn(known.generator, known.able, known.samples[known.able], max(self.candidates, known.size))

    def choose(self, known: Known) -> np.ndarray:
        if self.losses == "received":
            return greatest(known, known.able, known.losses)
        return greatest(known, self.candidates_of(known), np.where(known.times > 0, known.losses, np.inf))


class Active(Strategy):
    """By a softmax of valuations (Goetz et al., Active Federated Learning, 2019).

    A client's valuation is sqrt(n_k) times its mean loss, as it told when it last took part. The lowest alpha_1 of all
    valuations are dropped; (1 - alpha_3) m clients are drawn in the ratio of exp(alpha_2 valuation), and the others of
    the m uniformly from all that are left. Those that never took part have no valuation, and come by the second way.
    """

    name: Literal["active"] = "active"
    dropped: float = Field(0.75, ge=0, lt=1, description="alpha_1, the share of lowest valuations that is dropped")
    sharpness: float = Field(0.01, ge=0, allow_inf_nan=False, description="alpha_2, the factor of valuations")
    uniform: float = Field(0.1, ge=0, le=1, description="alpha_3, the share of the clients that is drawn uniformly")

    @property
    def asked(self) -> Asked:
        return "cohort"

    def choose(self, known: Known) -> np.ndarray:
        values = np.sqrt(known.samples) * known.losses
        told = known.able[np.isfinite(values[known.able])]
        order = told[np.argsort(values[told], kind="stable")]
        left = order[int(self.dropped * len(known.able)) :]
        wanted = min(int((1 - self.uniform) * known.size + 1e-9), len(left))
        logits = self.sharpness * values[left]
        weights = np.exp(logits - logits.max(initial=0.0))
        chosen = drawn(known.generator, left, weights, wanted)
        others = np.setdiff1d(known.able, chosen)
        rest = known.generator.choice(others, size=known.size - len(chosen), replace=False)
        return np.concatenate([chosen, rest])


class Custom(Strategy):
    """Your own function, as my_package.my_module:function.

    It is given what is known (:class:`rayfl.selection.known.Known`), and returns different clients of ``able``, at most
    ``size`` and at least one. It should draw from ``generator`` alone, so that a run that was interrupted goes on to
    the same bits.
    """

    name: Literal["custom"] = "custom"
    function: ObjectPath = Field(
        description="the function, as my_package.my_module:function; it may also stand in the place of the name"
    )
    losses: Literal["none", "cohort", "all"] = Field(
        "none",
        description="whose losses are found before each round: none; cohort: those of the chosen, for later rounds; "
        "all: those of all clients that can be asked, before the choice, which costs a message to each",
    )

    @property
    def asked(self) -> Asked:
        return {"none": "nobody", "cohort": "cohort", "all": "candidates"}[self.losses]  # type: ignore[return-value]

    @property
    def numbers(self) -> int:
        return 2

    def candidates_of(self, known: Known) -> np.ndarray:
        return known.able

    def choose(self, known: Known) -> np.ndarray:
        """Returns what the function returns, checked.

        Raises:
            ConfigError: it cannot be imported, fails, or returns something else.
        """
        function = import_object(self.function, "selection")
        try:
            found = function(known)
        except RayflError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise ConfigError(f"selection {self.function} fails: {type(error).__name__}: {text_of(error)}") from error
        return self._checked(found, known)

    def _checked(self, found: Any, known: Known) -> np.ndarray:
        what = f"selection {self.function} must return different clients of `able`, 1 to {known.size} (`size`)"
        if not isinstance(found, Iterable) or isinstance(found, str | bytes):
            raise ConfigError(f"{what}, not {found!r:.80}")
        clients = np.asarray(list(found))
        if not 1 <= clients.size <= known.size or clients.ndim != 1 or clients.dtype.kind not in "iu":
            raise ConfigError(f"{what}, not {clients.tolist()!r:.80}")
        strange = np.setdiff1d(clients, known.able)
        if strange.size or len(np.unique(clients)) < clients.size:
            wrong = f"client {strange[0]} cannot be asked" if strange.size else "a client is there twice"
            raise ConfigError(f"{what}: {wrong}")
        return clients


def _named_by_object(content: Any) -> Any:
    """``{name: my_module:choose}`` as ``{name: custom, function: my_module:choose}``."""
    return as_custom(content, "function")


Selection = Annotated[
    Annotated[Uniform | PowerOfChoice | Active | Oort | TiFL | Clustered | DivFL | Custom, Field(discriminator="name")],
    BeforeValidator(_named_by_object),
]

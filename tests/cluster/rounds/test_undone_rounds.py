"""Rounds that are done again, and who is left out of them."""

from __future__ import annotations

from typing import Any

from actors.hosting.failures import Failure, RoundUndoneError
from cluster.rounds.driver import Driver


def driver() -> Any:
    made: Any = Driver.__new__(Driver)
    made._absent, made._unscorable, made._failures = {}, {}, 2
    made.rewound = 0

    def rewind() -> None:
        made.rewound += 1

    made._rewind = rewind
    return made


def test_who_was_left_out_of_an_attempt_is_left_out_of_the_next_one_too() -> None:
    """As when an actor dies in a pass for losses, which knows nothing of clients that have failed in training."""
    one = driver()
    trained, scored = Failure("local_update", "out of order"), Failure("predictors", "no end")
    one._undo(RoundUndoneError(3, {1: trained}))
    one._undo(RoundUndoneError(3, {}, {2: scored}, deaths=1))
    one._undo(RoundUndoneError(3, {4: trained}))
    assert one._absent[3] == {1: trained, 4: trained}
    assert one._unscorable[3] == {2: scored}
    assert (one.rewound, one._failures) == (3, 1)

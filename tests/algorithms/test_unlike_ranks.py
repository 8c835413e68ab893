"""What HetLoRA, FLoRA and FlexLoRA share: clients whose adapters have unlike ranks."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.fedex_lora import FedExLoRA
from algorithms.flexlora import FlexLoRA
from algorithms.flora import FLoRA
from algorithms.hetlora import HetLoRA
from algorithms.lora_fair import LoRAFair
from algorithms.rolora import RoLoRA
from rayfl.errors import ConfigError
from tests.support.adapted import adapted_toy
from tests.support.toy_networks import two_layers
from tests.support.toys import assert_close, assert_equal

RANKS = (1, 3, 2)
PRUNING = {"kept_share": 0.5, "pruning_weight": 1.0}


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        pytest.param(FLoRA(), {"global"}, marks=pytest.mark.slow),
        (FLoRA(ranks=RANKS), {"global"}),
        pytest.param(FlexLoRA(ranks=RANKS), {"global", "truncated"}, marks=pytest.mark.slow),
        pytest.param(HetLoRA(ranks=RANKS, **PRUNING), {"global", "truncated"}, marks=pytest.mark.slow),
        (HetLoRA(ranks=RANKS, rank_choice="drawn", **PRUNING), {"global", "truncated"}),
    ],
    ids=["flora", "flora unlike", "flexlora", "hetlora in turn", "hetlora drawn"],
)
@pytest.mark.first_case
def test_stacked_is_looped_and_hosts_make_no_difference(method: Any, rows: set[str]) -> None:
    one, other, many = adapted_toy(method), adapted_toy(method, "vectorized"), adapted_toy(method, hosts=3)
    found = one.run()
    assert_close(found, other.run(), 1e-5)
    assert_equal(found, many.run())
    scores = other.scores()
    for client, own in one.scores().items():
        assert set(own) == rows
        assert all(abs(own[row].loss - scores[client][row].loss) < 1e-5 for row in rows)


@pytest.mark.parametrize(
    "method", [FlexLoRA(), FLoRA(), FedExLoRA(), RoLoRA(), LoRAFair()], ids=lambda method: method.name
)
def test_what_cannot_work_is_refused(method: Any) -> None:
    toy = adapted_toy(method, model={"adapter": {"r": 3, "alpha": 6, "trains": ["b"]}})
    with pytest.raises(ConfigError, match=rf"{method.name} needs model\.adapter\.trains=\[a,b\]"):
        method.check(toy.task, toy.context)
    toy = adapted_toy(method, model={"adapter": {"r": 3, "alpha": 6, "use_dora": True}})
    with pytest.raises(ConfigError, match=rf"{method.name} needs model\.adapter\.use_dora=false"):
        method.check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=rf"{method.name} needs a model with adapters .*model=pretrained"):
        method.check(two_layers(), toy.context)

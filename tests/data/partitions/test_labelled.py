"""Which training samples keep their labels: how many, which, where the others are, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.registry import Experiment
from rayfl.data.federated import FederatedDataset
from rayfl.data.hidden_labels import WithHiddenLabels
from rayfl.data.partitions.assignment import assignment_hash, to_parquet
from rayfl.data.partitions.labelled import Labelled
from rayfl.data.partitions.stats import dataset_stats
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from tests.support.toys import random_clients

SIZES = (40, 3, 17)


def parts(**sections: Any) -> Parts:
    content = {
        "dataset": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 6},
        "holdout": {"test": 0.2, "validation": 0.1},
        "model": {"name": "two_nn", "hidden": [8, 8]},
        "algorithm": {"name": "fedavg"},
        **sections,
    }
    return Parts(Experiment.model_validate(content))


def hidden(seed: int = 0, **options: Any) -> tuple[FederatedDataset, FederatedDataset]:
    inner = random_clients(SIZES)
    return inner, WithHiddenLabels(inner, Labelled(**options), RandomStreams(seed))


@pytest.mark.parametrize(("share", "expected"), [(0.1, (4, 1, 1)), (0.29, (11, 1, 4)), (0.5, (20, 1, 8))])
def test_a_share_is_rounded_down_to_whole_samples_and_one_at_least(share: float, expected: tuple[int, ...]) -> None:
    _, found = hidden(share=share)
    assert tuple(found.sizes()[:, 0]) == expected
    assert tuple(found.unlabelled_sizes()) == tuple(n - m for n, m in zip(SIZES, expected, strict=True))


def test_labelled_and_unlabelled_samples_are_all_there_are() -> None:
    inner, found = hidden(share=0.3)
    for client, size in enumerate(SIZES):
        whole, kept = inner.load(client)["train"], found.load(client)["train"]
        rest = found.load_unlabelled(client)
        rows = {tuple(row.tolist()): int(label) for row, label in zip(whole.x, whole.y, strict=True)}
        assert all(rows[tuple(row.tolist())] == int(label) for row, label in zip(kept.x, kept.y, strict=True))
        assert {tuple(row.tolist()) for row in torch.cat([kept.x, rest])} == set(rows)
        assert len(kept.x) + len(rest) == size
        assert np.array_equal(found.labels(client)["train"], kept.y.numpy())
        both = np.concatenate([found.places(client)["train"], found.unlabelled_places(client)])
        assert np.array_equal(np.sort(both), inner.places(client)["train"])
        assert torch.equal(found.load(client)["test"].x, inner.load(client)["test"].x)


def test_a_number_by_class_is_that_of_each_class_that_a_client_has() -> None:
    inner, found = hidden(per_class=2)
    for client in range(len(SIZES)):
        own, kept = (np.bincount(one.labels(client)["train"], minlength=3) for one in (inner, found))
        assert np.array_equal(kept, np.minimum(own, 2))


def test_which_samples_are_drawn_depends_on_seed_and_client_and_not_on_labels_with_a_share() -> None:
    _, one = hidden(share=0.3)
    _, other = hidden(seed=1, share=0.3)
    assert not np.array_equal(one.places(0)["train"], other.places(0)["train"])
    labels = np.arange(30) % 3
    drawn = [
        Labelled(share=0.2).kept(y, RandomStreams(0).generator("labelled", client=2)) for y in (labels, labels * 0)
    ]
    assert np.array_equal(*drawn)


def test_with_labels_at_the_server_no_client_has_one() -> None:
    made = parts(labelled={"at": "server"}, holdout={"test": 0.2, "validation": 0.1, "public": 60})
    sizes = made.dataset.sizes()
    assert not sizes[:, 0].any() and sizes[:, 1:].all()
    assert len(made.dataset.public_labels()) == 60
    assert made.dataset.unlabelled_sizes().sum() + sizes.sum() + 60 == 1797


def test_a_partition_says_which_samples_are_unlabelled_and_divides_another_run_alike(tmp_path: Path) -> None:
    made, plain = parts(labelled={"share": 0.1}), parts()
    table = made.assignment.to_pandas()
    counts = table["split"].value_counts()
    assert counts["unlabelled"] == made.dataset.unlabelled_sizes().sum() > 0
    assert counts["train"] == made.dataset.sizes()[:, 0].sum()
    # who owns which sample does not depend on who has labels, so that such runs can be compared
    assert made.partition_hash == plain.partition_hash == assignment_hash(made.assignment)
    path = tmp_path / "partition.parquet"
    path.write_bytes(to_parquet(made.assignment))
    again = parts(labelled={"share": 0.1}, partition={"name": "file", "path": str(path)}, holdout={})
    assert again.assignment.to_pandas().equals(table)
    # public samples stay at the end
    public = parts(labelled={"share": 0.1}, holdout={"test": 0.2, "public": 30})
    assert public.partition_hash == parts(holdout={"test": 0.2, "public": 30}).partition_hash


def test_statistics_count_labels_that_are_known_and_name_how_many_are_not() -> None:
    made = parts(labelled={"share": 0.1})
    stats = dataset_stats(made.dataset)
    assert stats.label_counts is not None
    assert int(stats.label_counts.sum()) == int(made.dataset.sizes().sum())
    facts = dict(stats.rows())
    assert facts["unlabelled training samples"] == str(int(made.dataset.unlabelled_sizes().sum()))
    assert "unlabelled training samples" not in dict(dataset_stats(parts().dataset).rows())


def test_clients_that_are_held_out_keep_their_samples() -> None:
    made = parts(labelled={"share": 0.1}, evaluation={"unseen_clients": 0.34})
    sizes, rest = made.dataset.sizes(), made.dataset.unlabelled_sizes()
    for client in range(made.dataset.num_clients):
        assert len(made.dataset.load_unlabelled(client)) == rest[client] == len(made.dataset.unlabelled_places(client))
        assert len(made.dataset.load(client)["train"]) == sizes[client, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.5, "per_class": 2}, "share and per_class are two ways"),
        ({"share": 0.5, "at": "server"}, "at=server leaves clients no labels"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Labelled.model_validate(options)


def test_labels_at_a_server_without_samples_are_refused_by_the_configuration() -> None:
    with pytest.raises(ValueError, match=r"labelled.at is server, but the server has no samples: set holdout.public"):
        parts(labelled={"at": "server"})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"labelled": {"at": "server"}, "holdout": {"public": 60}},
            "clients have no labels, but fedavg needs some there: set labelled.at=clients",
        ),
        (
            {
                "labelled": {"share": 0.5},
                "dataset": {"name": "diabetes"},
                "task": {"name": "regression"},
            },
            "labelled: it hides the classes of samples, but the data set has",
        ),
        (
            {
                "labelled": {"share": 0.5},
                "task": {"name": "self_supervised", "objective": "simsiam"},
                "augment": {"crop": 1},
            },
            "labelled: task=self_supervised learns without labels, and its evaluation needs the true ones",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_before_a_run(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(**sections).check()


def test_a_run_says_once_on_which_samples_a_method_trains(caplog: pytest.LogCaptureFixture) -> None:
    parts(labelled={"share": 0.1}).check()
    said = [record.message for record in caplog.records if record.message.startswith("labelled: ")]
    assert said == [
        "labelled: fedavg trains on the 126 of 1296 training samples that keep their labels, and not on the others"
    ]
    caplog.clear()
    parts(labelled={"share": 0.001}).check()
    assert "share 0.001 is less than one sample of 6 of 6 clients, which keep the label of one" in caplog.text

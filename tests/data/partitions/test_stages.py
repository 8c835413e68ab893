"""Which samples of a client are there in which stage, what they are then, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from algorithms.registry import Experiment
from rayfl.data.partitions.arriving import Arriving, ClassStages, SampleStages
from rayfl.data.partitions.drifting import LabelStages, RotationStages
from rayfl.data.partitions.stage import NoStages
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams

STREAMS = RandomStreams(3)
CLASSES = {"name": "classes", "count": 3, "rounds": 2}


def parts(**sections: Any) -> Parts:
    content = {
        "dataset": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 4},
        "holdout": {"test": 0.2, "validation": 0.1},
        "model": {"name": "two_nn", "hidden": [8, 8]},
        "algorithm": {"name": "fedavg"},
        "train": {"rounds": 6, "clients_per_round": "all"},
        "stages": CLASSES,
        **sections,
    }
    return Parts(Experiment.model_validate(content))


def test_the_last_stage_goes_on_to_the_end() -> None:
    stages = ClassStages(count=3, rounds=2)
    assert [stages.stage_of(round) for round in range(8)] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [done for done in range(9) if stages.ends_after(done)] == [2, 4]
    context = parts().context
    begins = [t for t in range(8) if type(context)(**{**vars(context), "round": t}).begins_stage]
    assert begins == [2, 4]
    assert NoStages().stage_of(7) == 0 and not NoStages().ends_after(7)


@pytest.mark.parametrize("bad", [{"count": 1}, {"rounds": 0}, {"memory": -1}, {"memory": "some"}, {"order": "sorted"}])
def test_numbers_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ClassStages(**{"count": 2, "rounds": 1, **bad})


def test_classes_arrive_in_groups_as_alike_in_size_as_can_be() -> None:
    labels = [np.arange(10), np.array([9, 0]), np.array([4], dtype=np.int64)]
    given = ClassStages(count=3, rounds=1).arrivals(labels, 10, STREAMS, 0)
    assert given[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert given[1].tolist() == [2, 0] and given[2].tolist() == [1]
    drawn = [ClassStages(count=3, rounds=1, order="drawn").arrivals(labels, 10, STREAMS, k)[0] for k in (0, 1)]
    assert (
        np.array_equal(drawn[0], drawn[1])
        and sorted(drawn[0]) == sorted(given[0])
        and drawn[0].tolist() != given[0].tolist()
    )


def test_with_an_order_of_its_own_a_client_divides_the_classes_that_it_has() -> None:
    stages, labels = ClassStages(count=2, rounds=1, order="own"), [np.array([3, 3, 7]), np.array([5]), np.array([9])]
    found = [stages.arrivals(labels, 10, STREAMS, client) for client in range(20)]
    for one in found:
        of = dict(zip(np.concatenate(labels).tolist(), np.concatenate(one).tolist(), strict=True))
        assert sorted(of.values()) == [0, 0, 1, 1] and one[0][0] == one[0][1]
    assert len({tuple(np.concatenate(one)) for one in found}) > 1


def test_training_samples_arrive_in_equal_parts_and_others_are_there_from_the_beginning() -> None:
    labels = [np.zeros(11, dtype=np.int64), np.zeros(3, dtype=np.int64), np.zeros(2, dtype=np.int64)]
    found = SampleStages(count=3, rounds=1).arrivals(labels, 0, STREAMS, 1)
    assert np.bincount(found[0]).tolist() == [4, 4, 3] and not found[1].any() and not found[2].any()
    assert not np.array_equal(found[0], SampleStages(count=3, rounds=1).arrivals(labels, 0, STREAMS, 2)[0])


@pytest.mark.parametrize("kind", [ClassStages, SampleStages])
def test_inv_stages_1_what_was_given_up_of_the_memory_never_comes_back(kind: type[Arriving]) -> None:
    labels = np.random.default_rng(0).integers(10, size=200)
    stages = kind(count=5, rounds=1, memory=17)
    arrivals = stages.arrivals([labels, labels[:0], labels[:0]], 10, STREAMS, 0)[0]
    had: set[int] = set()
    for stage in range(5):
        there = set(stages.trained_on(arrivals, labels, stage, STREAMS.generator("stages.memory", client=0)).tolist())
        new = set(np.flatnonzero(arrivals == stage).tolist())
        kept = there - new
        assert new <= there and kept <= had and len(kept) == (17 if stage else 0)
        if stage and kind is ClassStages:
            counts = np.bincount(labels[sorted(kept)], minlength=10)
            assert counts[counts > 0].max() - counts[counts > 0].min() <= 1
            assert (counts > 0).sum() == 2 * stage
        had = there


def test_all_that_has_arrived_is_kept_on_request_and_nothing_else_without_memory() -> None:
    labels, arrivals = np.array([0, 1, 2, 0]), np.array([0, 1, 2, 0])

    def there(stage: int, **memory: Any) -> list[int]:
        stages = ClassStages(count=3, rounds=1, **memory)
        return list(stages.trained_on(arrivals, labels, stage, STREAMS.generator("x")))

    assert [there(stage) for stage in range(3)] == [[0, 3], [1], [2]]
    assert [there(stage, memory="all") for stage in range(3)] == [[0, 3], [0, 1, 3], [0, 1, 2, 3]]


def test_clients_have_test_and_validation_samples_of_the_stages_so_far() -> None:
    made = parts()
    for round, most in ((0, 3), (1, 3), (2, 6), (4, 9), (5, 9)):
        there, sizes = made.dataset_in(round), made.dataset_in(round).sizes()
        for client in range(4):
            loaded, labels = there.load(client), there.labels(client)
            whole = made.dataset.labels(client)
            for place, split in enumerate(SPLITS):
                assert sizes[client, place] == len(loaded[split]) == len(there.places(client)[split])
                assert np.array_equal(loaded[split].y.numpy(), labels[split])
                if split != "train":
                    assert sorted(labels[split]) == sorted(whole[split][whole[split] <= most])
            assert set(labels["train"]) == set(range(most + 1)) - set(range({3: 0, 6: 4, 9: 7}[most]))
            tested = there.tested(client)
            assert set(tested.y.tolist()) <= set(labels["train"]) and len(tested)
    assert made.dataset.sizes().sum() == parts(stages={"name": "none"}).dataset.sizes().sum()
    assert made.partition_hash == parts(stages={"name": "none"}).partition_hash


def test_classes_arrive_by_their_true_labels_whatever_wrong_ones_say() -> None:
    clean = parts(partition={"name": "iid", "num_clients": 4})
    noisy = parts(noise={"ratio": 0.5, "kind": "symmetric"})
    flipped = parts(attack={"clients": [0, 1], "labels": "flipped"})
    for client in range(4):
        known = clean.dataset_in(0).places(client)["train"]
        assert np.array_equal(noisy.dataset_in(0).places(client)["train"], known)
        assert np.array_equal(flipped.dataset_in(0).places(client)["train"], known)
    assert (noisy.dataset_in(0).labels(0)["train"] != clean.dataset_in(0).labels(0)["train"]).mean() > 0.3


@pytest.mark.parametrize("course", ["join", "leave"])
def test_clients_join_and_leave_in_groups_and_newcomers_are_no_part_of_that(course: str) -> None:
    made = parts(
        partition={"name": "iid", "num_clients": 12},
        stages={"name": "clients", "count": 3, "rounds": 2, "course": course},
        evaluation={"unseen_clients": 0.17},
    )
    whole = made.dataset.sizes()
    there = [set(made.able(round)) for round in (0, 2, 4)]
    if course == "leave":
        there = there[::-1]
    assert [len(one) for one in there] == ([4, 7, 10] if course == "join" else [3, 6, 10])
    assert there[0] < there[1] < there[2] == set(range(10))
    for round in (0, 2, 4):
        now, able = made.dataset_in(round), {*made.able(round), 10, 11}
        assert np.array_equal(now.sizes()[:, 1:], whole[:, 1:])
        for client in range(12):
            count = whole[client, 0] if client in able else 0
            found = len(now.load(client)["train"]), len(now.labels(client)["train"]), len(now.places(client)["train"])
            assert found == (count,) * 3 and now.sizes()[client, 0] == count
            assert len(now.load(client)["test"]) == whole[client, 2]


def test_concepts_exchange_pairs_of_classes_and_each_client_moves_on_by_itself() -> None:
    stages = LabelStages(count=8, rounds=1)
    y = np.arange(7)
    assert stages.changed_labels(y, 0, 7).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert stages.changed_labels(y, 1, 7).tolist() == [1, 0, 2, 3, 4, 5, 6]
    assert stages.changed_labels(y, 3, 7).tolist() == [0, 1, 2, 3, 5, 4, 6]
    assert stages.changed_labels(y, 4, 7).tolist() == [1, 0, 2, 3, 4, 5, 6]
    assert (stages.concepts(50, STREAMS) == np.arange(8)).all()
    half = LabelStages(count=8, rounds=1, share=0.5).concepts(400, STREAMS)
    steps = np.diff(half, axis=1)
    assert not half[:, 0].any() and set(np.unique(steps)) == {0, 1} and 0.45 < steps.mean() < 0.55
    # a client's course does not depend on how many others there are
    assert np.array_equal(half[:10], LabelStages(count=8, rounds=1, share=0.5).concepts(10, STREAMS))


def test_all_parts_follow_the_client_s_concept() -> None:
    made = parts(stages={"name": "labels", "count": 3, "rounds": 2})
    before, after = made.dataset_in(1), made.dataset_in(2)
    for split in SPLITS:
        meaning = np.array([1, 0, 2, 3, 4, 5, 6, 7, 8, 9])
        assert np.array_equal(after.load(2)[split].y.numpy(), meaning[before.load(2)[split].y.numpy()])
        assert np.array_equal(after.labels(2)[split], after.load(2)[split].y.numpy())
        assert torch.equal(after.load(2)[split].x, before.load(2)[split].x)


def test_images_are_turned_about_their_middle() -> None:
    stages, image = RotationStages(count=5, rounds=1, degrees=90), torch.rand(3, 1, 5, 5)
    black = torch.tensor([-1.0])
    for concept in range(5):
        turned = stages.changed_inputs(image, concept, black)
        assert any(torch.equal(turned, torch.rot90(image, sign * concept, (2, 3))) for sign in (1, -1))
    eighth = RotationStages(count=2, rounds=1, degrees=45).changed_inputs(image, 1, black)
    assert (eighth[:, :, 0, 0] == -1).all() and torch.equal(eighth[:, :, 2, 2], image[:, :, 2, 2])
    made = parts(stages={"name": "rotation", "count": 2, "rounds": 1, "degrees": 180})
    for split in SPLITS:
        first, then = (made.dataset_in(round).load(1)[split] for round in (0, 1))
        assert torch.equal(first.x.flip(2, 3), then.x) and torch.equal(first.y, then.y)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"labelled": {"share": 0.5}}, "not together with labelled"),
        ({"system": {"name": "sampled"}}, "not together with system"),
        ({"early_stopping": {"patience": 3}}, "not together with early_stopping"),
        (
            {"evaluation": {"official_test": True}, "long_tail": {"balanced_test": 10}},
            "not together with evaluation.official_test",
        ),
        ({"stages": {**CLASSES, "count": 11}}, "only 10 classes"),
        (
            {
                "stages": {"name": "rotation", "count": 2, "rounds": 1},
                "dataset": {"name": "synthetic"},
                "partition": {"name": "natural"},
            },
            r"inputs of shape \(60,\) are no images",
        ),
        (
            {
                "dataset": {"name": "diabetes"},
                "task": {"name": "regression"},
            },
            "about samples of one class each",
        ),
        (
            {
                "partition": {"name": "classes", "num_clients": 5, "classes_per_client": 2},
                "stages": {**CLASSES, "order": "own"},
            },
            "in stage 3 only 0 of 5 clients have training samples",
        ),
        (
            {
                "algorithm": {"name": "l2gd"},
                "partition": {"name": "classes", "num_clients": 5, "classes_per_client": 2},
            },
            "l2gd needs every client in every round",
        ),
        (
            {
                "privacy": {"clip_norm": 1.0},
                "algorithm": {"name": "fedavg", "aggregation": "uniform"},
                "partition": {"name": "classes", "num_clients": 5, "classes_per_client": 2},
            },
            "not together with privacy.clip_norm where clients are without samples",
        ),
    ],
)
def test_what_goes_by_samples_that_stay_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    made = parts(**sections)
    with pytest.raises(ConfigError, match=words):
        made.check()


def test_stages_that_never_begin_and_clients_that_wait_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="rayfl")
    parts(train={"rounds": 3, "clients_per_round": "all"}).check()
    assert "stage 3 of 3 would begin with round 5, and there are 3" in caplog.text
    caplog.clear()
    parts(partition={"name": "classes", "num_clients": 5, "classes_per_client": 2}, seed=1).check()
    assert "of 5 clients those take part that have training samples" in caplog.text

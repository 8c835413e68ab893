"""Interactions from files and made up: who is held out, what is drawn beside it, and what is wrong in files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from rayfl.data.interactions import InteractionDataset
from rayfl.data.sources.interactions.source import InteractionsSource, SyntheticInteractionsSource
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

USERS, ITEMS, EACH = 6, 40, 8


def rows(seed: int = 0) -> list[tuple[str, str, int, int]]:
    """User, item, rating, time: shuffled, with times that say in which order each user's items are."""
    generator = np.random.default_rng(seed)
    found = [
        (f"u{user}", f"{item}", int(generator.integers(1, 6)), 1000 + 10 * place)
        for user in range(USERS)
        for place, item in enumerate(generator.permutation(ITEMS)[:EACH])
    ]
    return [found[place] for place in generator.permutation(len(found))]


def written(path: Path, kept: list[tuple[Any, ...]], header: bool = True) -> Path:
    separator = {".csv": ",", ".tsv": "\t", ".data": "\t", ".dat": "::", ".txt": ";"}[path.suffix]
    lines = [*([("user", "item", "rating", "time")] if header else []), *kept]
    path.write_text("".join(separator.join(map(str, line)) + "\n" for line in lines))
    return path


def opened(path: Path, seed: int = 0, **options: Any) -> InteractionDataset:
    given = {"time": "time", "negatives": 5, **options}
    return InteractionsSource(path=path, **given).open(RandomStreams(seed))


def in_order(user: str, kept: list[tuple[Any, ...]]) -> list[int]:
    return [int(item) for _, item, _, _ in sorted((row for row in kept if row[0] == user), key=lambda row: row[3])]


def numbered(kept: list[tuple[Any, ...]]) -> dict[int, int]:
    return {name: number for number, name in enumerate(sorted({int(row[1]) for row in kept}))}


def check(found: InteractionDataset, kept: list[tuple[Any, ...]]) -> None:
    number = numbered(kept)
    assert found.spec.vocabulary == len(number) and found.spec.shape == (6,) and found.spec.target == "ranking"
    for client, name in enumerate(found.names):
        own = [number[item] for item in in_order(name, kept)]
        splits = found.load(client)
        assert splits["train"].x[:, 0].tolist() == own[:-2]
        assert [splits[split].x[:, 0].tolist() for split in ("validation", "test")] == [own[-2:-1], own[-1:]]
        assert found.sizes()[client].tolist() == [len(own) - 2, 1, 1]
        for split, examples in splits.items():
            assert not examples.y.any() and examples.y.shape == examples.x.shape[:1]
            assert found.labels(client)[split].tolist() == examples.y.tolist()


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "u.data", "ratings.dat", "a.parquet", "a.txt"])
def test_the_last_items_by_time_are_held_out_whatever_the_file(name: str, tmp_path: Path) -> None:
    kept, options = rows(), {}
    if name.endswith("parquet"):
        columns = dict(zip(("user", "item", "rating", "time"), zip(*kept, strict=True), strict=True))
        pq.write_table(pa.table({key: list(value) for key, value in columns.items()}), tmp_path / name)
    else:
        headless = name in ("u.data", "ratings.dat")
        written(tmp_path / name, kept, not headless)
        options |= {"columns": ("user", "item", "rating", "time")} if headless else {}
        options |= {"separator": ";"} if name == "a.txt" else {}
    check(opened(tmp_path / name, **options), kept)


def test_columns_have_the_names_that_are_said_and_times_may_be_dates(tmp_path: Path) -> None:
    kept, path = rows(), tmp_path / "mine.parquet"
    day = datetime.date(2020, 1, 1)
    table = {
        "who": [int(row[0][1:]) for row in kept],
        "what": [row[1] for row in kept],
        "when": [day + datetime.timedelta(days=row[3]) for row in kept],
    }
    pq.write_table(pa.table(table), path)
    found = opened(path, user="who", item="what", time="when")
    assert found.names == tuple(str(user) for user in range(USERS))
    number = numbered(kept)
    assert found.chosen(2).tolist() == [number[item] for item in in_order("u2", kept)]


def test_ratings_below_the_threshold_and_users_with_few_items_are_left_out(tmp_path: Path) -> None:
    kept = rows()
    path = written(tmp_path / "a.csv", kept)
    found = opened(path, rating="rating", threshold=3, min_interactions=5)
    above = [row for row in kept if row[2] >= 3]
    enough = {user for user, *_ in above if sum(row[0] == user for row in above) >= 5}
    assert 0 < len(enough) < USERS and set(found.names) == enough
    check(found, [row for row in above if row[0] in enough])
    left = USERS - len(enough)
    assert list(found.remarks()) == [f"users with fewer than dataset.min_interactions=5 items are left out: {left}"]
    assert not opened(path).remarks()


def test_without_times_the_seed_says_which_items_are_held_out(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", rows())
    one, again, other = (opened(path, seed, time=None) for seed in (0, 0, 1))
    for client in range(USERS):
        assert one.chosen(client).tolist() == again.chosen(client).tolist()
        assert sorted(one.chosen(client)) == sorted(other.chosen(client))
    assert any(one.chosen(client)[-1] != other.chosen(client)[-1] for client in range(USERS))


def test_a_user_who_has_an_item_twice_is_named_or_the_first_time_counts(tmp_path: Path) -> None:
    kept = rows()
    user, item = kept[0][:2]
    again = [*kept, (user, item, 5, 99_999)]
    path = written(tmp_path / "a.csv", again)
    with pytest.raises(DataError, match=rf"row {len(kept)}: user '{user}' has item '{item}' a second time.*repeated=f"):
        opened(path)
    check(opened(path, repeated="first"), kept)


@pytest.mark.parametrize("unknown", ["training", "all"])
def test_negatives_are_never_among_the_items_that_a_user_is_known_to_have(unknown: str, tmp_path: Path) -> None:
    found = opened(written(tmp_path / "a.csv", rows()), unknown=unknown, negatives=20)
    held_out_drawn = False
    for client in range(USERS):
        own, splits = found.chosen(client), found.load(client)
        train = splits["train"].x.numpy()
        assert not np.isin(train[:, 1:], own[:-2]).any() and train[:, 1:].max() < found.spec.vocabulary
        held_out_drawn |= bool(np.isin(train[:, 1:], own[-2:]).any())
        for split in ("validation", "test"):
            drawn = splits[split].x.numpy()[0, 1:]
            assert not np.isin(drawn, own).any() and len(set(drawn)) == 20
    assert held_out_drawn == (unknown == "training")


def test_splits_are_a_function_of_the_seed_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", rows())
    one, again, other = (opened(path, seed) for seed in (0, 0, 1))
    again.load(2)["test"]  # in whatever order
    for split in ("train", "validation", "test"):
        assert one.load(2)[split].x.equal(again.load(2)[split].x)
        assert not one.load(2)[split].x.equal(other.load(2)[split].x)
    assert one.content_hash() == again.content_hash() == other.content_hash()
    shorter = opened(written(tmp_path / "b.csv", [row for row in rows() if row[0] != "u1"]))
    assert shorter.content_hash() != one.content_hash()


def test_without_validation_all_but_the_last_item_are_trained_on(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", rows())
    found = opened(path, validation=False, min_interactions=2)
    assert found.sizes().tolist() == [[EACH - 1, 0, 1]] * USERS
    splits = found.load(0)
    assert splits["validation"].x.shape == (0, 6)
    assert splits["train"].x[:, 0].tolist() == found.chosen(0)[:-1].tolist()


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (None, {"user": "usr"}, r"has no column 'usr' \(did you mean 'user'\?\), only user, item, rating, time"),
        (None, {"time": "when"}, r"no column 'when'.* name the columns with dataset.user, dataset.item, dataset.time"),
        (None, {"rating": "stars", "threshold": 1}, r"has no column 'stars'"),
        (None, {"min_interactions": 9}, r"no user has dataset.min_interactions=9 items; the most .* is 8: lower"),
        (None, {"rating": "rating", "threshold": 6}, r"no user has .* the most .* is 0: lower one of them"),
        (None, {"negatives": 33}, r"negatives is 33, but client 'u\d' has chosen 8 of \d+ items, so that \d+ are left"),
        (("u0", "", 3, 5), {}, r"column 'item', row 48: no value; fill it in, or remove the row"),
        (("u0", "77", 3, "late"), {}, r"column 'time' has the type string; needed are numbers, or times"),
        (("u0", "77", 3, "nan"), {}, r"column 'time', row 48: (the value is not finite|no value)"),
        (("u0", "77"), {}, r"is not a readable text with columns separated by ','"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    change: tuple[Any, ...] | None, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.csv", rows() + ([] if change is None else [change]))
    with pytest.raises(DataError, match=words):
        opened(path, **options)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent.csv does not exist"):
        opened(tmp_path / "absent.csv")
    (tmp_path / "a.log").write_text("user item\n")
    with pytest.raises(DataError, match=r"ends in none of .parquet, .csv, .tsv, .data, .dat: say with dataset.separat"):
        opened(tmp_path / "a.log")
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match=r"is not a readable Parquet file"):
        opened(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no rows"):
        opened(written(tmp_path / "a.csv", []))
    pq.write_table(pa.table({"user": [0.5], "item": ["a"], "time": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'user' has the type double; names are texts or whole numbers"):
        opened(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    "options",
    [
        {"rating": "rating"},
        {"threshold": 3.0},
        {"min_interactions": 2},
        {"path": "a.parquet", "columns": ("user", "item")},
        {"path": "a.parquet", "separator": ","},
    ],
)
def test_options_that_are_not_read_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        InteractionsSource(**{"path": "a.csv", **options})


def test_made_up_users_choose_by_taste_and_popularity() -> None:
    source = SyntheticInteractionsSource(num_clients=30, items=60, interactions=10, negatives=9)
    one, again = (source.open(RandomStreams(0)) for _ in range(2))
    assert one.num_clients == 30 and one.spec.vocabulary == 60 and one.spec.shape == (10,)
    for client in range(30):
        own = one.chosen(client)
        assert 5 <= len(own) <= 15 and len(set(own)) == len(own)
        assert own.tolist() == again.chosen(client).tolist()

    def overlap(taste: float) -> float:
        """How many of the items that a user has are the ten that most users have."""
        found = SyntheticInteractionsSource(num_clients=60, items=60, interactions=10, negatives=9, taste=taste)
        opened = found.open(RandomStreams(0))
        items = np.concatenate([opened.chosen(client) for client in range(60)])
        return float(np.sort(np.bincount(items, minlength=60))[-10:].sum() / len(items))

    assert overlap(0) > overlap(5) + 0.05
    with pytest.raises(DataError, match=r"dataset.items is 15, but a user may choose 15 of them"):
        SyntheticInteractionsSource(items=15, interactions=10).open(RandomStreams(0))
    with pytest.raises(DataError, match=r"dataset.negatives is 99, but client"):
        SyntheticInteractionsSource(items=100, interactions=10).open(RandomStreams(0))

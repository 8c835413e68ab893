"""Who a host works for, and what clients' code prints meanwhile."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from actors.hosting.host import ClientHost
from actors.hosting.job import Job
from actors.hosting.running_clients import Report, RunningClients, log_printed, printed_on_console
from actors.hosting.state import ClientStates
from algorithms.base import Averaging
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import StoredFile
from tests.support.toy_networks import softmax_regression
from tests.support.toys import CPU, random_clients


class Talkative(Averaging):
    """Prints before and after training, and in its objective; client 2 fails after that."""

    name: Literal["talkative"] = "talkative"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        print("before", client.id)
        trained = await client.train(model, self.objective)
        print("after", client.id, file=sys.stderr)
        if client.id == 2:
            raise RuntimeError("made up")
        return self.weighted(client, trained)

    def objective(self, model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        print("objective")
        loss: Tensor = task.loss(model, batch)
        return loss


def host(mode: Literal["looped", "vectorized"], store: CommitStore | None = None, **options: Any) -> ClientHost:
    """A host of four clients of one mini-batch each."""
    train = TrainConfig(rounds=1, clients_per_round=3, local_epochs=1, batch_size=8, lr=0.1)
    context = RoundContext(0, 1, 4, train, RandomStreams(0))
    engine = Engine(softmax_regression(), CPU, EngineConfig(mode=mode, width=3))
    return ClientHost(Talkative(), engine, random_clients([5, 5, 5, 5]), context, ClientStates(store, 0), 8, **options)


def job(*clients: int) -> Job:
    return Job("local_update", "mean", 4, clients)


BROADCAST = {"model": {name: value.numpy() for name, value in softmax_regression().network.initialize(0).items()}}


def test_a_line_names_the_client_whose_code_printed_it() -> None:
    printed = host("looped").run(job(0, 3), BROADCAST).printed
    expected = [f"{text}" for k in (0, 3) for text in (f"before {k}", "objective", f"after {k}")]
    assert [line.split(": ")[1] for line in printed] == expected
    assert [line.split(", ")[0] for line in printed] == ["client 0"] * 3 + ["client 3"] * 3
    assert {line.split(": ")[0].split(", ", 1)[1] for line in printed} == {"round 5, local_update"}


def test_of_stacked_clients_a_line_names_all_whose_code_ran_together() -> None:
    printed = host("vectorized").run(job(0, 1, 3), BROADCAST).printed
    assert "clients 0, 1, 3, round 5, local_update: objective" in printed
    assert "client 1, round 5, local_update: before 1" in printed
    assert "client 3, round 5, local_update: after 3" in printed


def test_what_was_printed_before_an_error_is_not_lost() -> None:
    with pytest.raises(ClientError) as caught:
        host("looped").run(job(1, 2), BROADCAST)
    assert caught.value.printed[-1] == "client 2, round 5, local_update: after 2"
    assert len(caught.value.printed) == 6


def test_lines_are_told_at_once_to_those_who_want_them() -> None:
    told: list[str] = []
    assert host("looped", tell=told.append).run(job(0), BROADCAST).printed == []
    assert [line.split(": ")[1] for line in told] == ["before 0", "objective", "after 0"]


def test_the_streams_are_as_before_afterwards() -> None:
    before = sys.stdout, sys.stderr
    one = host("looped")
    one.run(job(0), BROADCAST)
    assert (sys.stdout, sys.stderr) == before
    with pytest.raises(ClientError):
        one.run(job(2), BROADCAST)
    assert (sys.stdout, sys.stderr) == before
    assert one.running.clients == ()


def work(write: Any, tell: Any = None) -> list[str]:
    """The lines of client 7 that ``write`` prints."""
    running = RunningClients(tell)
    with running.start_call(job(7)):
        running.begin((7,))
        write()
    return [line.removeprefix("client 7, round 5, local_update: ") for line in running.printed]


def test_gigabytes_are_cut_with_a_note() -> None:
    block = "x" * 99

    def write() -> None:
        for _ in range(100_000):
            print(block)

    lines = work(write)
    assert sum(map(len, lines)) < 25_000
    assert lines[-1] == f"... and {100_000 * 99 - sum(map(len, lines[:-1])):,} more characters, which are not shown"
    without_end = work(lambda: [sys.stdout.write(block) for _ in range(10_000)])
    assert sum(map(len, without_end)) < 25_000
    assert "more characters, which are not shown" in without_end[-1]


def test_a_progress_bar_is_its_last_state() -> None:
    def write() -> None:
        for percent in range(101):
            sys.stderr.write(f"\r{percent} %")
        sys.stderr.write("\ndone\r\n")
        sys.stdout.write("no end of line")

    assert work(write) == ["100 %", "done", "no end of line"]


def test_other_threads_and_moments_print_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        thread = threading.Thread(target=print, args=("of another thread",))
        thread.start()
        thread.join()

    assert work(write) == []
    assert capsys.readouterr().out == "of another thread\n"
    running = RunningClients(None)
    with running.start_call(job(7)):
        print("nobody is at work")
    assert running.printed == []
    assert capsys.readouterr().out == "nobody is at work\n"


def test_an_actors_own_log_has_the_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    work(lambda: print("hello"))
    assert capsys.readouterr().out == "client 7, round 5, local_update: hello\n"


def test_the_report_says_who_is_at_work_since_when() -> None:
    running = RunningClients(None)
    with running.start_call(job(7, 8)):
        assert running.report().clients == ()
        running.begin((7, 8))
        running.switch_to((8,))
        print("hello")
        report = running.report()
    assert report.clients == (8,)
    assert 0 <= report.seconds < 60
    assert report.printed == ("client 8, round 5, local_update: hello",)


class Watched(CommitStore):
    """A store that notes what its host says to be doing while states are written or read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Storage(str(folder)))
        self.said: list[Report] = []
        self.host: ClientHost | None = None

    def write_states(self, *args: Any) -> StoredFile:
        self._note()
        return super().write_states(*args)

    def read_states(self, file: StoredFile) -> dict[int, Tree]:
        self._note()
        return super().read_states(file)

    def _note(self) -> None:
        assert self.host is not None
        self.said.append(self.host.running.report())


def test_the_report_says_which_work_of_its_own_a_host_does(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    store.host = one = host("looped", store=store)
    assert set(one.running.report().work) == {"waiting for a call or its arguments"}
    one.states.replace(3, {"x": torch.ones(2)}, 0)
    [(file, _)] = one.commit(1)
    one.rewind()
    one.run(replace(job(0, 3), committed={3: file}), BROADCAST)
    writing, reading = store.said
    assert set(writing.work) == {"waiting for a call or its arguments", "committing"}
    assert set(reading.work) == {"restoring states"}
    assert all(0 <= seconds < 60 for report in store.said for seconds in report.work.values())
    assert (writing.clients, reading.clients) == ((), ())
    assert set(one.running.report().work) == {"waiting for a call or its arguments"}


def test_a_commit_is_reported_beside_clients_at_work() -> None:
    running = RunningClients(None)
    with running.start_call(job(7, 8)):
        assert set(running.report().work) == {"preparing clients"}
        running.begin((7,))
        assert running.report().work == {}
        with running.committing():
            assert (running.report().clients, set(running.report().work)) == ((7,), {"committing"})
        running.switch_to(())
        assert set(running.report().work) == {"preparing clients"}


def test_lines_reach_the_console_and_the_log_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("rayfl").addHandler(handler)
    try:
        with printed_on_console():
            log_printed(["client 1: \x1b[31mred"])
    finally:
        logging.getLogger("rayfl").removeHandler(handler)
        handler.close()
    assert capsys.readouterr().out == "client 1: \\x1b[31mred\n"
    assert "client 1: " in (tmp_path / "log").read_text()


def test_the_printing_handler_may_print_while_a_client_is_at_work(capsys: pytest.CaptureFixture[str]) -> None:
    with printed_on_console():
        assert work(lambda: print("hello"), tell=lambda line: log_printed([line])) == []
    assert capsys.readouterr().out == "client 7, round 5, local_update: hello\n"

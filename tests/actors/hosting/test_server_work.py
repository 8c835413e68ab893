"""A procedure of the server's own runs on one host, and its failures are the server's."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting import host as hosting
from actors.hosting.job import Job, JobResult
from actors.hosting.running_clients import Report
from actors.processes.pool import HostDiedError, InlinePool
from actors.processes.waiting import silence
from algorithms.base import Algorithm, Clients
from rayfl.aggregation.exact_sum import Weighted
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.client import Client
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError, MethodError
from rayfl.examples import Examples
from rayfl.params import Tree
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_equal, random_clients

TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1)


class Distilling(Algorithm):
    """The server teaches its model what the mean of the clients' models says of the public samples."""

    name: str = "distilling"
    how: str = "well"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        assert "head.weight" in clients.task.network.parameter_names
        mean = clients.mean(self.local_update, cohort, {"model": server["model"]})
        said = clients.mean(self.say, cohort, {"model": mean}, counted=False)
        return clients.on_server(self.distil, {"model": server["model"], "targets": said["logits"]})

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        return Weighted(await client.train(model, self.objective), client.num_samples)

    async def say(self, client: Client, model: Tree) -> Weighted:
        function = lambda x, task: task.network.logits(model, x)  # noqa: E731
        return Weighted({"logits": await client.outputs(function, client.public())})

    async def distil(self, server: Server, model: Tree, targets: torch.Tensor) -> Tree:
        print("at work")
        if self.how == "raise":
            raise ValueError("no such thing")
        if self.how == "diverge":
            return {"model": {name: leaf * float("nan") for name, leaf in model.items()}}
        if self.how == "write":
            model["head.bias"].zero_()
        if self.how == "spoil":
            server.public().zero_()
        if self.how == "list":
            return [model]  # type: ignore[return-value]

        def objective(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Any:
            return batch.mean((task.logits(model, batch) - batch.y).square().sum(-1))

        samples = Examples(server.public(), targets)
        return {"model": await server.train(model, objective, examples=samples, steps=5, lr=0.2)}


def toy(hosts: int = 1, how: str = "well", mode: str = "looped") -> Toy:
    data = random_clients((9, 12, 6), public=7)
    return Toy(Distilling(how=how), data, two_layers(), TRAIN, hosts, mode)


def test_any_number_of_hosts_gives_the_same_bits() -> None:
    alone = toy()
    before = alone.server
    expected = alone.run()
    assert not torch.equal(before["model"]["head.weight"], expected["model"]["head.weight"])
    for hosts in (2, 3):
        assert_equal(toy(hosts).run(), expected)
    assert_equal(toy().run(), expected)


def test_only_messages_of_clients_count() -> None:
    found = toy()
    found.step([0, 2])
    size = 8 * found.task.network.num_parameters
    assert (found.federation.traffic.down, found.federation.traffic.up) == (2 * size, 2 * size)
    assert set(found.federation.traffic.by_client) == {0, 2}
    assert found.states() == {}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"the server, round 1, distil: ValueError: no such thing\n.*test_server_work.py"),
        ("diverge", "the server, round 1, distil: non-finite values in 'model/inner.weight'"),
        ("write", "the server, round 1, distil: MethodError: writes to 'model/head.bias' in place"),
        ("spoil", "the server, round 1, distil: MethodError: writes to 'the public samples' in place"),
        ("list", "distil must return a dict of tensors and numbers, got list"),
    ],
)
def test_a_failure_is_the_servers(how: str, message: str) -> None:
    with pytest.raises(ClientError, match=message):
        toy(how=how).step([0, 1])


class Plain(Distilling):
    def distil(self, server: Server, model: Tree, targets: torch.Tensor) -> Tree:  # type: ignore[override]
        return {"model": model}


class Greedy(Distilling):
    async def distil(self, server: Server, model: Tree) -> Tree:  # type: ignore[override]
        return {"model": model}


def test_what_is_no_procedure_or_takes_other_arguments_is_refused() -> None:
    data = random_clients((9, 12, 6), public=7)
    with pytest.raises(MethodError, match="define it with `async def distil`"):
        Toy(Plain(), data, two_layers(), TRAIN).step([0, 1])
    with pytest.raises(ClientError, match="the server, round 1, distil: MethodError: what it is sent is not"):
        Toy(Greedy(), data, two_layers(), TRAIN).step([0, 1])


def test_what_it_prints_is_the_servers(capfd: pytest.CaptureFixture[str]) -> None:
    toy().step([0, 1])
    assert "the server, round 1, distil: at work" in capfd.readouterr().out


class Dying(InlinePool):
    """A host is lost in the midst of the server's work, once."""

    left = 1

    def collect(self, handles: Any, *options: Any, **more: Any) -> Any:
        for handle, host in handles.items():
            job = self.asked[handle]
            if job is not None and job.kind == "server" and self.left:
                self.left -= 1
                raise HostDiedError(host, "gone", clients=(-1,), suspicious=True)
            yield host, handle.value

    def submit(self, host: int, method: str, *args: Any) -> Any:
        handle = super().submit(host, method, *args)
        self.asked = {**getattr(self, "asked", {}), handle: args[0] if method == "run" else None}
        return handle


def test_a_lost_host_is_nobodys_fault_and_the_round_can_be_done_again() -> None:
    expected, found = toy(), toy()
    hosts = Hosts(Dying(found.client_hosts))
    found.federation = Federation(hosts, found.task, found.context, found.dataset.sizes())
    with pytest.raises(HostDiedError, match="it had distil of the server in round 1") as caught:
        found.step([0, 1])
    assert caught.value.clients == ()
    found.federation.rewind()
    assert_equal(found.step([0, 1]), expected.step([0, 1]))


def test_a_device_too_small_is_tried_again_without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    found, run = toy(), hosting.run_on_server
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def short(*given: Any) -> Tree:
        if failures:
            raise failures.pop()
        return run(*given)

    monkeypatch.setattr(hosting, "run_on_server", short)
    assert_equal(found.step([0, 1]), toy().step([0, 1]))
    assert not failures


def test_results_of_the_job_have_nothing_of_clients() -> None:
    found = toy()
    job = Job("distil", "server", 0, ())
    model = {name: leaf.numpy() for name, leaf in found.server["model"].items()}
    result: JobResult = found.client_hosts[0].run(job, {"model": model, "targets": torch.zeros(7, 3).double().numpy()})
    assert set(result.values) == {-1}
    assert not (result.scores or result.upload_bytes or result.stateful or result.seconds)


def test_the_deadline_of_clients_is_not_the_servers() -> None:
    at_work = SimpleNamespace(doing=lambda: Report((-1,), 99.0, ()))
    assert silence(at_work, 0, 1.0, True, 99.0) == 0.0  # type: ignore[arg-type]


class OneFails(Distilling):
    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if client.id == 1 and self.how == "raise":
            raise RuntimeError("no such thing")
        return await super().local_update(client, model)

    async def distil(self, server: Server, model: Tree, targets: torch.Tensor) -> Tree:
        return await Distilling().distil(server, model, targets)


class ServerFirst(OneFails):
    """The server works before any client does."""

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        begun = clients.on_server(self.begin, {"model": server["model"]})
        return super().round({"model": begun["model"]}, cohort, clients)

    async def begin(self, server: Server, model: Tree) -> Tree:
        return {"model": {name: leaf + 0.1 for name, leaf in model.items()}}


@pytest.mark.parametrize("method", [OneFails, ServerFirst])
def test_a_client_that_is_left_out_is_missing_in_it_as_if_it_had_not_been_sampled(method: Any) -> None:
    data = random_clients((9, 12, 6), public=7)
    found, expected = (Toy(method(how=how), data, two_layers(), TRAIN, hosts=2) for how in ("raise", "well"))
    hosts, policy = Hosts(InlinePool(found.client_hosts)), ClientsConfig(on_error="skip")
    federation = Federation(hosts, found.task, found.context, data.sizes(), policy)
    federation.begin_round(0, (), [0, 1, 2])
    changed = federation.play(found.algorithm, found.server, [0, 1, 2])
    assert set(federation.absent) == {1}
    assert_equal(changed, expected.step([0, 2]))

"""One client of a round without the others, to repeat its part alone."""

from __future__ import annotations

from actors.federation.federation import Federation
from algorithms.clients import Call, Clients, Procedure, Replies
from rayfl.params import Tree


class NeedsOthersError(Exception):
    """The round needs the replies of other clients."""


class SingleClient(Clients):
    """The clients of a round, of which only one is run, and only in the first call.

    Args:
        federation: all clients, in the state before the round.
        client: the one.

    Attributes:
        asked: whether it has been run.
    """

    def __init__(self, federation: Federation, client: int) -> None:
        samples = federation.num_samples(range(federation.context.num_clients))
        super().__init__(federation.task, federation.context, samples)
        self._federation = federation
        self._client = client
        self.asked = False

    def received(self, client: int, server: Tree) -> Tree:
        return self._federation.received(client, server)

    def on_server(self, procedure: Procedure, given: Tree) -> Tree:
        if self.asked:
            raise NeedsOthersError  # it most likely needs what all clients have sent
        return self._federation.on_server(procedure, given)

    def call(self, call: Call) -> Replies:
        """Runs the one client; see ``algorithms.clients.Clients``.

        Raises:
            NeedsOthersError: when it has been run already, or is not asked.
        """
        if self.asked or self._client not in call.clients:
            raise NeedsOthersError
        self.asked = True
        return self._federation.call(call.of([self._client]))

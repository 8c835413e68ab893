"""What a method says about models, or samples, of single clients that its server keeps."""

from __future__ import annotations

from typing import ClassVar

from rayfl.engine.round_context import RoundContext
from rayfl.params import num_bytes
from rayfl.tasks.base import Task


class KeptModels:
    """The part of a method's contract by which a run knows how large the server's tree becomes.

    Class attributes:
        keeps_models: whether the server keeps a model of every client.
        kept_on_server: what it keeps, in words.
    """

    keeps_models: ClassVar[bool] = False
    kept_on_server: ClassVar[str] = "a model of each client"

    def kept_of_client(self, task: Task, clients: int) -> int:
        """Returns how many bytes the server keeps of each client that has taken part; 0 for nothing as long as a model.

        Args:
            task: has the architectures, of which the largest one counts.
            clients: K.
        """
        return largest_model(task) if self.keeps_models else 0

    def kept_bytes(self, task: Task, context: RoundContext, samples: int) -> int:
        """Returns how many bytes the server keeps at most that grow with the number of clients, or of samples.

        Args:
            task: what is learned.
            context: of round 0.
            samples: training samples of all clients together.
        """
        return context.num_clients * self.kept_of_client(task, context.num_clients)


def largest_model(task: Task) -> int:
    """Returns the bytes of a task's model, of several architectures of the largest one."""
    return max(num_bytes(one.network.initialize(0)) for one in task.candidates)

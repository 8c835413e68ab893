"""What a method says about models of single clients that its server keeps."""

from __future__ import annotations

from typing import ClassVar

from rayfl.params import num_bytes
from rayfl.tasks.base import Task


class KeptModels:
    """The part of a method's contract by which a run knows how large the server's tree becomes.

    Class attributes:
        keeps_models: whether the server keeps a model of every client.
    """

    keeps_models: ClassVar[bool] = False

    def kept_of_client(self, task: Task, clients: int) -> int:
        """Returns how many bytes the server keeps of each client that has taken part; 0 for nothing as long as a model.

        Args:
            task: has the architectures, of which the largest one counts.
            clients: K.
        """
        if not self.keeps_models:
            return 0
        return max(num_bytes(one.network.initialize(0)) for one in task.candidates)

"""What every process of a run would import for nothing: PyTorch's compiler, as slow as PyTorch, and much of SciPy."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys

import actors.processes.client_actor
from algorithms.parts.sparse_simplex import sparse_simplex
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.examples import InputSpec
from rayfl.models.custom import CustomModel
from rayfl.models.zoo import SimpleCNN
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, examples, request
from tests.support.zoo_inputs import image

spec = image(1, 16, 4)
for model in (SimpleCNN(), CustomModel(name="custom", factory="tests.support.own_norm:normalized", head="4")):
    network = model.network(spec)
    assert network.vectorizable
    requests = [request(examples(3, spec, client), network.initialize(0), client=client, epochs=1) for client in (0, 1)]
    for mode in ("looped", "vectorized"):
        for result in Engine(Classification(network), CPU, EngineConfig(mode=mode)).execute(requests):
            assert not isinstance(result, Exception), result
sparse_simplex(4, 8, 0.5, 1.0, 2, RandomStreams(0))
found = [name for name in ("torch._dynamo", "scipy.spatial") if name in sys.modules]
sys.exit(str(found) if found else 0)
"""


def test_no_process_imports_the_compiler_or_scipys_algorithms() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr

"""The race's works in Flower: its simulation engine, one CPU a client, and on a GPU an eighth of it."""

from __future__ import annotations

import logging

from flower_app import client_app, given, server_app
from flwr.simulation import run_simulation

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    task = given()[0]
    on_gpu = task.device != "cpu"
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.125 if on_gpu else 0.0},
        "init_args": {"num_cpus": 8 if on_gpu else 2, "include_dashboard": False},
    }
    run_simulation(server_app, client_app, task.work.clients, backend_config=resources)

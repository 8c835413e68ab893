"""The race's works in Flower: its simulation engine, one CPU a client."""

from __future__ import annotations

import logging

from flower_app import client_app, given, server_app
from flwr.simulation import run_simulation

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False},
    }
    run_simulation(server_app, client_app, given()[0].work.clients, backend_config=resources)

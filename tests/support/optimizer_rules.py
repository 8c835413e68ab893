"""Optimizers, and the options with which they are compared to PyTorch's."""

from __future__ import annotations

from rayfl.optimization.optimizers import OptimizerName, Rule

ADAMS: tuple[OptimizerName, ...] = ("adam", "adamw")

RULES = {
    "sgd": Rule(0.01),
    "sgd-decay": Rule(0.01, weight_decay=0.1),
    "momentum": Rule(0.01, momentum=0.9),
    "dampening": Rule(0.01, momentum=0.9, dampening=0.4),
    "nesterov": Rule(0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "all-but-nesterov": Rule(0.01, momentum=0.8, dampening=0.3, weight_decay=0.1),
    **{name: Rule(0.01, name) for name in ADAMS},
    **{f"{name}-betas": Rule(0.01, name, betas=(0.7, 0.9)) for name in ADAMS},
    **{f"{name}-eps": Rule(0.01, name, eps=0.1) for name in ADAMS},
    **{f"{name}-decay": Rule(0.01, name, weight_decay=0.1) for name in ADAMS},
    **{f"{name}-no-memory": Rule(0.01, name, betas=(0.0, 0.0)) for name in ADAMS},
    "adagrad": Rule(0.01, "adagrad"),
    "adagrad-all": Rule(0.01, "adagrad", weight_decay=0.1, options=(("eps", 0.1), ("initial", 0.5))),
    "rmsprop": Rule(0.01, "rmsprop"),
    "rmsprop-all": Rule(0.01, "rmsprop", weight_decay=0.1, options=(("alpha", 0.7), ("eps", 0.1), ("momentum", 0.6))),
    "lion": Rule(0.001, "lion", weight_decay=0.1, options=(("betas", (0.5, 0.8)),)),
}

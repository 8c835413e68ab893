"""Settings with which the options of methods are tried in small runs."""

from __future__ import annotations

from typing import Any

BASES: dict[str, dict[str, Any]] = {
    "adcol": {"adversarial_weight": 2.0, "discriminator_hidden": 6, "server_lr": 0.1},
    "apple": {"relation_lr": 0.05, "relation_share": 0.9},
    "ccvr": {"virtual_features": 5, "server_epochs": 2},
    "creff": {"features_per_class": 4, "match_steps": 5, "retrain_epochs": 3},
    "cfl": {"mean_norm": 1e9, "max_norm": 0, "split_from": 0},
    "gcfl": {"mean_norm": 1e9, "max_norm": 0, "split_from": 0, "length": 2},
    "dispfl": {"neighbours": 1},
    "elastic": {"sample_share": 0.9},
    "fedah": {"weight_lr": 0.5, "head_epochs": 2},
    "fedala": {"start_threshold": None, "start_passes": 2, "weight_lr": 0.5},
    "fedamp": {"sigma": 2.0, "alpha": 20.0, "alpha_every": 1, "alpha_min": 0.3},
    "fedap": {"warmup": 0.4},
    "fedapen": {"weight_lr": 0.5, "weight_epochs": 2, "tuning_data": "train"},
    "fedawa": {"server_steps": 3, "server_lr": 0.2},
    "fedaws": {"spread_margin": 1.5},
    "fedcac": {"collaboration_rounds": 3},
    "fedcm": {"alpha": 0.6},
    "fedcorr": {"iterations": 1, "clean_rounds": 1, "neighbours": 3, "confidence": 0.4},
    "fedcr": {"information_weight": 0.1, "train_samples": 2},
    "fedcross": {"alpha": 0.6},
    "feddbe": {"mean_weight": 5.0, "mean_momentum": 0.4},
    "feddf": {"distill_steps": 5, "server_lr": 0.05},
    "feddisco": {"offset": 0.3},
    "feddwa": {"top_k": 2},
    "feddrift": {"threshold": 0.0, "step_rounds": 1},
    "fedem": {"components": 2},
    "fedetf": {"alternations": 2, "finetune_epochs": 1},
    "fedfed": {"distillation_rounds": 1, "code_dim": 2, "hidden": 6, "distillation_lr": 0.03, "noise": 0.3},
    "fedfomo": {"peers": 2, "select_on": "train"},
    "fedgen": {
        "label_weight": 1,
        "feature_weight": 1,
        "noise_dim": 4,
        "generator_hidden": 6,
        "generator_steps": 3,
        "regularized_epochs": 1,
    },
    "fedhkd": {"prediction_weight": 0.5, "feature_weight": 0.3},
    "fediir": {"penalty_weight": 0.3},
    "fedkd": {"energy_start": 0.6, "energy_end": 0.9},
    "fedlaw": {"server_epochs": 2, "server_lr": 0.1},
    "fedloge": {"classifier_steps": 10, "classifier_norm": 0.7},
    "fedmd": {"digest_batch_size": 4, "alignment_samples": 6},
    "fedme": {"cluster_rounds": (1,), "tuning_data": "train"},
    "fedmtl": {"relationship": "learned"},
    "fednoro": {"warmup_rounds": 1, "ramp_rounds": 3},
    "fedphp": {"transfer_weight": 0.1},
    "fedsr": {"length_weight": 0.1, "information_weight": 0.1},
    "fedtgp": {"server_epochs": 2},
    "semifl": {"threshold": 0.4},
    "fixmatch": {"threshold": 0.4, "unlabelled_ratio": 2},
    **{key: {"widths": (0.5, 1.0, 0.25)} for key in ("heterofl", "fedrolex", "fjord")},
    **{key: {"ranks": (1, 3, 2)} for key in ("flexlora", "flora")},
    **{key: {"simplex_dimension": 2, "assignment_round": 1} for key in ("floco", "floco_plus")},
    "hetlora": {"ranks": (1, 3, 2), "kept_share": 0.5, "pruning_weight": 1.0},
    "knn_per": {"neighbours": 3},
    "l2gd": {"penalty_weight": 5.0},
    "lotteryfl": {"prune_share": 0.2, "target": 0.9, "accuracy_threshold": 0.5},
    "lora_fair": {"correction_weight": 1e-3},
    "pacfl": {"threshold": 28.0},
    "mapper": {"grid": (0.25, 0.75)},
    **{key: {"momentum": 0.5} for key in ("mime", "mimelite")},
    "metafed": {"warmup_epochs": 1, "ready_above": 0.4},
    "per_fedavg": {"alpha": 0.1},
    "perada": {"distill_steps": 5, "server_lr": 0.05, "server_batch_size": 4},
    "pfedmoap": {"peers": 2, "heads": 2},
    "pfedla": {"hidden": 6, "server_lr": 0.1},
    "pefll": {"hidden": 6, "inner_steps": 3, "server_lr": 0.01},
    "pfedhn": {"hidden": 6, "inner_steps": 3},
    "pfedbayes": {"kl_weight": 0.01},
    "pfedme": {"inner_steps": 3, "proximal_weight": 2.0, "personal_lr": 0.05},
    "pfedsim": {"warmup": 0.4},
    "rofl": {"forget_rounds": 1, "forget_rate": 0.4, "pseudo_from": 1},
    "scaffold": {"momentum_on_corrected": True},
    "subfedavg": {"prune_share": 0.2, "target": 0.9, "distance_threshold": 0.0},
    "superfed": {"start": 0.4},
    "term": {"estimate_share": 0.5},
}
"""Settings with which three rounds on few samples reach what a method does."""

BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("apple", "peer_base"): {"peers": 4},
    ("apple", "peer_growth"): {"peers": 4},
    ("fedamp", "clip_self"): {"heuristic": False, "alpha": 100.0},
    ("dfedsam", "weight_floor"): {"adaptive": True},
    **{(key, "edge_probability"): {"topology": "erdos_renyi"} for key in ("dfedavgm", "dfedsam", "dispfl")},
    ("fedala", "start_threshold"): {"start_threshold": 1e-9, "start_passes": 6, "start_window": 2},
    ("fedala", "start_window"): {"start_threshold": 1e9, "start_passes": 6, "start_window": 2},
    ("fedbuff", "staleness"): {"unit_staleness": 1.0},
    ("fedbuff", "staleness_exponent"): {"unit_staleness": 1.0},
    ("fedbuff", "staleness_threshold"): {"staleness": "threshold", "unit_staleness": 2.0, "stale_factor": 0.5},
    ("fedbuff", "stale_factor"): {"staleness": "threshold", "unit_staleness": 2.0},
    ("feddistill", "divergence"): {"output": "logits"},
    **{("fedcorr", key): {"iterations": 2} for key in ("proximal_weight", "proximal_form")},
    ("fedfomo", "explore_decay"): {"explore": 0.9},
    ("fedfomo", "fallback"): {"select_on": "validation"},
    ("fedsam", "weight_floor"): {"adaptive": True},
    ("fedfusion", "smoothing"): {"operator": "multi"},
    ("fedmd", "consensus"): {"digest_loss": "mse"},
    ("fedme", "cluster_outputs"): {"cluster_rounds": (1, 1, 2)},
    ("fedme", "initial_epochs"): {"warm": True},
    ("fedphp", "kd_form"): {"transfer": "kd"},
    ("fedphp", "temperature"): {"transfer": "kd"},
    **{(key, "shares"): {"width_choice": "drawn"} for key in ("heterofl", "fedrolex", "fjord")},
    **{("fjord", key): {"self_distillation": True} for key in ("distillation_weight", "temperature")},
    ("fedrecon", "adaptivity"): {"server_optimizer": "adam"},
    ("fedvarp", "assignment"): {"clusters": 2},
    ("gpfedrec", "hops"): {"neighbours": 1},
    ("mapper", "select_on"): {"grid": (0.0, 0.3, 0.6, 1.0)},
    ("per_fedavg", "delta"): {"version": "hf"},
    **{
        (key, option): {"base": "adam"}
        for key in ("mime", "mimelite")
        for option in ("second_decay", "adaptivity", "initial_accumulator")
    },
    ("pfedfda", "fixed_beta"): {"interpolation": "fixed"},
    ("superfed", "lm_lstm_per_layer"): {"mode": "lm"},
    ("superfed", "start"): {"start": 0.4},
}
"""What else must be set for an option to have an effect in a small run."""

OTHERS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("apple", "peer_base"): (1e9,),
    ("apple", "peer_growth"): (1e9,),
    ("apple", "relation_lr"): (0.01,),
    ("cfl", "gap"): (1.0,),
    ("cfl", "min_size"): (9,),
    ("cfl", "max_norm"): (1e9,),
    ("cfl", "mean_norm"): (0.0,),
    ("gcfl", "min_size"): (9,),
    ("gcfl", "max_norm"): (1e9,),
    ("gcfl", "mean_norm"): (0.0,),
    **{(key, "server_max_grad_norm"): (1e-3,) for key in ("feddf", "perada")},
    ("fedetf", "projection_dim"): (5,),
    ("fedu", "threshold"): (0.0,),
    ("fedme", "cluster_rounds"): ((0,), (2,)),
    ("fedme", "initial_architecture"): (1,),
    **{(key, "widths"): ((0.5, 0.25),) for key in ("heterofl", "fedrolex", "fjord")},
    **{(key, "shares"): ((1, 0, 5),) for key in ("heterofl", "fedrolex", "fjord")},
    ("flexlora", "ranks"): ((3, 2),),
    ("flora", "ranks"): ((3, 2),),
    ("hetlora", "ranks"): ((3, 2),),
    ("l2gd", "aggregation_probability"): (0.9,),
    ("mapper", "grid"): ((0.5,),),
    ("pefll", "server_max_grad_norm"): (1e-3,),
    ("pfedhn", "server_max_grad_norm"): (1e-3,),
    ("pfedme", "personal_lr"): (0.02,),
    ("superfed", "start"): (0.0, 0.8),
}
"""Values to try in place of the generic ones."""

TRAINING: dict[tuple[str, str], dict[str, Any]] = {
    ("fedfomo", "fallback"): {"lr": 3.0},
    ("fedme", "cluster_outputs"): {"lr": 1.0},
    ("fedme", "model_tuning"): {"lr": 1.0},
    ("fednova", "proximal_weight"): {"momentum": 0.0},
    ("flash", "least_progress"): {"local_epochs": 4},
    ("mapper", "select_on"): {"lr": 1.0},
}
"""How to train for an option to have an effect in a small run."""

PERMISSIONS = {
    *(("pfedme", "momentum_on_personal"), ("scaffold", "momentum_on_corrected")),
    *(("fedema", "target_momentum"), ("fedu", "target_momentum")),
    ("fpl", "clusters"),
    ("fednoro", "mixtures"),
    ("feddrift", "merge_threshold"),
    ("federaser", "calibration_share"),
    *(("fedasync", option) for option in ("staleness", "exponent", "slope", "hinge")),
}
"""Options without which momentum is refused, and which do nothing more; those of target networks, which tasks other
than BYOL's have not (``tests/algorithms/test_fedema.py``); that of FINCH's partitions, which are one and the same of
fewer than eight clients (``tests/algorithms/test_fpl.py``); that of votes, which agree on so few clients
(``tests/algorithms/test_fednoro.py``); that of clusters that merge, which takes a fourth round
(``tests/algorithms/test_feddrift.py``); that of clients who leave, which nobody does
(``tests/algorithms/test_federaser.py``); and those of the age of models, which rounds with a barrier have not
(``tests/algorithms/test_fedasync.py``)."""

"""The methods by what a client has in the end: the table of README.md and of the list of methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rayfl.naming.printed import PRINTED

FAMILIES: dict[str, tuple[str, ...]] = {
    "a point in a space of models (a line, a simplex)": ("superfed", "floco", "floco_plus"),
    "a model of its own beside the shared one": (
        *("ditto", "apfl", "pfedme", "l2gd", "mapper", "fedphp", "flda", "pfedbayes"),
        *("fml", "fedapen", "fedkd", "fedmrl", "perada", "fedhkd"),
    ),
    "a part of the network of its own": (
        *("fedper", "fedrep", "fedbabu", "lg_fedavg", "pfl_da", "fedbn", "fedpac", "fedrod", "fedcp", "gpfl", "fedas"),
        *("feddbe", "pfedfda", "flute", "fedgc", "pfedpara", "fedrap", "fedselect", "fedthe", "fedrecon"),
        *("subfedavg", "lotteryfl", "fedloge", "fedcr", "pfedvem"),
        *("fedweit",),
    ),
    "a mixture of the clients' models": (
        *("fedfomo", "fedamp", "apple", "pfedgraph", "pfedsim", "fedcac", "pfedhn", "pefll", "pfedla", "feddwa"),
        *("fedmtl", "fedap", "fedpub", "gpfedrec"),
    ),
    "the model of its cluster, or a mixture of several": (
        *("hypcluster", "cfl", "gcfl", "pacfl", "fesem", "feddrift", "hierfavg", "fedem", "fedsoft"),
    ),
    "the shared model, adapted to it": ("per_fedavg", "fedala", "fedah", "knn_per", "pfedgp", "fedetf", "fednh"),
    "a model of its own, taught by outputs, features or heads": (
        *("fedmd", "feddistill", "fedproto", "fedtgp", "fedhp", "fedpcl", "fedgh", "fedme", "metafed", "adcol"),
    ),
    "adapters of its own in a pretrained model": ("fedalt", "feddpa"),
    "a prompt of its own for CLIP's texts": ("fedpgp", "fedotp", "pfedmoap", "fedtpg"),
    "the shared adapters of a pretrained model, cut to a rank of its own": ("hetlora", "flexlora"),
    "a submodel of the shared model, as wide or as deep as its device allows": (
        *("heterofl", "fedrolex", "fjord", "depthfl", "scalefl", "inclusivefl"),
    ),
    "the one model of all": ("fedavg",),
    "the one model, from steps that do not drift apart": (
        *("fedprox", "scaffold", "feddyn", "fednova", "feddc", "fedadmm", "fedspeed", "fedsmoo", "fedcm", "fedacg"),
        *("fedinit", "mime", "mimelite", "scaffnew", "tamuna", "fedvarp", "fednar"),
    ),
    "the one model, from other steps or weights of the server": (
        *("fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedexp", "elastic", "fedcross", "feddisco", "fedawa"),
        *("fedlaw", "turbosvm", "kafe", "fedld", "fedbuff", "fedasync", "ca2fl"),
    ),
    "the one model, without backpropagation": ("fedzo", "fedkseed", "decomfl", "feedsign"),
    "the one model, a part of a network of random weights": ("fedpm",),
    "the one model, where the loss is flat": ("fedsam", "fedlesam", "fedsol"),
    "the one model, from features that agree or spread": (
        *("moon", "fedmmd", "fedfusion", "feddecorr", "feduv", "fedrcl", "fpl", "fedsr", "fediir"),
    ),
    "the one model, taught by outputs or by samples made for it": (
        *("fedntd", "fedgkd", "fedmlb", "fedgen", "feddf", "dense", "fedfed", "fedpft"),
    ),
    "the one model, for classes that are rare or that clients lack": ("fedlc", "fedrs", "fedaws", "ccvr", "creff"),
    "the one model, fair to clients, domains or groups": (
        *("qfedavg", "drfa", "term", "fedmgda", "fedheal", "fairfed", "fedfb"),
    ),
    "the one model, in spite of wrong labels or malicious clients": ("fednoro", "fedcorr", "rofl", "fedlsr", "fltrust"),
    "the one model, for inputs that are changed to mislead it": ("fat", "gear", "calfat"),
    "the one model, from few labels or none": ("fixmatch", "semifl", "fedu", "fedema"),
    "the one model, of data that change": (
        *("flwf", "target", "fedcurv", "fedewc", "adaptive_fedavg", "flash", "federaser"),
    ),
    "the one model, pretrained, with shared adapters": ("flora", "fedex_lora", "rolora", "lora_fair"),
    "a model of its own, mixed with its neighbours' without a server": ("dfedavgm", "dfedsam", "dispfl", "sgp"),
    "a model without federation": ("local", "centralized"),
}
"""By what a client has in the end, the methods."""


def family_table(methods: Iterable[str], folder: str) -> str:
    """Returns the table in Markdown.

    Args:
        methods: the registered ones, each of which must be in one family.
        folder: of the methods' pages, from the page that has the table; with the sign that ends it, or empty.
    """
    placed = Counter(name for names in FAMILIES.values() for name in names)
    wrong = sorted(set(methods) ^ set(placed)) + sorted(name for name, times in placed.items() if times > 1)
    if wrong:
        raise SystemExit(f"scripts/docs/families.py: each method has to be in one family: {', '.join(wrong)}")
    rows = [
        f"| {what} | {', '.join(f'[{PRINTED[name]}]({folder}{name}.md)' for name in names)} |"
        for what, names in FAMILIES.items()
    ]
    return "\n".join(["| what a client ends with | methods |", "|---|---|", *rows])

"""The commands ``rayfl data import-...``: LEAF's data sets, from its JSON or from their sources, and TFF's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.data.sources.root import data_root
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.data.sources.leaf import ImportReport


_Out = Annotated[
    Path | None, typer.Option(callback=at_home, help="Parquet file to write; default <data set>.parquet in RAYFL_DATA.")
]
_Fraction = Annotated[
    float, typer.Option(help="Fraction of all samples to keep; clients are taken at random until there are enough.")
]
_Iid = Annotated[bool, typer.Option("--iid", help="Deal the samples at random to new clients.")]
_IidClients = Annotated[
    float | None, typer.Option(help="With --iid: how many clients, as a fraction of their number. (Default: 0.01.)")
]
_MinSamples = Annotated[int, typer.Option(help="Leave out clients with fewer samples.")]
_TrainFraction = Annotated[float, typer.Option(help="Fraction of the samples (or clients) for the train part.")]
_By = Annotated[
    Literal["sample", "user"], typer.Option(help="Divide every client's samples into train and test, or the clients.")
]
_Seed = Annotated[int, typer.Option(help="Seed of all draws.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to ``rayfl data``."""
    app.command("import-leaf")(import_leaf)
    app.command("import-femnist-raw")(import_femnist_raw)
    app.command("import-shakespeare-raw")(import_shakespeare_raw)
    app.command("import-tff")(import_tff)


def import_leaf(
    kind: Annotated[
        Literal["femnist", "shakespeare", "sent140", "celeba", "synthetic", "reddit"],
        typer.Argument(help="Which LEAF data set."),
    ],
    source: Annotated[
        Path, typer.Argument(callback=at_home, help="LEAF's folder with train/ and test/, each full of JSON files.")
    ],
    out: _Out = None,
    images: Annotated[
        Path | None,
        typer.Option(callback=at_home, help="celeba: folder (or zip archive) with the image files img_align_celeba."),
    ] = None,
    tokens: Annotated[
        Literal["words", "characters"] | None, typer.Option(help="sent140: what a text is cut into. (Default: words.)")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="sent140: tokens in an input. (Default: 25 words or 140 characters.)")
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(help="sent140, reddit: most tokens of the vocabulary built from train/. (Default: 10000.)"),
    ] = None,
    vocabulary_file: Annotated[
        Path | None,
        typer.Option(callback=at_home, help="sent140, reddit: a vocabulary to take instead, one token a line."),
    ] = None,
    sequences: Annotated[
        bool,
        typer.Option("--sequences", help="reddit: a sample is a sequence, every next word of which is learned."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Turn LEAF's JSON files into one Parquet file, checked and sorted by client."""
    from rayfl.data.sources.leaf import LeafOptions
    from rayfl.data.sources.leaf import import_leaf as convert

    options = LeafOptions(images, tokens, length, vocabulary, vocabulary_file, sequences or None)
    _print_report(convert(kind, source, out or data_root() / f"{kind}.parquet", options), as_json)


def import_femnist_raw(
    source: Annotated[
        Path, typer.Argument(callback=at_home, help="Folder with NIST's by_class and by_write, folders or .zip files.")
    ],
    out: _Out = None,
    sample_fraction: _Fraction = 1.0,
    iid: _Iid = False,
    iid_clients: _IidClients = None,
    min_samples: _MinSamples = 0,
    train_fraction: _TrainFraction = 0.9,
    by: _By = "sample",
    seed: _Seed = 0,
    repeat_first: Annotated[
        bool, typer.Option("--repeat-first", help="Take the first image of every later writer twice, as LEAF does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make FEMNIST from NIST's images, by LEAF's rules."""
    from rayfl.data.sources.leaf import Sampling
    from rayfl.data.sources.leaf import import_femnist_raw as convert

    sampling = Sampling(sample_fraction, iid, iid_clients, min_samples, train_fraction, by, seed)
    _print_report(convert(source, out or data_root() / "femnist.parquet", sampling, repeat_first), as_json)


def import_shakespeare_raw(
    source: Annotated[
        Path, typer.Argument(callback=at_home, help="Text of the Complete Works (Project Gutenberg no. 100, of 1994).")
    ],
    out: _Out = None,
    sample_fraction: _Fraction = 1.0,
    iid: _Iid = False,
    iid_clients: _IidClients = None,
    min_samples: _MinSamples = 0,
    train_fraction: _TrainFraction = 0.9,
    by: _By = "sample",
    seed: _Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Make Shakespeare from the text of the plays, by LEAF's rules."""
    from rayfl.data.sources.leaf import Sampling
    from rayfl.data.sources.leaf import import_shakespeare_raw as convert

    sampling = Sampling(sample_fraction, iid, iid_clients, min_samples, train_fraction, by, seed)
    _print_report(convert(source, out or data_root() / "shakespeare.parquet", sampling), as_json)


def import_tff(
    kind: Annotated[
        Literal["stackoverflow", "shakespeare", "emnist", "emnist-digits", "cifar100"],
        typer.Argument(help="Which data set of TensorFlow Federated."),
    ],
    source: Annotated[
        Path,
        typer.Argument(
            callback=at_home, help="Folder with TFF's HDF5 files, its archive of them (.tar.bz2), or its SQLite file."
        ),
    ],
    out: _Out = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="stackoverflow: most words of the vocabulary. (Default: 10000.)")
    ] = None,
    vocabulary_file: Annotated[
        Path | None,
        typer.Option(
            callback=at_home, help="stackoverflow: TFF's stackoverflow.word_count. (Default: that beside the source.)"
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="stackoverflow, shakespeare: positions of a text. (Default: 20 words or 80 characters.)"),
    ] = None,
    users: Annotated[
        Literal["train", "held-out"] | None,
        typer.Option(help="stackoverflow: the users of the training part, or the held-out ones. (Default: train.)"),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients, drawn at random. (Default: all.)")] = None,
    most_samples: Annotated[
        int | None, typer.Option(help="Most training samples of a client, drawn at random. (Default: all.)")
    ] = None,
    train_only: Annotated[
        bool, typer.Option("--train-only", help="Leave the test part out; runs then draw each client's own.")
    ] = False,
    seed: _Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Turn files of TensorFlow Federated into one Parquet file, checked and sorted by client."""
    from rayfl.data.sources.tff import TffOptions
    from rayfl.data.sources.tff import import_tff as convert

    options = TffOptions(vocabulary, vocabulary_file, length, users, clients, most_samples, train_only, seed)
    _print_report(convert(kind, source, out or data_root() / f"tff-{kind}.parquet", options), as_json)


def _print_report(report: ImportReport, as_json: bool) -> None:
    if as_json:
        counts = {"clients": report.clients, "samples": report.samples}
        write_json("data-import", {"file": report.destination, **counts, "warnings": report.warnings})
        return
    for warning in report.warnings:
        terminal.warn(f"warning: {warning}")
    samples = ", ".join(f"{n:,} {split}" for split, n in report.samples.items())
    terminal.say(f"{report.clients:,} clients, {samples} samples -> {report.destination}")

"""The `betahook` command, for those who do not write Python: parsing of the arguments, and errors in one line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

import betahook
from betahook.cli import terminal
from betahook.report import html

USER_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)
"""Errors that tell the user what to do; any other is a bug in betahook, and shows its traceback."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for an error, 2 for invalid arguments, 130 if interrupted."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    command, page = given.pop("command"), given.pop("html", None)
    if command is None:
        parser.print_help()
        return 0
    from betahook.cli import commands  # imports transformers, which takes seconds: not for --help

    if command == "examine":
        given["pictured"] = page is not None
    try:
        document = getattr(commands, command)(**given)
        try:
            if command != "report":
                terminal.show(document)
        finally:  # even if printing fails, as in a closed pipe: the results took long to compute
            if page is not None:
                html.write(document, page)
        if command == "report":
            print(f"{page}: open it in a browser")
    except USER_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"betahook {command}: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser, whose arguments are named like the parameters of the command's function in `commands`."""
    parser = argparse.ArgumentParser(prog="betahook", description=betahook.__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {betahook.__version__}")
    group = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    where = "a folder with a config.json, or a name on the Hugging Face Hub"
    model: dict[str, Any] = {"metavar": "model", "help": where}

    inspect = _command(group, "inspect", "say where betahook would attach to a model; no weights are read")
    inspect.add_argument("name", **model)

    examine = _command(group, "examine", "examine the attention of a trained model, run on a text")
    examine.add_argument("name", **model)
    examine.add_argument("--text", required=True, metavar="FILE", help="plain text to run the model on")
    examine.add_argument("--length", type=_positive, default=512, help="tokens in a window (default: %(default)s)")
    examine.add_argument("--batch", type=_positive, default=4, help="windows in a forward (default: %(default)s)")
    examine.add_argument("--batches", type=_positive, default=8, help="forwards (default: %(default)s)")
    examine.add_argument("--html", type=_page, metavar="FILE", help="also write a page with pictures")

    report = _command(group, "report", "write what a run measured to one HTML file")
    report.add_argument("folder", metavar="RUN", help="a folder with TensorBoard files, checkpoints or both")
    where = "default: %(default)s in the current folder"
    report.add_argument("--html", type=_page, metavar="FILE", default="betahook.html", help=where)

    show = _command(group, "show", "show the beta of each layer of a checkpoint")
    show.add_argument("folder", help="a checkpoint of a run with betahook")

    fold = _command(group, "fold", "fold the beta of a checkpoint into its weights, after an interrupted run")
    fold.add_argument("folder", help="a checkpoint of a run with betahook")
    fold.add_argument("out", help="a new folder for the plain model")
    return parser


def _command(
    group: argparse._SubParsersAction[argparse.ArgumentParser], name: str, purpose: str
) -> argparse.ArgumentParser:
    """Add a command; its purpose appears in the list of commands and in its own help."""
    return group.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")


def _positive(text: str) -> int:
    """Convert an argument to a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more; got {text!r}")
    return int(text)


def _page(text: str) -> Path:
    """Convert an argument to a file to write; what cannot be one is refused before the model runs, not after."""
    path = Path(text)
    try:
        can_be = not path.is_dir() and path.parent.is_dir()
    except OSError as error:  # e.g. a name that is too long
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists; {error}") from error
    if not can_be:
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists; got {text!r}")
    return path

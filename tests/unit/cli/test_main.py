"""The `betahook` command: its help, its arguments, and what it does on errors."""

import re
import runpy
from io import BytesIO, TextIOWrapper

import pytest

import betahook
from betahook.cli import main, terminal
from betahook.report.document import Document, Table


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("inspect", "examine", "report", "show", "fold"))


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["betahook", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("betahook", run_name="__main__")
    assert capsys.readouterr().out == f"betahook {betahook.__version__}\n"


def test_arguments_that_make_no_sense(capsys):
    for arguments, message in [
        (["examine", "model"], "the following arguments are required: --text"),
        (
            ["examine", "m", "--text", "t", "--batch", "0"],
            "argument --batch: expected a whole number, 1 or more; got '0'",
        ),
        (["report", "run", "--html", "."], "argument --html: expected a file in a folder that exists; got '.'"),
        (["report", "run", "--html", "x" * 300], "expected a file in a folder that exists; [Errno "),
        (["report", "run", "--html", "no/x.html"], "expected a file in a folder that exists; got 'no/x.html'"),
        (["fold", "one"], "the following arguments are required: out"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


def test_a_fault_of_ours_shows_where_it_is(monkeypatch):
    monkeypatch.setattr("betahook.cli.commands.show", lambda folder: {}["missing"])
    with pytest.raises(KeyError):
        main(["show", "folder"])


def test_a_folder_in_the_place_of_the_page_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "betahook.html").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["report", "run"])
    assert "expected a file in a folder that exists; got 'betahook.html'" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_costs_no_findings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("betahook.cli.commands.examine", lambda *_, **__: Document("found", []))
    page = tmp_path / "page.html"
    (tmp_path / "page.html.unfinished").mkdir()
    assert main(["examine", "model", "--text", "text", "--html", str(page)]) == 1
    shown = capsys.readouterr()
    assert shown.out == "found\n"
    assert shown.err == f"betahook examine: {page} cannot be written: Is a directory\n"


def test_a_closed_pipe_costs_no_page(tmp_path, monkeypatch):
    def close(document):
        raise BrokenPipeError

    monkeypatch.setattr("betahook.cli.commands.examine", lambda *_, **__: Document("found", []))
    monkeypatch.setattr("betahook.cli.terminal.show", close)
    assert main(["examine", "model", "--text", "text", "--html", str(tmp_path / "page.html")]) == 1
    assert "found" in (tmp_path / "page.html").read_text()


def test_ctrl_c_is_no_fault(monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("betahook.cli.commands.show", interrupt)
    assert main(["show", "folder"]) == 130


def test_a_terminal_of_ascii_shows_what_it_can(monkeypatch):
    monkeypatch.setattr("sys.stdout", TextIOWrapper(written := BytesIO(), encoding="ascii"))
    terminal.show(Document("β · q", []))
    assert written.getvalue() == b"? ? q\n"


@pytest.mark.parametrize("columns", [20, 40, 70])
def test_a_narrow_terminal_cuts_no_number_short(monkeypatch, capsys, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    rows = [[f"model.layers.{layer}.attention", "1234.5", "0.25", "from q and k"] for layer in range(2)]
    terminal.show(Document("std", [Table(["layer", "measured", "from W_q and W_k", "closest"], rows)]))
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert ["layer", "measured", "from", "W_q", "and", "W_k", "closest"] in [line.split() for line in lines]
    assert [line.split()[1:4] for line in lines if "1234" in line] == [["1234.5", "0.25", "from"]] * 2

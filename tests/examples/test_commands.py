"""The commands of the documentation: each names a file that exists, options that it takes, a target of the Makefile."""

import ast
import re
import subprocess

import pytest

from support.commands import PAGES, ROOT, documented

COMMANDS = documented()


@pytest.mark.parametrize(
    "words", [words for _, words in COMMANDS], ids=[f"{page}: {words[0]}" for page, words in COMMANDS]
)
def test_a_command_names_a_script_and_options_of_it(words):
    script, *arguments = words
    assert {word for word in arguments if word.startswith("--")} <= options_of(ROOT / script)


def options_of(script):
    """Arguments that a script adds to its parser, or a module beside it that it imports."""
    nodes = list(ast.walk(ast.parse(script.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call) and "add_argument" in ast.unparse(node.func)]
    own = {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    beside = [script.with_name(f"{name}.py") for name in names]
    return own.union(*(options_of(path) for path in beside if path.exists()))


def test_there_are_commands():
    assert len(COMMANDS) > 40


def test_targets_are_those_of_the_makefile():
    targets = set(re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text()).group(1).split())
    pages = [page for page in PAGES if page.suffix == ".md"]
    named = {name for page in pages for name in re.findall(r"(?:`|^ {4})make ([\w-]+)", page.read_text(), re.MULTILINE)}
    assert named <= targets
    assert "demo" in named
    dry_run = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True)
    assert dry_run.returncode == 0, dry_run.stderr

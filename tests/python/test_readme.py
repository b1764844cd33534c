"""The README's tables and commands name what there is."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from spice_moe import SpiceOptions, fit_cli, plan_cli, run_arguments, sim_cli, trace_cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_option_is_in_the_table() -> None:
    table = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE))
    assert table == {field.name for field in dataclasses.fields(SpiceOptions)}


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def commands() -> list[str]:
    """The lines of code blocks that run one of the commands, without comments and pipes."""
    lines = []
    for page in PAGES:
        for line in page.read_text("utf-8").splitlines():
            if match := re.match(r"(?:    )?(spice-(?:run|plan|trace|sim|fit) .*)", line):
                lines.append(match[1])
    return lines


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)
    parse = {
        "spice-run": run_arguments.parse,
        "spice-plan": plan_cli._parse,
        "spice-trace": trace_cli._parse,
        "spice-sim": sim_cli._parse,
        "spice-fit": fit_cli._parse,
    }[name]
    parse(arguments)


@pytest.mark.parametrize("module", [run_arguments, plan_cli, trace_cli, sim_cli, fit_cli])
def test_examples_of_help_are_understood(module) -> None:
    parse = getattr(module, "parse", None) or module._parse
    examples = re.findall(r"^  (?:echo .* \| )?(spice-\S+ .*)$", module._EPILOG, re.MULTILINE)
    assert len(examples) >= 3
    for line in examples:
        text = re.split(r"   | > ", line)[0]
        parse(shlex.split(text, comments=True)[1:])

"""report: write a run, or a single plan, as one page that opens anywhere, without server or network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.reports.contents import contents
from bitplan.reports.kept_results import open_run
from bitplan.reports.subject import plan_subject, run_subject
from bitplan.store.files import write_text
from bitplan.store.run_folder import RunFolder

SCRIPTS = ("dom", "chart", "answer", "scores", "layers", "strip", "detail", "evidence", "page")
_ESCAPES = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})  # json writes U+2028 and U+2029 so itself


def report(run: str | Path | RunFolder, path: str | Path, *, budget: str | None = None) -> Path:
    """Write the page of a run; the answer is for `budget`, the study's middle one unless given."""
    folder = run if isinstance(run, RunFolder) else open_run(run)
    return write_text(path, render(contents(run_subject(folder, budget), folder.plans)))


def report_plan(
    plan: Plan, graph: Graph, gains: Gains, costs: tuple[Costs, ...], path: str | Path, command: str
) -> Path:
    """Write the page of a single plan; `command` is what made it."""
    return write_text(path, render(contents(plan_subject(plan, graph, gains, costs, command), {})))


def render(data: dict[str, Any]) -> str:
    """Return the page with its data inside; only its own script and style may run."""
    template, style = _part("page.html"), _part("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_part(f"{name}.js") for name in SCRIPTS) + "\n})();\n"
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(f"{data['title']} · bitplan").encode(errors="replace").decode(),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": escape_json(data),
    }
    return re.sub("@([A-Z]+)@", lambda mark: parts[mark[1]], template)  # one pass: no part is looked into


def escape_json(data: dict[str, Any]) -> str:
    """Return JSON that cannot end its own script element, whatever the names in it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _part(name: str) -> str:
    return files("bitplan.reports").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

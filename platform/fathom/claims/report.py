"""The report: one HTML page that needs no other file and no network, and the same numbers as JSON beside it."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathom import __version__
from fathom.claims.results import Cell, ClaimResult, Plot
from fathom.claims.verdict import DOES_NOT_HOLD, HOLDS, UNCLEAR

MARKS = {HOLDS: "holds", DOES_NOT_HOLD: "fails", UNCLEAR: "unclear"}

STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --paper: #ffffff; --line: #e2e8f0; --soft: #f8fafc; --faint: #64748b;
  --holds: #15803d; --fails: #b91c1c; --unclear: #92600a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e8f0; --paper: #0f172a; --line: #334155; --soft: #1e293b;
  --faint: #94a3b8; --holds: #4ade80; --fails: #f87171; --unclear: #fbbf24; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 16px/1.55 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.25rem; line-height: 1.3; margin-top: 2.5rem; }
a { color: inherit; } small, figcaption, .faint { color: var(--faint); }
.verdict { font-weight: 600; white-space: nowrap; }
.holds { color: var(--holds); } .fails { color: var(--fails); } .unclear { color: var(--unclear); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { background: var(--soft); vertical-align: bottom; } td.words, th.words { text-align: left; white-space: normal; }
tr:last-child td { border-bottom: 0; } tr.seed td { border-top: 2px solid var(--line); }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; max-width: 40rem; }
"""

RULE = (
    "Every seed gives one number per question, usually the difference between two models that share that seed's base "
    "weights, documents and order. The 95 % t-interval of their mean is laid against the range that the claim "
    "allows: all inside, it <b>holds</b>; all outside, it <b>does not hold</b>; otherwise, and always with one seed, "
    "it is <b>unclear at this scale</b>. A claim holds if all its deciding questions do, and does not hold as soon as "
    "one does not. No run is chosen or left out. Intervals are not corrected for the number of questions: of twenty "
    "questions without any effect, one may come out decided."
)


def write_report(results: Sequence[ClaimResult], about: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write ``claims.html`` and ``claims.json``.

    Args:
        about: what the report was made with: sizes, seeds, seconds, machine.

    Returns:
        The paths of the page and of the JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, numbers = folder / "claims.html", folder / "claims.json"
    page.write_text(render(results, about), encoding="utf-8")
    content = {"fathom": __version__, "about": about, "claims": [result.as_json() for result in results]}
    numbers.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return page, numbers


def render(results: Sequence[ClaimResult], about: dict[str, Any]) -> str:
    """The page."""
    facts = "".join(f"<tr>{_cell(name)}{_cell(value)}</tr>" for name, value in about.items())
    sections = "\n".join(_section(number, result) for number, result in enumerate(results, start=1))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The papers' claims, on small models</title>
<style>{STYLE}</style>
</head>
<body>
<h1>The papers' claims, on small models</h1>
<p>Models of a few hundred thousand weights cannot refute a paper about billions. They can show which effects are robust
enough to appear here, and what the comparison costs. {RULE}</p>
{_summary(results)}
{sections}
<h2>How this was made</h2>
<div class="scroll"><table>{facts}</table></div>
<p class="faint">Fathom {html.escape(__version__)}. All numbers are in claims.json beside this page.</p>
</body>
</html>
"""


def _summary(results: Sequence[ClaimResult]) -> str:
    rows = "".join(
        f'<tr><td class="words"><a href="#{result.key}">{html.escape(result.title)}</a></td>'
        f'<td class="words">{_mark(result.verdict)}</td></tr>'
        for result in results
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def _section(number: int, result: ClaimResult) -> str:
    reasons = "".join(
        f"<li>{_mark(comparison.verdict)}: {html.escape(comparison.why())}"
        f"{'' if comparison.decisive else ' <span class=faint>(informs, does not decide)</span>'}</li>"
        for comparison in result.findings.comparisons
    )
    remarks = "".join(f"<p>{html.escape(remark)}</p>" for remark in result.findings.remarks)
    return f"""<section id="{result.key}">
<h2>{number}. {html.escape(result.title)} {_mark(result.verdict)}</h2>
<p><b>The paper:</b> {html.escape(result.paper)}</p>
<p><b>Here:</b> {html.escape(result.setting)} Seeds: {", ".join(map(str, result.seeds))}.</p>
<ul>{reasons}</ul>
{"".join(map(_figure, result.findings.plots))}
{_table(result.findings.table)}
{remarks}
</section>"""


def _mark(verdict: str) -> str:
    return f'<span class="verdict {MARKS[verdict]}">{html.escape(verdict)}</span>'


def _figure(plot: Plot) -> str:
    return f"<figure>{plot.svg}<figcaption>{html.escape(plot.caption)}</figcaption></figure>"


def _table(rows: Sequence[dict[str, Cell]]) -> str:
    """Rows may have different columns: all of them are shown, in the order in which they appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th{_words(rows, name)}>{html.escape(name)}</th>" for name in columns)
    body, before = [], None
    for row in rows:
        start = ' class="seed"' if before is not None and row.get("seed") != before else ""
        before = row.get("seed")
        body.append(f"<tr{start}>{''.join(_cell(row.get(name, '')) for name in columns)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _words(rows: Sequence[dict[str, Cell]], name: str) -> str:
    return ' class="words"' if any(isinstance(row.get(name), str) for row in rows) else ""


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"<td>{value:.4g}</td>"
    if isinstance(value, int):
        return f"<td>{value}</td>"
    return f'<td class="words">{html.escape(str(value))}</td>'

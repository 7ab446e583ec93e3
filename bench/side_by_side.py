"""Reports of `headrace bench --output FILE`, side by side as a Markdown table.

    python bench/side_by_side.py FILE …

Rows are the reports by their labels, columns the levels of load that all of them have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Results = dict[tuple[str, float], dict[str, Any]]


def main(files: list[str]) -> None:
    reports = [json.loads(Path(file).read_text()) for file in files]
    rows: list[tuple[str, Results]] = [
        (report["label"] or report["settings"]["url"], {(r["loop"], r["level"]): r for r in report["results"]})
        for report in reports
    ]
    levels = [level for level in rows[0][1] if all(level in results for _, results in rows)]
    heading = " / ".join(f"{level:g}" if loop == "closed" else f"{level:g} a second" for loop, level in levels)
    print(f"| server | output tokens/s at {heading} | first token ms, p50 | between tokens ms, p50 | errors |")
    print("|---|---|---|---|---|")
    for label, results in rows:
        cells = [results[level] for level in levels]
        print(
            f"| {label} | {' / '.join(_short(r['output_tokens_per_s']) for r in cells)} | {_medians(cells, 'ttft_ms')} "
            f"| {_medians(cells, 'itl_ms')} | {sum(sum(r['errors'].values()) for r in cells)} |"
        )
    machine = reports[0]["environment"]
    print(f"\n{machine['cores']} cores, {machine['cpu']}, {reports[0]['date'][:10]}; ", end="")
    print(f"{reports[0]['settings']['input_len']} words in, {reports[0]['settings']['output_len']} tokens out.")


def _medians(cells: list[dict[str, Any]], name: str) -> str:
    return " / ".join("–" if r[name] is None else _short(r[name]["p50"]) for r in cells)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))

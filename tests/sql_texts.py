"""The SQL texts of the documentation and of the demo."""

import re
from pathlib import Path
from typing import Final

from rankscope.demo.report import STATEMENTS

ROOT: Final = Path(__file__).parents[1]
_SAMPLES: Final = ROOT / "docs" / "language_grades.md"
_SQLITE: Final = "trend_data"  # a table of the SQLite export


def sql_texts() -> dict[str, str]:
    """Return each statement by page and number. The names of runs are those of the cookbook."""
    found = {f"demo {number}": statement for number, (_, statement) in enumerate(STATEMENTS)}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if page == _SAMPLES:
            continue
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
        blocks += re.findall(r"rankscope sql (?:--\S+ \S+ )*\"([^\"]*)\"|\.sql\(\"([^\"]*)\"\)", text)
        joined = ("".join(block) for block in blocks)
        statements = [one.strip() for block in joined for one in block.split(";") if one.strip() and "…" not in block]
        own = (re.sub("'RUN'|'live-run-2'", "'my-run'", one) for one in statements if _SQLITE not in one)
        found |= {f"{page.name} {number}": statement for number, statement in enumerate(own)}
    return found

"""Tables of the sandbox's benchmarks, and their place in a page of the documentation."""

from collections.abc import Sequence
from pathlib import Path

MARK = "<!-- written by scripts/bench/{}: {} -->"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_section(page: Path, script: str, text: str) -> None:
    """Replaces what stands between the script's two marks, or adds it at the end."""
    begin, end = MARK.format(script, "begin"), MARK.format(script, "end")
    section = f"{begin}\n\n{text}\n\n{end}"
    old = page.read_text() if page.exists() else ""
    if begin in old:
        before, rest = old.split(begin)
        new = before + section + rest.split(end)[1]
    else:
        new = f"{old.rstrip()}\n\n{section}\n".lstrip()
    page.write_text(new)

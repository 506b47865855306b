"""The table of what the catalogue took; every case with -v, and a line a section without."""

from __future__ import annotations

from statistics import median


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    found = [dict(report.user_properties) for report in reports if report.when == "call"]
    rows = [row for row in found if "bad_input" in row]
    if not rows:
        return
    terminalreporter.section("bad input: time is told as a multiple of the bare import of the command line")
    sections: dict[str, list[dict]] = {}
    for row in rows:
        sections.setdefault(row["section"], []).append(row)
    for section, held in sections.items():
        times, most = [row["ratio"] for row in held], max(row["megabytes"] for row in held)
        took = f"time x{median(times):.1f} (at most x{max(times):.1f}), at most {most:.0f} MB"
        terminalreporter.write_line(f"{section}: {len(held)} cases, {took}")
        if terminalreporter.verbosity > 0:
            for row in held:
                terminalreporter.write_line(f"  x{row['ratio']:<5.1f}{row['megabytes']:4.0f} MB  {row['bad_input']}")
                terminalreporter.write_line(f"        {row['line']}")

"""REPORT/index.html, report.md and tables/*.csv, all from results.json: one content, written in each form."""

"""REPORT/index.html, report.md and tables/*.csv, from results.json, with the same content."""

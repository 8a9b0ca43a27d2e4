"""REPORT/index.html, report.md and tables/*.csv: the same content in three forms, made from results.json."""

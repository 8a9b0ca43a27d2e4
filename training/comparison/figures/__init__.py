"""Figures of the report, each as PNG, SVG and the CSV behind it: charts, t-SNE maps, and example retrievals."""

"""Receive, persist, export: nodes and edges from one YAML file."""

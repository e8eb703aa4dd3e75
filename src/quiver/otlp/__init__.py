"""OTLP and Arrow: what came over the wire as columns, and back."""

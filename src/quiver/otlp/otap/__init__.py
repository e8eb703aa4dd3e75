"""OTAP, the columnar protocol of OpenTelemetry Arrow: its tables from requests, and back."""

"""What is done with telemetry on its way."""

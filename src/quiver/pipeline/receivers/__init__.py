"""Where telemetry comes in."""

"""Where telemetry leaves a pipeline."""

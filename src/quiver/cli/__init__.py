"""The command line: ``quiver inspect | bench | demo``."""

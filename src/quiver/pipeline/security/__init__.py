"""Who may send, and over what kind of connection."""

"""A queue in object storage: many producers, one manifest, one consumer, no broker."""

"""The store: bundles in, durably; bundles out, to every subscriber.

``intake`` writes, ``segments`` keeps what was written, ``retention`` deletes, ``ledger`` remembers
what must not be forgotten. ``core`` puts them together, without threads; ``threads`` and
``store`` are the threads and the interface around it; ``reader`` looks at a store from another
process.
"""

"""Segments: immutable files of many Arrow streams, with tables that say what is in them.

``layout`` is the container, ``tables`` the directory and the manifest, ``dictionaries`` how batches
come to share a stream, ``writer`` and ``reader`` the two directions.
"""

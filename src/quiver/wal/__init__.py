"""The write-ahead log: what is durable before it is acknowledged.

``header`` and ``entry`` are the bytes of a file, ``cursor`` the sidecar. ``scan`` walks one file,
``files`` and ``replay`` all of them, ``recovery`` mends them, ``writer`` appends.
"""

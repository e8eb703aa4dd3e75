"""One YAML file to the settings of a pipeline; ``load`` is the way in.

The way of the text: ``yaml_text`` (values that know their line), ``substitution`` (``${env:X}``),
``document`` (both forms of a file), ``plugin_names`` and ``binding`` (values to options),
``graph_checks``. ``options`` is what can be said; ``schema`` and ``reference`` make the
documentation from the same classes.
"""

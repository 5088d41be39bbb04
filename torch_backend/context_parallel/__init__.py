"""Context parallelism: the documents of a row lie on the ranks of a group, and some of them on several.

A whole batch -> :mod:`.share`: what this rank holds of it -> the layers, which exchange what a straddling document
needs (:mod:`.exchange`), such as earlier keys and values in attention (:mod:`.rank_attention`). Documents that lie on
one rank run through the same operations as always.
"""

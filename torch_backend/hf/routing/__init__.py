"""Routing replay: a second forward takes the experts that a first one chose.

    record_routing(model) -> forward -> RoutingRecord: the experts of every token, document by document
    replay_routing(model, record) -> forward -> the same experts; routing weights from the present parameters

Two forwards of the same tokens can route differently: rounding depends on the other tokens of a batch, and a router
compares scores that may be closer than that. A policy loss then compares log-probabilities of two different functions.

``contexts`` (both functions) -> ``call`` (one forward, and its layers in the backward) -> ``choice`` (one router).
"""

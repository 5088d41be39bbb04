"""Configurations that build their owners, and the marks of overrides."""

import sys
from dataclasses import dataclass, fields


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self):
            owner = type(self).__qualname__.partition(".")[0]
            return getattr(sys.modules[type(self).__module__], owner)(self)


def override(*, target, fqns=None, description="", exact=False):
    def marked(function):
        function.target, function.fqns = target, fqns
        return function

    return marked


def derive(source, target_cls, **deltas):
    theirs = {each.name for each in fields(target_cls)}
    shared = {each.name: getattr(source, each.name) for each in fields(source) if each.name in theirs}
    return target_cls(**{**shared, **deltas})

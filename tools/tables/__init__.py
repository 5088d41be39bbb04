"""Audits behind the tables of the documentation, which `docs/make_*.py` write and tests hold."""

"""Reads a configuration."""

import sys

import yaml


def read_args(args=None):
    with open(sys.argv[1]) as file:
        config = yaml.safe_load(file)
    return config | dict(each.split("=", 1) for each in sys.argv[2:])

"""Packed training inside other people's training stacks, by the way in that each of them offers.

A stack's configuration -> its trainer, built by the stack -> ``enable_packing`` (:mod:`.options`). Each module imports
the stack that it is named after, and the backends through the public names of ``crosspack`` alone.
"""

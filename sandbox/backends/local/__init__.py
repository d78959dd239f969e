"""Sandboxes on this machine: no daemon, no root needed.

    worker ── zygote ── slot ── init ── the sandbox's processes

The zygote is a clean interpreter with imports done, in a root folder made of the
system's libraries. Each slot is a fork of it with a control group and an empty network,
and makes one sandbox after the other: an `init`, first process of fresh namespaces, which
gives up every privilege and then starts programs when the worker asks.
"""

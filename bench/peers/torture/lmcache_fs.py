#!/usr/bin/env python3
"""Torture worker for `lmcache server` with its L2 adapter `fs`: a file per chunk; see lmcache_server.py."""

import worker
from lmcache_server import Server

if __name__ == "__main__":
    worker.serve(lambda setup: Server(setup, {"type": "fs", "base_path": setup["dir"]}))

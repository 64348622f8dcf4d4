"""Benchmarks that ship with KVCellar: what this machine can do, measured by the code that does it."""

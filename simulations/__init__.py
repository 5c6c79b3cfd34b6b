"""Softmax bandits: what trust-region masks do, and how their estimators err.

`simulations.bandit` is the simulator, a library; `simulations.studies` has the studies that
`python -m simulations NAME` runs.  Run from a checkout; nothing here goes into the wheel.
"""

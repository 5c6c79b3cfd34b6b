"""SymPy derivations of every formula of pdverify, and the generator of its formula files.

`python -m derivations check` proves the statements and compares the generated files with what
`python -m derivations write` would write.  Nothing in `pdverify` imports this package.
"""

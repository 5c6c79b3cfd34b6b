"""How fast, lean and accurate the backends are, measured side by side with what people write.

`run.run_bench` measures and returns a `records.BenchReport`; `pdverify.report` turns that into
a table, JSON, and the page `docs/performance.md`.
"""

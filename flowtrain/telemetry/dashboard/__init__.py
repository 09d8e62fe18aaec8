"""One web page about a run, finished or live, from what its folder holds (`flowtrain dashboard`).

    RUN_DIR/metrics.jsonl ──Tail──▶ History ─┐
            decisions.jsonl ─Tail────────────┤
            traces/*.jsonl ──Tail──▶ Tracks ─┼─▶ RunView ──JSON──▶ page (assets/)
            plan, config, summary, error ────┘      └──"changed"──▶ by server-sent events

One reader a run, whoever looks. What changed is told, not sent: a page fetches what it shows, so that nobody waits for
a slow one. History is decimated and memory bounded ([why](docs/adr/0018-history-of-the-dashboard.md)). No file of a run
is handed out as it is.
"""

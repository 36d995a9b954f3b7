"""What the strategy costs, measured against what there is to compare it with. ``docs/performance.md`` says how."""
